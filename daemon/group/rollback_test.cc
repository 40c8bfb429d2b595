// Rollbacks and holds: the version before is served again at once, or the call is refused by name
// and nothing has changed.
#include <catch2/catch.hpp>

#include "daemon/group/shadowed_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::seconds;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

struct Shadowed : ShadowedPair {
  using ShadowedPair::ShadowedPair;
  void Take(int64_t version) { Install(trainer, version, kModel); }
  // Reads everything back for the version, as digests of it.
  void TakeWithDigests(int64_t version, uint64_t digest) {
    BeginEvent begin;
    begin.member = trainer;
    begin.version = Version(version);
    begin.verification = Verification::kReadback;
    begin.tensor_count = 2;
    Begin(begin);
    Push(trainer, version, 0, kModel);
    FinishAll();
    const CallId commit = Commit(trainer, version, 1);
    FinishVerify(absl::OkStatus(), {}, {digest, digest + 1});
    ReadyAll();
    REQUIRE(Code(commit) == kOk);
  }
  CommitReply RollBackNow(MemberId by = {}) {
    const CallId call = Rollback(by);
    ReadyAll();
    return Get<CommitReply>(call);
  }
  // Catch-ups run until none is due.
  void CatchUp() {
    while (!group.update_running() && group.NextDeadline().has_value()) Expire();
    if (!group.update_running()) return;
    if (compiling.has_value()) FinishCompile();
    ReadyAll();
    if (refitting.has_value()) FinishRefit();
    if (verifying.has_value()) FinishVerify();
    ReadyAll();
  }
};
// The same, which hold version 2 and, in their backs, version 1.
struct AtTwo : Shadowed {
  explicit AtTwo(GroupSpec spec = DefaultSpec(), GroupLimits limits = {}) : Shadowed(spec, limits) {
    Take(1);
    Take(2);
    flips.clear();
    committed.clear();
    prepares.clear();
  }
};

TEST_CASE("a rollback flips to the version before, under the number after the group's") {
  AtTwo g;
  const CallId call = g.Rollback();
  REQUIRE(g.flips.size() == 2);
  for (const SendFlip& flip : g.flips) {
    CHECK(flip.version == Version(3));
    CHECK(flip.content == Version(1));
  }
  CHECK(g.group.View(g.now).update->content == Version(1));
  CHECK(g.prepares.empty());
  CHECK(g.assembled->destinations.size() == 0);
  CHECK(g.Answer(call) == nullptr);
  g.Flipped(g.a);
  CHECK(g.committed.empty());
  g.Flipped(g.b);
  const auto done = g.Get<CommitReply>(call);
  CHECK(done.version == Version(3));
  CHECK(done.content == Version(1));
  REQUIRE(done.instances.size() == 2);
  CHECK(done.instances[0].committed);
  CHECK(g.group.version() == Version(3));
  CHECK(g.group.content() == Version(1));
  CHECK(g.Instance("a").version == Version(3));
  // The trainer goes on with version 4.
  REQUIRE(g.committed.size() == 3);
  for (const SendCommitted& told : g.committed) {
    CHECK(told.version == Version(3));
    CHECK(told.content == Version(1));
  }
  g.Take(4);
  CHECK(g.group.content() == std::nullopt);
}

TEST_CASE("a trainer rank rolls back, and a repeated request has no second effect") {
  AtTwo g;
  RollbackEvent e{.call = g.NewCall(), .member = g.trainer, .request_id = "undo"};
  g.Do(e);
  const CallId first = e.call;
  e.call = g.NewCall();
  g.Do(e);
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(first).version == Version(3));
  CHECK(g.Get<CommitReply>(e.call).version == Version(3));
  e.call = g.NewCall();
  g.Do(e);
  CHECK(g.Get<CommitReply>(e.call).version == Version(3));
  CHECK(g.group.version() == Version(3));
}

TEST_CASE("calls that come while a rollback runs wait for the same end") {
  AtTwo g;
  const CallId first = g.Rollback(g.trainer);
  const CallId second = g.Rollback({}, 2);
  CHECK(g.Code(g.Rollback({}, 1)) == kPrecondition);
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(first).version == Version(3));
  CHECK(g.Get<CommitReply>(second).version == Version(3));
}

