#include "daemon/peer_convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_set>

#include "daemon/peer_checks.h"
#include "daemon/peer_program_convert.h"
#include "daemon/wire.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;

using peer::AtMost;
using peer::InRange;
using peer::Invalid;
using peer::MemberOf;
using peer::NotNegative;

// ---- numbers ----

absl::StatusOr<CallId> CallOf(uint64_t id, std::string_view field) {
  if (id == 0) return Invalid("{} is 0, which is no call", field);
  return CallId(id);
}

absl::StatusOr<Version> VersionOf(int64_t version, std::string_view field) {
  REFITD_RETURN_IF_ERROR(NotNegative(version, field));
  return Version(version);
}

absl::StatusOr<PartSeq> PartOf(int64_t part, std::string_view field) {
  REFITD_RETURN_IF_ERROR(NotNegative(part, field));
  return PartSeq(part);
}

absl::StatusOr<Duration> MillisOf(int64_t ms, std::string_view field) {
  REFITD_RETURN_IF_ERROR(InRange(ms, 0, ToMillis(kMaxPeerDuration), field));
  return std::chrono::milliseconds(ms);
}

// Rounded up: 0 has a meaning of its own.
int64_t MillisToWire(Duration duration) {
  const Duration kept = std::clamp(duration, Duration(0), kMaxPeerDuration);
  return std::chrono::ceil<std::chrono::milliseconds>(kept).count();
}

// ---- texts ----

// Bytes of the UTF-8 sequence at the start of `text`; 0: there is none.
size_t SequenceBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond Unicode.
  if (first == 0xe0 && byte(1) < 0xa0) return 0;
  if (first == 0xed && byte(1) > 0x9f) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;
  if (first == 0xf4 && byte(1) > 0x8f) return 0;
  return length;
}

// A message with other bytes in a string would not be read at all.
std::string TextToWire(std::string_view text, size_t max_bytes = kMaxPeerTextBytes) {
  std::string out;
  out.reserve(std::min(text.size(), max_bytes));
  while (!text.empty()) {
    const size_t length = SequenceBytes(text);
    if (out.size() + std::max<size_t>(length, 1) > max_bytes) break;
    out += length == 0 ? std::string_view("?") : text.substr(0, length);
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

absl::StatusOr<std::string> TextOf(const std::string& text, std::string_view field,
                                   size_t max_bytes = kMaxPeerTextBytes) {
  if (text.size() <= max_bytes) return text;
  return Invalid("{} has {} bytes, more than {}", field, text.size(), max_bytes);
}

absl::StatusOr<std::string> OpaqueOf(const std::string& bytes, std::string_view field) {
  return TextOf(bytes, field, kMaxEpochAddressBytes);
}

// ---- statuses ----

void SetStatus(const absl::Status& status, v1::PeerStatus* wire) {
  wire->set_code(static_cast<uint32_t>(status.code()));
  wire->set_message(TextToWire(Message(status)));
}

// Sets message field `status` of `message` unless the status is OK.
template <typename Wire>
void SetStatusOf(const absl::Status& status, Wire* message) {
  if (!status.ok()) SetStatus(status, message->mutable_status());
}

// Of one answer: there are fewer methods, of this version and the next.
constexpr int kMaxBroadcastTotals = 64;

constexpr uint32_t kMaxStatusCode = static_cast<uint32_t>(StatusCode::kUnauthenticated);
static_assert(kMaxStatusCode == 16);

// Into *out: a StatusOr can't hold a status.
absl::Status ReadStatus(const v1::PeerStatus& wire, std::string_view field, absl::Status* out) {
  REFITD_RETURN_IF_ERROR(InRange(wire.code(), 0, kMaxStatusCode, fmt::format("{}.code", field)));
  REFITD_ASSIGN_OR_RETURN(const std::string message,
                          TextOf(wire.message(), fmt::format("{}.message", field)));
  *out = absl::Status(static_cast<StatusCode>(wire.code()), message);
  return absl::OkStatus();
}

// ---- slots ----

void SetSlot(const SlotGrant& grant, v1::PeerSlot* wire) {
  wire->set_slot(grant.slot.value());
  wire->set_grant(grant.grant.value());
}

absl::StatusOr<SlotGrant> SlotOf(const v1::PeerSlot& wire, const PeerBounds& bounds,
                                 std::string_view field) {
  REFITD_RETURN_IF_ERROR(InRange(wire.slot(), 0, std::min(bounds.slots, kMaxSlots) - 1,
                                 fmt::format("{}.slot", field)));
  return SlotGrant{SlotIndex(wire.slot()), GrantId(wire.grant())};
}

// ---- lists ----

template <typename Id>
void SetIds(const std::vector<Id>& ids, google::protobuf::RepeatedField<uint64_t>* wire) {
  wire->Reserve(static_cast<int>(ids.size()));
  for (const Id id : ids) wire->Add(id.value());
}

absl::StatusOr<std::vector<MemberId>> MembersOf(
    const google::protobuf::RepeatedField<uint64_t>& wire, std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(wire.size(), kMaxEngineRanks, field));
  std::vector<MemberId> members;
  members.reserve(static_cast<size_t>(wire.size()));
  for (int i = 0; i < wire.size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const MemberId member,
                            MemberOf(wire[i], fmt::format("{}[{}]", field, i)));
    members.push_back(member);
  }
  return members;
}

absl::StatusOr<std::vector<bool>> FlagsOf(const google::protobuf::RepeatedField<bool>& wire,
                                          std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(wire.size(), kMaxEngineRanks, field));
  return std::vector<bool>(wire.begin(), wire.end());
}

// Numbers below `bound`, at most `limit` of them.
absl::StatusOr<std::vector<uint32_t>> IndicesOf(
    const google::protobuf::RepeatedField<uint32_t>& wire, int64_t limit, int64_t bound,
    std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(wire.size(), limit, field));
  for (int i = 0; i < wire.size(); ++i) {
    REFITD_RETURN_IF_ERROR(InRange(wire[i], 0, bound - 1, fmt::format("{}[{}]", field, i)));
  }
  return std::vector<uint32_t>(wire.begin(), wire.end());
}

// ---- tensors ----

void SetTensors(const std::vector<TensorSpec>& tensors, const std::vector<TensorRange>& ranges,
                const std::vector<int64_t>& byte_offsets, v1::PeerTensors* wire) {
  for (const TensorSpec& tensor : tensors) {
    wire->add_names(tensor.name);
    wire->add_dtypes(ToWire(tensor.dtype));
    *wire->add_shapes() = ToWire(tensor.shape);
  }
  for (const TensorRange& range : ranges) {
    wire->add_starts(range.start);
    wire->add_sizes(range.count);
  }
  wire->mutable_byte_offsets()->Add(byte_offsets.begin(), byte_offsets.end());
}

absl::Status SameLength(int got, size_t want, std::string_view field) {
  if (static_cast<size_t>(got) == want) return absl::OkStatus();
  return Invalid("{} has {} entries where names has {}", field, got, want);
}

absl::StatusOr<std::vector<TensorRange>> RangesOf(const v1::PeerTensors& wire,
                                                  const std::vector<TensorSpec>& tensors,
                                                  std::string_view field) {
  REFITD_RETURN_IF_ERROR(
      SameLength(wire.starts_size(), tensors.size(), fmt::format("{}.starts", field)));
  REFITD_RETURN_IF_ERROR(
      SameLength(wire.sizes_size(), tensors.size(), fmt::format("{}.sizes", field)));
  std::vector<TensorRange> ranges;
  ranges.reserve(tensors.size());
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const int64_t whole, ElementCount(tensors[i].shape));
    const int64_t start = wire.starts(static_cast<int>(i));
    const int64_t count = wire.sizes(static_cast<int>(i));
    REFITD_RETURN_IF_ERROR(InRange(start, 0, whole, fmt::format("{}.starts[{}]", field, i)));
    REFITD_RETURN_IF_ERROR(InRange(count, 0, whole - start, fmt::format("{}.sizes[{}]", field, i)));
    const int64_t carried = count * ElementBytes(tensors[i].dtype);
    if (carried > kMaxBucketBytes - bytes) {
      return Invalid("{}.sizes[{}] is {}: more than {} bytes together", field, i, count,
                     kMaxBucketBytes);
    }
    bytes += carried;
    ranges.push_back({static_cast<uint32_t>(i), start, count});
  }
  return ranges;
}

int64_t BytesOf(const TensorSpec& tensor, const TensorRange& range) {
  return range.count * ElementBytes(tensor.dtype);
}

