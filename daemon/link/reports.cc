#include "daemon/link/reports.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "daemon/group/tensor_table.h"
#include "daemon/link/member_actions.h"
#include "daemon/link/trainer_messages.h"
#include "daemon/link/values.h"
#include "proto/convert.h"
#include "proto/delivery.h"
#include "transport/base/identity.h"
#include "transport/base/status.h"
#include "transport/plan/node_program.h"

namespace refitd {
namespace {

using peer::CallOf;
using peer::CheckSize;
using peer::IndicesOf;
using peer::kEnvelopeBytes;
using peer::MemberOf;
using peer::OpaqueOf;
using peer::PartOf;
using peer::ReadStatus;
using peer::SetStatus;
using peer::SetStatusOf;
using peer::TextOf;
using peer::TextToProto;
using peer::VersionOf;

// A run of a program can't take longer than this, since an update can't.
constexpr int64_t kMaxBusyMicros =
    std::chrono::duration_cast<std::chrono::microseconds>(kMaxWireTimeout).count();

// ---- reports: to the wire ----

void Put(const PeerAttach& v, v1::PeerMessage* message) {
  v1::PeerAttach* out = message->mutable_attach();
  out->set_member(v.member.value());
  if (const auto* trainer = std::get_if<TrainerIdentity>(&v.identity)) {
    v1::PeerTrainer* t = out->mutable_trainer();
    t->set_rank(trainer->rank);
    t->set_world_size(trainer->world_size);
    t->set_pid(trainer->pid);
    t->set_identity(TextToProto(trainer->identity, kMaxIdentityBytes));
    t->set_any_owner(trainer->any_owner);
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
  e->set_catch_up(engine.catch_up);
  e->set_wants_staged(engine.wants_staged);
  e->set_trainer_identity(engine.trainer_identity);
  e->set_held_owner(TextToProto(engine.held_owner, kMaxIdentityBytes));
  e->set_held_digest(engine.held_digest);
  if (engine.held_content.has_value()) e->set_held_content(engine.held_content->value());
  if (!engine.refused.ok()) SetStatus(engine.refused, e->mutable_refused());
  if (!engine.manifest.has_value()) return;
  v1::Manifest* manifest = e->mutable_manifest();
  for (const TensorSpec& tensor : *engine.manifest) {
    manifest->add_names(tensor.name);
    manifest->add_dtypes(ToProto(tensor.dtype));
    *manifest->add_shapes() = ToProto(tensor.shape);
  }
}

void Put(const MemberLost& v, v1::PeerMessage* message) {
  message->mutable_gone()->set_member(v.member.value());
  message->mutable_gone()->set_reason(TextToProto(v.reason));
}

// What an engine rank says travels as the rank's own message, without the version.
v1::EngineMessage* EngineMessageOf(MemberId member, v1::PeerMessage* message) {
  message->mutable_engine_message()->set_member(member.value());
  return message->mutable_engine_message()->mutable_message();
}

void Put(const ReadyEvent& v, v1::PeerMessage* message) {
  v1::Ready* out = EngineMessageOf(v.member, message)->mutable_ready();
  out->set_update_id(v.update.value());
  if (v.stopped.has_value())
    out->set_stopped_us(std::chrono::duration_cast<std::chrono::microseconds>(*v.stopped).count());
}

void Put(const ProcessedEvent& v, v1::PeerMessage* message) {
  EngineMessageOf(v.member, message)->mutable_processed()->set_update_id(v.update.value());
}

void Put(const EngineFailed& v, v1::PeerMessage* message) {
  v1::Failed* out = EngineMessageOf(v.member, message)->mutable_failed();
  out->set_update_id(v.update.value());
  out->set_reason(TextToProto(v.reason));
  if (v.refused.ok()) return;
  SetStatus(v.refused, message->mutable_engine_message()->mutable_refused());
}

void Put(const AckEvent& v, v1::PeerMessage* message) {
  v1::Ack* out = EngineMessageOf(v.member, message)->mutable_ack();
  out->set_update_id(v.update.value());
  out->set_part(v.part.value());
}

void Put(const PeerCall& v, v1::PeerMessage* message) { Fill(v.event, message->mutable_call()); }

void Put(const CallGone& v, v1::PeerMessage* message) { message->set_call_gone(v.call.value()); }

void Put(const PeerHeaderAck& v, v1::PeerMessage* message) {
  v1::PeerHeaderAck* out = message->mutable_header_ack();
  out->set_update(v.update.value());
  out->set_part(v.part.value());
  out->set_digest(v.digest);
  out->set_mismatch(TextToProto(v.mismatch));
  out->set_mismatch_tensor(CleanText(v.mismatch_tensor, kMaxNameBytes));
}

// PutMoved sets the fields that the end of a part's transfer and the end of a program's run share.
template <typename Done, typename Wire>
void PutMoved(const Done& v, Wire* out) {
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->set_wire_failed(v.wire_failed);
  out->mutable_bytes_written()->Add(v.bytes_written.begin(), v.bytes_written.end());
  if (v.failed_destination >= 0) {
    out->set_failed_destination(static_cast<uint32_t>(v.failed_destination));
  }
}

void Put(const TransferDone& v, v1::PeerMessage* message) {
  v1::PeerPartDone* out = message->mutable_part_done();
  PutMoved(v, out);
  out->set_part(v.part.value());
  out->mutable_digests()->Add(v.digests.begin(), v.digests.end());
  if (v.broadcast != BroadcastMethod::kDirect) out->set_broadcast(ToProto(v.broadcast));
}

void Put(const VerifyDone& v, v1::PeerMessage* message) {
  v1::PeerVerified* out = message->mutable_verified();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->mutable_failed_destinations()->Add(v.failed_destinations.begin(),
                                          v.failed_destinations.end());
  out->mutable_content()->Add(v.content.begin(), v.content.end());
}

template <typename Wire>
void SetStreams(const std::vector<PeerStream>& streams, Wire* message) {
  for (const PeerStream& stream : streams) {
    v1::PeerStream* out = message->add_streams();
    out->set_peer(stream.peer);
    out->set_out(stream.out);
    out->set_in(stream.in);
  }
}

void Put(const PeerProgramBuilt& v, v1::PeerMessage* message) {
  v1::PeerProgramBuilt* out = message->mutable_program_built();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->set_rounds(v.rounds);
  SetStreams(v.streams, out);
}

void Put(const CompareDone& v, v1::PeerMessage* message) {
  v1::PeerCompared* out = message->mutable_compared();
  out->set_update(v.update.value());
  SetStatusOf(v.status, out);
  out->mutable_digests()->Add(v.digests.begin(), v.digests.end());
}

void Put(const RefitDone& v, v1::PeerMessage* message) {
  v1::PeerRunDone* out = message->mutable_run_done();
  PutMoved(v, out);
  SetStreams(v.streams, out);
  out->set_attempt(v.attempt);
  if (v.lacks.has_value()) out->set_lacks(*v.lacks);
  for (const PeerWireUse& link : v.links) {
    v1::PeerWireUse* use = out->add_links();
    use->set_peer(link.peer);
    use->set_bytes(link.bytes);
    use->set_busy_us(std::chrono::duration_cast<std::chrono::microseconds>(link.busy).count());
  }
}

void Put(const CommunicatorOpened& v, v1::PeerMessage* message) {
  v1::PeerCommunicatorEnd* out = message->mutable_communicator_opened();
  out->set_communicator(v.communicator.value());
  SetStatusOf(v.status, out);
  out->set_address(v.address);
}

void Put(const CommunicatorUp& v, v1::PeerMessage* message) {
  message->mutable_communicator_up()->set_communicator(v.communicator.value());
  SetStatusOf(v.status, message->mutable_communicator_up());
}

void Put(const PeerWireGranted& v, v1::PeerMessage* message) {
  message->set_wire_granted(v.update.value());
}

void Put(const PeerWireWaits& v, v1::PeerMessage* message) {
  message->mutable_wire_waits()->set_update(v.update.value());
  message->mutable_wire_waits()->set_holder(TextToProto(v.holder));
}

void Put(const PeerWireWanted& v, v1::PeerMessage* message) {
  message->set_wire_wanted(v.update.value());
}

void Put(const PeerPong& v, v1::PeerMessage* message) { message->set_pong(v.number); }

// ---- reports: from the wire ----

absl::StatusOr<PeerAttach> ReportOf(const v1::PeerAttach& message) {
  PeerAttach out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "attach.member"));
  const auto ranks = [](int rank, int world_size, int pid, int limit,
                        std::string_view field) -> absl::Status {
    REFITD_RETURN_IF_ERROR(InRange(world_size, 1, limit, fmt::format("{}.world_size", field)));
    REFITD_RETURN_IF_ERROR(InRange(rank, 0, world_size - 1, fmt::format("{}.rank", field)));
    return NotNegative(pid, fmt::format("{}.pid", field));
  };
  if (message.has_trainer()) {
    const v1::PeerTrainer& t = message.trainer();
    REFITD_RETURN_IF_ERROR(
        ranks(t.rank(), t.world_size(), t.pid(), kMaxTrainerRanks, "attach.trainer"));
    TrainerIdentity trainer;
    trainer.rank = t.rank();
    trainer.world_size = t.world_size();
    trainer.pid = t.pid();
    REFITD_ASSIGN_OR_RETURN(trainer.identity,
                            TextOf(t.identity(), "attach.trainer.identity", kMaxIdentityBytes));
    trainer.any_owner = t.any_owner();
    out.identity = trainer;
    return out;
  }
  if (!message.has_engine()) return Invalid("attach.identity is missing");
  const v1::PeerEngine& e = message.engine();
  REFITD_RETURN_IF_ERROR(
      ranks(e.rank(), e.world_size(), e.pid(), kMaxEngineRanks, "attach.engine"));
  EngineIdentity engine;
  REFITD_RETURN_IF_ERROR(CheckName(e.instance(), "attach.engine.instance"));
  engine.instance = e.instance();
  engine.rank = e.rank();
  engine.world_size = e.world_size();
  REFITD_RETURN_IF_ERROR(
      InRange(e.delivery(), 1, static_cast<int64_t>(kDeliveries.size()), "attach.engine.delivery"));
  engine.delivery = static_cast<DeliveryMode>(e.delivery());
  engine.pid = e.pid();
  engine.dirty = e.dirty();
  engine.held_origin = e.held_origin();
  engine.held_digest = e.held_digest();
  if (e.has_held_content()) engine.held_content = Version(e.held_content());
  engine.catch_up = e.catch_up();
  engine.wants_staged = e.wants_staged();
  engine.trainer_identity = e.trainer_identity();
  if (!engine.trainer_identity.empty()) {
    REFITD_RETURN_IF_ERROR(
        CheckOwnerPattern(engine.trainer_identity, "attach.engine.trainer_identity"));
  }
  REFITD_ASSIGN_OR_RETURN(engine.held_owner,
                          TextOf(e.held_owner(), "attach.engine.held_owner", kMaxIdentityBytes));
  if (engine.catch_up && !CatchesUp(engine.delivery)) {
    return Invalid("attach.engine.catch_up: only {} delivery takes part in catch-ups",
                   DeliveriesWith(CatchesUp));
  }
  if (e.has_held_version()) {
    REFITD_ASSIGN_OR_RETURN(engine.held_version,
                            VersionOf(e.held_version(), "attach.engine.held_version"));
  }
  if (e.has_refused()) {
    REFITD_RETURN_IF_ERROR(ReadStatus(e.refused(), "attach.engine.refused", &engine.refused));
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

absl::StatusOr<MemberLost> ReportOf(const v1::PeerGone& message) {
  MemberLost out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "gone.member"));
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(message.reason(), "gone.reason"));
  return out;
}

