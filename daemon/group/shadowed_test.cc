// Shadowed instances: staged while they serve, flipped when the version is complete.
#include <catch2/catch.hpp>

#include "daemon/group/shadowed_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::seconds;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Both instances hold version 1.
struct TwoShadowed : ShadowedPair {
  TwoShadowed() {
    Install(trainer, 1, kModel);
    flips.clear();
    committed.clear();
  }
  // Version 2 is staged: both have to flip.
  CallId Stage(BeginEvent begin = {}) {
    begin.member = trainer;
    begin.version = Version(2);
    begin.tensor_count = tensor_count;
    Begin(begin);
    Push(trainer, 2, 0, kModel);
    FinishAll();
    const CallId commit = Commit(trainer, 2, 1);
    if (verifying.has_value()) FinishVerify();
    REQUIRE(flips.size() == 2);
    return commit;
  }
};

TEST_CASE("a shadowed instance serves its version until the next one is staged") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId engine = g.ShadowedRank("a", kModel);
  const CallId begin = g.Begin(trainer, 1);
  CHECK(g.Code(begin) == kOk);
  CHECK(g.prepares.empty());
  g.Push(trainer, 1, 0, kModel);
  CHECK(g.Instance("a").state == "clean");
  g.FinishAll();
  const CallId commit = g.Commit(trainer, 1, 1);
  REQUIRE(g.verifying.has_value());
  CHECK(g.flips.empty());
  g.FinishVerify();
  REQUIRE(g.flips.size() == 1);
  CHECK(g.flips[0].member == engine);
  CHECK(g.group.View(g.now).update->state == "flipping");
  CHECK(g.Instance("a").state == "clean_preparing");
  CHECK(g.Answer(commit) == nullptr);
  g.ReadyAll();
  CHECK(g.Code(commit) == kOk);
  CHECK(g.Instance("a").state == "clean");
  CHECK(g.Instance("a").version == Version(1));
  REQUIRE(g.committed.size() == 2);
}

TEST_CASE("a rank that has to copy its regions to the backs has no layout until it has") {
  TwoShadowed g;
  LayoutRegistered e{g.a, LayoutOf(kModel)};
  e.shadowed = e.backs_differ = true;
  g.Do(e);
  CHECK(g.Instance("a").state == "forming");
  // The instance is left out.
  g.Install(g.trainer, 2, kModel);
  CHECK(g.Instance("b").version == Version(2));
  e.backs_differ = false;
  g.Do(e);
  CHECK(g.Instance("a").state == "clean");
  CHECK(g.Instance("a").version == std::nullopt);
  g.Install(g.trainer, 3, kModel);
  CHECK(g.Instance("a").version == Version(3));
  // Its backs hold a version that was not committed to it.
  const CallId call = g.Rollback();
  g.ReadyAll();
  CHECK(g.Get<CommitReply>(call).instances.size() == 1);
}

TEST_CASE("a layout that is refused before its rank copies leaves the one before in force") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId first = g.ShadowedRank("a", kModel, 0, 2);
  g.ShadowedRank("a", kModel, 1, 2);
  g.Install(trainer, 1, kModel);
  LayoutRegistered e{first, LayoutOf(kModel), g.NewCall()};
  e.backs_differ = true;  // and without backs, where the other rank has some
  g.Do(e);
  CHECK(g.Code(e.call) == kInvalid);
  CHECK(g.Instance("a").state == "clean");
  CHECK(g.Instance("a").version == Version(1));
  g.Install(trainer, 2, kModel);
}

