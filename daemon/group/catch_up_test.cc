// Catch-ups as the group decides them: who gives, who catches up, what they give way to, and how
// they fail.
#include <catch2/catch.hpp>

#include "daemon/group/group_test_util.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

const std::vector<TensorSpec> kModel = {Bytes("a", 8), Bytes("b", 16)};

// A trainer rank, and instance x that holds version 1.
struct Served {
  explicit Served(GroupLimits limits = {}, GroupSpec spec = TestGroup::DefaultSpec())
      : g(std::move(spec), limits),
        trainer(g.AttachTrainer()),
        source_instance(g.MayCatchUp("x", kModel)) {
    g.Shards(trainer, kModel);
    Install(1);
  }
  CallId Install(int64_t version) {
    const CallId call = g.Refit(trainer, version);
    if (g.compiling.has_value()) g.FinishCompile();
    g.ReadyAll();
    g.FinishRefit();
    g.FinishVerify();
    CHECK(g.Code(call) == StatusCode::kOk);
    return call;
  }
  // Lets the catch-up begin that is due, up to its late instances' Prepare.
  void Open() {
    g.Expire();
    if (g.compiling.has_value()) g.FinishCompile();
  }
  // Lets that catch-up go on up to its copies.
  void Copy() {
    Open();
    g.ReadyAll();
    if (g.comparing.has_value()) g.FinishCompare();
    REQUIRE(g.refitting.has_value());
  }
  void Fill() {
    Copy();
    g.FinishRefit();
    g.FinishVerify();
  }
  std::string CatchUpOf(const std::string& instance) const { return g.Instance(instance).catch_up; }

  TestGroup g;
  MemberId trainer;
  MemberId source_instance;
};

TEST_CASE("an instance that attaches late catches up by a clean one, which hears nothing") {
  Served s;
  const size_t prepares = s.g.prepares.size();
  const size_t committed = s.g.committed.size();
  const MemberId late = s.g.MayCatchUp("y", kModel);
  CHECK(s.CatchUpOf("y") == "waits for a catch-up");
  s.Open();
  CHECK(s.CatchUpOf("y") == "catches up from instance x");
  REQUIRE(s.g.prepares.size() == prepares + 1);
  CHECK(s.g.prepares.back().member == late);
  CHECK(s.g.prepares.back().version == Version(1));
  CHECK(s.g.assembled->use->sources == std::vector<MemberId>{s.source_instance});
  CHECK(s.g.assembled->verification == Verification::kReadback);
  s.g.ReadyAll();
  CHECK(s.g.Instance("y").state == "dirty_ready");
  CHECK(s.g.Instance("x").state == "clean");
  s.g.FinishRefit();
  CHECK(s.g.committed.size() == committed);  // P1: not before the read-back
  s.g.FinishVerify();
  REQUIRE(s.g.committed.size() == committed + 1);
  CHECK(s.g.committed.back().member == late);
  CHECK(s.g.Instance("y").version == Version(1));
  CHECK(s.CatchUpOf("y").empty());
  REQUIRE(s.g.catch_ups.size() == 1);
  CHECK(s.g.catch_ups[0].outcome == Outcome::kCommitted);
  CHECK(s.g.catch_ups[0].bytes == 24);
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  SECTION("and the trainers' next update takes both, with the program that it would have had") {
    s.Install(2);
    CHECK(s.g.Instance("y").version == Version(2));
  }
}

TEST_CASE("a catch-up is no update of the trainers") {
  Served s;
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  CHECK(s.g.group.catch_up_running());
  CHECK(s.g.group.Past(Version(1)).outcome == Outcome::kCommitted);
  const GroupView view = s.g.group.View(s.g.now);
  CHECK(view.update->outcome == Outcome::kCommitted);
  CHECK_FALSE(view.update->catch_up);
  REQUIRE(view.catch_up.has_value());
  CHECK(view.catch_up->catch_up);
  CHECK(view.catch_up->source_instances == std::vector<std::string>{"x"});
  CHECK(view.catch_up->instances.at(0).instance == "y");
  // Late calls to version 1 mean the trainers' update.
  CHECK_THAT(s.g.Text(s.g.Commit(s.trainer, 1, 0)),
             Contains("registered a layout") || Contains("is committed already"));
  CHECK(s.g.Code(s.g.Abort(s.trainer, 1)) == StatusCode::kFailedPrecondition);
  s.g.FinishRefit(absl::InternalError("the copy failed"));
  CHECK(s.g.group.Past(Version(1)).outcome == Outcome::kCommitted);
  CHECK(s.g.group.View(s.g.now).committed == 1);
  CHECK(s.g.group.View(s.g.now).aborted == 0);
}