absl::StatusOr<PeerReport> ReportOf(const v1::PeerEngineMessage& message) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member,
                          MemberOf(message.member(), "engine_message.member"));
  const v1::EngineMessage& said = message.message();
  if (said.has_ready()) return ReadyOf(member, said.ready());
  if (said.has_processed()) {
    return ProcessedEvent{member, UpdateId(said.processed().update_id())};
  }
  if (said.has_ack()) {
    REFITD_ASSIGN_OR_RETURN(const PartSeq part, PartOf(said.ack().part(), "ack.part"));
    return AckEvent{member, UpdateId(said.ack().update_id()), part};
  }
  if (said.has_failed()) {
    REFITD_ASSIGN_OR_RETURN(std::string reason, TextOf(said.failed().reason(), "failed.reason"));
    EngineFailed failed{member, UpdateId(said.failed().update_id()), std::move(reason)};
    if (message.has_refused()) {
      REFITD_RETURN_IF_ERROR(ReadStatus(message.refused(), "failed.refused", &failed.refused));
    }
    return failed;
  }
  return Invalid("engine_message.message is none that is passed on");
}

absl::StatusOr<PeerCall> ReportOf(const v1::PeerCall& message, const PeerBounds& bounds) {
  absl::StatusOr<TrainerCall> call = TrainerCallOf(message, bounds);
  if (!call.ok()) return Invalid("call.{}", Message(call.status()));
  return PeerCall{*std::move(call)};
}