TEST_CASE("ranks get the digest of the content that they serve again") {
  Shadowed g;
  g.TakeWithDigests(1, 100);
  g.TakeWithDigests(2, 200);
  g.committed.clear();
  g.RollBackNow();
  REQUIRE(g.committed.size() == 3);
  CHECK(g.committed[0].digest == 100);
  CHECK(g.committed[1].digest == 101);
}

TEST_CASE("what was rolled back is not served again") {
  AtTwo g;
  g.RollBackNow();
  g.flips.clear();
  const CallId again = g.Rollback();
  CHECK(g.Code(again) == kPrecondition);
  CHECK_THAT(g.Text(again), Contains("version 3 is a rollback itself"));
  CHECK(g.flips.empty());
  // A caller that missed the answer names what it wanted undone, and gets the number.
  const auto done = g.Get<CommitReply>(g.Rollback(g.trainer, 2));
  CHECK(done.version == Version(3));
  CHECK(done.content == Version(1));
  CHECK(g.Code(g.Rollback({}, 1)) == kPrecondition);
}

TEST_CASE("a rollback after a rollback and another version names the content of the first") {
  AtTwo g;
  g.RollBackNow();
  g.Take(4);
  const CommitReply done = g.RollBackNow();
  CHECK(done.version == Version(5));
  CHECK(done.content == Version(1));
  g.Take(6);
  g.Take(7);
  const CommitReply later = g.RollBackNow();
  CHECK(later.version == Version(8));
  CHECK(later.content == Version(6));
}

TEST_CASE("there must be a version before") {
  Shadowed g;
  const CallId none = g.Rollback();
  CHECK(g.Code(none) == kPrecondition);
  CHECK_THAT(g.Text(none), Contains("no version was committed"));
  g.Take(1);
  const CallId first = g.Rollback();
  CHECK(g.Code(first) == kPrecondition);
  CHECK_THAT(g.Text(first), Contains("no version was committed before version 1"));
  CHECK(g.group.View(g.now).previous == std::nullopt);
}

TEST_CASE("the version that is rolled back may be named, and must be the group's") {
  AtTwo g;
  const CallId call = g.Rollback({}, 1);
  CHECK(g.Code(call) == kPrecondition);
  CHECK_THAT(g.Text(call), Contains("version: 1, and the group's is 2"));
  CHECK(g.flips.empty());
  const CallId right = g.Rollback({}, 2);
  g.ReadyAll();
  CHECK(g.Code(right) == kOk);
}

TEST_CASE("backs that an update has begun to write hold the version before no more") {
  AtTwo g;
  g.Begin(g.trainer, 3);
  const bool written = GENERATE(false, true);
  if (written) {
    g.Push(g.trainer, 3, 0, kModel);
    const CallId busy = g.Rollback();
    CHECK(g.Code(busy) == kPrecondition);
    CHECK_THAT(g.Text(busy), Contains("an update to version 3 runs (data)"));
  }
  g.Abort(g.trainer, 3);
  g.FinishAll();
  REQUIRE_FALSE(g.group.update_running());
  const CallId call = g.Rollback();
  if (written) {
    CHECK(g.Code(call) == kPrecondition);
    CHECK_THAT(g.Text(call),
               Contains("no instance holds version 1 in its arenas any more, beside version 2"));
    CHECK(g.flips.empty());
    CHECK(g.group.View(g.now).previous == std::nullopt);
    return;
  }
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(call).content == Version(1));
}

TEST_CASE("an update that was flipped back leaves no version before") {
  AtTwo g;
  g.Begin(g.trainer, 3);
  g.Push(g.trainer, 3, 0, kModel);
  g.FinishAll();
  g.Commit(g.trainer, 3, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  g.Do(EngineFailed{g.a, g.assembled->id, "the driver refuses"});
  REQUIRE_FALSE(g.group.update_running());
  CHECK(g.Code(g.Rollback()) == kPrecondition);
}

TEST_CASE("an update that has asked no engine for anything is given up for a rollback") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.hold_previous_seconds = 60;
  AtTwo g(spec);
  g.Advance(seconds(60));
  g.Take(3);
  g.flips.clear();
  const CallId begin = g.Begin(g.trainer, 4);
  REQUIRE(g.Answer(begin) == nullptr);  // held
  const CallId call = g.Rollback();
  CHECK(g.Code(begin) == kAborted);
  CHECK_THAT(g.Text(begin), Contains("version 3 is rolled back"));
  CHECK(FailureOf(g.Answer(begin)->status).may_be_retried);
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(call).version == Version(4));
  // The trainer's update to that number was lost, and GetUpdate says so.
  CHECK(g.group.Past(Version(4)).outcome == Outcome::kAborted);
  g.Take(5);
}

