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