// In the slot, aligned, disjoint.
absl::StatusOr<std::vector<int64_t>> OffsetsOf(const v1::PeerTensors& wire,
                                               const std::vector<TensorSpec>& tensors,
                                               const std::vector<TensorRange>& ranges,
                                               bool has_slot, const PeerBounds& bounds,
                                               std::string_view name) {
  const std::string field = fmt::format("{}.byte_offsets", name);
  REFITD_RETURN_IF_ERROR(SameLength(wire.byte_offsets_size(), has_slot ? tensors.size() : 0,
                                    has_slot ? field : field + " (there is no slot)"));
  std::vector<int64_t> offsets(wire.byte_offsets().begin(), wire.byte_offsets().end());
  std::vector<size_t> order;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t bytes = BytesOf(tensors[i], ranges[i]);
    REFITD_RETURN_IF_ERROR(
        InRange(offsets[i], 0, bounds.slot_bytes - bytes, fmt::format("{}[{}]", field, i)));
    if (offsets[i] % ElementBytes(tensors[i].dtype) != 0) {
      return Invalid("{}[{}] is {}: unaligned, not a multiple of {} bytes", field, i, offsets[i],
                     ElementBytes(tensors[i].dtype));
    }
    if (bytes > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  for (size_t k = 1; k < order.size(); ++k) {
    const size_t before = order[k - 1];
    if (offsets[before] + BytesOf(tensors[before], ranges[before]) > offsets[order[k]]) {
      return Invalid("{}[{}] is {}: overlaps entry {}", field, order[k], offsets[order[k]], before);
    }
  }
  return offsets;
}

struct CheckedTensors {
  std::vector<TensorSpec> tensors;
  std::vector<TensorRange> ranges;
  std::vector<int64_t> byte_offsets;
  int64_t bytes = 0;  // end of the last, or without offsets what is carried
};

absl::StatusOr<CheckedTensors> TensorsOf(const v1::PeerTensors& wire, bool has_slot,
                                         const PeerBounds& bounds, std::string_view field) {
  CheckedTensors out;
  REFITD_RETURN_IF_ERROR(
      InRange(wire.names_size(), 1, kMaxTensorsPerBucket, fmt::format("{}.names' length", field)));
  REFITD_ASSIGN_OR_RETURN(out.tensors, CheckManifest(wire.names(), wire.dtypes(), wire.shapes(),
                                                     field, kMaxTensorsPerBucket));
  REFITD_ASSIGN_OR_RETURN(out.ranges, RangesOf(wire, out.tensors, field));
  REFITD_ASSIGN_OR_RETURN(out.byte_offsets,
                          OffsetsOf(wire, out.tensors, out.ranges, has_slot, bounds, field));
  for (size_t i = 0; i < out.tensors.size(); ++i) {
    const int64_t bytes = BytesOf(out.tensors[i], out.ranges[i]);
    out.bytes = has_slot ? std::max(out.bytes, out.byte_offsets[i] + bytes) : out.bytes + bytes;
  }
  return out;
}

absl::StatusOr<Verification> VerificationOf(v1::Verification wire, std::string_view field) {
  const absl::StatusOr<std::optional<Verification>> verification = VerificationFromWire(wire);
  if (!verification.ok()) return Invalid("{}: {}", field, Message(verification.status()));
  if (!verification->has_value()) return Invalid("{} is not said", field);
  return **verification;
}

// ---- reports: to the wire ----

void Put(const PeerAttach& v, v1::PeerMessage* wire) {
  v1::PeerAttach* out = wire->mutable_attach();
  out->set_member(v.member.value());
  if (const auto* trainer = std::get_if<TrainerIdentity>(&v.identity)) {
    v1::PeerTrainer* t = out->mutable_trainer();
    t->set_rank(trainer->rank);
    t->set_world_size(trainer->world_size);
    t->set_pid(trainer->pid);
    return;
  }
  const auto& engine = std::get<EngineIdentity>(v.identity);
  v1::PeerEngine* e = out->mutable_engine();
  e->set_instance(engine.instance);
  e->set_rank(engine.rank);
  e->set_world_size(engine.world_size);
  e->set_delivery(static_cast<v1::Delivery>(engine.delivery));
  e->set_pid(engine.pid);
  if (engine.held_version.has_value()) e->set_held_version(engine.held_version->value());
  e->set_dirty(engine.dirty);
  e->set_held_origin(engine.held_origin);
  if (!engine.manifest.has_value()) return;
  v1::Manifest* manifest = e->mutable_manifest();
  for (const TensorSpec& tensor : *engine.manifest) {
    manifest->add_names(tensor.name);
    manifest->add_dtypes(ToWire(tensor.dtype));
    *manifest->add_shapes() = ToWire(tensor.shape);
  }
}

void Put(const PeerGone& v, v1::PeerMessage* wire) {
  wire->mutable_gone()->set_member(v.member.value());
  wire->mutable_gone()->set_reason(TextToWire(v.reason));
}

void Put(const PeerReady& v, v1::PeerMessage* wire) {
  wire->mutable_ready()->set_member(v.member.value());
  wire->mutable_ready()->set_update(v.update.value());
}

void Put(const PeerFailed& v, v1::PeerMessage* wire) {
  v1::PeerFailed* out = wire->mutable_failed();
  out->set_member(v.member.value());
  out->set_update(v.update.value());
  out->set_reason(TextToWire(v.reason));
}

void Put(const PeerAck& v, v1::PeerMessage* wire) {
  v1::PeerAck* out = wire->mutable_ack();
  out->set_member(v.member.value());
  out->set_update(v.update.value());
  out->set_part(v.part.value());
}

void PutEvent(const BeginEvent& e, v1::PeerCall* wire) {
  v1::PeerBegin* out = wire->mutable_begin();
  out->set_request_id(e.request_id);
  out->set_version(e.version.value());
  out->set_duration_ms(MillisToWire(e.duration));
  if (e.verification.has_value()) out->set_verification(ToWire(*e.verification));
  out->set_evict_late(e.evict_late);
  out->set_tensor_count(e.tensor_count);
  out->set_total_bytes(e.total_bytes);
  out->set_broadcast(ToWire(e.broadcast));
  out->set_without_layout(e.without_layout);
}

void PutEvent(const LeaseSlotEvent& e, v1::PeerCall* wire) {
  wire->mutable_lease_slot()->set_version(e.version.value());
  wire->mutable_lease_slot()->set_wait_ms(MillisToWire(e.wait));
  wire->mutable_lease_slot()->set_update_id(e.update.value());
}

void PutEvent(const ReleaseSlotEvent& e, v1::PeerCall* wire) {
  SetSlot(e.grant, wire->mutable_release_slot()->mutable_slot());
}

void PutEvent(const BucketEvent& e, v1::PeerCall* wire) {
  v1::PeerBucket* out = wire->mutable_bucket();
  out->set_request_id(e.request_id);
  out->set_version(e.version.value());
  out->set_seq(e.seq);
  SetTensors(e.tensors, e.ranges, e.slot_byte_offsets, out->mutable_tensors());
  if (e.slot.has_value()) SetSlot(*e.slot, out->mutable_slot());
  out->set_update_id(e.update.value());
}

void PutEvent(const CommitEvent& e, v1::PeerCall* wire) {
  v1::PeerCommit* out = wire->mutable_commit();
  out->set_request_id(e.request_id);
  out->set_version(e.version.value());
  out->set_bucket_count(e.bucket_count);
  out->set_pushes_under_way(e.pushes_under_way);
  out->set_update_id(e.update.value());
}

void PutEvent(const RefitEvent& e, v1::PeerCall* wire) {
  v1::PeerRefit* out = wire->mutable_refit();
  out->set_request_id(e.request_id);
  out->set_version(e.version.value());
  out->set_duration_ms(MillisToWire(e.duration));
  if (e.verification.has_value()) out->set_verification(ToWire(*e.verification));
  out->set_evict_late(e.evict_late);
  out->set_bucket_count(e.bucket_count);
  out->set_update_id(e.update.value());
}

void PutEvent(const AbortEvent& e, v1::PeerCall* wire) {
  v1::PeerAbort* out = wire->mutable_abort();
  out->set_request_id(e.request_id);
  out->set_version(e.version.value());
  out->set_reason(TextToWire(e.reason, kMaxReasonBytes));
  out->set_update_id(e.update.value());
}

void Put(const PeerCall& v, v1::PeerMessage* wire) {
  v1::PeerCall* out = wire->mutable_call();
  std::visit(
      [&](const auto& event) {
        out->set_call(event.call.value());
        out->set_member(event.member.value());
        PutEvent(event, out);
      },
      v.event);
}

void Put(const PeerCallGone& v, v1::PeerMessage* wire) {
  wire->mutable_call_gone()->set_call(v.call.value());
}

void Put(const PeerHeaderAck& v, v1::PeerMessage* wire) {
  v1::PeerHeaderAck* out = wire->mutable_header_ack();
  out->set_update(v.update.value());
  out->set_part(v.part.value());
  out->set_digest(v.digest);
  out->set_mismatch(TextToWire(v.mismatch));
}

void Put(const PeerPartDone& v, v1::PeerMessage* wire) {
  v1::PeerPartDone* out = wire->mutable_part_done();
  out->set_update(v.update.value());
  out->set_part(v.part.value());
  SetStatusOf(v.status, out);
  out->set_wire_failed(v.wire_failed);
  out->mutable_bytes_written()->Add(v.bytes_written.begin(), v.bytes_written.end());
  if (v.failed_destination >= 0) {
    out->set_failed_destination(static_cast<uint32_t>(v.failed_destination));
  }
  out->mutable_digests()->Add(v.digests.begin(), v.digests.end());
  if (v.broadcast != BroadcastMethod::kDirect) out->set_broadcast(ToWire(v.broadcast));
}

void Put(const PeerVerified& v, v1::PeerMessage* wire) {
  v1::PeerVerified* out = wire->mutable_verified();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->mutable_failed_destinations()->Add(v.failed_destinations.begin(),
                                          v.failed_destinations.end());
}

template <typename Wire>
void SetStreams(const std::vector<PeerStream>& streams, Wire* wire) {
  for (const PeerStream& stream : streams) {
    v1::PeerStream* out = wire->add_streams();
    out->set_peer(stream.peer);
    out->set_out(stream.out);
    out->set_in(stream.in);
  }
}

void Put(const PeerProgramBuilt& v, v1::PeerMessage* wire) {
  v1::PeerProgramBuilt* out = wire->mutable_program_built();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->set_rounds(v.rounds);
  SetStreams(v.streams, out);
}

void Put(const PeerCompared& v, v1::PeerMessage* wire) {
  v1::PeerCompared* out = wire->mutable_compared();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->mutable_digests()->Add(v.digests.begin(), v.digests.end());
}

void Put(const PeerRunDone& v, v1::PeerMessage* wire) {
  v1::PeerRunDone* out = wire->mutable_run_done();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->set_wire_failed(v.wire_failed);
  out->mutable_bytes_written()->Add(v.bytes_written.begin(), v.bytes_written.end());
  if (v.failed_destination >= 0) {
    out->set_failed_destination(static_cast<uint32_t>(v.failed_destination));
  }
  SetStreams(v.streams, out);
}

void Put(const PeerEpochOpened& v, v1::PeerMessage* wire) {
  v1::PeerEpochOpened* out = wire->mutable_epoch_opened();
  out->set_epoch(v.epoch.value());
  SetStatusOf(v.status, out);
  out->set_address(v.address);
}

void Put(const PeerEpochUp& v, v1::PeerMessage* wire) {
  wire->mutable_epoch_up()->set_epoch(v.epoch.value());
  SetStatusOf(v.status, wire->mutable_epoch_up());
}

void Put(const PeerWireGranted& v, v1::PeerMessage* wire) {
  wire->mutable_wire_granted()->set_update(v.update.value());
}

void Put(const PeerWireWaits& v, v1::PeerMessage* wire) {
  wire->mutable_wire_waits()->set_update(v.update.value());
  wire->mutable_wire_waits()->set_holder(TextToWire(v.holder));
}

void Put(const PeerWireWanted& v, v1::PeerMessage* wire) {
  wire->mutable_wire_wanted()->set_update(v.update.value());
}

void Put(const PeerPong& v, v1::PeerMessage* wire) { wire->mutable_pong()->set_number(v.number); }

// ---- reports: from the wire ----

absl::StatusOr<PeerAttach> ReportOf(const v1::PeerAttach& wire) {
  PeerAttach out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "attach.member"));
  const auto ranks = [](int rank, int world_size, int pid, int limit,
                        std::string_view field) -> absl::Status {
    REFITD_RETURN_IF_ERROR(InRange(world_size, 1, limit, fmt::format("{}.world_size", field)));
    REFITD_RETURN_IF_ERROR(InRange(rank, 0, world_size - 1, fmt::format("{}.rank", field)));
    return NotNegative(pid, fmt::format("{}.pid", field));
  };
  if (wire.has_trainer()) {
    const v1::PeerTrainer& t = wire.trainer();
    REFITD_RETURN_IF_ERROR(
        ranks(t.rank(), t.world_size(), t.pid(), kMaxTrainerRanks, "attach.trainer"));
    TrainerIdentity trainer;
    trainer.rank = t.rank();
    trainer.world_size = t.world_size();
    trainer.pid = t.pid();
    out.identity = trainer;
    return out;
  }
  if (!wire.has_engine()) return Invalid("attach.identity is missing");
  const v1::PeerEngine& e = wire.engine();
  REFITD_RETURN_IF_ERROR(
      ranks(e.rank(), e.world_size(), e.pid(), kMaxEngineRanks, "attach.engine"));
  EngineIdentity engine;
  REFITD_RETURN_IF_ERROR(CheckName(e.instance(), "attach.engine.instance"));
  engine.instance = e.instance();
  engine.rank = e.rank();
  engine.world_size = e.world_size();
  REFITD_RETURN_IF_ERROR(InRange(e.delivery(), v1::DELIVERY_REGISTERED, v1::DELIVERY_STAGED,
                                 "attach.engine.delivery"));
  engine.delivery = static_cast<DeliveryMode>(e.delivery());
  engine.pid = e.pid();
  engine.dirty = e.dirty();
  engine.held_origin = e.held_origin();
  if (e.has_held_version()) {
    REFITD_ASSIGN_OR_RETURN(engine.held_version,
                            VersionOf(e.held_version(), "attach.engine.held_version"));
  }
  if (e.has_manifest()) {
    REFITD_ASSIGN_OR_RETURN(
        engine.manifest,
        CheckManifest(e.manifest().names(), e.manifest().dtypes(), e.manifest().shapes(),
                      "attach.engine.manifest", kMaxTensorsPerLayout));
  }
  out.identity = std::move(engine);
  return out;
}