TEST_CASE("trainers' calls are refused while a rollback runs, and know no update of it") {
  AtTwo g;
  g.Rollback();
  for (const int64_t version : {3, 4}) {
    const CallId begin = g.Begin(g.trainer, version);
    CHECK(g.Code(begin) == kPrecondition);
    CHECK_THAT(g.Text(begin), Contains("a rollback to the content of version 1 runs"));
  }
  CHECK(g.Code(g.Commit(g.trainer, 3, 0)) == kPrecondition);
  CHECK(g.Code(g.Abort(g.trainer, 3)) == kPrecondition);
  CHECK(g.group.Past(Version(3)).outcome == Outcome::kUnknown);
  g.ReadyAll();
  CHECK(g.group.Past(Version(3)).outcome == Outcome::kUnknown);
  CHECK(g.Code(g.Begin(g.trainer, 3)) == kPrecondition);
}

// ---- instances that can't flip ----

TEST_CASE("instances without the version before catch up from those that flipped") {
  Shadowed g;
  const MemberId place = g.MayCatchUp("p", kModel);
  g.Take(1);
  g.Take(2);
  // "b" registers anew: its backs become copies of what it serves.
  LayoutRegistered again{g.b, LayoutOf(kModel)};
  again.shadowed = true;
  g.Do(again);
  // It holds no version until it has caught up.
  g.CatchUp();
  REQUIRE(g.Instance("b").version == Version(2));
  g.committed.clear();
  const CommitReply done = g.RollBackNow();
  REQUIRE(done.instances.size() == 1);
  CHECK(done.instances[0].instance == "a");
  CHECK(g.Instance("a").version == Version(3));
  CHECK(g.Instance("p").version == Version(2));
  const auto undone = [&g] {
    std::set<std::string> names;
    for (const InstanceStanding& each : g.group.Standings()) {
      if (each.standing == Standing::kUndone) names.insert(each.instance);
    }
    return names;
  };
  CHECK(undone() == std::set<std::string>{"b", "p"});
  g.CatchUp();
  CHECK(g.Instance("b").version == Version(3));
  CHECK(g.Instance("p").version == Version(3));
  CHECK(undone().empty());
  const auto told = std::find_if(g.committed.begin(), g.committed.end(),
                                 [&](const SendCommitted& c) { return c.member == place; });
  REQUIRE(told != g.committed.end());
  CHECK(told->content == Version(1));
}

TEST_CASE("an instance that would go on with what is rolled back is in the way, by name") {
  GroupLimits limits;
  const int how = GENERATE(0, 1, 2, 3);
  if (how == 3) limits.catch_ups = false;
  Shadowed g(TestGroup::DefaultSpec(), limits);
  if (how == 0) g.InPlaceRank("p", kModel);  // takes part in no catch-up
  if (how == 1) g.LoaderRank("p", kModel);   // neither does a loader
  if (how >= 2) g.MayCatchUp("p", kModel);   // would, but
  if (how == 2) {                            // nobody gives
    g.Lose(g.a);
    g.Lose(g.b);
    g.ShadowedRank("c", kModel);
  }
  g.Take(1);
  g.Take(2);
  g.flips.clear();
  const CallId call = g.Rollback();
  CHECK(g.Code(call) == kPrecondition);
  CHECK_THAT(g.Text(call), Contains("instance p does not hold version 1 any more"));
  CHECK(g.flips.empty());
  CHECK(g.group.version() == Version(2));
  const auto previous = g.group.View(g.now).previous;
  REQUIRE(previous.has_value());
  CHECK(previous->version == Version(1));
  CHECK_THAT(previous->refused, Contains("instance p"));
}

