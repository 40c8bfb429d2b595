// Any bytes as a message of a coordinator: an accepted command is unchanged by encoding and
// decoding, a header lies inside its slot, and an answer of another kind than its call reaches no
// caller (P10).
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/group/follower.h"
#include "daemon/link/commands.h"
#include "daemon/link/hello.h"
#include "daemon/link/limits.h"
#include "daemon/link/reports.h"
#include "refitd/v1/peer.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"

namespace refitd {
namespace {

constexpr PeerBounds kBounds{.slots = 4, .slot_bytes = 1 << 20};
constexpr int64_t kMessageBytes = 8 << 20;

void CheckHeader(const PeerHeader& header) {
  const PartContent& content = *header.content;
  const std::vector<TensorSpec>& tensors = content.bucket->tensors;
  REFITD_CHECK(!tensors.empty() && content.ranges.size() == tensors.size());
  REFITD_CHECK(!header.wired || header.slot.has_value());
  if (!header.slot.has_value()) {
    REFITD_CHECK(content.byte_offsets.empty());
    return;
  }
  REFITD_CHECK(header.slot->slot.value() < static_cast<uint32_t>(kBounds.slots));
  REFITD_CHECK(content.bytes <= kBounds.slot_bytes);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = content.ranges[i].count * ElementBytes(tensors[i].dtype);
    REFITD_CHECK(content.byte_offsets[i] >= 0 && bytes >= 0);
    REFITD_CHECK(content.byte_offsets[i] <= content.bytes - bytes);
  }
}

// A joined daemon has a call of every kind under way and takes the answer for one of them: an OK
// answer of the call's kind answers it; any other ends the link, and every call with it.
void CheckAnswer(Reply reply) {
  uint64_t updates = 0;
  FollowerOptions options;
  options.name = "g";
  options.coordinator_address = "elsewhere";
  options.next_update = [&updates] { return UpdateId(++updates); };
  Follower follower(std::move(options));
  const TimePoint now{std::chrono::hours(1)};
  MachineActions actions;
  const auto feed = [&](MachineEvent event) {
    follower.Handle(event, now, &actions);
    follower.CheckInvariants();
  };
  feed(LinkUp{7, {}, std::nullopt, "a"});
  feed(GroupEvent(TrainerAttached{MemberId(1), {}}));
  uint64_t calls = 0;
  std::vector<size_t> kinds;  // by call id, from 1 on
  const auto call = [&](auto event, const ReplyPayload& answer) {
    event.call = CallId(++calls);
    event.member = MemberId(1);
    kinds.push_back(answer.index());
    feed(GroupEvent(std::move(event)));
  };
  call(BeginEvent(), BeginReply());
  call(LeaseSlotEvent(), LeaseSlotReply());
  call(ReleaseSlotEvent(), EmptyReply());
  call(BucketEvent(), BucketReply());
  call(CommitEvent(), CommitReply());
  call(RefitEvent(), CommitReply());
  call(AbortEvent(), EmptyReply());
  call(RollbackEvent(), CommitReply());
  call(ReleasePreviousEvent(), EmptyReply());
  LayoutRegistered layout;
  layout.layout = std::make_shared<Layout>();
  call(std::move(layout), EmptyReply());
  reply.call = CallId(1 + reply.call.value() % calls);
  actions.clear();
  feed(CommandReceived{reply});
  size_t answered = 0;
  for (const MachineAction& action : actions) {
    const auto* own = std::get_if<GroupAction>(&action);
    const auto* told = own == nullptr ? nullptr : std::get_if<Reply>(own);
    if (told == nullptr) continue;
    ++answered;
    REFITD_CHECK(!told->status.ok() || told->payload.index() == kinds[told->call.value() - 1]);
  }
  REFITD_CHECK(answered == 1 || answered == calls);
}

void FuzzOne(const v1::PeerAnswer& answer) {
  (void)AcceptedFromProto(answer);
  const auto first = CommandDecoder(kBounds).Decode(answer);
  if (!first.ok()) {
    REFITD_CHECK(!first.status().message().empty());
    return;
  }
  if (!first->has_value()) return;  // more chunks would have to follow
  if (const auto* header = std::get_if<PeerHeader>(&**first)) CheckHeader(*header);
  if (const auto* reply = std::get_if<Reply>(&**first)) CheckAnswer(*reply);
  const auto sent = ToProto(**first, kMessageBytes);
  if (!sent.ok()) {
    REFITD_CHECK(sent.status().code() == absl::StatusCode::kResourceExhausted);
    return;
  }
  CommandDecoder decoder(kBounds);
  std::optional<PeerCommand> second;
  for (const v1::PeerAnswer& message : *sent) {
    REFITD_CHECK(!second.has_value());
    const auto decoded = decoder.Decode(message);
    REFITD_CHECK(decoded.ok());
    second = *decoded;
  }
  REFITD_CHECK(second.has_value());
  const auto again = ToProto(*second, kMessageBytes);
  REFITD_CHECK(again.ok() && again->size() == sent->size());
  for (size_t i = 0; i < sent->size(); ++i) {
    REFITD_CHECK((*again)[i].SerializeAsString() == (*sent)[i].SerializeAsString());
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::v1::PeerAnswer)