absl::StatusOr<CallGone> CallGoneOf(uint64_t number) {
  REFITD_ASSIGN_OR_RETURN(const CallId call, CallOf(number, "call_gone"));
  return CallGone{call};
}

absl::StatusOr<PeerHeaderAck> ReportOf(const v1::PeerHeaderAck& message) {
  PeerHeaderAck out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(message.part(), "header_ack.part"));
  out.digest = message.digest();
  REFITD_ASSIGN_OR_RETURN(out.mismatch, TextOf(message.mismatch(), "header_ack.mismatch"));
  REFITD_ASSIGN_OR_RETURN(out.mismatch_tensor, TextOf(message.mismatch_tensor(),
                                                      "header_ack.mismatch_tensor", kMaxNameBytes));
  return out;
}

// Reads what PutMoved wrote. `most`: bytes that one destination may have got.
template <typename Wire, typename Done>
absl::Status ReadMoved(const Wire& message, std::string_view field, int64_t most, Done* out) {
  const auto of = [field](std::string_view name) { return fmt::format("{}.{}", field, name); };
  out->update = UpdateId(message.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), of("status"), &out->status));
  out->wire_failed = message.wire_failed();
  REFITD_RETURN_IF_ERROR(
      AtMost(message.bytes_written_size(), kMaxEngineRanks, of("bytes_written")));
  for (int i = 0; i < message.bytes_written_size(); ++i) {
    REFITD_RETURN_IF_ERROR(
        InRange(message.bytes_written(i), 0, most, of(fmt::format("bytes_written[{}]", i))));
  }
  out->bytes_written.assign(message.bytes_written().begin(), message.bytes_written().end());
  if (!message.has_failed_destination()) return absl::OkStatus();
  out->failed_destination = static_cast<int>(message.failed_destination());
  return InRange(message.failed_destination(), 0, kMaxEngineRanks - 1, of("failed_destination"));
}