TEST_CASE("an instance that is behind is in the way, by name") {
  GroupLimits limits;
  limits.catch_ups = false;
  Shadowed g(TestGroup::DefaultSpec(), limits);
  g.Take(1);
  g.Begin(g.trainer, 2);
  g.Push(g.trainer, 2, 0, kModel);
  g.FinishAll();
  g.Commit(g.trainer, 2, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  g.Flipped(g.a);
  g.Expire();  // "b" is silent: it goes back to version 1
  REQUIRE(g.Instance("b").version == Version(1));
  const CallId call = g.Rollback();
  CHECK(g.Code(call) == kPrecondition);
  CHECK_THAT(g.Text(call), Contains("instance b is behind: it holds version 1, and the group's"));
  CHECK(g.Instance("a").version == Version(2));
}

TEST_CASE("instances without a version of the group are not in the way") {
  AtTwo g;
  g.InPlaceRank("new", kModel);
  g.ShadowedRank("half", kModel, 0, 2);
  g.RollBackNow();
  CHECK(g.Instance("a").version == Version(3));
}

TEST_CASE("what was rolled back is not ready, however near it is") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.max_lag = 5;
  Shadowed g(spec);
  g.MayCatchUp("p", kModel);
  g.Take(1);
  g.Take(2);
  g.RollBackNow();
  ReadinessBook book;
  book.SetVersion(g.group.version());
  for (const InstanceStanding& standing : g.group.Standings()) book.Set(standing);
  CHECK(book.Of("a", spec.max_lag)->ready);
  CHECK_FALSE(book.Of("p", spec.max_lag)->ready);
  CHECK(book.Of("p", spec.max_lag)->reason == "its version was rolled back");
}

TEST_CASE("the version that was rolled back is given to nobody") {
  Shadowed g;
  g.MayCatchUp("p", kModel);
  g.Take(1);
  g.Take(2);
  g.RollBackNow();
  g.Lose(g.a);
  g.Lose(g.b);
  g.MayCatchUp("q", kModel);
  g.compiling.reset();
  CHECK(g.group.NextDeadline() == std::nullopt);
  CHECK_THAT(g.Instance("q").catch_up, Contains("no clean instance gives version 3"));
}

TEST_CASE("a catch-up gives way to a rollback") {
  AtTwo g;
  g.MayCatchUp("late", kModel);
  g.Expire();
  REQUIRE(g.group.catch_up_running());
  const bool copies = GENERATE(false, true);
  g.FinishCompile();
  if (copies) g.ReadyAll();
  const CallId call = g.Rollback(g.trainer);
  if (copies) {
    CHECK(g.Answer(call) == nullptr);
    CHECK(g.flips.empty());
    g.FinishRefit();
  }
  REQUIRE(g.flips.size() == 2);
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(call).version == Version(3));
  g.CatchUp();
  CHECK(g.Instance("late").version == Version(3));
}

TEST_CASE("a rollback that is refused does not end a catch-up") {
  Shadowed g;
  g.Take(1);
  g.MayCatchUp("late", kModel);
  g.Expire();
  REQUIRE(g.group.catch_up_running());
  CHECK(g.Code(g.Rollback()) == kPrecondition);
  CHECK(g.group.catch_up_running());
}

// ---- ranks that fail ----

TEST_CASE("a rank that dies in a rollback costs its instance alone") {
  AtTwo g;
  const CallId call = g.Rollback();
  const bool first = GENERATE(false, true);
  if (first) g.Flipped(g.b);
  g.Lose(g.a);
  if (!first) g.Flipped(g.b);
  const auto done = g.Get<CommitReply>(call);
  CHECK(done.version == Version(3));
  CHECK(g.Instance("b").version == Version(3));
}

TEST_CASE("a rank that is silent in a rollback goes back, is not ready, and catches up") {
  AtTwo g;
  const CallId call = g.Rollback();
  g.Flipped(g.b);
  g.Expire();
  const auto done = g.Get<CommitReply>(call);
  REQUIRE(done.instances.size() == 2);
  CHECK_FALSE(done.instances[0].committed);
  CHECK(g.Instance("a").version == Version(2));
  for (const InstanceStanding& standing : g.group.Standings()) {
    if (standing.instance == "a") CHECK(standing.standing == Standing::kUndone);
  }
  std::erase_if(g.prepared, [&](const auto& p) { return p.first == g.a; });
  g.CatchUp();
  CHECK(g.Instance("a").version == Version(3));
}