absl::StatusOr<PeerGone> ReportOf(const v1::PeerGone& wire) {
  PeerGone out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "gone.member"));
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(wire.reason(), "gone.reason"));
  return out;
}

absl::StatusOr<PeerReady> ReportOf(const v1::PeerReady& wire) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(wire.member(), "ready.member"));
  return PeerReady{member, UpdateId(wire.update())};
}

absl::StatusOr<PeerFailed> ReportOf(const v1::PeerFailed& wire) {
  PeerFailed out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "failed.member"));
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(wire.reason(), "failed.reason"));
  return out;
}

absl::StatusOr<PeerAck> ReportOf(const v1::PeerAck& wire) {
  PeerAck out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "ack.member"));
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(wire.part(), "ack.part"));
  return out;
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerBegin& wire, const PeerBounds&) {
  BeginEvent out;
  REFITD_ASSIGN_OR_RETURN(out.request_id,
                          TextOf(wire.request_id(), "begin.request_id", kMaxRequestIdBytes));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "begin.version"));
  REFITD_ASSIGN_OR_RETURN(out.duration, MillisOf(wire.duration_ms(), "begin.duration_ms"));
  REFITD_ASSIGN_OR_RETURN(out.verification, VerificationFromWire(wire.verification()));
  out.evict_late = wire.evict_late();
  REFITD_RETURN_IF_ERROR(NotNegative(wire.tensor_count(), "begin.tensor_count"));
  out.tensor_count = wire.tensor_count();
  REFITD_RETURN_IF_ERROR(NotNegative(wire.total_bytes(), "begin.total_bytes"));
  out.total_bytes = wire.total_bytes();
  REFITD_ASSIGN_OR_RETURN(out.broadcast, BroadcastFromWire(wire.broadcast()));
  out.without_layout = wire.without_layout();
  return PeerCall{std::move(out)};
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerLeaseSlot& wire, const PeerBounds&) {
  LeaseSlotEvent out;
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "lease_slot.version"));
  REFITD_ASSIGN_OR_RETURN(out.wait, MillisOf(wire.wait_ms(), "lease_slot.wait_ms"));
  out.update = UpdateId(wire.update_id());
  return PeerCall{out};
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerReleaseSlot& wire, const PeerBounds& bounds) {
  ReleaseSlotEvent out;
  REFITD_ASSIGN_OR_RETURN(out.grant, SlotOf(wire.slot(), bounds, "release_slot.slot"));
  return PeerCall{out};
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerBucket& wire, const PeerBounds& bounds) {
  BucketEvent out;
  REFITD_ASSIGN_OR_RETURN(out.request_id,
                          TextOf(wire.request_id(), "bucket.request_id", kMaxRequestIdBytes));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "bucket.version"));
  REFITD_RETURN_IF_ERROR(NotNegative(wire.seq(), "bucket.seq"));
  out.seq = wire.seq();
  REFITD_ASSIGN_OR_RETURN(CheckedTensors tensors,
                          TensorsOf(wire.tensors(), wire.has_slot(), bounds, "bucket.tensors"));
  out.tensors = std::move(tensors.tensors);
  out.ranges = std::move(tensors.ranges);
  out.slot_byte_offsets = std::move(tensors.byte_offsets);
  if (wire.has_slot()) {
    REFITD_ASSIGN_OR_RETURN(out.slot, SlotOf(wire.slot(), bounds, "bucket.slot"));
  }
  out.update = UpdateId(wire.update_id());
  return PeerCall{std::move(out)};
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerCommit& wire, const PeerBounds&) {
  CommitEvent out;
  REFITD_ASSIGN_OR_RETURN(out.request_id,
                          TextOf(wire.request_id(), "commit.request_id", kMaxRequestIdBytes));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "commit.version"));
  REFITD_RETURN_IF_ERROR(NotNegative(wire.bucket_count(), "commit.bucket_count"));
  out.bucket_count = wire.bucket_count();
  out.pushes_under_way = wire.pushes_under_way();
  out.update = UpdateId(wire.update_id());
  return PeerCall{std::move(out)};
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerRefit& wire, const PeerBounds&) {
  RefitEvent out;
  REFITD_ASSIGN_OR_RETURN(out.request_id,
                          TextOf(wire.request_id(), "refit.request_id", kMaxRequestIdBytes));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "refit.version"));
  REFITD_ASSIGN_OR_RETURN(out.duration, MillisOf(wire.duration_ms(), "refit.duration_ms"));
  REFITD_ASSIGN_OR_RETURN(out.verification, VerificationFromWire(wire.verification()));
  out.evict_late = wire.evict_late();
  REFITD_RETURN_IF_ERROR(NotNegative(wire.bucket_count(), "refit.bucket_count"));
  out.bucket_count = wire.bucket_count();
  out.update = UpdateId(wire.update_id());
  return PeerCall{std::move(out)};
}

absl::StatusOr<PeerCall> CallFrom(const v1::PeerAbort& wire, const PeerBounds&) {
  AbortEvent out;
  REFITD_ASSIGN_OR_RETURN(out.request_id,
                          TextOf(wire.request_id(), "abort.request_id", kMaxRequestIdBytes));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "abort.version"));
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(wire.reason(), "abort.reason", kMaxReasonBytes));
  out.update = UpdateId(wire.update_id());
  return PeerCall{std::move(out)};
}

absl::StatusOr<PeerCall> EventOf(const v1::PeerCall& wire, const PeerBounds& bounds) {
  switch (wire.event_case()) {
    case v1::PeerCall::kBegin:
      return CallFrom(wire.begin(), bounds);
    case v1::PeerCall::kLeaseSlot:
      return CallFrom(wire.lease_slot(), bounds);
    case v1::PeerCall::kReleaseSlot:
      return CallFrom(wire.release_slot(), bounds);
    case v1::PeerCall::kBucket:
      return CallFrom(wire.bucket(), bounds);
    case v1::PeerCall::kCommit:
      return CallFrom(wire.commit(), bounds);
    case v1::PeerCall::kRefit:
      return CallFrom(wire.refit(), bounds);
    case v1::PeerCall::kAbort:
      return CallFrom(wire.abort(), bounds);
    case v1::PeerCall::EVENT_NOT_SET:
      break;
  }
  return Invalid("call.event is missing");
}

absl::StatusOr<PeerCall> ReportOf(const v1::PeerCall& wire, const PeerBounds& bounds) {
  REFITD_ASSIGN_OR_RETURN(const CallId call, CallOf(wire.call(), "call.call"));
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(wire.member(), "call.member"));
  absl::StatusOr<PeerCall> out = EventOf(wire, bounds);
  if (!out.ok()) return Invalid("call.{}", Message(out.status()));
  std::visit(
      [&](auto& event) {
        event.call = call;
        event.member = member;
      },
      out->event);
  return out;
}

absl::StatusOr<PeerCallGone> ReportOf(const v1::PeerCallGone& wire) {
  REFITD_ASSIGN_OR_RETURN(const CallId call, CallOf(wire.call(), "call_gone.call"));
  return PeerCallGone{call};
}

absl::StatusOr<PeerHeaderAck> ReportOf(const v1::PeerHeaderAck& wire) {
  PeerHeaderAck out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(wire.part(), "header_ack.part"));
  out.digest = wire.digest();
  REFITD_ASSIGN_OR_RETURN(out.mismatch, TextOf(wire.mismatch(), "header_ack.mismatch"));
  return out;
}

