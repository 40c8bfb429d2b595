#include "daemon/link/values.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "daemon/checks/bucket.h"
#include "proto/convert.h"

namespace refitd::peer {

using absl::StatusCode;

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

int64_t MillisToWire(Duration duration) {
  const Duration kept = std::clamp(duration, Duration(0), kMaxPeerDuration);
  return std::chrono::ceil<std::chrono::milliseconds>(kept).count();
}

// ---- texts ----

absl::StatusOr<std::string> TextOf(const std::string& text, std::string_view field,
                                   size_t max_bytes) {
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

constexpr uint32_t kMaxStatusCode = static_cast<uint32_t>(StatusCode::kUnauthenticated);
static_assert(kMaxStatusCode == 16);

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

absl::StatusOr<std::vector<uint32_t>> IndicesOf(
    const google::protobuf::RepeatedField<uint32_t>& wire, int64_t limit, int64_t bound,
    std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(wire.size(), limit, field));
  for (int i = 0; i < wire.size(); ++i) {
    REFITD_RETURN_IF_ERROR(InRange(wire[i], 0, bound - 1, fmt::format("{}[{}]", field, i)));
  }
  return std::vector<uint32_t>(wire.begin(), wire.end());
}

// ---- buckets ----

absl::Status SameLength(int got, size_t want, std::string_view field) {
  if (static_cast<size_t>(got) == want) return absl::OkStatus();
  return Invalid("{} has {} entries where names has {}", field, got, want);
}

namespace {

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

// Checks that the offsets lie in the slot, are aligned, and that the ranges do not overlap.
absl::StatusOr<std::vector<int64_t>> OffsetsOf(const v1::PeerTensors& wire,
                                               const CheckedBucket& bucket, bool has_slot,
                                               const PeerBounds& bounds, std::string_view name) {
  const std::vector<TensorSpec>& tensors = bucket.tensors;
  const std::vector<TensorRange>& ranges = bucket.ranges;
  const std::string field = fmt::format("{}.byte_offsets", name);
  REFITD_RETURN_IF_ERROR(SameLength(wire.byte_offsets_size(), has_slot ? tensors.size() : 0,
                                    has_slot ? field : field + " (there is no slot)"));
  std::vector<int64_t> offsets(wire.byte_offsets().begin(), wire.byte_offsets().end());
  std::vector<size_t> order;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t bytes = bucket.BytesOf(ranges[i]);
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
    if (offsets[before] + bucket.BytesOf(ranges[before]) > offsets[order[k]]) {
      return Invalid("{}[{}] is {}: overlaps entry {}", field, order[k], offsets[order[k]], before);
    }
  }
  return offsets;
}

template <typename Wire>
void SetBucket(const PartContent& content, const std::optional<SlotGrant>& slot,
               v1::PeerTensors* tensors, Wire* wire) {
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorSpec& tensor = content.tensor(i);
    tensors->add_names(tensor.name);
    tensors->add_dtypes(ToWire(tensor.dtype));
    *tensors->add_shapes() = ToWire(tensor.shape);
    tensors->add_starts(content.ranges[i].start);
    tensors->add_sizes(content.ranges[i].count);
  }
  tensors->mutable_byte_offsets()->Add(content.byte_offsets.begin(), content.byte_offsets.end());
  if (slot.has_value()) SetSlot(*slot, wire->mutable_slot());
}

// `field` names the tensors in errors, `slot_field` the slot.
template <typename Wire>
absl::StatusOr<CheckedBucket> BucketOf(const v1::PeerTensors& tensors, const Wire& wire,
                                       const PeerBounds& bounds, std::string_view field,
                                       std::string_view slot_field) {
  CheckedBucket out;
  REFITD_RETURN_IF_ERROR(InRange(tensors.names_size(), 1, kMaxTensorsPerBucket,
                                 fmt::format("{}.names' length", field)));
  REFITD_ASSIGN_OR_RETURN(out.tensors,
                          CheckManifest(tensors.names(), tensors.dtypes(), tensors.shapes(), field,
                                        kMaxTensorsPerBucket));
  REFITD_ASSIGN_OR_RETURN(out.ranges, RangesOf(tensors, out.tensors, field));
  for (const TensorRange& range : out.ranges) out.bytes += out.BytesOf(range);
  REFITD_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                          OffsetsOf(tensors, out, wire.has_slot(), bounds, field));
  if (!wire.has_slot()) return out;
  out.source = CheckedBucket::Source::kSlot;
  for (const int64_t offset : offsets) out.places.push_back({.byte_offset = offset});
  REFITD_ASSIGN_OR_RETURN(out.slot, SlotOf(wire.slot(), bounds, slot_field));
  return out;
}

}  // namespace

void SetBucket(const PartContent& content, const std::optional<SlotGrant>& slot,
               v1::PeerBucket* wire) {
  SetBucket(content, slot, wire->mutable_tensors(), wire);
}

void SetBucket(const PartContent& content, const std::optional<SlotGrant>& slot,
               v1::PeerHeader* wire) {
  SetBucket(content, slot, wire->mutable_content(), wire);
}

absl::StatusOr<CheckedBucket> BucketOf(const v1::PeerBucket& wire, const PeerBounds& bounds) {
  return BucketOf(wire.tensors(), wire, bounds, "bucket.tensors", "bucket.slot");
}

absl::StatusOr<CheckedBucket> BucketOf(const v1::PeerHeader& wire, const PeerBounds& bounds) {
  return BucketOf(wire.content(), wire, bounds, "header.content", "header.slot");
}

absl::StatusOr<Verification> VerificationOf(v1::Verification wire, std::string_view field) {
  const absl::StatusOr<std::optional<Verification>> verification = VerificationFromWire(wire);
  if (!verification.ok()) return Invalid("{}: {}", field, Message(verification.status()));
  if (!verification->has_value()) return Invalid("{} is not said", field);
  return **verification;
}

// ---- sizes ----

absl::Status CheckSize(int64_t bytes, int64_t message_bytes, std::string_view what) {
  if (bytes <= std::min(message_bytes, kMaxSerialisedBytes)) return absl::OkStatus();
  return Error(StatusCode::kResourceExhausted,
               "{} for another daemon has {} bytes, more than message_bytes of {}", what, bytes,
               message_bytes);
}

absl::Status CheckIncarnation(uint64_t incarnation, std::string_view field) {
  if (incarnation != 0) return absl::OkStatus();
  return Invalid("{} is 0, which is no incarnation", field);
}

}  // namespace refitd::peer