TEST_CASE("if no rank answers, the rollback is given up and may be tried again") {
  AtTwo g;
  const CallId call = g.Rollback();
  g.Expire();
  CHECK(g.Code(call) == absl::StatusCode::kDeadlineExceeded);
  CHECK(g.group.version() == Version(2));
  g.prepared.clear();
  g.RollBackNow();
  CHECK(g.group.version() == Version(3));
}

TEST_CASE("a live rank that can't flip makes all flip back, and its own backs are not trusted") {
  AtTwo g;
  const CallId call = g.Rollback();
  g.Flipped(g.b);
  g.Do(EngineFailed{g.a, g.assembled->id, "the driver refuses"});
  CHECK(g.Code(call) == kAborted);
  CHECK(FailureOf(g.Answer(call)->status).weights == Weights::kClean);
  CHECK(g.Instance("a").version == Version(2));
  CHECK(g.Instance("b").version == Version(2));
  REQUIRE(g.ended.size() == 3);
  g.flips.clear();
  g.prepared.clear();
  // "b" still holds version 1, and "a" catches up from it.
  const CommitReply done = g.RollBackNow();
  REQUIRE(g.flips.size() == 1);
  CHECK(g.flips[0].member == g.b);
  CHECK(done.version == Version(3));
}

TEST_CASE("an operator may give a rollback up: all flip back") {
  AtTwo g;
  const CallId call = g.Rollback();
  g.Flipped(g.a);
  g.Do(OperatorAbort{g.NewCall(), "no"});
  CHECK(g.Code(call) == kAborted);
  CHECK(g.Instance("a").version == Version(2));
  CHECK(g.aborted.size() == 2);
}

TEST_CASE("a rollback needs neither its caller nor any trainer") {
  AtTwo g;
  const CallId call = g.Rollback(g.trainer);
  if (GENERATE(false, true)) {
    g.Do(CallGone{call});
  } else {
    g.Lose(g.trainer);
  }
  g.ReadyAll();
  CHECK(g.group.version() == Version(3));
}

TEST_CASE("a rank that is lost takes the version before along") {
  AtTwo g;
  g.Lose(g.a);
  g.ShadowedRank("a", kModel, 0, 1, /*catch_up=*/true);
  const CallId call = g.Rollback();
  REQUIRE(g.flips.size() == 1);
  CHECK(g.flips[0].member == g.b);
  g.ReadyAll();
  CHECK(g.Code(call) == kOk);
}

TEST_CASE("a rank that comes back with the group's version brings no version before") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  g.ShadowedRank("a", kModel, 0, 2);
  const MemberId second = g.ShadowedRank("a", kModel, 1, 2);
  g.Install(trainer, 1, kModel);
  g.Install(trainer, 2, kModel);
  g.Lose(second);
  EngineIdentity who{"a", 1, 2, DeliveryMode::kInPlace, 2001, Version(2), {}};
  who.held_origin = g.group.incarnation();
  const MemberId again = g.AttachEngine(who);
  g.engines[again].shadowed = true;
  LayoutRegistered layout{again, LayoutOf(kModel, 1, 2)};
  layout.shadowed = true;
  g.engines[again].layout = layout.layout;
  g.Do(layout);
  REQUIRE(g.Instance("a").version == Version(2));
  g.flips.clear();
  CHECK(g.Code(g.Rollback()) == kPrecondition);
  CHECK(g.flips.empty());
}

TEST_CASE("a trainer that is lost before every node was sent the rollback does not end it") {
  AtTwo g;
  g.announces = false;
  g.Rollback(g.trainer);
  g.Lose(g.trainer);
  CHECK(g.flips.empty());
  g.Do(UpdateAnnounced{g.assembled->id});
  REQUIRE(g.flips.size() == 2);
  g.ReadyAll();
  CHECK(g.group.version() == Version(3));
}

