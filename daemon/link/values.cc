#include "daemon/link/values.h"

#include <algorithm>
#include <chrono>
#include <optional>

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

int64_t MillisToProto(Duration duration) {
  const Duration kept = std::clamp(duration, Duration(0), kMaxPeerDuration);
  return std::chrono::ceil<std::chrono::milliseconds>(kept).count();
}

// ---- texts ----

absl::StatusOr<std::string> TextOf(const std::string& text, std::string_view field,
                                   size_t max_bytes) {
  REFITD_RETURN_IF_ERROR(CheckText(text, max_bytes, field));
  return Harmless(text, max_bytes);
}

absl::StatusOr<std::string> OpaqueOf(const std::string& bytes, std::string_view field) {
  REFITD_RETURN_IF_ERROR(CheckText(bytes, kMaxCommunicatorAddressBytes, field));
  return bytes;
}

// ---- statuses ----

void SetStatus(const absl::Status& status, v1::PeerStatus* message) {
  message->set_code(static_cast<uint32_t>(status.code()));
  message->set_message(TextToProto(Message(status)));
  SetFailure(FailureOf(status), message);
}

constexpr uint32_t kMaxStatusCode = static_cast<uint32_t>(StatusCode::kUnauthenticated);
static_assert(kMaxStatusCode == 16);

absl::Status ReadStatus(const v1::PeerStatus& message, std::string_view field, absl::Status* out) {
  REFITD_RETURN_IF_ERROR(InRange(message.code(), 0, kMaxStatusCode, fmt::format("{}.code", field)));
  REFITD_ASSIGN_OR_RETURN(const std::string text,
                          TextOf(message.message(), fmt::format("{}.message", field)));
  *out = absl::Status(static_cast<StatusCode>(message.code()), text);
  if (!message.has_failure() || out->ok()) return absl::OkStatus();
  REFITD_ASSIGN_OR_RETURN(const Failure failure, FailureOfMessage(message, field));
  *out = WithFailure(std::move(*out), failure);
  return absl::OkStatus();
}

// ---- slots ----

void SetSlot(const SlotGrant& grant, v1::SlotRef* message) {
  message->set_slot(grant.slot.value());
  message->set_grant(grant.grant.value());
}

absl::Status CheckSlot(uint32_t slot, const PeerBounds& bounds, std::string_view field) {
  return InRange(slot, 0, std::min(bounds.slots, kMaxSlots) - 1, field);
}

absl::StatusOr<SlotGrant> SlotOf(const v1::SlotRef& message, const PeerBounds& bounds,
                                 std::string_view field) {
  REFITD_RETURN_IF_ERROR(CheckSlot(message.slot(), bounds, fmt::format("{}.slot", field)));
  return SlotGrant{SlotIndex(message.slot()), GrantId(message.grant())};
}

// ---- lists ----

absl::StatusOr<std::vector<MemberId>> MembersOf(
    const google::protobuf::RepeatedField<uint64_t>& message, std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(message.size(), kMaxEngineRanks, field));
  std::vector<MemberId> members;
  members.reserve(static_cast<size_t>(message.size()));
  for (int i = 0; i < message.size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const MemberId member,
                            MemberOf(message[i], fmt::format("{}[{}]", field, i)));
    members.push_back(member);
  }
  return members;
}

absl::StatusOr<std::vector<bool>> FlagsOf(const google::protobuf::RepeatedField<bool>& message,
                                          std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(message.size(), kMaxEngineRanks, field));
  return std::vector<bool>(message.begin(), message.end());
}

absl::StatusOr<std::vector<uint32_t>> IndicesOf(
    const google::protobuf::RepeatedField<uint32_t>& message, int64_t limit, int64_t bound,
    std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(message.size(), limit, field));
  for (int i = 0; i < message.size(); ++i) {
    REFITD_RETURN_IF_ERROR(InRange(message[i], 0, bound - 1, fmt::format("{}[{}]", field, i)));
  }
  return std::vector<uint32_t>(message.begin(), message.end());
}

absl::StatusOr<Verification> VerificationOf(v1::Verification message, std::string_view field) {
  const absl::StatusOr<std::optional<Verification>> verification = VerificationFromProto(message);
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