absl::StatusOr<PeerPartDone> ReportOf(const v1::PeerPartDone& wire) {
  PeerPartDone out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(wire.part(), "part_done.part"));
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "part_done.status", &out.status));
  out.wire_failed = wire.wire_failed();
  REFITD_RETURN_IF_ERROR(
      AtMost(wire.bytes_written_size(), kMaxEngineRanks, "part_done.bytes_written"));
  for (int i = 0; i < wire.bytes_written_size(); ++i) {
    REFITD_RETURN_IF_ERROR(InRange(wire.bytes_written(i), 0, kMaxBucketBytes,
                                   fmt::format("part_done.bytes_written[{}]", i)));
  }
  out.bytes_written.assign(wire.bytes_written().begin(), wire.bytes_written().end());
  if (wire.has_failed_destination()) {
    REFITD_RETURN_IF_ERROR(
        InRange(wire.failed_destination(), 0, kMaxEngineRanks - 1, "part_done.failed_destination"));
    out.failed_destination = static_cast<int>(wire.failed_destination());
  }
  REFITD_RETURN_IF_ERROR(AtMost(wire.digests_size(), kMaxTensorsPerBucket, "part_done.digests"));
  out.digests.assign(wire.digests().begin(), wire.digests().end());
  // It is counted, no more, and may be of a method that only the next version knows.
  if (wire.has_broadcast()) {
    out.broadcast = BroadcastFromWire(wire.broadcast()).value_or(BroadcastMethod::kDirect);
  }
  return out;
}

absl::StatusOr<PeerVerified> ReportOf(const v1::PeerVerified& wire) {
  PeerVerified out;
  out.update = UpdateId(wire.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "verified.status", &out.status));
  REFITD_ASSIGN_OR_RETURN(out.failed_destinations,
                          IndicesOf(wire.failed_destinations(), kMaxEngineRanks, kMaxEngineRanks,
                                    "verified.failed_destinations"));
  return out;
}

absl::StatusOr<std::vector<PeerStream>> StreamsOf(
    const google::protobuf::RepeatedPtrField<v1::PeerStream>& wire, std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(wire.size(), kMaxNodes, field));
  std::vector<PeerStream> streams;
  for (int i = 0; i < wire.size(); ++i) {
    REFITD_RETURN_IF_ERROR(
        InRange(wire[i].peer(), 0, kMaxNodes - 1, fmt::format("{}[{}].peer", field, i)));
    streams.push_back({wire[i].peer(), wire[i].out(), wire[i].in()});
  }
  return streams;
}

absl::StatusOr<PeerProgramBuilt> ReportOf(const v1::PeerProgramBuilt& wire) {
  PeerProgramBuilt out;
  out.update = UpdateId(wire.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "program_built.status", &out.status));
  REFITD_RETURN_IF_ERROR(NotNegative(wire.rounds(), "program_built.rounds"));
  out.rounds = wire.rounds();
  REFITD_ASSIGN_OR_RETURN(out.streams, StreamsOf(wire.streams(), "program_built.streams"));
  return out;
}

absl::StatusOr<PeerCompared> ReportOf(const v1::PeerCompared& wire) {
  PeerCompared out;
  out.update = UpdateId(wire.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "compared.status", &out.status));
  out.digests.assign(wire.digests().begin(), wire.digests().end());
  return out;
}

absl::StatusOr<PeerRunDone> ReportOf(const v1::PeerRunDone& wire) {
  PeerRunDone out;
  out.update = UpdateId(wire.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "run_done.status", &out.status));
  out.wire_failed = wire.wire_failed();
  REFITD_RETURN_IF_ERROR(
      AtMost(wire.bytes_written_size(), kMaxEngineRanks, "run_done.bytes_written"));
  for (int i = 0; i < wire.bytes_written_size(); ++i) {
    REFITD_RETURN_IF_ERROR(
        NotNegative(wire.bytes_written(i), fmt::format("run_done.bytes_written[{}]", i)));
  }
  out.bytes_written.assign(wire.bytes_written().begin(), wire.bytes_written().end());
  if (wire.has_failed_destination()) {
    REFITD_RETURN_IF_ERROR(
        InRange(wire.failed_destination(), 0, kMaxEngineRanks - 1, "run_done.failed_destination"));
    out.failed_destination = static_cast<int>(wire.failed_destination());
  }
  REFITD_ASSIGN_OR_RETURN(out.streams, StreamsOf(wire.streams(), "run_done.streams"));
  return out;
}

absl::StatusOr<PeerEpochOpened> ReportOf(const v1::PeerEpochOpened& wire) {
  PeerEpochOpened out;
  out.epoch = EpochId(wire.epoch());
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "epoch_opened.status", &out.status));
  REFITD_ASSIGN_OR_RETURN(out.address, OpaqueOf(wire.address(), "epoch_opened.address"));
  return out;
}

absl::StatusOr<PeerEpochUp> ReportOf(const v1::PeerEpochUp& wire) {
  PeerEpochUp out;
  out.epoch = EpochId(wire.epoch());
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "epoch_up.status", &out.status));
  return out;
}

absl::StatusOr<PeerWireWaits> ReportOf(const v1::PeerWireWaits& wire) {
  PeerWireWaits out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.holder, TextOf(wire.holder(), "wire_waits.holder"));
  return out;
}

// ---- commands: to the wire ----

void Put(const PeerWelcome& v, v1::PeerAnswer* wire) {
  v1::PeerWelcome* out = wire->mutable_welcome();
  out->set_member(v.member.value());
  if (v.group_version.has_value()) out->set_group_version(v.group_version->value());
  out->set_trainer_ranks(v.trainer_ranks);
}

void Put(const PeerRefuse& v, v1::PeerAnswer* wire) {
  wire->mutable_refuse()->set_member(v.member.value());
  SetStatus(v.status, wire->mutable_refuse()->mutable_status());
}

void PutPayload(const EmptyReply&, v1::PeerReply*) {}

void PutPayload(const BeginReply& r, v1::PeerReply* wire) {
  v1::PeerBegun* out = wire->mutable_begun();
  out->set_update(r.update.value());
  out->set_remaining_ms(MillisToWire(r.remaining));
  out->set_instances(r.instances);
  out->set_leasable_slots(r.leasable_slots);
}

void PutPayload(const LeaseSlotReply& r, v1::PeerReply* wire) {
  v1::PeerSlotLeased* out = wire->mutable_leased();
  SetSlot(r.grant, out->mutable_slot());
  out->set_expires_ms(MillisToWire(r.expires));
  out->set_slot_bytes(r.slot_bytes);
}

void PutPayload(const BucketReply& r, v1::PeerReply* wire) {
  wire->mutable_taken()->set_group_seq(r.group_seq);
  wire->mutable_taken()->set_bytes(r.bytes);
}

void PutPayload(const CommitReply& r, v1::PeerReply* wire) {
  v1::PeerCommitDone* out = wire->mutable_done();
  out->set_version(r.version.value());
  for (const InstanceOutcome& outcome : r.instances) {
    v1::InstanceResult* result = out->add_instances();
    result->set_instance(outcome.instance);
    result->set_committed(outcome.committed);
    result->set_reason(TextToWire(outcome.reason));
  }
  out->set_bytes(r.bytes);
  out->set_elapsed_us(
      std::chrono::ceil<std::chrono::microseconds>(std::max(r.elapsed, Duration(0))).count());
  for (const BroadcastTotals& totals : r.pushed) {
    *out->add_pushed() = BroadcastTotalsToWire(totals.method, totals.bytes, totals.buckets);
  }
  out->set_left_out_tensors(r.left_out_tensors);
  out->set_left_out_bytes(r.left_out_bytes);
}

void Put(const PeerReply& v, v1::PeerAnswer* wire) {
  v1::PeerReply* out = wire->mutable_reply();
  out->set_call(v.call.value());
  SetStatusOf(v.status, out);
  if (v.status.ok()) std::visit([&](const auto& payload) { PutPayload(payload, out); }, v.payload);
}

void Put(const PeerPrepare& v, v1::PeerAnswer* wire) {
  v1::PeerPrepare* out = wire->mutable_prepare();
  out->set_update(v.update.value());
  out->set_version(v.version.value());
  out->set_remaining_ms(MillisToWire(v.remaining));
  out->set_tensor_count(v.tensor_count);
  out->set_verification(ToWire(v.verification));
  SetIds(v.engines, out->mutable_engines());
  SetIds(v.destinations, out->mutable_destinations());
  out->mutable_layout_digests()->Add(v.layout_digests.begin(), v.layout_digests.end());
  out->set_trainer_ranks(v.trainer_ranks);
}

void Put(const PeerHeader& v, v1::PeerAnswer* wire) {
  v1::PeerHeader* out = wire->mutable_header();
  const BucketHeader& header = v.header;
  out->set_update(header.update.value());
  out->set_version(header.version.value());
  out->set_part(header.part.value());
  out->set_group_seq(header.group_seq);
  out->set_root(header.root.value());
  SetTensors(header.content->tensors, header.content->ranges, header.content->byte_offsets,
             out->mutable_content());
  out->set_bytes(header.content->bytes);
  if (header.slot.has_value()) SetSlot(*header.slot, out->mutable_slot());
  out->set_leased(header.leased);
  out->set_verification(ToWire(header.verification));
  out->set_digest(v.digest);
  out->set_is_root(v.is_root);
  out->set_wired(v.wired);
  out->set_fill_slot(v.fill_slot);
  out->set_epoch(v.epoch.value());
  out->set_wire_seq(v.wire_seq.value());
  out->mutable_ranks()->Add(v.ranks.begin(), v.ranks.end());
  out->set_bucket_call(v.bucket_call.value());
  out->set_trainer(v.trainer.value());
  out->mutable_bucket_ranges()->Add(v.bucket_ranges.begin(), v.bucket_ranges.end());
  out->mutable_skip()->Add(v.skip.begin(), v.skip.end());
  SetIds(v.staged, out->mutable_staged());
  if (v.broadcast != BroadcastMethod::kDirect) out->set_broadcast(ToWire(v.broadcast));
}

void Put(const PeerIssue& v, v1::PeerAnswer* wire) {
  wire->mutable_issue()->set_update(v.update.value());
  wire->mutable_issue()->set_part(v.part.value());
}

void Put(const PeerSendPart& v, v1::PeerAnswer* wire) {
  v1::PeerSendPart* out = wire->mutable_send_part();
  out->set_member(v.member.value());
  out->set_update(v.update.value());
  out->set_part(v.part.value());
}

void Put(const PeerCommitted& v, v1::PeerAnswer* wire) {
  wire->mutable_committed()->set_member(v.member.value());
  wire->mutable_committed()->set_version(v.version.value());
}

void Put(const PeerAborted& v, v1::PeerAnswer* wire) {
  v1::PeerAborted* out = wire->mutable_aborted();
  out->set_member(v.member.value());
  out->set_version(v.version.value());
  out->set_reason(TextToWire(v.reason));
  out->set_dirty(v.dirty);
}