TEST_CASE("an instance that failed after the commit does not flip") {
  AtTwo g;
  g.Fail(g.a, g.assembled->id, "too late");
  REQUIRE(g.Instance("a").state == "dirty");
  g.RollBackNow();
  REQUIRE(g.flips.size() == 1);
  CHECK(g.flips[0].member == g.b);
}

TEST_CASE("an instance of two ranks flips back as a whole") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId first = g.ShadowedRank("a", kModel, 0, 2);
  const MemberId second = g.ShadowedRank("a", kModel, 1, 2);
  g.Install(trainer, 1, kModel);
  g.Install(trainer, 2, kModel);
  g.committed.clear();
  const CallId call = g.Rollback();
  g.Flipped(first);
  CHECK(g.committed.empty());
  g.Flipped(second);
  CHECK(g.Get<CommitReply>(call).content == Version(1));
}

TEST_CASE("a replaced group has no version before, and a draining daemon begins no rollback") {
  AtTwo g;
  if (GENERATE(false, true)) {
    g.Do(ReplaceGroup{g.NewCall(), 99});
    CHECK(g.Code(g.Rollback()) == kPrecondition);
    CHECK(g.group.View(g.now).previous == std::nullopt);
  } else {
    g.Do(DrainEvent{});
    CHECK(g.Code(g.Rollback()) == kUnavailable);
  }
}

// ---- holds ----

TEST_CASE("while the version before is held, the next update waits and says for what") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.hold_previous_seconds = 60;
  AtTwo g(spec);
  BeginEvent begin;
  begin.member = g.trainer;
  begin.version = Version(3);
  begin.duration = seconds(90);
  SECTION("until the time is over") {
    const CallId call = g.Begin(begin);
    CHECK(g.Answer(call) == nullptr);
    const auto previous = g.group.View(g.now).previous;
    REQUIRE(previous.has_value());
    CHECK(previous->refused.empty());
    CHECK(previous->held);
    CHECK(previous->held_for == Duration(seconds(60)));
    g.Advance(seconds(59));
    CHECK(g.Answer(call) == nullptr);
    g.Expire();
    CHECK(g.Code(call) == kOk);
  }
  SECTION("until it is released, by a trainer or an operator") {
    const CallId call = g.Begin(begin);
    CHECK(g.group.ViewLatest(g.now)->waits_for ==
          "version 1, which is held for 60 s more, to be released");
    CHECK_THAT(g.group.ViewLatest(g.now + seconds(20))->waits_for, Contains("for 40 s more"));
    const bool of_trainer = GENERATE(false, true);
    CHECK(g.Code(g.ReleasePrevious(of_trainer ? g.trainer : MemberId())) == kOk);
    CHECK(g.Code(call) == kOk);
  }
  SECTION("it has its deadline all the same, which names the hold") {
    begin.duration = seconds(20);
    const CallId call = g.Begin(begin);
    g.Advance(seconds(20));
    CHECK(g.Code(call) == absl::StatusCode::kDeadlineExceeded);
    CHECK_THAT(g.Text(call), Contains("version 1, which is held for 40 s more, to be released"));
  }
  SECTION("and not where nobody holds it any more") {
    const CallId call = g.Begin(begin);
    g.Lose(g.a);
    CHECK(g.Answer(call) == nullptr);
    g.ShadowedRank("c", kModel);
    g.Lose(g.b);
    CHECK(g.Code(call) == kOk);
  }
  SECTION("a rollback ends it") {
    g.RollBackNow();
    begin.version = Version(4);
    CHECK(g.Code(g.Begin(begin)) == kOk);
  }
}

// Version 3 waits for a hold of 60 s, and a catch-up of an instance that came later runs.
struct CatchUpBeside : AtTwo {
  explicit CatchUpBeside(GroupSpec spec = Held()) : AtTwo(spec) {
    BeginEvent e;
    e.member = trainer;
    e.version = Version(3);
    e.duration = seconds(90);
    begin = Begin(e);
    late = MayCatchUp("late", kModel);
    REQUIRE(Answer(begin) == nullptr);
    Expire();
    REQUIRE(compiling.has_value());
  }
  static GroupSpec Held() {
    GroupSpec spec = DefaultSpec();
    spec.hold_previous_seconds = 60;
    return spec;
  }
  // The catch-up copies.
  void Copy() {
    FinishCompile();
    ReadyAll();
    REQUIRE(refitting.has_value());
  }
  void CatchUp() {
    Copy();
    FinishRefit();
    FinishVerify();
    REQUIRE(Instance("late").version == Version(2));
  }
  CallId begin;
  MemberId late;
};