TEST_CASE("several late instances catch up at once, whether dirty, old or empty") {
  Served s;
  EngineIdentity old{"y", 0, 1, DeliveryMode::kInPlace, 1, Version(0), {}};
  old.held_origin = 7;
  old.catch_up = true;
  s.g.Register(s.g.AttachEngine(old), LayoutOf(kModel));
  EngineIdentity dirty{"z", 0, 1, DeliveryMode::kInPlace, 1, {}, {}};
  dirty.dirty = dirty.catch_up = true;
  const MemberId z = s.g.AttachEngine(dirty);
  s.g.dirty.insert("z");
  s.g.Advance(std::chrono::milliseconds(50));
  s.g.Register(z, LayoutOf(kModel));
  s.Fill();
  CHECK(s.g.catch_ups.size() == 1);
  CHECK(s.g.Instance("y").version == Version(1));
  CHECK(s.g.Instance("z").version == Version(1));
}

TEST_CASE("who does not take part neither gives nor catches up") {
  Served s;
  s.g.InPlaceRank("old_client", kModel);
  s.g.LoaderRank("loader", kModel);
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  CHECK(s.CatchUpOf("old_client").empty());
  // Only one of the two ranks takes part in catch-ups.
  s.g.MayCatchUp("half", kModel, 0, 2);
  s.g.InPlaceRank("half", kModel, 1, 2);
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  s.g.Lose(s.source_instance);
  s.g.MayCatchUp("late", kModel);
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  CHECK_THAT(s.CatchUpOf("late"), Contains("waits for the next version: no clean instance gives"));
}

TEST_CASE("catch-ups can be switched off") {
  GroupLimits limits;
  limits.catch_ups = false;
  Served s(limits);
  s.g.MayCatchUp("y", kModel);
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  CHECK(s.CatchUpOf("y").empty());
}

TEST_CASE("a group without a version catch-ups nobody") {
  TestGroup g;
  g.AttachTrainer();
  g.MayCatchUp("x", kModel);
  g.MayCatchUp("y", kModel);
  CHECK_FALSE(g.group.NextDeadline().has_value());
}

TEST_CASE("a catch-up gives way to a trainer's call, which takes the late instance in") {
  Served s;
  const MemberId late = s.g.MayCatchUp("y", kModel);
  SECTION("while its program is compiled") {
    s.g.Expire();
    REQUIRE(s.g.compiling.has_value());
    const CallId call = s.g.Refit(s.trainer, 2);
    s.g.FinishCompile(absl::CancelledError("not wanted"));
    REQUIRE(s.g.compiling.has_value());
    s.g.FinishCompile();
    CHECK(s.g.prepared.size() == 2);
    s.g.ReadyAll();
    s.g.FinishRefit();
    s.g.FinishVerify();
    CHECK(s.g.Code(call) == StatusCode::kOk);
  }
  SECTION("before a byte is written") {
    s.Open();
    s.g.Refit(s.trainer, 2);
    CHECK(s.g.aborted.back().member == late);
    CHECK_FALSE(s.g.aborted.back().dirty);
    CHECK_FALSE(s.g.group.catch_up_running());
  }
  SECTION("while it copies: the call waits for the copies to end, and no longer") {
    s.Copy();
    const CallId call = s.g.Refit(s.trainer, 2);
    CHECK(s.g.Answer(call) == nullptr);
    CHECK(s.g.group.catch_up_running());
    s.g.FinishRefit(absl::CancelledError("given up"));
    CHECK_FALSE(s.g.group.catch_up_running());
    CHECK(s.g.aborted.back().dirty);
    CHECK_THAT(s.g.aborted.back().reason, Contains("gives way to the update to version 2"));
    s.g.FinishCompile();
    CHECK(s.g.prepared.size() == 2);
    s.g.ReadyAll();
    s.g.FinishRefit();
    s.g.FinishVerify();
    CHECK(s.g.Code(call) == StatusCode::kOk);
    CHECK(s.g.Instance("y").version == Version(2));
  }
  SECTION("while it reads back") {
    s.Copy();
    s.g.FinishRefit();
    s.g.Begin(s.trainer, 2);
    CHECK(s.g.group.catch_up_running());
    s.g.FinishVerify();
    CHECK_FALSE(s.g.group.catch_up_running());
    CHECK(s.g.Instance("y").version == std::nullopt);
  }
  REQUIRE(s.g.catch_ups.size() == 1);
  CHECK(s.g.catch_ups[0].gave_way);
}