void Put(const PeerDraining& v, v1::PeerAnswer* wire) {
  wire->mutable_draining()->set_member(v.member.value());
}

void Put(const PeerVerify& v, v1::PeerAnswer* wire) {
  wire->mutable_verify()->set_update(v.update.value());
  wire->mutable_verify()->mutable_skip()->Add(v.skip.begin(), v.skip.end());
}

void Put(const PeerCompare& v, v1::PeerAnswer* wire) {
  wire->mutable_compare()->set_update(v.update.value());
  if (v.part.parts == 1) return;
  wire->mutable_compare()->set_part(v.part.part);
  wire->mutable_compare()->set_parts(v.part.parts);
}

void Put(const PeerRun& v, v1::PeerAnswer* wire) {
  v1::PeerRun* out = wire->mutable_run();
  out->set_update(v.update.value());
  out->set_part(v.part.value());
  out->set_wired(v.wired);
  out->set_epoch(v.epoch.value());
  out->set_wire_seq(v.wire_seq.value());
  out->mutable_ranks()->Add(v.ranks.begin(), v.ranks.end());
  for (const SlotGrant& slot : v.slots) SetSlot(slot, out->add_slots());
  out->mutable_skip()->Add(v.skip.begin(), v.skip.end());
}

void Put(const PeerAbandon& v, v1::PeerAnswer* wire) {
  wire->mutable_abandon()->set_update(v.update.value());
}

void Put(const PeerUpdateEnded& v, v1::PeerAnswer* wire) {
  v1::PeerUpdateEnded* out = wire->mutable_update_ended();
  out->set_update(v.update.value());
  out->set_version(v.version.value());
  out->set_outcome(static_cast<v1::UpdateOutcome>(v.outcome));
  out->set_reason(TextToWire(v.reason));
}

void Put(const PeerEpochOpen& v, v1::PeerAnswer* wire) {
  v1::PeerEpochOpen* out = wire->mutable_epoch_open();
  out->set_epoch(v.epoch.value());
  out->set_rank(v.rank);
  out->set_size(v.size);
}

void Put(const PeerEpochConnect& v, v1::PeerAnswer* wire) {
  v1::PeerEpochConnect* out = wire->mutable_epoch_connect();
  out->set_epoch(v.epoch.value());
  if (v.addresses != nullptr) {
    for (const std::string& address : *v.addresses) out->add_addresses(address);
  }
  out->set_timeout_ms(MillisToWire(v.timeout));
}

void Put(const PeerEpochClose& v, v1::PeerAnswer* wire) {
  wire->mutable_epoch_close()->set_epoch(v.epoch.value());
}

void Put(const PeerWireLock& v, v1::PeerAnswer* wire) {
  wire->mutable_wire_lock()->set_update(v.update.value());
}

void Put(const PeerWireUnlock& v, v1::PeerAnswer* wire) {
  wire->mutable_wire_unlock()->set_update(v.update.value());
}

void Put(const PeerPing& v, v1::PeerAnswer* wire) { wire->mutable_ping()->set_number(v.number); }

void Put(const PeerIncarnation& v, v1::PeerAnswer* wire) {
  wire->mutable_new_incarnation()->set_incarnation(v.incarnation);
}

// ---- commands: from the wire ----

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerWelcome& wire, const PeerBounds&) {
  PeerWelcome out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "welcome.member"));
  if (wire.has_group_version()) {
    REFITD_ASSIGN_OR_RETURN(out.group_version,
                            VersionOf(wire.group_version(), "welcome.group_version"));
  }
  REFITD_RETURN_IF_ERROR(
      InRange(wire.trainer_ranks(), 0, kMaxTrainerRanks, "welcome.trainer_ranks"));
  out.trainer_ranks = wire.trainer_ranks();
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerRefuse& wire, const PeerBounds&) {
  PeerRefuse out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "refuse.member"));
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "refuse.status", &out.status));
  if (out.status.ok()) return Invalid("refuse.status.code is 0, which refuses nothing");
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PeerBegun& wire) {
  BeginReply out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.remaining, MillisOf(wire.remaining_ms(), "reply.begun.remaining_ms"));
  REFITD_RETURN_IF_ERROR(InRange(wire.instances(), 0, kMaxEngineRanks, "reply.begun.instances"));
  out.instances = wire.instances();
  REFITD_RETURN_IF_ERROR(
      InRange(wire.leasable_slots(), 0, kMaxSlots, "reply.begun.leasable_slots"));
  out.leasable_slots = wire.leasable_slots();
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PeerSlotLeased& wire, const PeerBounds& bounds) {
  LeaseSlotReply out;
  REFITD_ASSIGN_OR_RETURN(out.grant, SlotOf(wire.slot(), bounds, "reply.leased.slot"));
  REFITD_ASSIGN_OR_RETURN(out.expires, MillisOf(wire.expires_ms(), "reply.leased.expires_ms"));
  // The joined daemon's own slots have this size, whatever the coordinator says.
  REFITD_RETURN_IF_ERROR(
      InRange(wire.slot_bytes(), 1, bounds.slot_bytes, "reply.leased.slot_bytes"));
  out.slot_bytes = wire.slot_bytes();
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PeerBucketTaken& wire) {
  REFITD_RETURN_IF_ERROR(NotNegative(wire.group_seq(), "reply.taken.group_seq"));
  REFITD_RETURN_IF_ERROR(InRange(wire.bytes(), 0, kMaxBucketBytes, "reply.taken.bytes"));
  return BucketReply{wire.group_seq(), wire.bytes()};
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PeerCommitDone& wire) {
  CommitReply out;
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "reply.done.version"));
  REFITD_RETURN_IF_ERROR(AtMost(wire.instances_size(), kMaxEngineRanks, "reply.done.instances"));
  for (int i = 0; i < wire.instances_size(); ++i) {
    const v1::InstanceResult& result = wire.instances(i);
    const std::string field = fmt::format("reply.done.instances[{}]", i);
    REFITD_RETURN_IF_ERROR(CheckName(result.instance(), field + ".instance"));
    REFITD_ASSIGN_OR_RETURN(std::string reason, TextOf(result.reason(), field + ".reason"));
    out.instances.push_back({result.instance(), result.committed(), std::move(reason)});
  }
  REFITD_RETURN_IF_ERROR(NotNegative(wire.bytes(), "reply.done.bytes"));
  out.bytes = wire.bytes();
  constexpr int64_t kMaxMicros =
      std::chrono::duration_cast<std::chrono::microseconds>(kMaxPeerDuration).count();
  REFITD_RETURN_IF_ERROR(InRange(wire.elapsed_us(), 0, kMaxMicros, "reply.done.elapsed_us"));
  out.elapsed = std::chrono::microseconds(wire.elapsed_us());
  REFITD_RETURN_IF_ERROR(AtMost(wire.pushed_size(), kMaxBroadcastTotals, "reply.done.pushed"));
  for (const v1::BroadcastTotals& totals : wire.pushed()) {
    REFITD_RETURN_IF_ERROR(NotNegative(totals.bytes(), "reply.done.pushed.bytes"));
    REFITD_RETURN_IF_ERROR(NotNegative(totals.buckets(), "reply.done.pushed.buckets"));
    // A daemon of the next version may know more methods: no reason to refuse what was committed.
    const absl::StatusOr<BroadcastMethod> method = BroadcastFromWire(totals.method());
    if (method.ok()) out.pushed.push_back({*method, totals.bytes(), totals.buckets()});
  }
  REFITD_RETURN_IF_ERROR(NotNegative(wire.left_out_tensors(), "reply.done.left_out_tensors"));
  out.left_out_tensors = wire.left_out_tensors();
  REFITD_RETURN_IF_ERROR(NotNegative(wire.left_out_bytes(), "reply.done.left_out_bytes"));
  out.left_out_bytes = wire.left_out_bytes();
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PeerReply& wire, const PeerBounds& bounds) {
  switch (wire.payload_case()) {
    case v1::PeerReply::kBegun:
      return PayloadOf(wire.begun());
    case v1::PeerReply::kLeased:
      return PayloadOf(wire.leased(), bounds);
    case v1::PeerReply::kTaken:
      return PayloadOf(wire.taken());
    case v1::PeerReply::kDone:
      return PayloadOf(wire.done());
    case v1::PeerReply::PAYLOAD_NOT_SET:
      break;
  }
  return EmptyReply{};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerReply& wire, const PeerBounds& bounds) {
  PeerReply out;
  REFITD_ASSIGN_OR_RETURN(out.call, CallOf(wire.call(), "reply.call"));
  REFITD_RETURN_IF_ERROR(ReadStatus(wire.status(), "reply.status", &out.status));
  if (!out.status.ok() && wire.payload_case() != v1::PeerReply::PAYLOAD_NOT_SET) {
    return Invalid("reply.payload is there where reply.status.code is {}", wire.status().code());
  }
  REFITD_ASSIGN_OR_RETURN(out.payload, PayloadOf(wire, bounds));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerPrepare& wire, const PeerBounds&) {
  PeerPrepare out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "prepare.version"));
  REFITD_ASSIGN_OR_RETURN(out.remaining, MillisOf(wire.remaining_ms(), "prepare.remaining_ms"));
  REFITD_RETURN_IF_ERROR(NotNegative(wire.tensor_count(), "prepare.tensor_count"));
  out.tensor_count = wire.tensor_count();
  REFITD_ASSIGN_OR_RETURN(out.verification,
                          VerificationOf(wire.verification(), "prepare.verification"));
  REFITD_ASSIGN_OR_RETURN(out.engines, MembersOf(wire.engines(), "prepare.engines"));
  REFITD_ASSIGN_OR_RETURN(out.destinations, MembersOf(wire.destinations(), "prepare.destinations"));
  if (wire.layout_digests_size() != wire.destinations_size()) {
    return Invalid("prepare.layout_digests has {} entries where destinations has {}",
                   wire.layout_digests_size(), wire.destinations_size());
  }
  out.layout_digests.assign(wire.layout_digests().begin(), wire.layout_digests().end());
  REFITD_RETURN_IF_ERROR(
      InRange(wire.trainer_ranks(), 0, kMaxTrainerRanks, "prepare.trainer_ranks"));
  out.trainer_ranks = wire.trainer_ranks();
  return out;
}