absl::StatusOr<TransferDone> ReportOf(const v1::PeerPartDone& message) {
  TransferDone out;
  REFITD_RETURN_IF_ERROR(ReadMoved(message, "part_done", kMaxBucketBytes, &out));
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(message.part(), "part_done.part"));
  REFITD_RETURN_IF_ERROR(AtMost(message.digests_size(), kMaxTensorsPerBucket, "part_done.digests"));
  out.digests.assign(message.digests().begin(), message.digests().end());
  // The method is only counted. One that only a later version knows counts as direct.
  if (message.has_broadcast()) {
    out.broadcast = BroadcastFromProto(message.broadcast()).value_or(BroadcastMethod::kDirect);
  }
  return out;
}

absl::StatusOr<VerifyDone> ReportOf(const v1::PeerVerified& message) {
  VerifyDone out;
  out.update = UpdateId(message.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "verified.status", &out.status));
  REFITD_ASSIGN_OR_RETURN(out.failed_destinations,
                          IndicesOf(message.failed_destinations(), kMaxEngineRanks, kMaxEngineRanks,
                                    "verified.failed_destinations"));
  REFITD_RETURN_IF_ERROR(AtMost(message.content_size(), kMaxEngineRanks, "verified.content"));
  out.content.assign(message.content().begin(), message.content().end());
  return out;
}