TEST_CASE("a call that is refused does not end a catch-up") {
  Served s;
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  CHECK(s.g.Code(s.g.Refit(s.trainer, 1)) == StatusCode::kFailedPrecondition);
  CHECK(s.g.Code(s.g.Begin(s.trainer, 1)) == StatusCode::kFailedPrecondition);
  CHECK(s.g.Code(s.g.Begin(s.trainer, -1)) == StatusCode::kInvalidArgument);
  CHECK_FALSE(s.g.group.ViewLatest(s.g.now)->state == "draining");
  s.g.FinishRefit();
  s.g.FinishVerify();
  CHECK(s.g.Instance("y").version == Version(1));
}

TEST_CASE(
    "a call that waits for a catch-up has its deadline, and is gone with its caller or its rank") {
  Served s;
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  BeginEvent begin;
  begin.member = s.trainer;
  begin.version = Version(2);
  begin.duration = std::chrono::seconds(3);
  const CallId call = s.g.Begin(begin);
  CHECK(s.g.Answer(call) == nullptr);
  SECTION("deadline") {
    s.g.Advance(std::chrono::seconds(2));
    CHECK(s.g.Answer(call) == nullptr);
    s.g.Advance(std::chrono::seconds(1));
    CHECK(s.g.Code(call) == StatusCode::kDeadlineExceeded);
    CHECK_THAT(s.g.Text(call), Contains("waited for the program"));
  }
  SECTION("caller") {
    s.g.Do(CallGone{call});
    CHECK(s.g.Code(call) == StatusCode::kCancelled);
  }
  SECTION("abort") {
    CHECK(s.g.Code(s.g.Abort(s.trainer, 2)) == StatusCode::kOk);
    CHECK(s.g.Code(call) == StatusCode::kAborted);
  }
  SECTION("rank") {
    s.g.Lose(s.trainer);
    CHECK(s.g.Code(call) == StatusCode::kAborted);
  }
  s.g.FinishRefit();
  CHECK_FALSE(s.g.group.update_running());
}

TEST_CASE("what a call's catch-up took of its time does not come back") {
  Served s;
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  BeginEvent begin;
  begin.member = s.trainer;
  begin.version = Version(2);
  begin.duration = std::chrono::seconds(10);
  s.g.Begin(begin);
  s.g.Advance(std::chrono::seconds(4));
  s.g.FinishRefit();
  REQUIRE(s.g.group.ViewUpdate(s.g.now)->version == Version(2));
  CHECK(s.g.group.ViewUpdate(s.g.now)->remaining == std::chrono::seconds(6));
}

TEST_CASE("source instances that leave, register anew or are dirty are replaced") {
  Served s;
  const MemberId other = s.g.MayCatchUp("w", kModel);
  s.Fill();
  REQUIRE(s.g.Instance("w").version == Version(1));
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  CHECK(s.g.assembled->use->sources == std::vector<MemberId>{other, s.source_instance});
  SECTION("left") {
    s.g.Lose(s.source_instance);
    CHECK_FALSE(s.g.released.contains(s.source_instance));  // P6: the copies still read it
  }
  SECTION("dirty") {
    s.g.Fail(s.source_instance, s.g.ended.at(0), "the loader failed");
    CHECK(s.g.Instance("x").state == "dirty");
  }
  SECTION("registered anew") { s.g.Register(s.source_instance, LayoutOf(kModel)); }
  CHECK(s.g.group.ViewLatest(s.g.now)->state == "draining");
  s.g.FinishRefit(absl::CancelledError("given up"));
  CHECK(s.g.aborted.back().dirty);
  CHECK(s.g.catch_ups.back().gave_way);
  s.Fill();
  CHECK(s.g.assembled->use->sources == std::vector<MemberId>{other});
  CHECK(s.g.Instance("y").version == Version(1));
}