absl::StatusOr<BucketHeader> HeaderOf(const v1::PeerHeader& wire, const PeerBounds& bounds) {
  BucketHeader out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "header.version"));
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(wire.part(), "header.part"));
  REFITD_RETURN_IF_ERROR(NotNegative(wire.group_seq(), "header.group_seq"));
  out.group_seq = wire.group_seq();
  out.root = NodeId(wire.root());
  REFITD_ASSIGN_OR_RETURN(CheckedTensors tensors,
                          TensorsOf(wire.content(), wire.has_slot(), bounds, "header.content"));
  if (wire.bytes() != tensors.bytes) {
    return Invalid("header.bytes is {} where the content has {}", wire.bytes(), tensors.bytes);
  }
  out.content = std::make_shared<const PartContent>(
      PartContent{std::move(tensors.tensors), std::move(tensors.ranges),
                  std::move(tensors.byte_offsets), tensors.bytes});
  if (wire.has_slot()) {
    REFITD_ASSIGN_OR_RETURN(out.slot, SlotOf(wire.slot(), bounds, "header.slot"));
  }
  out.leased = wire.leased();
  REFITD_ASSIGN_OR_RETURN(out.verification,
                          VerificationOf(wire.verification(), "header.verification"));
  return out;
}

// What needs the slot has one.
absl::Status CheckSlotUse(const v1::PeerHeader& wire) {
  const auto check = [&](bool used, std::string_view field) {
    if (!used || wire.has_slot()) return absl::OkStatus();
    return Invalid("header.{} is true where there is no slot", field);
  };
  REFITD_RETURN_IF_ERROR(check(wire.leased(), "leased"));
  REFITD_RETURN_IF_ERROR(check(wire.fill_slot(), "fill_slot"));
  REFITD_RETURN_IF_ERROR(check(wire.wired(), "wired"));
  if (wire.staged_size() == 0 || wire.has_slot()) return absl::OkStatus();
  return Invalid("header.staged has {} entries where there is no slot", wire.staged_size());
}

absl::Status CheckRanks(const v1::PeerHeader& wire) {
  const std::unordered_set<uint32_t> ranks(wire.ranks().begin(), wire.ranks().end());
  if (ranks.size() != static_cast<size_t>(wire.ranks_size())) {
    return Invalid("header.ranks has {} entries, {} of them different", wire.ranks_size(),
                   ranks.size());
  }
  return absl::OkStatus();
}