TEST_CASE("a version is read back on GPUs too where no pause holds that: all are shadowed") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  EngineIdentity who{"shadowed", 0, 1, DeliveryMode::kInPlace, 1, {}, {}};
  who.on_device = true;
  g.ShadowedRank(who, LayoutOf(kModel));
  g.Install(trainer, 1, kModel);
  g.Install(trainer, 2, kModel);
  CHECK(g.assembled->verification == Verification::kReadback);
  who.instance = "with_a_driver";  // which has no memory
  who.world_size = 2;
  g.ShadowedRank(who, LayoutOf(kModel));
  who.rank = 1;
  const MemberId driver = g.AttachEngine(who);
  g.engines[driver].shadowed = true;
  g.Register(driver, LayoutOf({}));
  g.Install(trainer, 3, kModel);
  g.Install(trainer, 4, kModel);
  CHECK(g.assembled->verification == Verification::kReadback);
  who.rank = 0;
  who.world_size = 1;
  who.instance = "in_place";
  g.Register(g.AttachEngine(who), LayoutOf(kModel));
  g.Install(trainer, 5, kModel);  // the first version of a rank
  g.Install(trainer, 6, kModel);
  CHECK(g.assembled->verification == Verification::kTransfer);
}

TEST_CASE("a shadowed instance is not written before every node was sent the update") {
  TestGroup g;
  g.announces = false;
  const MemberId trainer = g.AttachTrainer();
  g.ShadowedRank("a", kModel);
  const CallId begin = g.Begin(trainer, 1);
  CHECK(g.Answer(begin) == nullptr);
  g.Do(UpdateAnnounced{UpdateId(99)});
  CHECK(g.Answer(begin) == nullptr);
  g.Do(UpdateAnnounced{g.assembled->id});
  CHECK(g.Code(begin) == kOk);
}

TEST_CASE("an abort before the flips touches no shadowed instance") {
  TwoShadowed g;
  g.Begin(g.trainer, 2);
  const CallId push = g.Push(g.trainer, 2, 0, kModel);
  const bool ended = GENERATE(false, true);
  if (ended) g.FinishAll();
  const CallId abort = g.Abort(g.trainer, 2);
  g.FinishAll();
  CHECK(g.Code(abort) == kOk);
  CHECK(g.Code(push) == (ended ? kOk : kAborted));
  CHECK(g.flips.empty());
  for (const SendAborted& told : g.aborted) CHECK(told.member == g.trainer);
  for (const char* name : {"a", "b"}) {
    CHECK(g.Instance(name).state == "clean");
    CHECK(g.Instance(name).version == Version(1));
  }
  // The backs hold a part of version 2; version 3 is written in full.
  g.Install(g.trainer, 3, kModel);
  CHECK(g.Instance("a").version == Version(3));
}

