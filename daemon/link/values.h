// Converts single values of peer messages (numbers, texts, statuses, slots, lists of tensors) to
// and from messages, with their checks. Private to this folder: reports.cc, commands.cc, hello.cc
// and program.cc share it.
//
// Functions whose names end in Of read a value, and refuse a malformed one with INVALID_ARGUMENT
// naming `field`. Functions whose names begin with Set or end in ToProto write a value.
#ifndef REFITD_DAEMON_LINK_VALUES_H_
#define REFITD_DAEMON_LINK_VALUES_H_

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket_message.h"
#include "daemon/checks/fields.h"
#include "daemon/group/peer.h"
#include "daemon/link/limits.h"
#include "proto/failure.h"
#include "refitd/v1/peer.pb.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/ids.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd::peer {

// ---- numbers ----

inline absl::StatusOr<MemberId> MemberOf(uint64_t id, std::string_view field) {
  if (id == 0) return Invalid("{} is 0, which is no member", field);
  return MemberId(id);
}

absl::StatusOr<CallId> CallOf(uint64_t id, std::string_view field);

absl::StatusOr<Version> VersionOf(int64_t version, std::string_view field);
// The message's content_version, which `field` names; nullopt: it has none.
template <typename Message>
absl::StatusOr<std::optional<Version>> ContentVersionOf(const Message& message,
                                                        std::string_view field) {
  if (!message.has_content_version()) return std::optional<Version>();
  REFITD_ASSIGN_OR_RETURN(const Version content, VersionOf(message.content_version(), field));
  return std::optional<Version>(content);
}

absl::StatusOr<PartSeq> PartOf(int64_t part, std::string_view field);

absl::StatusOr<Duration> MillisOf(int64_t ms, std::string_view field);

// Rounds up, since 0 has a meaning of its own.
int64_t MillisToProto(Duration duration);

// ---- texts ----

// Shortens the text and replaces bytes that are not UTF-8, since a message with such bytes in a
// string could not be read.
inline std::string TextToProto(std::string_view text, size_t max_bytes = kMaxPeerTextBytes) {
  return CleanText(text, max_bytes);
}

// A text of another daemon, as a terminal may show it: each control character becomes a "?".
absl::StatusOr<std::string> TextOf(const std::string& text, std::string_view field,
                                   size_t max_bytes = kMaxPeerTextBytes);

absl::StatusOr<std::string> OpaqueOf(const std::string& bytes, std::string_view field);

// ---- statuses ----

template <typename Wire>
absl::StatusOr<Failure> FailureOfMessage(const Wire& message, std::string_view field) {
  if (!message.has_failure()) return Failure();
  absl::StatusOr<Failure> failure = FailureFromProto(message.failure());
  if (!failure.ok()) return Prefixed(failure.status(), "{}", field);
  return failure;
}

void SetStatus(const absl::Status& status, v1::PeerStatus* message);

// Sets message field `status` of `message` unless the status is OK.
template <typename Wire>
void SetStatusOf(const absl::Status& status, Wire* message) {
  if (!status.ok()) SetStatus(status, message->mutable_status());
}

// Writes to *out, since a StatusOr can't hold a status.
absl::Status ReadStatus(const v1::PeerStatus& message, std::string_view field, absl::Status* out);

// ---- slots ----

void SetSlot(const SlotGrant& grant, v1::SlotRef* message);

absl::Status CheckSlot(uint32_t slot, const PeerBounds& bounds, std::string_view field);
absl::StatusOr<SlotGrant> SlotOf(const v1::SlotRef& message, const PeerBounds& bounds,
                                 std::string_view field);

// ---- lists ----

template <typename Id>
void SetIds(const std::vector<Id>& ids, google::protobuf::RepeatedField<uint64_t>* message) {
  message->Reserve(static_cast<int>(ids.size()));
  for (const Id id : ids) message->Add(id.value());
}

absl::StatusOr<std::vector<MemberId>> MembersOf(
    const google::protobuf::RepeatedField<uint64_t>& message, std::string_view field);

absl::StatusOr<std::vector<bool>> FlagsOf(const google::protobuf::RepeatedField<bool>& message,
                                          std::string_view field);

// Numbers below `bound`; at most `limit` of them.
absl::StatusOr<std::vector<uint32_t>> IndicesOf(
    const google::protobuf::RepeatedField<uint32_t>& message, int64_t limit, int64_t bound,
    std::string_view field);

// ---- buckets ----

// A bucket or a part's header, with the slot in which its tensors lie. `wire` is a v1::PeerBucket
// or a v1::PeerHeader.
template <typename Wire>
void SetBucket(const PartContent& content, const std::optional<SlotGrant>& slot, Wire* message) {
  WriteBucket(content, message);
  if (slot.has_value()) SetSlot(*slot, message->mutable_slot());
}

template <typename Wire>
absl::StatusOr<CheckedBucket> BucketOf(const Wire& message, const PeerBounds& bounds,
                                       std::string_view slot_field) {
  std::optional<SlotGrant> slot;
  if (message.has_slot()) {
    REFITD_ASSIGN_OR_RETURN(slot, SlotOf(message.slot(), bounds, slot_field));
  }
  return ReadBucket(message, slot, bounds.slot_bytes);
}

absl::StatusOr<Verification> VerificationOf(v1::Verification message, std::string_view field);

// ---- sizes ----

inline constexpr int64_t kMaxSerialisedBytes = std::numeric_limits<int>::max();

absl::Status CheckSize(int64_t bytes, int64_t message_bytes, std::string_view what);

// Room for sequence and incarnation, and for the lengths of enclosing messages.
inline constexpr int64_t kEnvelopeBytes = 64;

absl::Status CheckIncarnation(uint64_t incarnation, std::string_view field);

}  // namespace refitd::peer

#endif  // REFITD_DAEMON_LINK_VALUES_H_