absl::Status CheckRoot(const v1::PeerHeader& wire) {
  if (wire.is_root()) {
    REFITD_RETURN_IF_ERROR(CallOf(wire.bucket_call(), "header.bucket_call").status());
    REFITD_RETURN_IF_ERROR(MemberOf(wire.trainer(), "header.trainer").status());
  }
  return SameLength(wire.bucket_ranges_size(),
                    wire.is_root() ? static_cast<size_t>(wire.content().names_size()) : 0,
                    wire.is_root() ? "header.bucket_ranges" : "header.bucket_ranges (not root)");
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerHeader& wire, const PeerBounds& bounds) {
  PeerHeader out;
  REFITD_ASSIGN_OR_RETURN(out.header, HeaderOf(wire, bounds));
  REFITD_RETURN_IF_ERROR(CheckSlotUse(wire));
  out.digest = wire.digest();
  out.is_root = wire.is_root();
  out.wired = wire.wired();
  out.fill_slot = wire.fill_slot();
  out.epoch = EpochId(wire.epoch());
  out.wire_seq = WireSeq(wire.wire_seq());
  REFITD_ASSIGN_OR_RETURN(out.ranks, IndicesOf(wire.ranks(), kMaxNodes, kMaxNodes, "header.ranks"));
  REFITD_RETURN_IF_ERROR(CheckRanks(wire));
  REFITD_RETURN_IF_ERROR(CheckRoot(wire));
  out.bucket_call = CallId(wire.bucket_call());
  out.trainer = MemberId(wire.trainer());
  REFITD_ASSIGN_OR_RETURN(
      out.bucket_ranges, IndicesOf(wire.bucket_ranges(), kMaxTensorsPerBucket, kMaxTensorsPerBucket,
                                   "header.bucket_ranges"));
  REFITD_ASSIGN_OR_RETURN(out.skip, FlagsOf(wire.skip(), "header.skip"));
  REFITD_ASSIGN_OR_RETURN(out.staged, MembersOf(wire.staged(), "header.staged"));
  if (wire.has_broadcast()) {
    REFITD_ASSIGN_OR_RETURN(out.broadcast, BroadcastFromWire(wire.broadcast()));
  }
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerIssue& wire, const PeerBounds&) {
  REFITD_ASSIGN_OR_RETURN(const PartSeq part, PartOf(wire.part(), "issue.part"));
  return PeerIssue{UpdateId(wire.update()), part};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerSendPart& wire, const PeerBounds&) {
  PeerSendPart out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "send_part.member"));
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(wire.part(), "send_part.part"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerCommitted& wire, const PeerBounds&) {
  PeerCommitted out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "committed.member"));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "committed.version"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerAborted& wire, const PeerBounds&) {
  PeerAborted out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(wire.member(), "aborted.member"));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "aborted.version"));
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(wire.reason(), "aborted.reason"));
  out.dirty = wire.dirty();
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerCompare& wire, const PeerBounds&) {
  PeerCompare v;
  v.update = UpdateId(wire.update());
  if (wire.parts() == 0) return v;
  if (wire.parts() > kMaxReplicaParts || wire.part() >= wire.parts()) {
    return Invalid("compare: part {} of {} parts, where {} are possible", wire.part(), wire.parts(),
                   kMaxReplicaParts);
  }
  v.part = {wire.part(), wire.parts()};
  return v;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerDraining& wire, const PeerBounds&) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(wire.member(), "draining.member"));
  return PeerDraining{member};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerVerify& wire, const PeerBounds&) {
  PeerVerify out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.skip, FlagsOf(wire.skip(), "verify.skip"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerRun& wire, const PeerBounds& bounds) {
  constexpr int kMaxProgramSlots = 4;
  PeerRun out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(wire.part(), "run.part"));
  out.wired = wire.wired();
  out.epoch = EpochId(wire.epoch());
  out.wire_seq = WireSeq(wire.wire_seq());
  REFITD_RETURN_IF_ERROR(AtMost(wire.ranks_size(), kMaxNodes, "run.ranks"));
  for (int i = 0; i < wire.ranks_size(); ++i) {
    if (wire.ranks(i) != kNoRank && wire.ranks(i) >= kMaxNodes) {
      return Invalid("run.ranks[{}] is {}, more than {}", i, wire.ranks(i), kMaxNodes - 1);
    }
    out.ranks.push_back(wire.ranks(i));
  }
  REFITD_RETURN_IF_ERROR(AtMost(wire.slots_size(), kMaxProgramSlots, "run.slots"));
  if (wire.slots_size() % 2 != 0 || (out.wired && wire.slots_size() == 0)) {
    return Invalid("run.slots has {} entries: to send from and to receive into come in pairs",
                   wire.slots_size());
  }
  for (int i = 0; i < wire.slots_size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const SlotGrant slot,
                            SlotOf(wire.slots(i), bounds, fmt::format("run.slots[{}]", i)));
    for (const SlotGrant& other : out.slots) {
      if (other.slot == slot.slot) return Invalid("run.slots[{}] is {} again", i, slot.slot);
    }
    out.slots.push_back(slot);
  }
  REFITD_ASSIGN_OR_RETURN(out.skip, FlagsOf(wire.skip(), "run.skip"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerUpdateEnded& wire, const PeerBounds&) {
  PeerUpdateEnded out;
  out.update = UpdateId(wire.update());
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(wire.version(), "update_ended.version"));
  REFITD_RETURN_IF_ERROR(InRange(wire.outcome(), v1::UPDATE_OUTCOME_UNKNOWN,
                                 v1::UPDATE_OUTCOME_ABORTED, "update_ended.outcome"));
  out.outcome = static_cast<Outcome>(wire.outcome());
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(wire.reason(), "update_ended.reason"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerEpochOpen& wire, const PeerBounds&) {
  REFITD_RETURN_IF_ERROR(InRange(wire.size(), 1, kMaxNodes, "epoch_open.size"));
  REFITD_RETURN_IF_ERROR(InRange(wire.rank(), 0, wire.size() - 1, "epoch_open.rank"));
  return PeerEpochOpen{EpochId(wire.epoch()), wire.rank(), wire.size()};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerEpochConnect& wire, const PeerBounds&) {
  PeerEpochConnect out;
  out.epoch = EpochId(wire.epoch());
  REFITD_RETURN_IF_ERROR(AtMost(wire.addresses_size(), kMaxNodes, "epoch_connect.addresses"));
  auto addresses = std::make_shared<std::vector<std::string>>();
  for (int i = 0; i < wire.addresses_size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(
        std::string address,
        OpaqueOf(wire.addresses(i), fmt::format("epoch_connect.addresses[{}]", i)));
    addresses->push_back(std::move(address));
  }
  out.addresses = std::move(addresses);
  REFITD_ASSIGN_OR_RETURN(out.timeout, MillisOf(wire.timeout_ms(), "epoch_connect.timeout_ms"));
  return out;
}

absl::Status CheckIncarnation(uint64_t incarnation, std::string_view field) {
  if (incarnation != 0) return absl::OkStatus();
  return Invalid("{} is 0, which is no incarnation", field);
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerIncarnation& wire, const PeerBounds&) {
  REFITD_RETURN_IF_ERROR(CheckIncarnation(wire.incarnation(), "new_incarnation.incarnation"));
  return PeerIncarnation{wire.incarnation()};
}

// ---- sizes ----

constexpr int64_t kMaxSerialisedBytes = std::numeric_limits<int>::max();

absl::Status CheckSize(int64_t bytes, int64_t message_bytes, std::string_view what) {
  if (bytes <= std::min(message_bytes, kMaxSerialisedBytes)) return absl::OkStatus();
  return Error(StatusCode::kResourceExhausted,
               "{} for another daemon has {} bytes, more than message_bytes of {}", what, bytes,
               message_bytes);
}

// Sequence and incarnation, and lengths of the messages around.
constexpr int64_t kEnvelopeBytes = 64;

// ---- layouts ----

// Without addresses.
Layout StructureOf(const Layout& layout) {
  Layout out = layout;
  out.binding_generation = 0;
  for (Piece& piece : out.pieces) {
    piece.region = RegionId();
    piece.byte_offset = 0;
  }
  return out;
}

// ValidateLayout judges structure and addresses together: pieces are laid out one behind the other,
// which is right for any structure. `destination`: why it can't be a destination's, else OK.
absl::Status ValidateStructure(const Layout& structure, absl::Status* destination) {
  Layout placed = structure;
  int64_t end = 0;
  for (size_t i = 0; i < placed.pieces.size(); ++i) {
    Piece& piece = placed.pieces[i];
    const int64_t element = ElementBytes(placed.tensors[piece.tensor].dtype);
    if (piece.strides.size() != piece.box.extent.size()) {
      return Invalid("piece {} has {} strides where its box has {} dimensions", i,
                     piece.strides.size(), piece.box.extent.size());
    }
    // Also what SpanBytes needs.
    for (const int64_t stride : piece.strides) {
      REFITD_RETURN_IF_ERROR(NotNegative(stride, fmt::format("layout.piece_strides of {}", i)));
    }
    REFITD_ASSIGN_OR_RETURN(const int64_t span,
                            SpanBytes(piece, placed.tensors[piece.tensor].dtype));
    end = (end + element - 1) / element * element;
    if (span > std::numeric_limits<int64_t>::max() / 2 - end) {
      return Invalid("layout.piece_strides: piece {} spans {} bytes, more than there can be", i,
                     span);
    }
    piece.region = RegionId(1);
    piece.byte_offset = end;
    end += span;
  }
  const auto region_bytes = [end](RegionId) -> std::optional<int64_t> { return end; };
  REFITD_RETURN_IF_ERROR(ValidateLayout(placed, region_bytes, /*destination=*/false));
  *destination = ValidateLayout(placed, region_bytes, /*destination=*/true);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::PeerMessage>> LayoutToWire(const PeerLayout& report,
                                                          int64_t message_bytes) {
  const int64_t chunk_bytes = std::min(kPeerLayoutChunkBytes, message_bytes / 2);
  std::vector<v1::PeerMessage> messages;
  for (v1::LayoutChunk& chunk :
       EncodeLayout(StructureOf(*report.layout), v1::Lease(), chunk_bytes)) {
    v1::PeerLayout* out = messages.emplace_back().mutable_layout();
    out->set_member(report.member.value());
    out->set_call(report.call.value());
    chunk.clear_lease();
    *out->mutable_chunk() = std::move(chunk);
  }
  return messages;
}

}  // namespace

// ---- the first messages ----

v1::GroupSpec SpecToWire(const GroupSpec& spec) {
  v1::GroupSpec wire;
  wire.set_trainer_ranks(spec.trainer_ranks);
  wire.set_min_instances(spec.min_instances);
  wire.set_slot_bytes(spec.slot_bytes);
  wire.set_slots(spec.slots);
  for (const std::string& name : spec.engine_only_tensors) wire.add_engine_only_tensors(name);
  for (const std::string& name : spec.unwanted_tensors) wire.add_unwanted_tensors(name);
  return wire;
}

namespace {

absl::StatusOr<std::vector<std::string>> OrderedNames(
    const google::protobuf::RepeatedPtrField<std::string>& names, std::string_view what) {
  REFITD_RETURN_IF_ERROR(AtMost(names.size(), kMaxTensorsPerLayout, what));
  for (int i = 0; i < names.size(); ++i) {
    const std::string field = fmt::format("{}[{}]", what, i);
    REFITD_RETURN_IF_ERROR(TextOf(names[i], field, kMaxNameBytes).status());
    if (i > 0 && names[i] <= names[i - 1]) return Invalid("{} is not in order", field);
  }
  return std::vector<std::string>(names.begin(), names.end());
}

absl::StatusOr<GroupSpec> SpecFromWire(const v1::GroupSpec& wire) {
  GroupSpec spec;
  REFITD_RETURN_IF_ERROR(
      InRange(wire.trainer_ranks(), 1, kMaxTrainerRanks, "accepted.spec.trainer_ranks"));
  spec.trainer_ranks = wire.trainer_ranks();
  REFITD_RETURN_IF_ERROR(
      InRange(wire.min_instances(), 1, kMaxEngineRanks, "accepted.spec.min_instances"));
  spec.min_instances = wire.min_instances();
  REFITD_RETURN_IF_ERROR(
      InRange(wire.slot_bytes(), 1, kMaxTensorBytes, "accepted.spec.slot_bytes"));
  spec.slot_bytes = wire.slot_bytes();
  REFITD_RETURN_IF_ERROR(InRange(wire.slots(), 1, kMaxSlots, "accepted.spec.slots"));
  spec.slots = wire.slots();
  REFITD_ASSIGN_OR_RETURN(
      spec.engine_only_tensors,
      OrderedNames(wire.engine_only_tensors(), "accepted.spec.engine_only_tensors"));
  REFITD_ASSIGN_OR_RETURN(spec.unwanted_tensors,
                          OrderedNames(wire.unwanted_tensors(), "accepted.spec.unwanted_tensors"));
  return spec;
}

absl::Status CheckMessageBytes(int64_t bytes, std::string_view field) {
  return InRange(bytes, kMinPeerMessageBytes, kMaxSerialisedBytes, field);
}

}  // namespace

absl::Status CheckPeerHello(const v1::PeerMessage& message) {
  if (!message.has_hello()) return Invalid("kind: the first message of Link must be hello");
  const v1::PeerHello& hello = message.hello();
  REFITD_RETURN_IF_ERROR(
      AgreeProtocol(hello.protocol(), hello.highest_protocol(), "hello.protocol").status());
  if (message.sequence() != 0 || message.incarnation() != 0) {
    return Invalid("sequence is {}, incarnation {}: those of a hello are 0", message.sequence(),
                   message.incarnation());
  }
  REFITD_RETURN_IF_ERROR(CheckName(hello.group(), "hello.group"));
  REFITD_RETURN_IF_ERROR(MillisOf(hello.wait_ms(), "hello.wait_ms").status());
  static_assert(kMaxDaemonIdBytes == kMaxGroupNameBytes);
  REFITD_RETURN_IF_ERROR(CheckName(hello.daemon_id(), "hello.daemon_id"));
  if (hello.boot_id().size() != kBootIdBytes) {
    return Invalid("hello.boot_id has {} bytes, not {}", hello.boot_id().size(), kBootIdBytes);
  }
  return CheckMessageBytes(hello.message_bytes(), "hello.message_bytes");
}

v1::PeerAnswer AcceptedToWire(const LinkUp& up, int64_t message_bytes) {
  v1::PeerAnswer answer;
  answer.set_incarnation(up.incarnation);
  v1::PeerAccepted* out = answer.mutable_accepted();
  out->set_incarnation(up.incarnation);
  *out->mutable_spec() = SpecToWire(up.spec);
  if (up.version.has_value()) out->set_group_version(up.version->value());
  out->set_coordinator_id(up.coordinator_id);
  out->set_message_bytes(message_bytes);
  out->set_protocol(static_cast<v1::ProtocolVersion>(up.protocol));
  out->set_highest_protocol(static_cast<v1::ProtocolVersion>(kProtocol));
  return answer;
}

absl::StatusOr<PeerAcceptance> AcceptedFromWire(const v1::PeerAnswer& answer) {
  if (!answer.has_accepted()) return Invalid("kind: the first answer of Link must be accepted");
  const v1::PeerAccepted& accepted = answer.accepted();
  PeerAcceptance acceptance;
  LinkUp& up = acceptance.up;
  REFITD_RETURN_IF_ERROR(CheckIncarnation(accepted.incarnation(), "accepted.incarnation"));
  if (answer.sequence() != 0 || answer.incarnation() != accepted.incarnation()) {
    return Invalid(
        "accepted: sequence is {}, incarnation {:#x} where accepted.incarnation is {:#x}",
        answer.sequence(), answer.incarnation(), accepted.incarnation());
  }
  up.incarnation = accepted.incarnation();
  REFITD_ASSIGN_OR_RETURN(up.spec, SpecFromWire(accepted.spec()));
  if (accepted.has_group_version()) {
    REFITD_ASSIGN_OR_RETURN(up.version,
                            VersionOf(accepted.group_version(), "accepted.group_version"));
  }
  REFITD_RETURN_IF_ERROR(CheckName(accepted.coordinator_id(), "accepted.coordinator_id"));
  up.coordinator_id = accepted.coordinator_id();
  REFITD_RETURN_IF_ERROR(CheckMessageBytes(accepted.message_bytes(), "accepted.message_bytes"));
  acceptance.message_bytes = accepted.message_bytes();
  // Coordinators before version 2 say nothing of it.
  const int agreed = accepted.protocol() == 0 ? 1 : static_cast<int>(accepted.protocol());
  REFITD_ASSIGN_OR_RETURN(up.protocol, ProtocolOf(agreed, "accepted.protocol"));
  acceptance.newer = accepted.highest_protocol() > static_cast<int>(kProtocol);
  return acceptance;
}

bool OfUnknownKind(const v1::PeerMessage& message) {
  return message.kind_case() == v1::PeerMessage::KIND_NOT_SET &&
         !message.GetReflection()->GetUnknownFields(message).empty();
}

bool OfUnknownKind(const v1::PeerAnswer& answer) {
  return answer.kind_case() == v1::PeerAnswer::KIND_NOT_SET &&
         !answer.GetReflection()->GetUnknownFields(answer).empty();
}

// ---- reports and commands ----

absl::Status CheckHeaderFits(const std::vector<TensorSpec>& tensors, int64_t message_bytes) {
  constexpr int64_t kVarintBytes = 10;
  // Per tensor: tags and lengths of name and shape (its own and its dims'), dtype, start, size,
  // byte offset, bucket range.
  constexpr int64_t kTensorBytes = 4 + 8 + 1 + 3 * kVarintBytes + 5;
  // Once: everything else, two bytes a rank of the epoch, and a flag (registered) or an id (staged)
  // for each of as many engine ranks as one daemon is likely to have. With more, the header itself
  // may still be refused.
  constexpr int64_t kEngineRanks = 4096;
  constexpr int64_t kIdBytes = 5;
  constexpr int64_t kFixedBytes = 1024 + kIdBytes * kEngineRanks + 2 * kMaxNodes;
  static_assert(kFixedBytes < kMinPeerMessageBytes);
  int64_t bytes = kFixedBytes;
  for (const TensorSpec& tensor : tensors) {
    bytes += kTensorBytes + static_cast<int64_t>(tensor.name.size()) +
             kVarintBytes * static_cast<int64_t>(tensor.shape.size());
  }
  return CheckSize(bytes, message_bytes,
                   fmt::format("the header of a bucket of {} tensors", tensors.size()));
}

absl::StatusOr<std::vector<v1::PeerMessage>> ToWire(const PeerReport& report,
                                                    const PeerBounds& bounds,
                                                    int64_t message_bytes) {
  if (const auto* layout = std::get_if<PeerLayout>(&report)) {
    return LayoutToWire(*layout, message_bytes);
  }
  if (const auto* call = std::get_if<PeerCall>(&report)) {
    // What the group would refuse must not end the link.
    if (const auto* bucket = std::get_if<BucketEvent>(&call->event)) {
      REFITD_RETURN_IF_ERROR(CheckHeaderFits(bucket->tensors, message_bytes));
    }
    if (const auto* begin = std::get_if<BeginEvent>(&call->event)) {
      REFITD_RETURN_IF_ERROR(
          InRange(ToMillis(begin->duration), 0, ToMillis(kMaxPeerDuration), "duration_ms"));
    }
    if (const auto* lease = std::get_if<LeaseSlotEvent>(&call->event)) {
      REFITD_RETURN_IF_ERROR(
          InRange(ToMillis(lease->wait), 0, ToMillis(kMaxPeerDuration), "wait_ms"));
    }
  }
  std::vector<v1::PeerMessage> messages(1);
  std::visit(
      [&](const auto& value) {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (!std::is_same_v<Value, PeerLayout>) Put(value, &messages[0]);
      },
      report);
  REFITD_RETURN_IF_ERROR(
      CheckSize(static_cast<int64_t>(messages[0].ByteSizeLong()) + kEnvelopeBytes, message_bytes,
                "a report"));
  if (messages[0].has_attach()) {
    REFITD_RETURN_IF_ERROR(ReportOf(messages[0].attach()).status());
  }
  if (messages[0].has_call()) {
    REFITD_RETURN_IF_ERROR(ReportOf(messages[0].call(), bounds).status());
  }
  return messages;
}

absl::StatusOr<std::vector<v1::PeerAnswer>> ToWire(const PeerCommand& command,
                                                   int64_t message_bytes) {
  std::vector<v1::PeerAnswer> answers;
  if (const auto* program = std::get_if<PeerProgram>(&command)) {
    answers =
        ProgramToWire(WithItsPart(*program), std::min(kPeerLayoutChunkBytes, message_bytes / 2));
  } else {
    answers.resize(1);
    std::visit(
        [&](const auto& value) {
          using Value = std::decay_t<decltype(value)>;
          if constexpr (!std::is_same_v<Value, PeerProgram>) Put(value, &answers[0]);
        },
        command);
  }
  for (const v1::PeerAnswer& answer : answers) {
    REFITD_RETURN_IF_ERROR(CheckSize(static_cast<int64_t>(answer.ByteSizeLong()) + kEnvelopeBytes,
                                     message_bytes, "a command"));
  }
  return answers;
}

absl::StatusOr<std::optional<PeerCommand>> CommandDecoder::Decode(const v1::PeerAnswer& answer) {
  if (answer.has_program()) return programs_.Add(answer.program());
  if (!programs_.idle())
    return Invalid("kind: another command where the program's next chunk is to come");
  return FromWire(answer, bounds_);
}

absl::StatusOr<PeerCommand> FromWire(const v1::PeerAnswer& answer, const PeerBounds& bounds) {
  switch (answer.kind_case()) {
    case v1::PeerAnswer::kAccepted:
      return Invalid("kind: accepted was said already");
    case v1::PeerAnswer::kWelcome:
      return CommandOf(answer.welcome(), bounds);
    case v1::PeerAnswer::kRefuse:
      return CommandOf(answer.refuse(), bounds);
    case v1::PeerAnswer::kReply:
      return CommandOf(answer.reply(), bounds);
    case v1::PeerAnswer::kPrepare:
      return CommandOf(answer.prepare(), bounds);
    case v1::PeerAnswer::kHeader:
      return CommandOf(answer.header(), bounds);
    case v1::PeerAnswer::kIssue:
      return CommandOf(answer.issue(), bounds);
    case v1::PeerAnswer::kSendPart:
      return CommandOf(answer.send_part(), bounds);
    case v1::PeerAnswer::kCommitted:
      return CommandOf(answer.committed(), bounds);
    case v1::PeerAnswer::kAborted:
      return CommandOf(answer.aborted(), bounds);
    case v1::PeerAnswer::kDraining:
      return CommandOf(answer.draining(), bounds);
    case v1::PeerAnswer::kVerify:
      return CommandOf(answer.verify(), bounds);
    case v1::PeerAnswer::kProgram:
      return Invalid("kind: a program comes in chunks");
    case v1::PeerAnswer::kCompare:
      return CommandOf(answer.compare(), bounds);
    case v1::PeerAnswer::kRun:
      return CommandOf(answer.run(), bounds);
    case v1::PeerAnswer::kAbandon:
      return PeerAbandon{UpdateId(answer.abandon().update())};
    case v1::PeerAnswer::kUpdateEnded:
      return CommandOf(answer.update_ended(), bounds);
    case v1::PeerAnswer::kEpochOpen:
      return CommandOf(answer.epoch_open(), bounds);
    case v1::PeerAnswer::kEpochConnect:
      return CommandOf(answer.epoch_connect(), bounds);
    case v1::PeerAnswer::kEpochClose:
      return PeerEpochClose{EpochId(answer.epoch_close().epoch())};
    case v1::PeerAnswer::kWireLock:
      return PeerWireLock{UpdateId(answer.wire_lock().update())};
    case v1::PeerAnswer::kWireUnlock:
      return PeerWireUnlock{UpdateId(answer.wire_unlock().update())};
    case v1::PeerAnswer::kPing:
      return PeerPing{answer.ping().number()};
    case v1::PeerAnswer::kNewIncarnation:
      return CommandOf(answer.new_incarnation(), bounds);
    case v1::PeerAnswer::KIND_NOT_SET:
      break;
  }
  return Invalid("kind is missing, or not known");
}

absl::StatusOr<std::optional<PeerReport>> ReportDecoder::AddChunk(const v1::PeerLayout& layout) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(layout.member(), "layout.member"));
  if (assembly_.has_value() && assembly_->member != member) {
    return Invalid("layout.member is {} where the last chunk of member {}'s layout is to come",
                   member, assembly_->member);
  }
  if (!assembly_.has_value()) assembly_ = Assembly{member, {}};
  REFITD_RETURN_IF_ERROR(assembly_->decoder.Add(layout.chunk()));
  if (!layout.chunk().last()) return std::nullopt;
  REFITD_ASSIGN_OR_RETURN(Layout complete, std::move(assembly_->decoder).Finish());
  assembly_.reset();
  complete = StructureOf(complete);
  absl::Status destination;
  if (absl::Status status = ValidateStructure(complete, &destination); !status.ok()) {
    return Invalid("layout of member {}: {}", member, Message(status));
  }
  // Here, where no daemon's mutex is held.
  const uint64_t digest = complete.Digest();
  return PeerLayout{member, std::make_shared<const Layout>(std::move(complete)),
                    CallId(layout.call()), std::move(destination), digest};
}