absl::StatusOr<std::vector<PeerStream>> StreamsOf(
    const google::protobuf::RepeatedPtrField<v1::PeerStream>& message, std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(message.size(), kMaxNodes, field));
  std::vector<PeerStream> streams;
  for (int i = 0; i < message.size(); ++i) {
    REFITD_RETURN_IF_ERROR(
        InRange(message[i].peer(), 0, kMaxNodes - 1, fmt::format("{}[{}].peer", field, i)));
    streams.push_back({message[i].peer(), message[i].out(), message[i].in()});
  }
  return streams;
}

absl::StatusOr<PeerProgramBuilt> ReportOf(const v1::PeerProgramBuilt& message) {
  PeerProgramBuilt out;
  out.update = UpdateId(message.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "program_built.status", &out.status));
  REFITD_RETURN_IF_ERROR(NotNegative(message.rounds(), "program_built.rounds"));
  out.rounds = message.rounds();
  REFITD_ASSIGN_OR_RETURN(out.streams, StreamsOf(message.streams(), "program_built.streams"));
  return out;
}

absl::StatusOr<CompareDone> ReportOf(const v1::PeerCompared& message) {
  CompareDone out;
  out.update = UpdateId(message.update());
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "compared.status", &out.status));
  out.digests.assign(message.digests().begin(), message.digests().end());
  return out;
}

absl::StatusOr<RefitDone> ReportOf(const v1::PeerRunDone& message) {
  RefitDone out;
  REFITD_RETURN_IF_ERROR(ReadMoved(message, "run_done", std::numeric_limits<int64_t>::max(), &out));
  REFITD_ASSIGN_OR_RETURN(out.streams, StreamsOf(message.streams(), "run_done.streams"));
  out.attempt = message.attempt();
  if (message.has_lacks()) {
    REFITD_RETURN_IF_ERROR(InRange(message.lacks(), 0, kMaxRounds, "run_done.lacks"));
    out.lacks = message.lacks();
  }
  REFITD_RETURN_IF_ERROR(AtMost(message.links_size(), kMaxNodes, "run_done.links"));
  for (int i = 0; i < message.links_size(); ++i) {
    const v1::PeerWireUse& link = message.links(i);
    const std::string field = fmt::format("run_done.links[{}]", i);
    REFITD_RETURN_IF_ERROR(InRange(link.peer(), 0, kMaxNodes - 1, field + ".peer"));
    REFITD_RETURN_IF_ERROR(NotNegative(link.bytes(), field + ".bytes"));
    REFITD_RETURN_IF_ERROR(InRange(link.busy_us(), 0, kMaxBusyMicros, field + ".busy_us"));
    out.links.push_back({link.peer(), link.bytes(), std::chrono::microseconds(link.busy_us())});
  }
  return out;
}