// Regression: the loss of a source instance's daemon is told before the loss of its ranks, and
// counted as a failure of the catch-up.
TEST_CASE(
    "the loss of a source instance's daemon fails no catch-up: the late instance catches up by "
    "another at once") {
  Served s;
  const MemberId other = s.g.MayCatchUp("w", kModel);
  s.Fill();
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  s.g.Do(FailUpdate{s.g.refitting->update, "daemon b was lost", GiveUpClass::kPeerLost});
  s.g.Lose(s.source_instance);
  s.g.FinishRefit(absl::CancelledError("given up"));
  CHECK(s.g.catch_ups.back().gave_way);
  CHECK(s.CatchUpOf("y") == "waits for a catch-up");
  s.Fill();
  CHECK(s.g.assembled->use->sources == std::vector<MemberId>{other});
  CHECK(s.g.Instance("y").version == Version(1));
}

TEST_CASE(
    "a late instance that loses a rank did not fail: it catches up as soon as it is whole again") {
  Served s;
  s.g.MayCatchUp("y", kModel, 0, 2);
  const MemberId lost = s.g.MayCatchUp("y", kModel, 1, 2);
  s.Open();
  s.g.Lose(lost);
  CHECK_FALSE(s.g.group.catch_up_running());
  s.g.MayCatchUp("y", kModel, 1, 2);
  CHECK(s.CatchUpOf("y") == "waits for a catch-up");
  s.Fill();
  CHECK(s.g.Instance("y").version == Version(1));
}

TEST_CASE("an instance gives what was committed to it here, not what it says that it holds (P1)") {
  Served s;
  const uint64_t incarnation = s.g.group.View(s.g.now).incarnation;
  s.g.Lose(s.source_instance);
  EngineIdentity again{"x", 0, 1, DeliveryMode::kInPlace, 1, Version(1), {}};
  again.held_origin = incarnation;
  again.catch_up = true;
  s.g.Register(s.g.AttachEngine(again), LayoutOf(kModel));
  CHECK(s.g.Instance("x").state == "clean");
  CHECK(s.g.Instance("x").version == Version(1));
  s.g.MayCatchUp("y", kModel);
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  // The next version makes its memory known.
  s.Install(2);
  s.g.MayCatchUp("z", kModel);
  s.Fill();
  CHECK(s.g.Instance("z").version == Version(2));
}

TEST_CASE("without a source instance that is left, a late instance waits for the next version") {
  Served s;
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  s.g.Lose(s.source_instance);
  s.g.FinishRefit(absl::CancelledError("given up"));
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
  CHECK_THAT(s.CatchUpOf("y"), Contains("waits for the next version"));
  s.Install(2);
  CHECK(s.g.Instance("y").version == Version(2));
}

TEST_CASE("a late instance that is late or fails costs only itself, and is tried later and later") {
  Served s;
  const MemberId good = s.g.MayCatchUp("y", kModel);
  const MemberId bad = s.g.MayCatchUp("z", kModel);
  Duration before{};
  for (int round = 0; round < 9; ++round) {
    s.Open();
    REQUIRE(s.g.prepared.size() == (round == 0 ? 2 : 1));
    if (round == 0) s.g.Ready(good, 1);
    s.g.prepared.clear();
    if (round == 0) {
      s.g.Advance(std::chrono::seconds(30));  // ready_limit
      if (s.g.comparing.has_value()) s.g.FinishCompare();
      s.g.FinishRefit();
      s.g.FinishVerify();
      CHECK(s.g.Instance("y").version == Version(1));
    } else {
      s.g.Do(EngineFailed{bad, s.g.prepares.back().update, "out of memory"});
    }
    CHECK_FALSE(s.g.group.catch_up_running());
    const Duration wait = *s.g.group.NextDeadline() - s.g.now;
    CHECK(wait >= before);
    CHECK(wait <= std::chrono::seconds(64));
    before = wait;
    CHECK_THAT(s.CatchUpOf("z"), Contains("is tried again in"));
  }
  CHECK(before == std::chrono::seconds(64));
  s.Install(2);
}