TEST_CASE("no instance caught up while an update waited for a hold") {
  CatchUpBeside g;
  // The update is the group's still.
  CHECK(g.group.update_running());
  CHECK_FALSE(g.group.catch_up_running());
  CHECK(g.group.Past(Version(3)).outcome == Outcome::kRunning);
  CHECK(g.group.View(g.now).update->version == Version(3));
  CHECK(g.group.View(g.now).update->state == "opening");
  CHECK(g.group.View(g.now).catch_up->version == Version(2));
  CHECK(g.Code(g.Begin(g.trainer, 4)) == kPrecondition);
  g.Do(ReplaceGroup{g.NewCall(), 99});
  g.CatchUp();
  CHECK(g.group.incarnation() == 7);
  CHECK(g.Answer(g.begin) == nullptr);
  const auto previous = g.group.View(g.now).previous;
  REQUIRE(previous.has_value());
  CHECK(previous->held);
  SECTION("and then goes on when the hold ends") {
    g.Advance(seconds(60));
    g.ReadyAll();
    CHECK(g.Code(g.begin) == kOk);
    g.PushAndCommit(g.trainer, 3, kModel);
    CHECK(g.Instance("late").version == Version(3));
    CHECK(g.Instance("a").version == Version(3));
  }
  SECTION("and then another one may catch up") {
    g.MayCatchUp("later", kModel);
    g.Expire();
    g.Copy();
    g.FinishRefit();
    g.FinishVerify();
    CHECK(g.Instance("later").version == Version(2));
    CHECK(g.Answer(g.begin) == nullptr);
  }
  SECTION("and then the version before is in place again: it was not written") {
    const CallId call = g.Rollback();
    CHECK(g.Code(g.begin) == kAborted);
    REQUIRE(g.flips.size() == 2);
    g.ReadyAll();
    CHECK(g.Get<CommitReply>(call).content == Version(1));
  }
}

TEST_CASE("a catch-up gives way to an update whose hold ends, and to a rollback") {
  CatchUpBeside g;
  g.Copy();
  const std::string how = GENERATE("time", "release", "rollback");
  CallId call;
  if (how == "time") g.Advance(seconds(60));
  if (how == "release") g.ReleasePrevious();
  if (how == "rollback") call = g.Rollback();
  CHECK(g.Answer(g.begin) == nullptr);  // its copies run
  CHECK(g.flips.empty());
  g.FinishRefit();
  if (how != "rollback") {
    CHECK(g.Instance("late").version == std::nullopt);
    g.ReadyAll();
    CHECK(g.Code(g.begin) == kOk);
    return;
  }
  CHECK(g.Code(g.begin) == kAborted);
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(call).version == Version(3));
}

TEST_CASE("an update that waits for a hold ends beside a catch-up as it would alone") {
  CatchUpBeside g;
  g.Copy();
  const std::string how = GENERATE("abort", "operator", "death", "drain");
  CallId call;
  if (how == "abort") call = g.Abort(g.trainer, 3);
  if (how == "operator") g.Do(OperatorAbort{call = g.NewCall(), "no"});
  if (how == "death") g.Lose(g.trainer);
  if (how == "drain") g.Do(DrainEvent{});
  g.FinishRefit();
  if (how == "drain") {
    CHECK(g.Answer(g.begin) == nullptr);
    g.Advance(seconds(60));
    g.ReadyAll();
    CHECK(g.Code(g.begin) == kOk);  // it had begun before
    return;
  }
  CHECK(g.Code(g.begin) == kAborted);
  if (call != CallId()) CHECK(g.Code(call) == kOk);
  CHECK(g.group.Past(Version(3)).outcome == Outcome::kAborted);
  CHECK_FALSE(g.group.update_running());
  CHECK(g.Instance("a").version == Version(2));
  if (how == "death") return;
  g.ReleasePrevious();
  g.Take(4);
}

