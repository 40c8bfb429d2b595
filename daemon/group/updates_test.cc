// These tests open, suspend and end updates of a group without engines.
#include "daemon/group/updates.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/aborts.h"

namespace refitd::group {
namespace {

using std::chrono::seconds;

// A group of one trainer rank that has committed version 1, without engines.
struct OneTrainer {
  OneTrainer() {
    out.Open(now, &actions);
    TrainerAttached e{trainer, {}};
    members.EnterTrainer(MemberOf(e), false);
    versions.Commit(Version(1));
    actions.clear();
  }
  ~OneTrainer() {
    if (!updates.RollbackRuns()) updates.CheckInvariants();
  }
  void At(Duration later) { out.Open(now + later, &actions); }
  void Open(int64_t version) {
    BeginEvent e;
    e.version = Version(version);
    updates.Open(e);
  }
  TrainerProgress& Join() { return updates.Opened()->push.Join(members.Find(trainer)); }
  void Abandon(std::string reason) { updates.Abandon(updates.Opened(), {std::move(reason)}); }
  void End(Outcome outcome) {
    UpdateView view;
    view.id = updates.running()->id;
    view.version = updates.running()->version;
    view.catch_up = updates.CatchUpRuns();
    updates.End(std::move(view), PastUpdate{outcome, updates.running()->end.why().reason});
  }
  absl::Status Refused(int64_t version, uint64_t id = 0) const {
    return updates.Find(*members.Find(trainer), Version(version), UpdateId(id)).status();
  }
  template <typename Action>
  int64_t Count() const {
    return std::count_if(actions.begin(), actions.end(),
                         [](const auto& a) { return std::holds_alternative<Action>(a); });
  }