TEST_CASE("a catch-up whose digests differ commits nothing") {
  Served s;
  const MemberId late = s.g.MayCatchUp("y", kModel);
  s.Copy();
  SECTION("of the copies") {
    s.g.FinishRefit(absl::DataLossError("what b received is not what a sent"));
  }
  SECTION("of the read-back") {
    s.g.FinishRefit();
    s.g.FinishVerify(absl::DataLossError("tensor a differs"), {0});
  }
  CHECK(s.g.aborted.back().member == late);
  CHECK(s.g.aborted.back().dirty);
  CHECK(s.g.Instance("y").state == "dirty");
  CHECK(s.g.catch_ups.back().give_up_class == GiveUpClass::kVerification);
  CHECK_FALSE(s.g.catch_ups.back().gave_way);
}

TEST_CASE("after a catch-up that failed, one instance gives, each time another") {
  Served s;
  const MemberId other = s.g.MayCatchUp("w", kModel);
  s.Fill();
  s.g.MayCatchUp("y", kModel);
  std::vector<MemberId> gave;
  for (int round = 0; round < 3; ++round) {
    s.Copy();
    const auto& sources = s.g.assembled->use->sources;
    REQUIRE(sources.size() == (round == 0 ? 2 : 1));
    if (round > 0) gave.push_back(sources[0]);
    s.g.FinishRefit(absl::UnavailableError("no route to host"));
  }
  CHECK(gave == std::vector<MemberId>{other, s.source_instance});
}

TEST_CASE("what can't be planned is said, and tried again later") {
  Served s;
  s.g.MayCatchUp("y", {Bytes("a", 8), Bytes("b", 16), Bytes("c", 4)});
  s.g.Expire();
  s.g.FinishCompile(absl::FailedPreconditionError("tensor c: no source holds it"));
  CHECK_FALSE(s.g.group.catch_up_running());
  CHECK_THAT(s.CatchUpOf("y"), Contains("tensor c: no source holds it"));
  CHECK(s.g.group.NextDeadline() == s.g.now + std::chrono::seconds(1));
}

TEST_CASE("a drain ends a catch-up, and a replaced group has nobody left that gives") {
  Served s;
  s.g.MayCatchUp("y", kModel);
  s.Copy();
  SECTION("drain") { s.g.Do(DrainEvent{}); }
  SECTION("replace") {
    s.g.Do(ReplaceGroup{s.g.NewCall(), 8});
    CHECK(s.g.group.incarnation() == 8);
    s.g.dirty = {"x", "y"};
  }
  s.g.FinishRefit();
  CHECK_FALSE(s.g.group.update_running());
  CHECK_FALSE(s.g.Instance("y").version.has_value());
  CHECK_FALSE(s.g.group.NextDeadline().has_value());
}

TEST_CASE("instances on a late instance's node give first, and no more than the limit") {
  GroupSpec spec = TestGroup::DefaultSpec();
  TestGroup g(spec);
  const MemberId trainer = g.AttachTrainer();
  g.Shards(trainer, kModel);
  std::vector<MemberId> engines;
  for (uint32_t i = 0; i < 2 * kMaxSourceInstances; ++i) {
    engines.push_back(g.MayCatchUp(fmt::format("e{:02}", i), kModel, 0, 1, NodeId(i)));
  }
  g.Refit(trainer, 1);
  g.FinishCompile();
  g.ReadyAll();
  g.FinishRefit();
  g.FinishVerify();
  g.MayCatchUp("late", kModel, 0, 1, NodeId(11));
  g.Expire();
  REQUIRE(g.compiling.has_value());
  CHECK(g.compiling->sources.size() == kMaxSourceInstances);
  g.FinishCompile();
  CHECK(g.assembled->use->sources.front() == engines[11]);
  CHECK(g.group.SendsFrom(NodeId(11)));
  CHECK_FALSE(g.group.SendsFrom(NodeId(15)));
}

}  // namespace
}  // namespace refitd