TEST_CASE("the deadline of an update that waits for a hold names the hold, beside a catch-up too") {
  GroupSpec spec = CatchUpBeside::Held();
  spec.hold_previous_seconds = 600;
  CatchUpBeside g(spec);
  g.Copy();
  g.now += seconds(90);
  g.Do(Tick{});
  CHECK(g.Answer(g.begin) == nullptr);
  g.FinishRefit();
  g.Expire();
  CHECK(g.Code(g.begin) == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(g.Text(g.begin), Contains("version 1, which is held for"));
}

TEST_CASE("trainer ranks begin an update that waits for a hold while a catch-up runs") {
  GroupSpec spec = CatchUpBeside::Held();
  spec.trainer_ranks = 2;
  TestGroup g(spec);
  const MemberId first = g.AttachTrainer(0, 2);
  const MemberId second = g.AttachTrainer(1, 2);
  g.ShadowedRank("a", kModel, 0, 1, /*catch_up=*/true);
  for (int64_t version = 1; version <= 2; ++version) {
    g.Begin(first, version);
    g.Begin(second, version);
    g.Push(first, version, 0, kModel);
    g.FinishAll();
    g.Commit(first, version, 1);
    g.Commit(second, version, 0);
    g.FinishVerify();
    g.ReadyAll();
    REQUIRE(g.group.version() == Version(version));
  }
  BeginEvent begin;
  begin.member = first;
  begin.version = Version(3);
  begin.request_id = "once";
  const CallId one = g.Begin(begin);
  g.MayCatchUp("late", kModel);
  g.Expire();
  REQUIRE(g.compiling.has_value());
  const CallId again = g.Begin(begin);
  const CallId two = g.Begin(second, 3);
  g.FinishCompile();
  g.ReadyAll();
  g.FinishRefit();
  g.FinishVerify();
  CHECK(g.Instance("late").version == Version(2));
  CHECK(g.Answer(one) == nullptr);
  g.ReleasePrevious();
  g.ReadyAll();
  for (const CallId call : {one, again, two}) CHECK(g.Code(call) == kOk);
}

TEST_CASE("Begin or Refit may ask for a hold, which lasts until it is released") {
  Shadowed g;
  g.Take(1);
  const bool refit = GENERATE(false, true);
  if (refit) {
    g.Shards(g.trainer, kModel);
    RefitEvent e;
    e.member = g.trainer;
    e.version = Version(2);
    e.hold = true;
    g.Refit(e);
    g.FinishCompile();
    g.FinishRefit();
    if (g.verifying.has_value()) g.FinishVerify();
    g.ReadyAll();
    g.Shards(g.trainer, {});
  } else {
    BeginEvent begin;
    begin.member = g.trainer;
    begin.version = Version(2);
    begin.hold = true;
    g.Open(begin);
    g.PushAndCommit(g.trainer, 2, kModel);
  }
  REQUIRE(g.group.version() == Version(2));
  const auto previous = g.group.View(g.now).previous;
  REQUIRE(previous.has_value());
  CHECK(previous->held);
  CHECK(previous->held_for == std::nullopt);
  const CallId begin = g.Begin(g.trainer, 3);
  g.Advance(seconds(100));
  CHECK(g.Answer(begin) == nullptr);
  g.ReleasePrevious(g.trainer);
  CHECK(g.Code(begin) == kOk);
}

TEST_CASE("a hold does not concern groups without backs, and holds up no catch-up") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.hold_previous_seconds = 60;
  SECTION("in place") {
    TestGroup g(spec);
    const MemberId trainer = g.AttachTrainer();
    g.InPlaceRank("p", kModel);
    g.Install(trainer, 1, kModel);
    g.Install(trainer, 2, kModel);
    g.Install(trainer, 3, kModel);
  }
  SECTION("a late instance catches up") {
    AtTwo g(spec);
    g.MayCatchUp("late", kModel);
    g.CatchUp();
    CHECK(g.Instance("late").version == Version(2));
    CHECK(g.group.View(g.now).previous->held);
  }
}

}  // namespace
}  // namespace refitd