TEST_CASE("a digest that differs leaves shadowed instances as they were") {
  TwoShadowed g;
  g.Begin(g.trainer, 2);
  g.Push(g.trainer, 2, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(g.trainer, 2, 1);
  REQUIRE(g.verifying.has_value());
  g.FinishVerify(absl::DataLossError("differs"), {0});
  CHECK(g.Code(commit) == kAborted);
  CHECK(g.flips.empty());
  CHECK(g.Instance("a").version == Version(1));
  CHECK(FailureOf(g.Answer(commit)->status).weights == Weights::kClean);
}

TEST_CASE("a rank that dies while it flips costs its instance alone") {
  TwoShadowed g;
  const CallId commit = g.Stage();
  const bool first = GENERATE(false, true);
  if (first) g.Flipped(g.b);
  g.Lose(g.a);
  if (!first) g.Flipped(g.b);
  CHECK(g.Code(commit) == kOk);
  CHECK(g.Instance("b").version == Version(2));
  const auto outcomes = g.Get<CommitReply>(commit).instances;
  REQUIRE(outcomes.size() == 2);
  CHECK_FALSE(outcomes[0].committed);
  CHECK(outcomes[1].committed);
}

TEST_CASE("a rank without pieces flips with the instance that it belongs to") {
  // The rank without pieces comes first, or last.
  for (const int driver : {0, 1}) {
    TestGroup g;
    const MemberId trainer = g.AttachTrainer();
    std::vector<MemberId> ranks;
    for (const int rank : {0, 1}) {
      const EngineIdentity who{"a", rank, 2, DeliveryMode::kInPlace, 2000 + rank, {}, {}};
      const MemberId id = ranks.emplace_back(g.AttachEngine(who));
      g.engines[id].shadowed = true;
      LayoutRegistered e{id, LayoutOf(rank == driver ? std::vector<TensorSpec>() : kModel, 0, 1)};
      e.shadowed = rank != driver;
      g.engines[id].layout = e.layout;
      g.Do(std::move(e));
    }
    CHECK(g.Code(g.Begin(trainer, 1)) == kOk);
    CHECK(g.prepares.empty());
    g.Push(trainer, 1, 0, kModel);
    g.FinishAll();
    const CallId commit = g.Commit(trainer, 1, 1);
    if (g.verifying.has_value()) g.FinishVerify();
    CHECK(g.flips.size() == 2);
    g.Flipped(ranks[0]);
    CHECK(g.Answer(commit) == nullptr);
    g.Flipped(ranks[1]);
    CHECK(g.Code(commit) == kOk);
  }
}

TEST_CASE("a rank that stays silent while it flips is evicted and goes back") {
  TwoShadowed g;
  const CallId commit = g.Stage();
  g.Flipped(g.b);
  g.Expire();
  CHECK(g.Code(commit) == kOk);
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == g.a);
  CHECK_FALSE(g.aborted[0].dirty);
  CHECK_THAT(g.aborted[0].reason, Contains("did not flip within"));
  CHECK(g.Instance("a").state == "clean");
  CHECK(g.Instance("a").version == Version(1));
  // Its answer comes too late to count.
  g.Do(ReadyEvent{g.a, g.assembled->id});
  CHECK(g.Instance("a").version == Version(1));
}

TEST_CASE("the update's own deadline evicts ranks that have not flipped, and commits") {
  TwoShadowed g;
  BeginEvent begin;
  begin.duration = seconds(5);
  const CallId commit = g.Stage(begin);
  g.Flipped(g.a);
  g.Advance(seconds(5));
  CHECK(g.Code(commit) == kOk);
  CHECK(g.Instance("a").version == Version(2));
  CHECK(g.Instance("b").version == Version(1));
}

TEST_CASE("if no instance can flip, the update is given up and none has changed") {
  TwoShadowed g;
  const CallId commit = g.Stage();
  g.Expire();
  CHECK(g.Code(commit) == absl::StatusCode::kDeadlineExceeded);
  CHECK(g.Instance("a").version == Version(1));
  CHECK(g.Instance("b").version == Version(1));
  CHECK(g.aborted.size() == 3);  // the trainer too
}

TEST_CASE("a live rank that can't flip makes all flip back") {
  TwoShadowed g;
  const CallId commit = g.Stage();
  g.Flipped(g.b);
  g.Do(EngineFailed{g.a, g.assembled->id, "the driver refuses"});
  CHECK(g.Code(commit) == kAborted);
  CHECK(g.aborted.size() == 3);
  for (const SendAborted& told : g.aborted) CHECK_FALSE(told.dirty);
  CHECK(g.Instance("a").version == Version(1));
  CHECK(g.Instance("b").version == Version(1));
}

// Status shows this of the instances of the running update or the last one: "a" and "b", and
// others.
std::vector<InstanceOutcome> Shown(const TestGroup& g) {
  return g.group.ViewLatest(g.now)->instances;
}