absl::StatusOr<std::optional<PeerReport>> ReportDecoder::Decode(const v1::PeerMessage& message) {
  switch (message.kind_case()) {
    case v1::PeerMessage::kHello:
      return Invalid("kind: hello was said already");
    case v1::PeerMessage::kAttach:
      return ReportOf(message.attach());
    case v1::PeerMessage::kGone:
      if (assembly_.has_value() && assembly_->member.value() == message.gone().member()) {
        assembly_.reset();
      }
      return ReportOf(message.gone());
    case v1::PeerMessage::kLayout:
      return AddChunk(message.layout());
    case v1::PeerMessage::kReady:
      return ReportOf(message.ready());
    case v1::PeerMessage::kFailed:
      return ReportOf(message.failed());
    case v1::PeerMessage::kAck:
      return ReportOf(message.ack());
    case v1::PeerMessage::kCall:
      return ReportOf(message.call(), bounds_);
    case v1::PeerMessage::kCallGone:
      return ReportOf(message.call_gone());
    case v1::PeerMessage::kHeaderAck:
      return ReportOf(message.header_ack());
    case v1::PeerMessage::kPartDone:
      return ReportOf(message.part_done());
    case v1::PeerMessage::kVerified:
      return ReportOf(message.verified());
    case v1::PeerMessage::kProgramBuilt:
      return ReportOf(message.program_built());
    case v1::PeerMessage::kCompared:
      return ReportOf(message.compared());
    case v1::PeerMessage::kRunDone:
      return ReportOf(message.run_done());
    case v1::PeerMessage::kEpochOpened:
      return ReportOf(message.epoch_opened());
    case v1::PeerMessage::kEpochUp:
      return ReportOf(message.epoch_up());
    case v1::PeerMessage::kWireGranted:
      return PeerWireGranted{UpdateId(message.wire_granted().update())};
    case v1::PeerMessage::kWireWaits:
      return ReportOf(message.wire_waits());
    case v1::PeerMessage::kWireWanted:
      return PeerWireWanted{UpdateId(message.wire_wanted().update())};
    case v1::PeerMessage::kPong:
      return PeerPong{message.pong().number()};
    case v1::PeerMessage::KIND_NOT_SET:
      break;
  }
  return Invalid("kind is missing, or not known");
}

// ---- order ----

absl::Status PeerOrder::Announce(uint64_t incarnation) {
  if (incarnations_.size() > kMaxIncarnationsAhead) {
    return Error(StatusCode::kResourceExhausted,
                 "the group was replaced {} times without the other daemon taking note",
                 incarnations_.size() - 1);
  }
  incarnations_.push_back(incarnation);
  return absl::OkStatus();
}

absl::StatusOr<bool> PeerOrder::Check(uint64_t sequence, uint64_t incarnation) {
  if (sequence != 0 && sequence <= last_) return false;
  if (sequence != last_ + 1) {
    return Error(StatusCode::kAborted, "sequence is {} where {} comes next: messages are missing",
                 sequence, last_ + 1);
  }
  const auto found = std::find(incarnations_.begin(), incarnations_.end(), incarnation);
  if (found == incarnations_.end()) {
    return Error(StatusCode::kFailedPrecondition, "incarnation is {:#x} where the group's is {:#x}",
                 incarnation, incarnations_.back());
  }
  incarnations_.erase(incarnations_.begin(), found);
  last_ = sequence;
  return true;
}

}  // namespace refitd