absl::StatusOr<CommunicatorOpened> OpenedOf(const v1::PeerCommunicatorEnd& message) {
  CommunicatorOpened out;
  out.communicator = CommunicatorId(message.communicator());
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "communicator_opened.status", &out.status));
  REFITD_ASSIGN_OR_RETURN(out.address, OpaqueOf(message.address(), "communicator_opened.address"));
  return out;
}

absl::StatusOr<CommunicatorUp> UpOf(const v1::PeerCommunicatorEnd& message) {
  CommunicatorUp out;
  out.communicator = CommunicatorId(message.communicator());
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "communicator_up.status", &out.status));
  return out;
}

absl::StatusOr<PeerWireWaits> ReportOf(const v1::PeerWireWaits& message) {
  PeerWireWaits out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.holder, TextOf(message.holder(), "wire_waits.holder"));
  return out;
}

// ---- layouts ----

// The layout without addresses.
Layout StructureOf(const Layout& layout) {
  Layout out = layout;
  out.binding_generation = 0;
  out.backs.clear();
  out.flips = 0;
  for (Piece& piece : out.pieces) {
    piece.region = RegionId();
    piece.byte_offset = 0;
  }
  return out;
}

// ValidateLayout judges structure and addresses together, so the pieces are laid out one behind the
// other, which suits any structure. `destination`: why the layout can't be a destination's, else
// OK.
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
    // Strides must not be negative for SpanBytes either.
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

absl::StatusOr<std::vector<v1::PeerMessage>> LayoutToProto(const PeerLayout& report,
                                                           int64_t message_bytes) {
  const int64_t chunk_bytes = std::min(kPeerLayoutChunkBytes, message_bytes / 2);
  std::vector<v1::PeerMessage> messages;
  for (v1::LayoutChunk& chunk :
       EncodeLayout(StructureOf(*report.layout), v1::Lease(), chunk_bytes)) {
    v1::PeerLayout* out = messages.emplace_back().mutable_layout();
    out->set_member(report.member.value());
    out->set_call(report.call.value());
    out->set_content(report.content);
    out->set_shadowed(report.shadowed);
    out->set_backs_differ(report.backs_differ);
    chunk.clear_lease();
    *out->mutable_chunk() = std::move(chunk);
  }
  return messages;
}

}  // namespace