TEST_CASE("a pause lasts from Prepare to the outcome, and is shown with who serves meanwhile") {
  TwoShadowed g;
  const MemberId in_place = g.InPlaceRank("in-place", kModel);
  g.Install(g.trainer, 2, kModel);
  g.flips.clear();
  g.Begin(g.trainer, 3);
  g.Ready(in_place, 3);
  g.Advance(seconds(7));
  g.Push(g.trainer, 3, 0, kModel);
  g.FinishAll();
  CHECK(Shown(g)[0].shadowed);
  CHECK_FALSE(Shown(g)[2].shadowed);
  CHECK_FALSE(Shown(g)[0].pause.has_value());
  const CallId commit = g.Commit(g.trainer, 3, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  REQUIRE(g.flips.size() == 2);
  g.Advance(seconds(1));
  g.Flipped(g.a);
  g.Advance(seconds(2));
  g.Flipped(g.b);
  REQUIRE(g.Code(commit) == kOk);
  for (const auto& outcomes : {Shown(g), g.Get<CommitReply>(commit).instances}) {
    REQUIRE(outcomes.size() == 3);
    CHECK(outcomes[0].pause == Duration(seconds(3)));
    CHECK(outcomes[1].pause == Duration(seconds(3)));
    CHECK(outcomes[2].pause == Duration(seconds(10)));
    CHECK_FALSE(outcomes[0].flipped_back);
  }
}

TEST_CASE("the pause of an instance that flips back ends with that") {
  TwoShadowed g;
  g.Stage();
  g.Advance(seconds(1));
  g.Do(EngineFailed{g.a, g.assembled->id, "the driver refuses"});
  for (const InstanceOutcome& outcome : Shown(g)) {
    CHECK(outcome.pause == Duration(seconds(1)));
    CHECK(outcome.flipped_back);
  }
  // An instance that was not asked to pause has no pause.
  g.Begin(g.trainer, 3);
  g.Abort(g.trainer, 3);
  CHECK_FALSE(Shown(g)[0].pause.has_value());
  g.Install(g.trainer, 4, kModel);
  CHECK(Shown(g)[0].pause == Duration(0));
}

TEST_CASE("with evict_late a rank that can't flip costs its instance alone") {
  TwoShadowed g;
  BeginEvent begin;
  begin.evict_late = true;
  const CallId commit = g.Stage(begin);
  g.Do(EngineFailed{g.a, g.assembled->id, "the driver refuses"});
  g.Flipped(g.b);
  CHECK(g.Code(commit) == kOk);
  CHECK(g.Instance("a").version == Version(1));
  CHECK(g.Instance("b").version == Version(2));
}

TEST_CASE("a staged version needs neither its trainer nor its data plane any more") {
  TwoShadowed g;
  g.Stage();
  if (GENERATE(false, true)) {
    g.Lose(g.trainer);
  } else {
    g.Do(FailUpdate{g.assembled->id, "the wire broke"});
  }
  g.ReadyAll();
  CHECK(g.Instance("a").version == Version(2));
  CHECK(g.group.version() == Version(2));
}

TEST_CASE("who takes the place of a trainer that was lost has no part in what is staged") {
  TwoShadowed g;
  g.Stage();
  g.Lose(g.trainer);
  const MemberId next = g.AttachTrainer();
  CHECK(g.Code(g.Begin(next, 2)) == kPrecondition);
  CHECK(g.Code(g.Abort(next, 2)) == kPrecondition);
  CHECK(g.Code(g.Commit(next, 2, 1)) == kPrecondition);
  g.ReadyAll();
  CHECK(g.group.version() == Version(2));
  g.Install(next, 3, kModel);
}

TEST_CASE("a refit that is staged needs its trainer no more") {
  TwoShadowed g;
  g.Shards(g.trainer, kModel);
  const CallId refit = g.Refit(g.trainer, 2);
  g.FinishCompile();
  g.FinishRefit();
  if (g.verifying.has_value()) g.FinishVerify();
  REQUIRE(g.flips.size() == 2);
  g.Lose(g.trainer);
  CHECK(g.released.contains(g.trainer));
  g.ReadyAll();
  CHECK(g.Instance("a").version == Version(2));
  CHECK(g.Code(refit) == kOk);
}

TEST_CASE("in-place instances stay paused until the flips are decided") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId shadowed = g.ShadowedRank("s", kModel);
  const MemberId in_place = g.InPlaceRank("p", kModel);
  g.Begin(trainer, 1);
  REQUIRE(g.prepares.size() == 1);
  CHECK(g.prepares[0].member == in_place);
  g.ReadyAll();
  g.Push(trainer, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(trainer, 1, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  REQUIRE(g.flips.size() == 1);
  CHECK(g.committed.empty());
  SECTION("the flip commits both") {
    g.Flipped(shadowed);
    CHECK(g.Code(commit) == kOk);
    CHECK(g.committed.size() == 3);
  }
  SECTION("a flip that fails leaves the in-place instance dirty") {
    g.Do(EngineFailed{shadowed, g.assembled->id, "the driver refuses"});
    CHECK(g.Code(commit) == kAborted);
    CHECK(g.Instance("p").state == "dirty");
    CHECK(g.Instance("s").state == "clean");
  }
}

// "a" asks for Staged, "b" does not. Both hold version 1.
struct OneProcesses : TestGroup {
  explicit OneProcesses(GroupLimits limits = {}) : TestGroup(DefaultSpec(), limits) {
    trainer = AttachTrainer();
    EngineIdentity who{"a", 0, 1, DeliveryMode::kInPlace, 2000, {}, {}};
    who.wants_staged = true;
    a = ShadowedRank(who, LayoutOf(kModel));
    b = ShadowedRank("b", kModel);
    Stage(1);
    Processed(a);
    ReadyAll();
    REQUIRE(group.version() == Version(1));
    flips.clear();
    staged.clear();
    committed.clear();
  }
  CallId Stage(int64_t version, Duration duration = {}) {
    BeginEvent begin;
    begin.member = trainer;
    begin.version = Version(version);
    begin.tensor_count = tensor_count;
    begin.duration = duration;
    Begin(begin);
    Push(trainer, version, 0, kModel);
    FinishAll();
    const CallId commit = Commit(trainer, version, 1);
    if (verifying.has_value()) FinishVerify();
    return commit;
  }
  std::string_view State() const { return group.View(now).update->state; }
  MemberId trainer;
  MemberId a;
  MemberId b;
};

TEST_CASE("no engine is asked to pause while another processes the staged version") {
  OneProcesses g;
  const CallId commit = g.Stage(2);
  REQUIRE(g.staged.size() == 1);
  CHECK(g.staged[0].member == g.a);
  CHECK(g.State() == "staged");
  CHECK(g.flips.empty());
  for (const char* name : {"a", "b"}) CHECK(g.Instance(name).state == "clean");
  CHECK_THAT(g.group.View(g.now).update->waits_for,
             Contains("engine a rank 0 (pid 2000) to process it"));
  g.Advance(seconds(20));
  CHECK(g.flips.empty());
  g.Processed(g.a);
  CHECK(g.State() == "flipping");
  REQUIRE(g.flips.size() == 2);
  g.Advance(seconds(1));
  g.Flipped(g.a);
  g.Flipped(g.b);
  REQUIRE(g.Code(commit) == kOk);
  for (const InstanceOutcome& outcome : Shown(g)) CHECK(outcome.pause == Duration(seconds(1)));
}

TEST_CASE("an answer to another update's staged version counts for nothing") {
  OneProcesses g;
  g.Stage(2);
  g.Do(ProcessedEvent{g.a, UpdateId(1)});
  g.Do(ProcessedEvent{g.b, g.assembled->id});
  g.Do(ReadyEvent{g.a, g.assembled->id});
  CHECK(g.State() == "staged");
  g.Processed(g.a);
  CHECK(g.flips.size() == 2);
}

TEST_CASE("who does not process a staged version in time is waited for no longer") {
  GroupLimits limits;
  limits.processing_limit = seconds(3);
  OneProcesses g(limits);
  const bool little = GENERATE(false, true);
  const CallId commit = g.Stage(2, little ? Duration(seconds(4)) : Duration(0));
  CHECK(g.staged[0].remaining == seconds(little ? 2 : 3));  // the flips need the other half
  g.Expire();
  REQUIRE(g.flips.size() == 2);
  CHECK_THAT(g.log.back().text, Contains("without waiting for engine a rank 0 (pid 2000)"));
  g.Do(ProcessedEvent{g.a, g.assembled->id});  // too late to count
  g.ReadyAll();
  CHECK(g.Code(commit) == kOk);
  CHECK(g.Instance("a").version == Version(2));
}

TEST_CASE("a rank that dies while it processes a staged version costs its instance alone") {
  OneProcesses g;
  const CallId commit = g.Stage(2);
  g.Lose(g.a);
  REQUIRE(g.flips.size() == 1);
  g.Flipped(g.b);
  CHECK(g.Code(commit) == kOk);
}

TEST_CASE("an update that is given up while it is staged tells only those that process it") {
  OneProcesses g;
  g.Stage(2);
  SECTION("by an operator") { g.Do(OperatorAbort{g.NewCall(), "stop"}); }
  SECTION("by its trainer") { g.Abort(g.trainer, 2); }
  SECTION("by a rank that fails") { g.Do(EngineFailed{g.a, g.assembled->id, "out of memory"}); }
  CHECK(g.flips.empty());
  REQUIRE(g.aborted.size() == 2);
  std::set<MemberId> told;
  for (const SendAborted& aborted : g.aborted) {
    told.insert(aborted.member);
    CHECK_FALSE(aborted.dirty);
  }
  CHECK(told == std::set<MemberId>{g.trainer, g.a});
  for (const InstanceOutcome& outcome : Shown(g)) {
    CHECK_FALSE(outcome.pause.has_value());
    CHECK_FALSE(outcome.flipped_back);
  }
  for (const char* name : {"a", "b"}) CHECK(g.Instance(name).version == Version(1));
  g.Stage(3);
  CHECK(g.staged.size() == 2);
  g.Processed(g.a);
  g.ReadyAll();
  CHECK(g.Instance("a").version == Version(3));
}

TEST_CASE("the other ranks of an instance that is lost while it processes are sent that") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  std::vector<MemberId> ranks;
  for (const int rank : {0, 1}) {
    EngineIdentity who{"a", rank, 2, DeliveryMode::kInPlace, 2000 + rank, {}, {}};
    who.wants_staged = true;
    ranks.push_back(g.ShadowedRank(who, LayoutOf(kModel, rank, 2)));
  }
  g.ShadowedRank("b", kModel);
  g.Begin(trainer, 1);
  g.Push(trainer, 1, 0, kModel);
  g.FinishAll();
  g.Commit(trainer, 1, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  REQUIRE(g.staged.size() == 2);
  g.Processed(ranks[1]);
  CHECK(g.flips.empty());
  g.Lose(ranks[0]);
  CHECK(g.flips.size() == 1);
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == ranks[1]);
}

TEST_CASE("a staged version that is processed needs neither its trainer nor its data plane") {
  OneProcesses g;
  g.Stage(2);
  if (GENERATE(false, true)) {
    g.Lose(g.trainer);
  } else {
    g.Do(FailUpdate{g.assembled->id, "the wire broke"});
  }
  CHECK(g.State() == "staged");
  g.Processed(g.a);
  g.ReadyAll();
  CHECK(g.group.version() == Version(2));
}

TEST_CASE("a rank processes what a rollback brings back") {
  OneProcesses g;
  g.Stage(2);
  g.Processed(g.a);
  g.ReadyAll();
  const CallId call = g.Rollback();
  REQUIRE(g.staged.size() == 2);
  CHECK(g.staged[1].content == Version(1));
  CHECK(g.Answer(call) == nullptr);
  g.Processed(g.a);
  g.ReadyAll();
  CHECK(g.Code(call) == kOk);
}

TEST_CASE("nobody processes a version while an instance in place is paused for it") {
  OneProcesses g;
  const MemberId in_place = g.InPlaceRank("p", kModel);
  g.Begin(g.trainer, 2);
  g.Ready(in_place, 2);
  g.Push(g.trainer, 2, 0, kModel);
  g.FinishAll();
  g.Commit(g.trainer, 2, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  CHECK(g.staged.empty());
  CHECK(g.flips.size() == 2);
}

TEST_CASE("a pause begins when the first rank of the instance has stopped") {
  TwoShadowed g;
  g.Stage();
  g.Advance(seconds(5));
  g.Flipped(g.a, seconds(1));
  g.Flipped(g.b, seconds(99));  // it was asked 5 s ago
  CHECK(Shown(g)[0].pause == Duration(seconds(1)));
  CHECK(Shown(g)[1].pause == Duration(seconds(5)));
}

TEST_CASE("an instance of two ranks flips as a whole") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId first = g.ShadowedRank("a", kModel, 0, 2);
  const MemberId second = g.ShadowedRank("a", kModel, 1, 2);
  g.Begin(trainer, 1);
  g.Push(trainer, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(trainer, 1, 1);
  if (g.verifying.has_value()) g.FinishVerify();
  g.Flipped(first);
  CHECK(g.committed.empty());
  g.Flipped(second);
  CHECK(g.Code(commit) == kOk);
}

TEST_CASE("all ranks of an instance have backs, or none has") {
  TestGroup g;
  g.ShadowedRank("a", kModel, 0, 2);
  const MemberId second = g.AttachEngine({"a", 1, 2, DeliveryMode::kInPlace, 2001, {}, {}});
  const CallId call = g.NewCall();
  g.Do(LayoutRegistered{second, LayoutOf(kModel, 1, 2), call});
  CHECK(g.Code(call) == kInvalid);
  CHECK_THAT(g.Text(call), Contains("layout.backs: engine a rank 1 (pid 2001) has none"));
  CHECK(g.Instance("a").state == "forming");
}

TEST_CASE("a rank registers no layout while its backs are written") {
  TwoShadowed g;
  CHECK(g.group.CanRegisterLayout(g.a).ok());
  g.Begin(g.trainer, 2);
  CHECK(g.group.CanRegisterLayout(g.a).code() == kPrecondition);
  g.Push(g.trainer, 2, 0, kModel);
  g.Abort(g.trainer, 2);
  CHECK(g.group.CanRegisterLayout(g.a).code() == kPrecondition);
  g.FinishAll();
  CHECK(g.group.CanRegisterLayout(g.a).ok());
}

TEST_CASE("a rank that dies while its back is written is released when the copies have ended") {
  TwoShadowed g;
  g.Begin(g.trainer, 2);
  g.Push(g.trainer, 2, 0, kModel);
  g.Lose(g.a);
  CHECK_FALSE(g.released.contains(g.a));
  g.FinishAll();
  CHECK(g.released.contains(g.a));
  CHECK(g.Settled(g.Commit(g.trainer, 2, 1)) == kOk);
  CHECK(g.Instance("b").version == Version(2));
}

TEST_CASE("a catch-up stages the version for a late shadowed instance, and flips it") {
  TwoShadowed g;
  const MemberId late = g.ShadowedRank("late", kModel, 0, 1, /*catch_up=*/true);
  g.Expire();
  REQUIRE(g.compiling.has_value());
  g.FinishCompile();
  CHECK(g.Instance("late").state == "clean");
  REQUIRE(g.refitting.has_value());
  g.FinishRefit();
  REQUIRE(g.verifying.has_value());
  g.FinishVerify();
  REQUIRE(g.flips.size() == 1);
  CHECK(g.flips[0].member == late);
  g.ReadyAll();
  CHECK(g.Instance("late").version == Version(1));
}

}  // namespace
}  // namespace refitd