  const TimePoint now{seconds(100)};
  const MemberId trainer{1};
  GroupActions actions;
  Outbox out;
  Requests requests{&out};
  Membership members{"g", GroupSpec(), nullptr, &out, &requests};
  Versions versions{"g", 11, &members, &out};
  GroupLimits limits;
  Slots slots{limits, &members, &requests, &out};
  CatchUp catch_up{limits, &members, &versions, &out};
  RefitCompiler compiler{&members, &slots, &out};
  Rollback rollback{&members, &versions, &catch_up, &out};
  uint64_t last_id = 0;
  Updates updates{
      [this] { return UpdateId(++last_id); },
      {limits, &members, &versions, &requests, &slots, &catch_up, &compiler, &rollback, &out}};
};

TEST_CASE("one update runs at a time (P3)") {
  OneTrainer g;
  CHECK(g.updates.Opened() == nullptr);
  g.Open(2);
  CHECK(g.updates.running() != nullptr);
  CHECK(g.updates.state() == GroupState::kUpdating);
  CHECK(g.updates.running()->deadline == g.now + g.limits.default_duration);
  CHECK(Aborts([&] { g.Open(3); }));
  CHECK_FALSE(g.updates.Replace());
  CHECK(g.updates.IsAnother(UpdateId(2)));
  CHECK_FALSE(g.updates.IsAnother(UpdateId(1)));
  CHECK_FALSE(g.updates.IsAnother(UpdateId()));
  g.updates.running()->state = UpdateState::kData;
  g.End(Outcome::kCommitted);
  CHECK(g.updates.state() == GroupState::kIdle);
  CHECK(g.updates.history().committed() == 1);
  CHECK(g.updates.Replace());
  CHECK(g.updates.history().Find(Version(2)).outcome == Outcome::kUnknown);
  // An update to a version that is not greater than the group's.
  g.Open(1);
  CHECK(Aborts([&] { g.updates.CheckState(); }));
  g.Abandon("done");
  g.End(Outcome::kAborted);
}

TEST_CASE("calls of an update that is over, or not yet open, are answered by what became of it") {
  OneTrainer g;
  CHECK(g.Refused(2).code() == absl::StatusCode::kFailedPrecondition);
  g.Open(2);
  g.Join();
  CHECK(std::string(g.Refused(3).message()).find("is to version 2") != std::string::npos);
  CHECK(std::string(g.Refused(2).message()).find("was not answered") != std::string::npos);
  g.members.Find(g.trainer)->state = MemberState::kReady;
  CHECK(g.Refused(2).ok());
  CHECK(g.Refused(2, 9).code() == absl::StatusCode::kAborted);
  g.Abandon("a reason");
  CHECK(std::string(g.Refused(2).message()).find("a reason") != std::string::npos);
  g.members.Find(g.trainer)->state = MemberState::kAttached;
  g.End(Outcome::kAborted);
  CHECK(std::string(g.Refused(2).message()).find("a reason") != std::string::npos);
  CHECK(g.Refused(2, 1).code() == absl::StatusCode::kAborted);
}

TEST_CASE("an update waits while a catch-up runs, and runs again under a new number") {
  OneTrainer g;
  g.Open(2);
  g.Join();
  CHECK_FALSE(g.updates.Resume());
  g.updates.OpenCatchUp();
  CHECK(g.updates.CatchUpRuns());
  CHECK(g.updates.running()->version == Version(1));
  CHECK(g.updates.Opened() == g.updates.waiting().get());
  CHECK(g.updates.WaitedFor(g.now) == "the program to be compiled");
  CHECK_FALSE(g.updates.IdleDeadline().has_value());
  g.updates.CheckInvariants();
  SECTION("until the catch-up gives way") { g.updates.GiveWay("the hold is over"); }
  SECTION("and is given up once that is over") {
    g.Abandon("a rank left");
    CHECK(g.updates.Opened()->state == UpdateState::kEnding);
  }
  CHECK(g.updates.running()->state == UpdateState::kEnding);
  CHECK(g.updates.running()->catch_up->gave_way);
  g.End(Outcome::kAborted);
  CHECK(g.updates.state() == GroupState::kUpdating);
  CHECK(g.updates.Resume());
  CHECK(g.updates.running()->id == UpdateId(3));
  CHECK(g.updates.running()->version == Version(2));
  CHECK(g.updates.waiting() == nullptr);
}

TEST_CASE("a catch-up alone gives way to a new incarnation and to a drain") {
  OneTrainer g;
  g.updates.OpenCatchUp();
  SECTION("replace") {
    CHECK(g.updates.Replace());
    CHECK(g.updates.state() == GroupState::kUpdating);
  }
  SECTION("drain") {
    g.updates.Drain();
    CHECK(g.updates.drains());
  }
  CHECK(g.updates.running()->state == UpdateState::kEnding);
  const bool drains = g.updates.drains();
  g.End(Outcome::kAborted);
  CHECK(g.updates.state() == (drains ? GroupState::kDrained : GroupState::kIdle));
}

TEST_CASE("a rollback brings the content of the version before, under a number of its own") {
  OneTrainer g;
  g.versions.Commit(Version(5));
  g.updates.OpenRollback({});
  CHECK(g.updates.RollbackRuns());
  CHECK(g.updates.running()->version == Version(6));
  CHECK(g.updates.running()->content == Version(1));
  CHECK(g.Refused(6).code() == absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("an update whose ranks are silent ends, unless a call waits for an answer (P4)") {
  OneTrainer g;
  g.Open(2);
  CHECK(g.updates.IdleDeadline() == g.now + g.limits.idle_limit);
  CHECK(g.updates.WaitedFor(g.now).find("trainer rank 0") != std::string::npos);
  CHECK_FALSE(g.updates.SuspectAwaited().suspects.empty());
  TrainerProgress& progress = g.Join();
  const auto begin = g.requests.Track(g.trainer, {CallKind::kBegin, Version(2)}, "", CallId(1));
  CHECK_FALSE(g.updates.IdleDeadline().has_value());
  g.At(seconds(5));
  g.requests.Finish(begin, absl::OkStatus(), EmptyReply{});
  CHECK(g.updates.IdleDeadline() == g.now + seconds(5) + g.limits.idle_limit);
  // A Commit that waits for its own rank's buckets does not count.
  progress.awaited_buckets = 3;
  g.requests.Track(g.trainer, {CallKind::kCommit, Version(2), 3}, "", CallId(2));
  CHECK(g.updates.IdleDeadline().has_value());
  g.updates.running()->state = UpdateState::kSettling;
  CHECK_FALSE(g.updates.IdleDeadline().has_value());
  g.updates.running()->state = UpdateState::kOpening;
}

// ---- how an update ends ----

TEST_CASE("every call that waits for a lost update is answered, each with its own code (P4, P8)") {
  OneTrainer g;
  g.Open(2);
  g.updates.running()->push.Join(g.members.Find(g.trainer));
  UpdateEnd& end = g.updates.running()->end;
  std::vector<std::pair<CallKind, absl::StatusCode>> wanted = {
      {CallKind::kBegin, absl::StatusCode::kInvalidArgument},
      {CallKind::kBucket, absl::StatusCode::kDataLoss},
      {CallKind::kCommit, absl::StatusCode::kDeadlineExceeded},
      {CallKind::kRefit, absl::StatusCode::kInvalidArgument},
      {CallKind::kAbort, absl::StatusCode::kOk},
      {CallKind::kRollback, absl::StatusCode::kDeadlineExceeded}};
  if (GENERATE(false, true)) {
    g.updates.running()->data_began = g.now;
    // Refit counts as a Commit from then on.
    wanted[3].second = absl::StatusCode::kDeadlineExceeded;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    g.requests.Track(g.trainer, {wanted[i].first, Version(2)}, "", CallId(i + 1));
  }
  end.AddOperator(CallId(90));
  end.AddOperator(CallId(91));
  CHECK(g.updates.Leave(CallId(90)));
  CHECK_FALSE(g.updates.Leave(CallId(90)));
  GiveUp why{"a reason"};
  why.begin_code = absl::StatusCode::kInvalidArgument;
  why.bucket_code = absl::StatusCode::kDataLoss;
  why.commit_code = absl::StatusCode::kDeadlineExceeded;
  g.updates.Abandon(why);
  CHECK(Aborts([&] { end.GiveUpFor(why); }));
  const Failure failure = end.FailureOf(g.updates.running()->participants);
  CHECK(failure.version == 2);
  CHECK_FALSE(failure.may_be_retried);
  g.actions.clear();
  end.Answer(g.requests.unfinished(), nullptr, why.reason, failure);
  REQUIRE(g.Count<Reply>() == std::ssize(wanted) + 1);
  for (const GroupAction& action : g.actions) {
    const auto* reply = std::get_if<Reply>(&action);
    if (reply == nullptr) continue;
    const bool of_operator = reply->call == CallId(91);
    CHECK(reply->status.code() ==
          (of_operator ? absl::StatusCode::kOk : wanted[reply->call.value() - 1].second));
  }
}

TEST_CASE("a clean-up that takes too long is reported once") {
  OneTrainer g;
  g.Open(2);
  UpdateEnd& end = g.updates.running()->end;
  CHECK_FALSE(end.TakeOverdue());
  g.Abandon("a reason");
  CHECK(end.cleanup_deadline() == g.now + g.limits.cleanup_limit);
  CHECK_FALSE(end.TakeOverdue());
  g.At(g.limits.cleanup_limit);
  CHECK(end.TakeOverdue());
  CHECK_FALSE(end.TakeOverdue());
  CHECK_FALSE(end.cleanup_deadline().has_value());
}

}  // namespace
}  // namespace refitd::group