absl::Status CheckHeaderFits(const std::vector<TensorSpec>& tensors, int64_t message_bytes) {
  constexpr int64_t kVarintBytes = 10;
  // For each tensor: tags and lengths of name and shape (its own and its dims'), dtype, start,
  // size, byte offset, bucket range.
  constexpr int64_t kTensorBytes = 4 + 8 + 1 + 3 * kVarintBytes + 5;
  // Once: everything else, two bytes for each rank of the communicator, and a flag (registered) or
  // an id (staged) for each of as many engine ranks as one daemon is likely to have. With more
  // ranks the header itself may still be refused.
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

absl::StatusOr<std::vector<v1::PeerMessage>> ToProto(const PeerReport& report,
                                                     const PeerBounds& bounds,
                                                     int64_t message_bytes) {
  if (const auto* layout = std::get_if<PeerLayout>(&report)) {
    return LayoutToProto(*layout, message_bytes);
  }
  if (const auto* call = std::get_if<PeerCall>(&report)) {
    // A call that the group would refuse must not end the link.
    if (const auto* bucket = std::get_if<BucketEvent>(&call->event)) {
      REFITD_RETURN_IF_ERROR(CheckHeaderFits(bucket->bucket->tensors, message_bytes));
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

namespace {

absl::Status Grow(const Room& room, int64_t bytes) {
  return room == nullptr ? absl::OkStatus() : room(bytes);
}

}  // namespace

absl::StatusOr<std::optional<PeerReport>> ReportDecoder::AddChunk(const v1::PeerLayout& layout) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(layout.member(), "layout.member"));
  if (assembly_.has_value() && assembly_->member != member) {
    return Invalid("layout.member is {} where the last chunk of member {}'s layout is to come",
                   member, assembly_->member);
  }
  if (!assembly_.has_value()) assembly_ = Assembly{member, {}, NewRoom(), {}};
  if (assembly_->refused.ok()) {
    REFITD_RETURN_IF_ERROR(assembly_->decoder.Add(layout.chunk()));
    assembly_->refused = Grow(assembly_->room, assembly_->decoder.bytes());
    if (!assembly_->refused.ok()) assembly_->decoder = LayoutDecoder();
  }
  if (!layout.chunk().last()) return std::nullopt;
  Assembly assembly = *std::exchange(assembly_, std::nullopt);
  const CallId call(layout.call());
  if (!assembly.refused.ok()) return PeerLayout{member, nullptr, call, {}, {}, 0, assembly.refused};
  REFITD_ASSIGN_OR_RETURN(Layout complete, std::move(assembly.decoder).Finish());
  complete = StructureOf(complete);
  absl::Status destination;
  if (absl::Status status = ValidateStructure(complete, &destination); !status.ok()) {
    return Invalid("layout of member {}: {}", member, Message(status));
  }
  // Computed here, where no daemon's mutex is held.
  const uint64_t digest = complete.Digest();
  struct Kept {
    Layout layout;
    Room room;
  };
  const auto kept =
      std::make_shared<const Kept>(Kept{std::move(complete), std::move(assembly.room)});
  return PeerLayout{member,
                    {kept, &kept->layout},
                    call,
                    std::move(destination),
                    digest,
                    layout.content(),
                    {},
                    layout.shadowed(),
                    layout.backs_differ()};
}

PeerAttach ReportDecoder::Counted(PeerAttach attach) const {
  auto* const engine = std::get_if<EngineIdentity>(&attach.identity);
  if (engine == nullptr || !engine->manifest.has_value()) return attach;
  Room room = NewRoom();
  attach.room = Grow(room, group::MemoryOf(*engine->manifest));
  if (!attach.room.ok()) engine->manifest.reset();
  engine->counted = std::make_shared<const Room>(std::move(room));
  return attach;
}

absl::StatusOr<std::optional<PeerReport>> ReportDecoder::Decode(const v1::PeerMessage& message) {
  switch (message.kind_case()) {
    case v1::PeerMessage::kHello:
      return Invalid("kind: hello was said already");
    case v1::PeerMessage::kAttach: {
      REFITD_ASSIGN_OR_RETURN(PeerAttach attach, ReportOf(message.attach()));
      return Counted(std::move(attach));
    }
    case v1::PeerMessage::kGone:
      if (assembly_.has_value() && assembly_->member.value() == message.gone().member()) {
        assembly_.reset();
      }
      return ReportOf(message.gone());
    case v1::PeerMessage::kLayout:
      return AddChunk(message.layout());
    case v1::PeerMessage::kEngineMessage:
      return ReportOf(message.engine_message());
    case v1::PeerMessage::kCall:
      return ReportOf(message.call(), bounds_);
    case v1::PeerMessage::kCallGone:
      return CallGoneOf(message.call_gone());
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
    case v1::PeerMessage::kCommunicatorOpened:
      return OpenedOf(message.communicator_opened());
    case v1::PeerMessage::kCommunicatorUp:
      return UpOf(message.communicator_up());
    case v1::PeerMessage::kWireGranted:
      return PeerWireGranted{UpdateId(message.wire_granted())};
    case v1::PeerMessage::kWireWaits:
      return ReportOf(message.wire_waits());
    case v1::PeerMessage::kWireWanted:
      return PeerWireWanted{UpdateId(message.wire_wanted())};
    case v1::PeerMessage::kPong:
      return PeerPong{message.pong()};
    case v1::PeerMessage::KIND_NOT_SET:
      break;
  }
  return Invalid("kind is missing, or not known");
}

}  // namespace refitd
