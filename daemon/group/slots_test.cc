#include "daemon/group/slots.h"

#include <catch2/catch.hpp>

namespace refitd::group {
namespace {

constexpr int64_t kSlotBytes = 4096;

// A group of two trainer ranks and an engine rank, with four slots.
struct Pool {
  Pool() {
    out.Open(now, &actions);
    for (int rank = 0; rank < 2; ++rank) {
      TrainerAttached e{MemberId(static_cast<uint64_t>(rank) + 1), {}};
      e.identity.rank = rank;
      e.identity.world_size = 2;
      members.EnterTrainer(MemberOf(e), false);
    }
    EngineAttached e{reader, {}};
    e.identity.instance = "i";
    e.identity.delivery = DeliveryMode::kLoader;
    members.EnterEngine(MemberOf(e), e.identity, false);
    actions.clear();
  }
  static GroupSpec Spec() {
    GroupSpec spec;
    spec.trainer_ranks = 2;
    spec.slot_bytes = kSlotBytes;
    spec.slots = 4;
    return spec;
  }
  void Wait(uint64_t call, MemberId member, Duration wait = Duration(0)) {
    slots.Wait({CallId(call), member, Version(1), wait}, 0, 0, latest);
  }
  // The answer to the call; null: it waits.
  const Reply* Answer(uint64_t call) const {
    for (const GroupAction& action : actions) {
      const auto* reply = std::get_if<Reply>(&action);
      if (reply != nullptr && reply->call == CallId(call)) return reply;
    }
    return nullptr;
  }
  absl::StatusCode Code(uint64_t call) const {
    const Reply* reply = Answer(call);
    return reply == nullptr ? absl::StatusCode::kUnknown : reply->status.code();
  }

  const TimePoint now{std::chrono::seconds(10)};
  const TimePoint latest = now + std::chrono::seconds(60);
  const MemberId first{1};
  const MemberId second{2};
  const MemberId reader{3};
  GroupActions actions;
  Outbox out;
  Requests requests{&out};
  Membership members{"g", Spec(), nullptr, &out, &requests};
  GroupLimits limits;
  Slots slots{limits, &members, &requests, &out};
};

TEST_CASE("a rank that holds as many slots as it may is refused, and others are served") {
  Pool p;
  REQUIRE(p.slots.leasable() == 1);
  p.Wait(1, p.first);
  p.slots.Serve(p.latest);
  REQUIRE(p.Code(1) == absl::StatusCode::kOk);
  CHECK(std::get<LeaseSlotReply>(p.Answer(1)->payload).slot_bytes == kSlotBytes);
  p.Wait(2, p.first);
  CHECK(p.Code(2) == absl::StatusCode::kResourceExhausted);
  p.Wait(3, p.second);
  p.slots.Serve(p.latest);
  CHECK(p.Code(3) == absl::StatusCode::kOk);
  CHECK_FALSE(p.slots.anyone_waits());
  p.slots.CheckInvariants();
}

TEST_CASE("a wait for a slot ends at its deadline, and the error names the holders (P4)") {
  Pool p;
  while (p.slots.Grant().has_value()) {
  }
  p.Wait(1, p.first, std::chrono::seconds(5));
  p.slots.Serve(p.latest);
  CHECK(p.Answer(1) == nullptr);
  CHECK(p.slots.NextDeadline() == p.now + std::chrono::seconds(5));
  p.out.Open(p.now + std::chrono::seconds(5), &p.actions);
  p.slots.RefuseOverdue();
  REQUIRE(p.Code(1) == absl::StatusCode::kDeadlineExceeded);
  CHECK(std::string(p.Answer(1)->status.message()).find("by the update") != std::string::npos);
  CHECK(FailureOf(p.Answer(1)->status).suspects.empty());
  CHECK(FailureOf(p.Answer(1)->status).may_be_retried);
  CHECK_FALSE(p.slots.NextDeadline().has_value());
}

TEST_CASE("a slot is free again when its last reader is done, or lost (P6)") {
  Pool p;
  const UpdateId update(1);
  const auto slot = p.slots.Grant();
  CHECK(p.slots.IsStaging(*slot));
  p.slots.Publish(*slot, update, PartSeq(0), {p.reader});
  p.slots.CheckInvariants();
  CHECK(p.slots.SuspectHolders().suspects.size() == 1);
  CHECK(p.slots.free() == 3);
  CHECK_FALSE(p.slots.Acknowledge({p.reader, update, PartSeq(1)}));
  CHECK(p.slots.Acknowledge({p.reader, update, PartSeq(0)}));
  CHECK_FALSE(p.slots.Acknowledge({p.reader, update, PartSeq(0)}));
  CHECK(p.slots.free() == 4);
  p.slots.Publish(*p.slots.Grant(), update, PartSeq(1), {p.reader});
  p.slots.Forget(p.reader);
  CHECK(p.slots.free() == 4);
  p.slots.CheckInvariants();
}

TEST_CASE("a call whose caller went away waits for no slot") {
  Pool p;
  p.Wait(1, p.first);
  CHECK(p.slots.Leave(CallId(1), absl::CancelledError("gone")));
  CHECK(p.Code(1) == absl::StatusCode::kCancelled);
  CHECK_FALSE(p.slots.Leave(CallId(1), absl::CancelledError("gone")));
  CHECK_FALSE(p.slots.anyone_waits());
}

}  // namespace
}  // namespace refitd::group
