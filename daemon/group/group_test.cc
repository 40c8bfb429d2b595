#include "daemon/group/group.h"

#include <catch2/catch.hpp>

#include "daemon/group/group_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr auto kOk = absl::StatusCode::kOk;
constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kAlreadyExists = absl::StatusCode::kAlreadyExists;
constexpr auto kCancelled = absl::StatusCode::kCancelled;
constexpr auto kDeadline = absl::StatusCode::kDeadlineExceeded;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

const std::vector<TensorSpec> kModel = {Bytes("a", 1000), Bytes("b", 500)};

// A bucket that may come again and again, since it carries no element of its tensor.
BucketDraft WithoutElements(MemberId trainer, int64_t version, int64_t seq) {
  BucketDraft bucket = TestGroup::MakeBucket(trainer, version, seq, {kModel[0]});
  bucket.ranges[0].count = 0;
  return bucket;
}

GroupSpec SpecOf(int trainer_ranks, int min_instances = 1, int slots = 4) {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.trainer_ranks = trainer_ranks;
  spec.min_instances = min_instances;
  spec.slots = slots;
  return spec;
}

// A trainer and an in-place instance "r"; an update to `version` is open for data.
struct OneToOne : TestGroup {
  explicit OneToOne(int64_t version = 1, GroupSpec spec = DefaultSpec(), GroupLimits limits = {})
      : TestGroup(std::move(spec), limits) {
    trainer = AttachTrainer();
    engine = InPlaceRank("r", kModel);
    begin = Begin(trainer, version);
    ReadyAll();
  }
  MemberId trainer;
  MemberId engine;
  CallId begin;
};

// A trainer and a loader instance "s" with a manifest; an update is open for data.
struct OneToLoader : TestGroup {
  explicit OneToLoader(GroupSpec spec = DefaultSpec(), GroupLimits limits = {},
                       bool evict_late = false)
      : TestGroup(std::move(spec), limits) {
    trainer = AttachTrainer();
    engine = LoaderRank("s", kModel);
    BeginEvent e;
    e.member = trainer;
    e.version = Version(1);
    e.evict_late = evict_late;
    begin = Begin(e);
    ReadyAll();
  }
  MemberId trainer;
  MemberId engine;
  CallId begin;
};

// ---- the main path ----

TEST_CASE("an update of one trainer and one in-place engine commits") {
  OneToOne g;
  const auto begun = g.Get<BeginReply>(g.begin);
  CHECK(begun.instances == 1);
  CHECK(begun.leasable_slots == 3);
  CHECK(begun.remaining == seconds(120));
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.slot == std::nullopt);
  CHECK(g.Answer(push) == nullptr);
  CHECK(g.Instance("r").state == "dirty_ready");
  g.FinishAll();
  CHECK(g.Get<BucketReply>(push).bytes == 1500);
  const CallId commit = g.Commit(g.trainer, 1, 1);
  REQUIRE(g.verifying.has_value());
  CHECK(g.Answer(commit) == nullptr);
  g.FinishVerify();
  const auto done = g.Get<CommitReply>(commit);
  CHECK(done.bytes == 1500);
  REQUIRE(done.instances.size() == 1);
  CHECK(done.instances[0].committed);
  CHECK(g.committed.size() == 2);
  CHECK(g.ended.size() == 1);
  CHECK(g.group.version() == Version(1));
  CHECK(g.Instance("r").state == "clean");
  CHECK(g.Instance("r").version == Version(1));
  CHECK(g.group.Past(Version(1)).outcome == Outcome::kCommitted);
  CHECK(g.group.Past(Version(2)).outcome == Outcome::kUnknown);
  CHECK_FALSE(g.group.update_running());
  CHECK(g.group.NextDeadline() == std::nullopt);
}

TEST_CASE("a rank that attaches with unknown weights makes its instance dirty until a commit") {
  TestGroup g(SpecOf(1, 1));
  EngineIdentity who{"r", 0, 2, DeliveryMode::kInPlace, 1, Version(4), {}};
  g.Register(g.AttachEngine(who), LayoutOf(kModel, 0, 2));
  who.rank = 1;
  who.held_version.reset();
  who.dirty = true;
  g.Register(g.AttachEngine(who), LayoutOf(kModel, 1, 2));
  CHECK(g.Instance("r").state == "dirty");
  CHECK(g.Instance("r").version == std::nullopt);
  CHECK(g.group.version() == std::nullopt);
}

TEST_CASE("an update to both deliveries and an instance of two ranks commits in all of them") {
  TestGroup g(SpecOf(2, 3));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  g.LoaderRank("s", kModel);
  g.InPlaceRank("tp", kModel, 0, 2);
  const CallId b0 = g.Begin(t0, 3);
  const CallId b1 = g.Begin(t1, 3);
  CHECK(g.prepares.empty());  // tp lacks a rank
  g.InPlaceRank("tp", kModel, 1, 2);
  CHECK(g.prepares.size() == 4);
  CHECK(g.Answer(b0) == nullptr);
  g.ReadyAll();
  CHECK(g.Get<BeginReply>(b0).instances == 3);
  CHECK(g.Get<BeginReply>(b1).leasable_slots == 1);
  g.Push(t1, 3, 0, {kModel[1]});
  g.Push(t0, 3, 0, {kModel[0]});
  g.Settle();
  CHECK(g.parts.size() == 2);
  const CallId c0 = g.Commit(t0, 3, 1);
  const CallId c1 = g.Commit(t1, 3, 1);
  g.Settle();
  CHECK(g.Get<CommitReply>(c0).instances.size() == 3);
  CHECK(g.Code(c1) == kOk);
  CHECK(g.committed.size() == 6);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE(
    "ranks of one update that say no verification get the same, whichever daemon they are on") {
  TestGroup g(SpecOf(2));
  EngineIdentity who{"r", 0, 1, DeliveryMode::kInPlace, 1, {}, {}};
  who.on_device = true;
  const MemberId engine = g.AttachEngine(who);
  g.Register(engine, LayoutOf(kModel));
  const MemberId t0 = g.AttachTrainer(0, 2);
  MemberId t1 = g.AttachTrainer(1, 2);
  // Begins until the update is assembled; returns its verification.
  const auto begin = [&](int64_t version) {
    g.Begin(t0, version);
    const CallId second = g.Begin(t1, version);
    g.ReadyAll();
    CHECK(g.Code(second) == kOk);
    return g.assembled->verification;
  };
  const auto install = [&](int64_t version) {
    g.Push(t0, version, 0, kModel);
    g.Settle();
    g.Commit(t0, version, 1);
    g.Commit(t1, version, 0);
    g.Settle();
  };
  CHECK(begin(1) == Verification::kReadback);  // the engine's first version
  install(1);
  CHECK(begin(2) == Verification::kTransfer);
  install(2);
  // Rank 1 comes back on another daemon while rank 0 has begun.
  g.Lose(t1);
  const CallId first = g.Begin(t0, 3);
  t1 = MemberId(777);
  g.Do(TrainerAttached{t1, {1, 2, 1, NodeId(5), "far"}});
  SECTION("it says none as well") {
    const CallId second = g.Begin(t1, 3);
    g.ReadyAll();
    CHECK(g.Code(first) == kOk);
    CHECK(g.Code(second) == kOk);
    CHECK(g.assembled->verification == Verification::kTransfer);
  }
  SECTION("it says another") {
    BeginEvent e;
    e.member = t1;
    e.version = Version(3);
    e.verification = Verification::kReadback;
    CHECK(g.Code(g.Begin(e)) == kPrecondition);
  }
}

TEST_CASE("tensors without an element need not be pushed, and may be") {
  TestGroup g;
  const std::vector<TensorSpec> model = {Bytes("a", 8), Bytes("none", 0)};
  g.InPlaceRank("r", model);
  g.LoaderRank("s", model);
  const MemberId trainer = g.AttachTrainer();
  const bool pushed = GENERATE(false, true);
  g.tensor_count = GENERATE(0, 1, 2);
  if (pushed && g.tensor_count == 1) return;
  g.Open(trainer, 1);
  g.Push(trainer, 1, 0, pushed ? model : std::vector<TensorSpec>{model[0]});
  g.Settle();
  CHECK(g.Settled(g.Commit(trainer, 1, 1)) == kOk);
}

TEST_CASE(
    "a tensor that one side lacks is refused with what to do, and a wrapper's name is known") {
  TestGroup g;
  g.InPlaceRank("r", {Bytes("a", 8), Bytes("layers.b", 8)});
  const MemberId t = g.AttachTrainer();
  g.Open(t, 1);
  const auto refused = [&](const std::string& name) {
    return g.Text(g.Push(t, 1, 0, {Bytes(name, 8)}));
  };
  CHECK_THAT(refused("_orig_mod.a"), Contains("'a' is known") && Contains("torch.compile"));
  CHECK_THAT(refused("module.module.layers._orig_mod.b"), Contains("'layers.b' is known"));
  CHECK_THAT(refused("c"), Contains("unknown to instance r; if no engine wants it") &&
                               Contains("unwanted_tensors"));
  CHECK_THAT(refused("module.c"), Contains("unwanted_tensors"));
  g.Push(t, 1, 0, {Bytes("a", 8)});
  g.Settle();
  CHECK_THAT(g.Text(g.Commit(t, 1, 1)),
             Contains("tensor 'layers.b' of instance r was never pushed") &&
                 Contains("engine_only_tensors") && Contains("tied="));
}

// Commit compares counts: a refused bucket must leave them as they were (P1).
TEST_CASE("the tensors of a refused bucket count as never pushed") {
  TestGroup g;
  const std::vector<TensorSpec> model = {Bytes("a", 8), Bytes("b", 8), Bytes("c", 8)};
  g.InPlaceRank("r", model);
  const MemberId t = g.AttachTrainer();
  g.Open(t, 1);
  g.Push(t, 1, 0, {model[0]});
  // The first half of "b", all of "c", and "a" once more.
  BucketDraft twice = TestGroup::MakeBucket(t, 1, 1, {model[1], model[2], model[0]});
  twice.ranges[0].count = 4;
  const CallId refused = g.Push(twice);
  CHECK(g.Code(refused) == absl::StatusCode::kAlreadyExists);
  const CallId early = g.Commit(t, 1, 1);
  CHECK(g.Code(early) == kPrecondition);
  CHECK_THAT(g.Text(early), Contains("tensor 'b' of instance r was never pushed"));
  // Each half is complete only with the other.
  BucketDraft half = TestGroup::MakeBucket(t, 1, 1, {model[1], model[2]});
  half.ranges[0].count = 4;
  g.Push(half);
  const CallId partial = g.Commit(t, 1, 2);
  CHECK(g.Code(partial) == kPrecondition);
  CHECK_THAT(g.Text(partial), Contains("tensor 'b': element 4 of 8 was never pushed"));
  half.tensors = {model[1]};
  half.ranges = {{0, 4, 4}};
  half.seq = 2;
  g.Push(half);
  g.Settle();
  CHECK(g.Settled(g.Commit(t, 1, 3)) == kOk);
}

TEST_CASE("verification off or transfer commits without reading back") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(1);
  e.verification = GENERATE(Verification::kOff, Verification::kTransfer);
  g.Open(e);
  g.Push(t, 1, 0, kModel);
  CHECK(g.running[0].transfer.verification == *e.verification);
  g.FinishAll();
  CHECK(g.Code(g.Commit(t, 1, 1)) == kOk);
  CHECK_FALSE(g.verifying.has_value());
}

TEST_CASE(
    "tensors larger than a slot go to loader engines in parts, in order, as slots come free") {
  TestGroup g(SpecOf(1, 1, 2));
  const std::vector<TensorSpec> big = {Bytes("big", 10'000), Bytes("small", 10)};
  const MemberId t = g.AttachTrainer();
  g.LoaderRank("s", big);
  g.Open(t, 1);
  const CallId push = g.Push(t, 1, 0, big);
  CHECK(g.running.size() == 2);  // both slots are being filled
  g.Finish(1);
  CHECK(g.parts.empty());  // part 0 must come first
  g.Finish(0);
  CHECK(g.parts.size() == 2);
  CHECK(g.running.empty());
  CHECK(g.Answer(push) == nullptr);
  g.AckOne(1);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.part == PartSeq(2));
  g.Finish(0);
  CHECK(g.Code(push) == kOk);  // the source is not read any more, though parts are unacknowledged
  const CallId commit = g.Commit(t, 1, 1);
  CHECK(g.Answer(commit) == nullptr);
  g.Settle();
  CHECK(g.Code(commit) == kOk);
  CHECK(g.FreeSlots() == 2);
}

TEST_CASE("updates follow each other with growing versions") {
  OneToOne g;
  g.PushAndCommit(g.trainer, 1, kModel);
  for (int64_t version = 2; version < 5; ++version) {
    g.Install(g.trainer, version, kModel);
    CHECK(g.Instance("r").version == Version(version));
  }
}

// ---- attach ----

TEST_CASE("trainers that have ended may come back with another world size, engines staying") {
  TestGroup g(SpecOf(2));
  const MemberId engine = g.InPlaceRank("r", kModel);
  const auto run = [&g](const std::vector<MemberId>& trainers, int64_t version) {
    for (const MemberId trainer : trainers) g.Begin(trainer, version);
    g.ReadyAll();
    g.Push(trainers[0], version, 0, kModel);
    g.Settle();
    CallId last;
    for (const MemberId trainer : trainers) {
      last = g.Commit(trainer, version, trainer == trainers[0] ? 1 : 0);
    }
    g.Settle();
    CHECK(g.Code(last) == kOk);
    CHECK(g.Instance("r").version == Version(version));
  };
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  run({t0, t1}, 1);
  // The trainers' running update is lost with them.
  g.Begin(t0, 2);
  g.Open(t1, 2);
  g.Push(t0, 2, 0, kModel);
  g.Lose(t0);
  const absl::Status refused = g.refused[g.AttachTrainer(0, 3)];
  CHECK(refused.code() == kPrecondition);
  CHECK_THAT(std::string(refused.message()),
             Contains("world_size: 3 differs from the 2 trainer_ranks of group g") &&
                 Contains("while trainer rank 1 (pid 1001) still is attached"));
  g.Lose(t1);
  SECTION("when its copies have ended") { g.FinishAll(); }
  SECTION("while they end") {}
  const MemberId u0 = g.AttachTrainer(0, 3);
  CHECK(g.group.spec().trainer_ranks == 3);
  CHECK(g.refused[g.AttachTrainer(1, 2)].code() == kPrecondition);
  const MemberId u1 = g.AttachTrainer(1, 3);
  g.FinishAll();
  const MemberId u2 = g.AttachTrainer(2, 3);
  CHECK_FALSE(g.released.contains(engine));
  // The update waits for all three.
  const CallId first = g.Begin(u0, 2);
  g.Begin(u1, 2);
  CHECK(g.Answer(first) == nullptr);
  g.Open(u2, 2);
  CHECK(g.Get<BeginReply>(first).leasable_slots == 1);
  g.Abort(u0, 2);
  run({u0, u1, u2}, 3);
  for (const MemberId trainer : {u0, u1, u2}) g.Lose(trainer);
  run({g.AttachTrainer(0, 1)}, 4);
}

TEST_CASE("attach is refused for wrong world sizes, ranks and duplicates") {
  TestGroup g(SpecOf(2));
  CHECK(g.refused[g.AttachTrainer(2, 2)].code() == kInvalid);
  CHECK(g.refused[g.AttachTrainer(-1, 2)].code() == kInvalid);
  g.AttachTrainer(0, 2);
  CHECK(g.refused[g.AttachTrainer(1, 3)].code() == kPrecondition);
  const absl::Status again = g.refused[g.AttachTrainer(0, 2)];
  CHECK(again.code() == kAlreadyExists);
  CHECK_THAT(std::string(again.message()), Contains("trainer rank 0 (pid 1000)"));
  g.LoaderRank("s", kModel, 0, 2);
  CHECK(g.refused[g.LoaderRank("s", kModel, 1, 3)].code() == kPrecondition);
  CHECK(g.refused[g.LoaderRank("s", kModel, 0, 2)].code() == kAlreadyExists);
  CHECK(g.refused[g.LoaderRank("s", kModel, 2, 2)].code() == kInvalid);
  CHECK(g.refused[g.LoaderRank("z", kModel, 0, 0)].code() == kInvalid);
  CHECK(g.welcome.size() == 2);
  CHECK(g.group.View(g.now).members.size() == 2);
}

TEST_CASE("an instance is complete when all ranks are attached and registered") {
  TestGroup g;
  const MemberId r0 = g.AttachEngine({"tp", 0, 2, DeliveryMode::kInPlace, 0, {}, {}});
  g.InPlaceRank("tp", kModel, 1, 2);
  CHECK(g.Instance("tp").state == "forming");
  g.Register(r0, LayoutOf(kModel, 0, 2));
  CHECK(g.Instance("tp").state == "clean");
  CHECK(g.Instance("tp").version == std::nullopt);
  g.Lose(r0);
  CHECK(g.released.contains(r0));
  CHECK(g.Instance("tp").state == "forming");
  CHECK(g.Instance("tp").attached == 1);
}

// Attaches one rank of a loader instance that already holds a version.
MemberId AttachHolding(TestGroup* g, const std::string& instance, int rank, int world_size,
                       int64_t held, uint64_t origin) {
  EngineIdentity who{instance, rank, world_size, DeliveryMode::kLoader, 0, Version(held), kModel};
  who.held_origin = origin;
  return g->AttachEngine(std::move(who));
}

TEST_CASE("a version that an instance brings is shown with its origin, and is not the group's") {
  TestGroup g;
  AttachHolding(&g, "a", 0, 2, 4, 0x55);
  CHECK(g.Instance("a").state == "forming");
  AttachHolding(&g, "a", 1, 2, 4, 0x55);
  CHECK(g.Instance("a").state == "clean");
  CHECK(g.Instance("a").version == Version(4));
  CHECK(g.Instance("a").origin == 0x55);
  CHECK(g.group.version() == std::nullopt);
  AttachHolding(&g, "b", 0, 2, 9, 0x55);
  AttachHolding(&g, "b", 1, 2, 8, 0x55);  // the ranks disagree
  CHECK(g.Instance("b").version == std::nullopt);
  AttachHolding(&g, "d", 0, 2, 9, 0x55);
  AttachHolding(&g, "d", 1, 2, 9, 0x66);  // the same number, of another incarnation
  CHECK(g.Instance("d").version == std::nullopt);
  AttachHolding(&g, "c", 0, 2, 6, 0);  // tells no origin
  const MemberId c1 = AttachHolding(&g, "c", 1, 2, 6, 0);
  CHECK(g.Instance("c").version == Version(6));
  CHECK(g.Instance("c").origin == 0);
  g.Lose(c1);
  g.LoaderRank("c", kModel, 1, 2);  // restarted without a version
  CHECK(g.Instance("c").state == "clean");
  CHECK(g.Instance("c").version == std::nullopt);
  // Version 6 is not greater than the version that engines hold, but that version is of another
  // incarnation.
  const CallId begin = g.Begin(g.AttachTrainer(), 6);
  CHECK(g.Answer(begin) == nullptr);
  CHECK(g.group.update_running());
}

TEST_CASE("members that attach during an update take part from the next one") {
  OneToOne g;
  g.InPlaceRank("late", kModel);
  CHECK(g.prepares.size() == 1);
  g.Push(g.trainer, 1, 0, kModel);
  CHECK(g.assembled->destinations.size() == 1);
  g.Settle();
  const CallId commit = g.Commit(g.trainer, 1, 1);
  g.Settle();
  CHECK(g.Get<CommitReply>(commit).instances.size() == 1);
  CHECK(g.Instance("late").version == std::nullopt);
  g.Begin(g.trainer, 2);
  CHECK(g.prepares.size() == 3);
}

TEST_CASE("a rank may attach anew while its predecessor's memory is still touched") {
  OneToOne g;
  g.InPlaceRank("other", kModel);
  g.Push(g.trainer, 1, 0, {kModel[0]});
  g.Lose(g.engine);
  CHECK_FALSE(g.released.contains(g.engine));
  const MemberId again = g.InPlaceRank("r", kModel);
  CHECK(g.welcome.contains(again));
  g.FinishAll();
  CHECK(g.released.contains(g.engine));
  CHECK(g.Instance("r").state == "clean");
}

TEST_CASE("registering a layout is refused for loader ranks and during an update") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const MemberId r = g.InPlaceRank("r", kModel);
  const MemberId s = g.LoaderRank("s", kModel);
  CHECK(g.group.CanRegisterLayout(s).code() == kPrecondition);
  CHECK(g.group.CanRegisterLayout(r).ok());
  CHECK(g.group.CanRegisterLayout(MemberId(99)).code() == kPrecondition);
  g.Begin(t, 1);
  CHECK(g.group.CanRegisterLayout(r).code() == kPrecondition);
}

// ---- begin ----

TEST_CASE("Begin refuses bad versions, durations and counts and changes nothing") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const MemberId r = g.InPlaceRank("r", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(-1);
  CHECK(g.Code(g.Begin(e)) == kInvalid);
  e.version = Version(1);
  e.duration = std::chrono::hours(2);
  CHECK(g.Code(g.Begin(e)) == kInvalid);
  e.duration = seconds(-1);
  CHECK(g.Code(g.Begin(e)) == kInvalid);
  e.duration = {};
  e.tensor_count = -1;
  CHECK(g.Code(g.Begin(e)) == kInvalid);
  e.tensor_count = kMaxTensorsPerLayout + 1;
  CHECK(g.Code(g.Begin(e)) == kExhausted);
  e.tensor_count = 0;
  e.total_bytes = -1;
  CHECK(g.Code(g.Begin(e)) == kInvalid);
  e.total_bytes = 0;
  e.member = r;
  CHECK(g.Code(g.Begin(e)) == kPrecondition);
  e.member = MemberId(77);
  CHECK(g.Code(g.Begin(e)) == absl::StatusCode::kUnauthenticated);
  CHECK_FALSE(g.group.update_running());
  CHECK(g.prepares.empty());
}

TEST_CASE("a second rank's Begin joins, and must agree with the first") {
  TestGroup g(SpecOf(2));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  BeginEvent e;
  e.member = t0;
  e.version = Version(1);
  e.verification = Verification::kTransfer;
  e.evict_late = true;
  e.tensor_count = 2;
  const CallId b0 = g.Begin(e);
  e.member = t1;
  e.verification = Verification::kOff;
  CHECK_THAT(g.Text(g.Begin(e)), Contains("verification"));
  e.verification = Verification::kTransfer;
  e.evict_late = false;
  CHECK_THAT(g.Text(g.Begin(e)), Contains("evict_late"));
  e.evict_late = true;
  e.tensor_count = 3;
  CHECK_THAT(g.Text(g.Begin(e)), Contains("tensor_count"));
  e.tensor_count = 0;
  e.version = Version(2);
  const CallId other = g.Begin(e);
  CHECK(g.Code(other) == kPrecondition);
  CHECK_THAT(g.Text(other), Contains("version 1 runs"));
  CHECK(g.prepares.empty());
  e.version = Version(1);
  const CallId b1 = g.Begin(e);
  g.ReadyAll();
  CHECK(g.Code(b0) == kOk);
  CHECK(g.Code(b1) == kOk);
  CHECK(g.prepares[0].tensor_count == 2);
}

TEST_CASE("Begin that waits for instances ends at the deadline and names what is missing") {
  TestGroup g(SpecOf(1, 2));
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  g.InPlaceRank("tp", kModel, 0, 2);
  const CallId begin = g.Begin(t, 1);
  CHECK(g.group.NextDeadline() == g.now + seconds(120));
  g.Expire();
  CHECK(g.Code(begin) == kDeadline);
  CHECK_THAT(g.Text(begin), Contains("1 of 2 instances complete") && Contains("tp rank 1"));
  CHECK(g.group.Past(Version(1)).outcome == Outcome::kAborted);
  CHECK(g.Instance("r").state == "clean");
  CHECK(g.aborted.size() == 1);  // the trainer: engines were never told
}

TEST_CASE("Begin that waits for another trainer rank ends at the deadline and names it") {
  TestGroup g(SpecOf(2));
  const MemberId t = g.AttachTrainer(0, 2);
  g.InPlaceRank("r", kModel);
  const CallId begin = g.Begin(t, 1);
  g.Expire();
  CHECK(g.Code(begin) == kDeadline);
  CHECK_THAT(g.Text(begin), Contains("trainer rank 1 to begin"));
}

absl::Status TooLarge() { return TooManyTensors("layout.names", kMaxTensorsPerLayout + 1); }

// Checks that the call failed for the limit, and that its failure names the engine.
void CheckTooLarge(const TestGroup& g, CallId call, const std::string& instance) {
  CHECK(g.Code(call) == kExhausted);
  CHECK_THAT(g.Text(call), Contains("engine " + instance + " rank 0") && Contains("262145") &&
                               Contains("262144 (kMaxTensorsPerLayout)"));
  const Failure failure = FailureOf(g.Answer(call)->status);
  REQUIRE(failure.suspects.size() == 1);
  CHECK(failure.suspects[0].instance == instance);
  CHECK(failure.weights == Weights::kClean);
}

TEST_CASE("a Begin that waited for an engine whose layout is too large waited out its deadline") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const MemberId a = g.AttachEngine({"a", 0, 1, DeliveryMode::kInPlace, 7, {}, {}});
  const CallId waits = g.Begin(t, 1);
  CHECK(g.Answer(waits) == nullptr);
  g.Do(EngineFailed{a, UpdateId(), "", TooLarge()});
  CheckTooLarge(g, waits, "a");
  // The next call fails as well, until the engine has registered what it can.
  CheckTooLarge(g, g.Begin(t, 2), "a");
  g.Shards(t, kModel);
  CheckTooLarge(g, g.Refit(t, 3), "a");
  g.Register(a, LayoutOf(kModel));
  const CallId begin = g.Begin(t, 4);
  g.FinishCompile();  // the trainer has shards
  g.ReadyAll();
  CHECK(g.Code(begin) == absl::StatusCode::kOk);
}

TEST_CASE("a Begin waits for other instances where one is refused for its size") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const MemberId a = g.AttachEngine({"a", 0, 1, DeliveryMode::kInPlace, 7, {}, {}});
  const MemberId b = g.AttachEngine({"b", 0, 1, DeliveryMode::kInPlace, 8, {}, {}});
  const CallId begin = g.Begin(t, 1);
  g.Do(EngineFailed{a, UpdateId(), "", TooLarge()});
  CHECK(g.Answer(begin) == nullptr);
  SECTION("one that registers") {
    g.Register(b, LayoutOf(kModel));
    g.ReadyAll();
    CHECK(g.Code(begin) == absl::StatusCode::kOk);
  }
  SECTION("one that leaves") {
    g.Lose(b);
    CheckTooLarge(g, begin, "a");
  }
  SECTION("one that is refused, too") {
    g.Do(EngineFailed{b, UpdateId(), "", TooLarge()});
    CheckTooLarge(g, begin, "b");
  }
  SECTION("none, after all have left") {
    g.Lose(a);
    g.Expire();
    CHECK(g.Code(begin) == kDeadline);
    CHECK_THAT(g.Text(begin), Contains("0 of 1 instances complete") && Contains("262145"));
  }
}

TEST_CASE("a Begin that waited for an engine whose manifest is too large waited out its deadline") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const CallId waits = g.Begin(t, 1);
  EngineIdentity who{"a", 0, 1, DeliveryMode::kLoader, 7, {}, {}};
  who.refused = TooLarge();
  const MemberId a = g.AttachEngine(who);
  CHECK(g.refused.at(a).code() == kExhausted);
  CheckTooLarge(g, waits, "a");
  // The engine is gone, and another may come in its place.
  const CallId begin = g.Begin(t, 2);
  CHECK(g.Answer(begin) == nullptr);
  g.InPlaceRank("a", kModel);
  g.ReadyAll();
  CHECK(g.Code(begin) == absl::StatusCode::kOk);
}

TEST_CASE("an engine that never answers Ready is named, and its instance stays clean") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  g.InPlaceRank("slow", kModel);
  const CallId begin = g.Begin(t, 1);
  g.Ready(g.prepares[0].member, 1);
  CHECK(g.group.NextDeadline() == g.now + seconds(30));
  g.Expire();
  CHECK(g.Code(begin) == kDeadline);
  CHECK_THAT(g.Text(begin), Contains("engine slow rank 0 (pid 2000) did not answer Ready"));
  CHECK(g.aborted.size() == 3);
  CHECK(g.Instance("slow").state == "clean");
}

TEST_CASE("with evict_late an engine that never answers Ready loses its instance only") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const MemberId r = g.InPlaceRank("r", kModel);
  const MemberId slow = g.InPlaceRank("slow", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(1);
  e.evict_late = true;
  const CallId begin = g.Begin(e);
  g.Ready(r, 1);
  g.Expire();
  CHECK(g.Get<BeginReply>(begin).instances == 1);
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == slow);
  g.prepared.clear();
  g.Ready(slow, 1);  // too late: no effect
  g.Push(t, 1, 0, kModel);
  g.Settle();
  const CallId commit = g.Commit(t, 1, 1);
  g.Settle();
  const auto outcomes = g.Get<CommitReply>(commit).instances;
  REQUIRE(outcomes.size() == 2);
  CHECK(outcomes[0].committed);
  CHECK_FALSE(outcomes[1].committed);
  CHECK_THAT(outcomes[1].reason, Contains("Ready"));
}

TEST_CASE("with evict_late and nobody ready the update aborts") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("slow", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(1);
  e.evict_late = true;
  const CallId begin = g.Begin(e);
  g.Expire();
  CHECK(g.Code(begin) == kDeadline);
  CHECK_THAT(g.Text(begin), Contains("no instance is left") && Contains("slow rank 0"));
}

TEST_CASE("loader engines without a manifest need a tensor count, of Begin or of Commit (P1)") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.LoaderRank("s");
  const bool at_begin = GENERATE(true, false);
  g.tensor_count = at_begin ? 2 : 0;
  g.Open(t, 1);
  g.Push(t, 1, 0, {kModel[0]});
  g.Settle();
  if (!at_begin) {
    const CallId untold = g.Commit(t, 1, 1);
    CHECK(g.Code(untold) == kPrecondition);
    CHECK_THAT(g.Text(untold), Contains("tensor_count: 0") && Contains("engine s rank 0"));
  }
  const CallId early = g.CommitCounted(t, 1, 1, 2);
  CHECK(g.Code(early) == kPrecondition);
  CHECK_THAT(g.Text(early), Contains("1 tensors") && Contains("is 2"));
  g.Push(t, 1, 1, {kModel[1]});
  if (at_begin) CHECK(g.Code(g.Push(t, 1, 2, {Bytes("c", 1)})) == kPrecondition);
  g.Settle();
  CHECK(g.Code(g.CommitCounted(t, 1, 2, 1)) == kPrecondition);
  CHECK(g.Code(g.CommitCounted(t, 1, 2, 2)) == kOk);
}

TEST_CASE("a tensor count that Commit tells is of all ranks, and the same on each that tells it") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.trainer_ranks = 2;
  TestGroup g(spec);
  const MemberId first = g.AttachTrainer(0, 2);
  const MemberId second = g.AttachTrainer(1, 2);
  g.LoaderRank("s");
  g.Begin(first, 1);
  g.Open(second, 1);
  g.Push(first, 1, 0, {kModel[0]});
  g.Push(second, 1, 0, {kModel[1]});
  g.Settle();
  const CallId told = g.CommitCounted(first, 1, 1, 2);
  CHECK(g.Answer(told) == nullptr);
  CHECK(g.group.ViewUpdate(g.now)->tensor_count == 2);
  const CallId other = g.CommitCounted(second, 1, 1, 3);
  CHECK(g.Code(other) == kPrecondition);
  CHECK_THAT(g.Text(other), Contains("tensor_count: 3 differs from the 2"));
  CHECK(g.Code(g.Commit(second, 1, 1)) == kOk);
  CHECK(g.Code(told) == kOk);
}

TEST_CASE("a tensor count is dropped with the waiting commit that named it") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.LoaderRank("s");
  g.Open(t, 1);
  const CallId ahead = g.CommitCounted(t, 1, 1, 3, true);
  g.Push(t, 1, 0, {kModel[0]});
  CHECK(g.Code(ahead) == kPrecondition);
  CHECK_THAT(g.Text(ahead), Contains("1 tensors") && Contains("is 3"));
  g.Settle();
  CHECK(g.Code(g.CommitCounted(t, 1, 1, 1)) == kOk);
}

TEST_CASE("instances that disagree about a tensor are both named at Begin") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  g.LoaderRank("s", std::vector<TensorSpec>{Bytes("a", 999)});
  const CallId begin = g.Begin(t, 1);
  CHECK(g.Code(begin) == kPrecondition);
  CHECK_THAT(g.Text(begin), Contains("'a'") && Contains("engine r rank 0") &&
                                Contains("engine s rank 0") && Contains("[999]"));
  CHECK_FALSE(g.group.update_running());
}

// ---- request ids ----

TEST_CASE("a repeated request id has no second effect and gets the first answer") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(1);
  e.request_id = "x";
  const CallId first = g.Begin(e);
  const CallId pending = g.Begin(e);
  CHECK(g.Answer(pending) == nullptr);
  g.ReadyAll();
  CHECK(g.Get<BeginReply>(pending).update == g.Get<BeginReply>(first).update);
  CHECK(g.Code(g.Begin(e)) == kOk);
  CHECK(g.prepares.size() == 1);
  BucketDraft b = g.MakeBucket(t, 1, 0, kModel);
  b.request_id = "x";
  const CallId reused = g.Push(b);
  CHECK(g.Code(reused) == kInvalid);
  CHECK_THAT(g.Text(reused), Contains("'x'"));
  b.request_id = "y";
  const CallId push = g.Push(b);
  const CallId repeat = g.Push(b);
  CHECK(g.running.size() == 1);
  g.FinishAll();
  CHECK(g.Get<BucketReply>(repeat).group_seq == g.Get<BucketReply>(push).group_seq);
  CHECK(g.Code(g.Push(b)) == kOk);
  const CallId c1 = g.Commit(t, 1, 1, "z");
  const CallId c2 = g.Commit(t, 1, 1, "z");
  g.Settle();
  CHECK(g.Code(c1) == kOk);
  CHECK(g.Code(c2) == kOk);
  const CallId after = g.Commit(t, 1, 1, "z");
  CHECK(g.Get<CommitReply>(after).version == Version(1));
  CHECK(g.Code(g.Commit(t, 1, 1)) == kPrecondition);
}

TEST_CASE("a commit whose caller went away is answered to its repeat") {
  OneToOne g;
  g.Push(g.trainer, 1, 0, kModel);
  g.Settle();
  const CallId gone = g.Commit(g.trainer, 1, 1, "c");
  g.Do(CallGone{gone});
  CHECK(g.Code(gone) == kCancelled);
  g.Settle();
  CHECK(g.group.version() == Version(1));
  CHECK(g.Get<CommitReply>(g.Commit(g.trainer, 1, 1, "c")).version == Version(1));
}

TEST_CASE("a refused request may be tried again under its id") {
  OneToOne g;
  BucketDraft b = g.MakeBucket(g.trainer, 1, 500, kModel);
  b.request_id = "x";
  CHECK(g.Code(g.Push(b)) == kExhausted);
  b.seq = 0;
  const CallId push = g.Push(b);
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
}

// ---- buckets ----

TEST_CASE("buckets before Begin, after Commit and of another version are refused") {
  TestGroup g(SpecOf(2));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  CHECK(g.Code(g.Push(t0, 1, 0, kModel)) == kPrecondition);
  g.Begin(t0, 1);
  CHECK(g.Code(g.Push(t0, 1, 0, kModel)) == kPrecondition);
  g.Open(t1, 1);
  CHECK(g.Code(g.Push(t0, 2, 0, kModel)) == kPrecondition);
  g.Push(t0, 1, 0, kModel);
  g.FinishAll();
  g.Commit(t0, 1, 1);
  const CallId after = g.Push(t0, 1, 1, kModel);
  CHECK(g.Code(after) == kPrecondition);
  CHECK_THAT(g.Text(after), Contains("committed"));
  g.Commit(t1, 1, 0);
  g.Settle();
  CHECK(g.group.version() == Version(1));
  CHECK(g.Code(g.Push(t0, 1, 1, kModel)) == kPrecondition);
}

TEST_CASE("repeated and far seqs are refused; early ones wait for their turn") {
  OneToOne g;
  const CallId early = g.Push(g.trainer, 1, 1, {kModel[1]});
  CHECK(g.running.empty());
  CHECK(g.Code(g.Push(g.trainer, 1, 1, {kModel[0]})) == kAlreadyExists);
  const CallId far = g.Push(g.trainer, 1, 256, {kModel[0]});
  CHECK(g.Code(far) == kExhausted);
  CHECK(g.Code(g.Push(g.trainer, 1, -1, {kModel[0]})) == kInvalid);
  // A waiting bucket holds its elements.
  CHECK(g.Code(g.Push(g.trainer, 1, 0, {kModel[1]})) == kAlreadyExists);
  const CallId gap = g.Commit(g.trainer, 1, 2);
  CHECK(g.Code(gap) == kPrecondition);
  CHECK_THAT(g.Text(gap), Contains("seq 0 was never pushed"));
  const CallId first = g.Push(g.trainer, 1, 0, {kModel[0]});
  CHECK(g.running.size() == 2);
  g.FinishAll();
  CHECK(g.Get<BucketReply>(first).group_seq == 0);
  CHECK(g.Get<BucketReply>(early).group_seq == 1);
  CHECK(g.Code(g.Push(g.trainer, 1, 0, {kModel[0]})) == kAlreadyExists);
  const CallId less = g.Commit(g.trainer, 1, 1);
  CHECK(g.Code(less) == kPrecondition);
  CHECK_THAT(g.Text(less), Contains("2 buckets were pushed"));
  CHECK(g.Settled(g.Commit(g.trainer, 1, 2)) == kOk);
}

TEST_CASE("the number of unanswered buckets of a rank is limited") {
  GroupLimits limits;
  limits.outstanding_buckets = 2;
  OneToOne g(1, TestGroup::DefaultSpec(), limits);
  g.Push(g.trainer, 1, 0, {kModel[0]});
  BucketDraft half = g.MakeBucket(g.trainer, 1, 1, {kModel[1]});
  half.ranges[0].count = 250;
  g.Push(half);
  half.seq = 2;
  half.ranges[0].start = 250;
  CHECK(g.Code(g.Push(half)) == kExhausted);
  g.Finish(0);
  const CallId now = g.Push(half);
  g.FinishAll();
  CHECK(g.Code(now) == kOk);
}

TEST_CASE("tensors that an instance does not know, or knows otherwise, are refused by name") {
  OneToOne g;
  const CallId unknown = g.Push(g.trainer, 1, 0, {kModel[0], Bytes("zzz", 3)});
  CHECK(g.Code(unknown) == kPrecondition);
  CHECK_THAT(g.Text(unknown), Contains("'zzz'") && Contains("instance r"));
  const CallId shape = g.Push(g.trainer, 1, 0, {Bytes("a", 999)});
  CHECK(g.Code(shape) == kPrecondition);
  CHECK_THAT(g.Text(shape), Contains("'a'") && Contains("[999]") && Contains("[1000]") &&
                                Contains("engine r rank 0"));
  const CallId dtype = g.Push(g.trainer, 1, 0, {{"a", DType::kInt8, {1000}}});
  CHECK_THAT(g.Text(dtype), Contains("int8") && Contains("uint8"));
  // Nothing changed: the same seq and tensors may come again.
  CHECK(g.running.empty());
  CHECK(g.Instance("r").state == "clean_ready");
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
}

TEST_CASE("overlapping elements are refused by name, disjoint ranges add up") {
  OneToOne g;
  BucketDraft b = g.MakeBucket(g.trainer, 1, 0, {kModel[0], kModel[1]});
  b.ranges[0].count = 600;
  g.Push(b);
  BucketDraft c = g.MakeBucket(g.trainer, 1, 1, {kModel[0]});
  c.ranges[0] = {0, 599, 401};
  const CallId overlap = g.Push(c);
  CHECK(g.Code(overlap) == kAlreadyExists);
  CHECK_THAT(g.Text(overlap), Contains("'a'") && Contains("[599, 1000)"));
  g.FinishAll();
  const CallId partial = g.Commit(g.trainer, 1, 1);
  CHECK(g.Code(partial) == kPrecondition);
  CHECK_THAT(g.Text(partial), Contains("'a'") && Contains("element 600"));
  c.ranges[0] = {0, 600, 400};
  g.Push(c);
  g.FinishAll();
  CHECK(g.Settled(g.Commit(g.trainer, 1, 2)) == kOk);
}

TEST_CASE("tensors without elements are pushed once, where they are") {
  const std::vector<TensorSpec> model = {Bytes("a", 10), {"empty", DType::kFloat32, {0, 4}}};
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", model);
  g.Open(t, 1);
  g.Push(t, 1, 0, {model[0]});
  g.FinishAll();
  g.Push(t, 1, 1, {model[1]});
  CHECK(g.Code(g.Push(t, 1, 2, {model[1]})) == kAlreadyExists);
  CHECK(g.Settled(g.Commit(t, 1, 2)) == kOk);
}

TEST_CASE("engine-only tensors are neither needed nor taken") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.engine_only_tensors = {"rotary"};
  TestGroup g(spec);
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", {kModel[0], Bytes("rotary", 64)});
  g.Open(t, 1);
  const CallId push = g.Push(t, 1, 0, {Bytes("rotary", 64)});
  CHECK(g.Code(push) == kPrecondition);
  g.Push(t, 1, 0, {kModel[0]});
  g.FinishAll();
  CHECK(g.Settled(g.Commit(t, 1, 1)) == kOk);
}

TEST_CASE("a missing tensor withdraws the last commit only, and names tensor and instance") {
  TestGroup g(SpecOf(2));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  g.Begin(t0, 1);
  g.Open(t1, 1);
  g.Push(t0, 1, 0, {kModel[0]});
  g.FinishAll();
  const CallId c0 = g.Commit(t0, 1, 1);
  const CallId c1 = g.Commit(t1, 1, 0);
  CHECK(g.Answer(c0) == nullptr);
  CHECK(g.Code(c1) == kPrecondition);
  CHECK_THAT(g.Text(c1), Contains("'b'") && Contains("instance r"));
  g.Push(t1, 1, 0, {kModel[1]});
  g.FinishAll();
  const CallId again = g.Commit(t1, 1, 1);
  g.Settle();
  CHECK(g.Code(c0) == kOk);
  CHECK(g.Code(again) == kOk);
}

// ---- leased slots ----

TEST_CASE("a bucket in a leased slot is handed to loader engines from that slot") {
  OneToLoader g;
  const auto lease = g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  CHECK(lease.expires == seconds(30));
  CHECK(lease.slot_bytes == 4096);
  BucketDraft b = g.MakeBucket(g.trainer, 1, 0, kModel);
  b.LieIn(lease.grant, {0, 1024});
  const CallId push = g.Push(b);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.slot == lease.grant);
  CHECK(g.running[0].transfer.leased);
  CHECK(g.parts.empty());
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
  REQUIRE(g.parts.size() == 1);
  CHECK(g.parts[0].slot == lease.grant);
  CHECK(g.parts[0].content->byte_offsets == std::vector<int64_t>{0, 1024});
  CHECK(g.parts[0].content->bytes == 1524);
  CHECK(g.Settled(g.Commit(g.trainer, 1, 1)) == kOk);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("a leased slot is free again after the transfer where no engine has a loader") {
  OneToOne g;
  const auto lease = g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  BucketDraft first = g.MakeBucket(g.trainer, 1, 0, {kModel[0]});
  first.LieIn(lease.grant, {0});
  g.Push(first);
  CHECK(g.FreeSlots() == 3);
  g.FinishAll();
  CHECK(g.FreeSlots() == 4);
  BucketDraft second = g.MakeBucket(g.trainer, 1, 1, {kModel[1]});
  second.LieIn(lease.grant, {0});
  CHECK(g.Code(g.Push(second)) == kNotFound);  // the grant ended with the call
}

// ---- broadcasts through slots ----

// A trainer on a GPU, two in-place instances on other GPUs, and an open update by `method`.
struct OneToTwo : TestGroup {
  explicit OneToTwo(BroadcastMethod method, bool slots = true, GroupSpec spec = DefaultSpec())
      : TestGroup(std::move(spec)) {
    trainer = AttachTrainer();
    first = InPlaceRank("a", kModel);
    second = InPlaceRank("b", kModel);
    begin = BeginBy(method, slots);
    ReadyAll();
  }
  CallId BeginBy(BroadcastMethod method, bool slots, int64_t version = 1) {
    BeginEvent e;
    e.member = trainer;
    e.version = Version(version);
    e.broadcast = method;
    e.slots_on_devices = slots;
    return Begin(e);
  }
  MemberId trainer;
  MemberId first;
  MemberId second;
  CallId begin;
};

TEST_CASE("a broadcast goes through a slot, in parts of a slot's size, and gives it back") {
  const BroadcastMethod method = GENERATE(BroadcastMethod::kChain, BroadcastMethod::kSymmetric,
                                          BroadcastMethod::kNccl, BroadcastMethod::kAuto);
  OneToTwo g(method);
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.broadcast == method);
  CHECK(g.running[0].transfer.slot.has_value());
  CHECK(g.running[0].transfer.readers.empty());
  CHECK(g.running[0].transfer.touched.size() == 2);
  CHECK_FALSE(g.running[0].transfer.content->byte_offsets.empty());
  CHECK(g.FreeSlots() == 3);
  g.FinishAll();
  CHECK(g.FreeSlots() == 4);
  CHECK(g.parts.empty());
  CHECK(g.Code(push) == kOk);
  const CallId commit = g.Commit(g.trainer, 1, 1);
  g.Settle();
  const auto pushed = g.Get<CommitReply>(commit).pushed;
  REQUIRE(pushed.size() == 1);
  CHECK(pushed[0].method == (method == BroadcastMethod::kAuto ? BroadcastMethod::kChain : method));
  CHECK(pushed[0].bytes == 1500);
  CHECK(pushed[0].buckets == 1);
}

TEST_CASE("with kDirect, and with kAuto where GPUs lack slots, nothing passes through one") {
  const bool automatic = GENERATE(false, true);
  OneToTwo g(automatic ? BroadcastMethod::kAuto : BroadcastMethod::kDirect, !automatic);
  g.Push(g.trainer, 1, 0, kModel);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.broadcast == BroadcastMethod::kDirect);
  CHECK(g.running[0].transfer.slot == std::nullopt);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("parts of a broadcast start in order as slots come free, whichever ends first") {
  const std::vector<TensorSpec> big = {Bytes("big", 5 * 4096)};
  TestGroup g(SpecOf(1, 2, 2));
  const MemberId trainer = g.AttachTrainer();
  g.InPlaceRank("a", big);
  g.InPlaceRank("b", big);
  BeginEvent e;
  e.member = trainer;
  e.version = Version(1);
  e.broadcast = BroadcastMethod::kChain;
  e.slots_on_devices = true;
  g.Open(e);
  const CallId push = g.Push(trainer, 1, 0, big);
  REQUIRE(g.running.size() == 2);
  g.Finish(1);  // the part's slot is free although the part before still runs
  REQUIRE(g.running.size() == 2);
  CHECK(g.running[0].transfer.part == PartSeq(0));
  CHECK(g.running[1].transfer.part == PartSeq(2));
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
  CHECK(g.Settled(g.Commit(trainer, 1, 1)) == kOk);
  CHECK(g.FreeSlots() == 2);
  const UpdateStatistics statistics = g.group.Statistics();
  REQUIRE(statistics.buckets.size() == 1);
  CHECK(statistics.buckets[0].parts == 5);
  CHECK(statistics.buckets[0].bytes == 5 * 4096);
  CHECK(statistics.buckets[0].broadcast == BroadcastMethod::kChain);
}

TEST_CASE("a bucket of a leased slot is broadcast from it") {
  OneToTwo g(BroadcastMethod::kChain);
  const auto lease = g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  BucketDraft b = g.MakeBucket(g.trainer, 1, 0, kModel);
  b.LieIn(lease.grant, {0, 1024});
  g.Push(b);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.broadcast == BroadcastMethod::kChain);
  CHECK(g.running[0].transfer.slot == lease.grant);
  CHECK(g.running[0].transfer.leased);
  g.FinishAll();
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("a broadcast to loader engines too hands them its slot") {
  TestGroup g(SpecOf(1, 2));
  const MemberId trainer = g.AttachTrainer();
  g.InPlaceRank("a", kModel);
  g.LoaderRank("s", kModel);
  BeginEvent e;
  e.member = trainer;
  e.version = Version(1);
  e.broadcast = BroadcastMethod::kChain;
  e.slots_on_devices = true;
  g.Open(e);
  g.Push(trainer, 1, 0, kModel);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.readers.size() == 1);
  CHECK(g.running[0].transfer.broadcast == BroadcastMethod::kChain);
  g.FinishAll();
  REQUIRE(g.parts.size() == 1);
  CHECK(g.FreeSlots() == 3);
  CHECK(g.Settled(g.Commit(trainer, 1, 1)) == kOk);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("ranks agree about the method, and all of them need slots for kAuto to use any") {
  TestGroup g(SpecOf(2));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  BeginEvent e;
  e.member = t0;
  e.version = Version(1);
  e.slots_on_devices = true;
  g.Begin(e);
  e.member = t1;
  e.broadcast = BroadcastMethod::kChain;
  const CallId other = g.Begin(e);
  CHECK(g.Code(other) == kPrecondition);
  CHECK_THAT(g.Text(other), Contains("broadcast") && Contains("chain") && Contains("auto"));
  e.broadcast = BroadcastMethod::kAuto;
  e.slots_on_devices = GENERATE(false, true);
  g.Open(e);
  g.Push(t1, 1, 0, kModel);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.slot.has_value() == e.slots_on_devices);
}

TEST_CASE("a method that needs slots is refused where there are none") {
  OneToTwo g(BroadcastMethod::kAuto);
  g.Abort(g.trainer, 1);
  const CallId begin = g.BeginBy(BroadcastMethod::kSymmetric, false, 2);
  CHECK(g.Code(begin) == kPrecondition);
  CHECK_THAT(g.Text(begin), Contains("broadcast") && Contains("symmetric"));
  CHECK_FALSE(g.group.update_running());
}

TEST_CASE("an engine that comes while an update is opened, on a GPU without slots, is named") {
  const bool automatic = GENERATE(true, false);
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  BeginEvent e;
  e.member = trainer;
  e.version = Version(1);
  e.broadcast = automatic ? BroadcastMethod::kAuto : BroadcastMethod::kChain;
  e.slots_on_devices = true;
  const CallId begin = g.Begin(e);
  const MemberId late(77);
  g.engines[late] = {late, "late", DeliveryMode::kInPlace, nullptr};
  EngineAttached attached{late, {}, true};
  attached.identity.instance = "late";
  g.Do(attached);
  g.Register(late, LayoutOf(kModel));
  if (!automatic) {
    CHECK(g.Code(begin) == kExhausted);
    CHECK_THAT(g.Text(begin), Contains("chain") && Contains("engine late rank 0"));
    return;
  }
  g.ReadyAll();
  CHECK(g.Code(begin) == kOk);
  g.Push(trainer, 1, 0, kModel);
  REQUIRE(g.running.size() == 1);
  CHECK(g.running[0].transfer.slot == std::nullopt);
}

TEST_CASE("an abort gives the slots of a broadcast back when its copies have ended") {
  OneToTwo g(BroadcastMethod::kChain);
  g.Push(g.trainer, 1, 0, kModel);
  g.Abort(g.trainer, 1);
  CHECK(g.FreeSlots() == 3);
  g.FinishAll();
  CHECK(g.FreeSlots() == 4);
  CHECK_FALSE(g.group.update_running());
}

// ---- parts of what goes directly ----

// Eight tensors "t0" to "t7" of 500 bytes: in one bucket they make four parts of two tensors.
std::vector<TensorSpec> Eight() {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 8; ++i) tensors.push_back(Bytes("t" + std::to_string(i), 500));
  return tensors;
}

GroupLimits PartsOf(int64_t bytes, int64_t tensors) {
  GroupLimits limits;
  limits.direct_part_bytes = bytes;
  limits.direct_part_tensors = tensors;
  return limits;
}

// An instance "r" of one rank and an instance "tp" of two.
struct InParts : TestGroup {
  InParts() : TestGroup(DefaultSpec(), PartsOf(1000, 2)) {
    trainer = AttachTrainer();
    whole = InPlaceRank("r", Eight());
    tp0 = InPlaceRank("tp", Eight(), 0, 2);
    tp1 = InPlaceRank("tp", Eight(), 1, 2);
    Open(trainer, 1);
    push = Push(trainer, 1, 0, Eight());
    REQUIRE(running.size() == 4);
  }
  MemberId trainer;
  MemberId whole;
  MemberId tp0;
  MemberId tp1;
  CallId push;
};

TEST_CASE(
    "a big bucket that goes directly is cut between tensors; its answer waits for all parts") {
  InParts g;
  for (uint32_t p = 0; p < 4; ++p) {
    const MovePart& part = g.running[p].transfer;
    CHECK(part.part == PartSeq(p));
    CHECK(part.content->bytes == 1000);
    REQUIRE(part.content->ranges.size() == 2);
    CHECK(part.content->tensor(1).name == "t" + std::to_string(2 * p + 1));
    CHECK(part.content->ranges[1] == TensorRange{2 * p + 1, 0, 500});
    CHECK(part.content->ranges[0].tensor == 2 * p);
    CHECK(part.touched == std::vector<uint32_t>{0, 1, 2});
    CHECK(part.slot == std::nullopt);
  }
  const CallId commit = g.Commit(g.trainer, 1, 1);
  for (const size_t index : {3, 1, 0}) {
    g.Finish(index);
    CHECK(g.Answer(g.push) == nullptr);
    CHECK_FALSE(g.verifying.has_value());
  }
  g.Finish(0);
  CHECK(g.Get<BucketReply>(g.push).bytes == 4000);
  g.Settle();
  CHECK(g.Get<CommitReply>(commit).bytes == 4000);
  CHECK(g.FreeSlots() == 4);
  const UpdateStatistics statistics = g.group.Statistics();
  REQUIRE(statistics.buckets.size() == 1);
  CHECK(statistics.buckets[0].parts == 4);
  CHECK(statistics.buckets[0].tensors == 8);
  CHECK(statistics.buckets[0].bytes == 4000);
  CHECK(statistics.buckets[0].broadcast == BroadcastMethod::kDirect);
}

// The bytes of each part of a bucket that has tensors of these sizes.
std::vector<int64_t> PartsOfBucket(const std::vector<int64_t>& sizes, GroupLimits limits,
                                   int64_t pushed_of_each = -1) {
  std::vector<TensorSpec> tensors;
  for (const int64_t size : sizes) {
    tensors.push_back(Bytes("t" + std::to_string(tensors.size()), size));
  }
  TestGroup g(TestGroup::DefaultSpec(), limits);
  const MemberId trainer = g.AttachTrainer();
  g.InPlaceRank("r", tensors);
  g.Open(trainer, 1);
  BucketDraft bucket = g.MakeBucket(trainer, 1, 0, tensors);
  for (TensorRange& range : bucket.ranges) {
    if (pushed_of_each >= 0) range.count = std::min(range.count, pushed_of_each);
  }
  const CallId push = g.Push(bucket);
  std::vector<int64_t> parts;
  uint32_t next = 0;
  for (const TestGroup::Running& running : g.running) {
    parts.push_back(running.transfer.content->bytes);
    for (const TensorRange& range : running.transfer.content->ranges) CHECK(range.tensor == next++);
  }
  CHECK(next == sizes.size());
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
  return parts;
}

TEST_CASE("parts are of about one size, of whole ranges, and small buckets are one") {
  using Parts = std::vector<int64_t>;
  const GroupLimits limits = PartsOf(1000, 2);
  CHECK(PartsOfBucket({0, 0, 0, 0}, limits) == Parts{0});
  CHECK(PartsOfBucket({400, 400, 400, 400}, limits) == Parts{1600});  // too few bytes for two
  CHECK(PartsOfBucket({9000, 9000, 9000}, limits) == Parts{27000});   // too few tensors
  CHECK(PartsOfBucket({500, 500, 500, 500}, limits) == Parts{1000, 1000});
  CHECK(PartsOfBucket({600, 600, 600, 600, 600}, limits) == Parts{1800, 1200});
  CHECK(PartsOfBucket({5000, 1, 1, 1, 1, 1}, limits) == Parts{5000, 5});
  CHECK(PartsOfBucket({1, 1, 1, 1, 1, 5000}, limits) == Parts{5005});
  CHECK(PartsOfBucket({1000, 0, 1000, 0, 0}, limits) == Parts{1000, 1000});
  // Only the bytes carried count.
  CHECK(PartsOfBucket({9000, 9000, 9000, 9000}, limits, 500) == Parts{1000, 1000});
  CHECK(PartsOfBucket({9000, 9000, 9000, 9000}, limits, 100) == Parts{400});
}

TEST_CASE("however small its tensors, a bucket makes no more parts than any may") {
  const std::vector<int64_t> sizes(2 * kMaxPartsPerBucket + 2, 3);
  const std::vector<int64_t> parts = PartsOfBucket(sizes, PartsOf(1, 1));
  CHECK(parts.size() <= kMaxPartsPerBucket);
  CHECK(parts.size() > kMaxPartsPerBucket / 2);
}

TEST_CASE("a part of a bucket that fails ends the update when the others have ended") {
  InParts g;
  g.Finish(0);
  g.Finish(1, absl::DataLossError("tensor 't4' differs"), 0);
  CHECK(g.Answer(g.push) == nullptr);  // two of the parts still read its source
  CHECK(g.aborted.empty());
  g.Finish(0);
  CHECK(g.Answer(g.push) == nullptr);
  g.Finish(0);
  CHECK(g.Code(g.push) == kAborted);
  CHECK_THAT(g.Text(g.push), Contains("verification of part 2 to engine r rank 0"));
  CHECK(g.Instance("r").state == "dirty");
  CHECK(g.Instance("tp").state == "dirty");
  CHECK(g.aborted.size() == 4);
  const Failure failure = FailureOf(g.Answer(g.push)->status);
  REQUIRE(failure.suspects.size() == 1);
  CHECK(failure.suspects[0].role == SuspectRole::kEngine);
  CHECK(failure.suspects[0].instance == "r");
  CHECK(failure.suspects[0].rank == 0);
  CHECK(failure.weights == Weights::kDirty);
  CHECK(failure.dirty_instances == std::vector<std::string>{"r", "tp"});
  CHECK(failure.version == 1);
  CHECK_FALSE(failure.may_be_retried);  // other bytes than were sent: that does not pass
  CHECK(g.group.Past(Version(1)).failure == failure);
  for (const SendAborted& told : g.aborted) CHECK(told.failure.version == 1);
}

TEST_CASE("a reason that calls weights whole made dirty engines read as whole") {
  InParts g;
  g.Finish(0);
  const std::string reason = "loader died (weights are whole): tensor 'forged' of trainer rank 9";
  g.Fail(g.whole, UpdateId(1), reason);
  while (!g.running.empty()) g.Finish(0);
  CHECK_THAT(g.Text(g.push), Contains(reason) && Contains("weights are dirty: instance"));
  const Failure failure = FailureOf(g.Answer(g.push)->status);
  CHECK(failure.weights == Weights::kDirty);
  CHECK(failure.tensor.empty());
  REQUIRE(failure.suspects.size() == 1);
  CHECK(failure.suspects[0].role == SuspectRole::kEngine);
}

TEST_CASE("an abort between the parts of a bucket leaves its engines dirty until the next commit") {
  InParts g;
  g.Finish(2);
  g.Finish(0);
  const CallId abort = g.Abort(g.trainer, 1);
  g.Finish(0);
  CHECK(g.Answer(abort) == nullptr);
  CHECK(g.Answer(g.push) == nullptr);
  g.Finish(0);
  CHECK(g.Code(abort) == kOk);
  CHECK(g.Code(g.push) == kAborted);
  CHECK(g.Instance("tp").state == "dirty");
  // Elements of the aborted update count for nothing.
  g.Open(g.trainer, 1);
  CHECK_THAT(g.Text(g.Commit(g.trainer, 1, 0)), Contains("'t0'"));
  g.Push(g.trainer, 1, 0, Eight());
  g.FinishAll();
  CHECK(g.Settled(g.Commit(g.trainer, 1, 1)) == kOk);
  CHECK(g.Instance("tp").state == "clean");
}

TEST_CASE("parts cut for a loader engine go directly when it dies before they start") {
  TestGroup g(SpecOf(1, 1, 2));
  const std::vector<TensorSpec> model = {Bytes("a", 3000), Bytes("b", 10), Bytes("c", 17'000)};
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", model);
  const MemberId s = g.LoaderRank("s", model);
  g.Open(t, 1);
  g.Push(t, 1, 0, model);
  REQUIRE(g.running.size() == 2);
  CHECK(g.running[0].transfer.slot.has_value());
  CHECK_FALSE(g.running[0].transfer.content->byte_offsets.empty());
  g.FinishAll();
  CHECK(g.running.empty());  // no reader acknowledges
  g.Lose(s);
  REQUIRE(g.running.size() > 1);
  for (const auto& running : g.running) {
    const PartContent& content = *running.transfer.content;
    CHECK_FALSE(running.transfer.slot.has_value());
    CHECK(content.byte_offsets.empty());
    int64_t carried = 0;  // one byte for each element
    for (const TensorRange& range : content.ranges) carried += range.count;
    CHECK(content.bytes == carried);
  }
  g.Settle();
  CHECK(g.Settled(g.Commit(t, 1, 1)) == kOk);
  CHECK(g.Instance("r").state == "clean");
  CHECK(g.FreeSlots() == 2);
}

TEST_CASE("an engine that dies between the parts of a bucket is released after the last of them") {
  InParts g;
  const CallId commit = g.Commit(g.trainer, 1, 1);
  g.Finish(0);
  g.Lose(g.tp1);
  while (g.running.size() > 1) {
    g.Finish(1 % g.running.size());
    CHECK_FALSE(g.released.contains(g.tp1));
    CHECK(g.aborted.empty());  // the rank's sibling is still being written
    CHECK(g.Answer(g.push) == nullptr);
  }
  g.Finish(0);
  CHECK(g.released.contains(g.tp1));
  CHECK(g.Code(g.push) == kOk);
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == g.tp0);
  CHECK(g.aborted[0].dirty);
  g.Settle();
  const auto outcomes = g.Get<CommitReply>(commit).instances;
  CHECK(outcomes[0].committed);
  CHECK_FALSE(outcomes[1].committed);
}

TEST_CASE("the loss of the trainer between the parts of a bucket waits for those that read it") {
  InParts g;
  g.Finish(0);
  g.Lose(g.trainer);
  while (!g.running.empty()) {
    CHECK_FALSE(g.released.contains(g.trainer));
    CHECK(g.aborted.empty());
    g.Finish(0);
  }
  CHECK(g.released.contains(g.trainer));
  CHECK(g.Code(g.push) == kAborted);
  CHECK(g.Instance("r").state == "dirty");
}

TEST_CASE("what one part wrote too little, no other makes up for") {
  InParts g;
  const CallId commit = g.Commit(g.trainer, 1, 1);
  for (int64_t p = 0; p < 4; ++p) {
    const MovePart t = g.running[0].transfer;
    g.running.erase(g.running.begin());
    // In part 1 one rank got 499 bytes instead of 500, and the other got 501.
    std::vector<int64_t> bytes = {1000, 500, 500};
    if (p == 1) bytes = {1000, 499, 501};
    g.Do(TransferDone{t.update, t.part, absl::OkStatus(), bytes, -1, {}});
  }
  CHECK(g.Code(g.push) == kOk);
  CHECK(g.Code(commit) == kAborted);
  CHECK_THAT(g.Text(commit), Contains("engine tp rank 0") && Contains("1999") && Contains("2000"));
}

TEST_CASE("a bucket that is refused leaves no trace, whatever it was refused for") {
  OneToOne g;
  BucketDraft part = g.MakeBucket(g.trainer, 1, 0, {kModel[0]});
  part.ranges[0].count = 400;
  g.Push(part);
  // The range of "a" is refused, since it repeats element 399. It also brings new elements of "a",
  // and "b", which is new, comes before it.
  BucketDraft bad = g.MakeBucket(g.trainer, 1, 1, {kModel[1], kModel[0]});
  bad.ranges[1] = {1, 399, 601};
  CHECK(g.Code(g.Push(bad)) == kAlreadyExists);
  bad = g.MakeBucket(g.trainer, 1, 1, {kModel[0], kModel[1], kModel[0]});
  bad.ranges[0] = {0, 400, 600};
  bad.ranges[2] = {2, 999, 1};
  CHECK(g.Code(g.Push(bad)) == kAlreadyExists);
  bad = g.MakeBucket(g.trainer, 1, 1, kModel);
  bad.ranges[0] = {0, 400, 600};
  bad.LieIn(SlotGrant{SlotIndex(0), GrantId(77)}, {0, 1024});
  CHECK(g.Code(g.Push(bad)) == kNotFound);
  g.FinishAll();
  CHECK_THAT(g.Text(g.Commit(g.trainer, 1, 1)), Contains("'a'") && Contains("element 400"));
  bad.slot.reset();
  CHECK(g.Answer(g.Push(bad)) == nullptr);
  g.FinishAll();
  CHECK(g.Settled(g.Commit(g.trainer, 1, 2)) == kOk);
}

TEST_CASE("the statistics of the last buckets are kept until the next update, and no more") {
  OneToTwo g(BroadcastMethod::kDirect);
  const CallId first = g.Push(g.trainer, 1, 0, {kModel[0]});
  g.Advance(milliseconds(5));
  g.FinishAll();
  g.Push(g.trainer, 1, 1, {kModel[1]});
  g.FinishAll();
  CHECK(g.Code(first) == kOk);
  g.Commit(g.trainer, 1, 2);
  g.Settle();
  const UpdateStatistics statistics = g.group.Statistics();
  REQUIRE(statistics.buckets.size() == 2);
  CHECK(statistics.buckets[0].took == milliseconds(5));
  CHECK(statistics.buckets[1].took == Duration(0));
  CHECK(statistics.buckets[1].group_seq == 1);
  CHECK(statistics.buckets[1].seq == 1);
  CHECK(statistics.buckets[1].tensors == 1);
  CHECK(statistics.left_out == 0);
  // Buckets without elements fill the log like any other.
  g.BeginBy(BroadcastMethod::kDirect, true, 2);
  CHECK(g.group.Statistics().buckets.empty());
  g.ReadyAll();
  for (int64_t seq = 0; seq < kRememberedBuckets + 3; ++seq) {
    g.Push(WithoutElements(g.trainer, 2, seq));
    g.FinishAll();
  }
  CHECK(g.group.Statistics().buckets.size() == kRememberedBuckets);
  CHECK(g.group.Statistics().left_out == 3);
  CHECK(g.group.Statistics().buckets.front().group_seq == 3);
}

TEST_CASE("leases are limited, waited for in order, given back and named when none comes free") {
  OneToLoader g(SpecOf(1, 1, 3));
  const auto first = g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  const CallId third = g.Lease(g.trainer, 1);
  CHECK(g.Code(third) == kExhausted);
  CHECK_THAT(g.Text(third), Contains("trainer rank 0"));
  CHECK(g.Code(g.Release(g.trainer, {first.grant.slot, GrantId(99)})) == kNotFound);
  CHECK(g.Code(g.Release(g.trainer, first.grant)) == kOk);
  CHECK(g.Code(g.Release(g.trainer, first.grant)) == kNotFound);
  // One slot is leased, one is read by the engine, the last is kept for staging.
  g.Push(g.trainer, 1, 0, kModel);
  g.FinishAll();
  const CallId wait = g.Lease(g.trainer, 1, milliseconds(100));
  CHECK(g.Answer(wait) == nullptr);
  CHECK(g.Code(g.Lease(g.trainer, 1, seconds(-1))) == kInvalid);
  CHECK(g.group.NextDeadline() == g.now + milliseconds(100));
  g.Expire();
  CHECK(g.Code(wait) == kDeadline);
  CHECK_THAT(g.Text(wait), Contains("leased by trainer rank 0") &&
                               Contains("reading by engine s rank 0 (pid 3000)"));
  const CallId served = g.Lease(g.trainer, 1);
  CHECK(g.Answer(served) == nullptr);
  g.AckOne(0);
  CHECK(g.Code(served) == kOk);
}

TEST_CASE("a lease that only the rank's own earlier bucket can free fails at once and says so") {
  OneToLoader g(SpecOf(1, 1, 2));
  BucketDraft b = g.MakeBucket(g.trainer, 1, 1, {kModel[1]});
  b.LieIn(g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1)).grant, {0});
  const CallId early = g.Push(b);
  const CallId lease = g.Lease(g.trainer, 1);
  CHECK(g.Code(lease) == kExhausted);
  CHECK_THAT(g.Text(lease), Contains("wait for its seq 0"));
  g.Push(g.trainer, 1, 0, {kModel[0]});
  g.Settle();
  CHECK(g.Code(early) == kOk);
}

TEST_CASE("groups with too few slots grant no leases") {
  TestGroup g(SpecOf(4, 1, 4));
  std::vector<MemberId> trainers;
  for (int rank = 0; rank < 4; ++rank) trainers.push_back(g.AttachTrainer(rank, 4));
  g.InPlaceRank("r", kModel);
  for (const MemberId t : trainers) g.Begin(t, 1);
  g.ReadyAll();
  CHECK(g.Code(g.Lease(trainers[0], 1)) == kExhausted);
  CHECK(g.Code(g.Lease(trainers[0], 2)) == kPrecondition);
}

TEST_CASE("a lease that is not submitted in time aborts the update, and stays its holder's") {
  GroupLimits limits;
  limits.grant_limit = seconds(5);
  OneToLoader g(TestGroup::DefaultSpec(), limits);
  const auto lease = g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  const CallId push = g.Push(g.trainer, 1, 1, {kModel[0]});  // waits for seq 0
  CHECK(g.group.NextDeadline() == g.now + seconds(5));
  g.Expire();
  CHECK(g.Code(push) == kAborted);
  CHECK_THAT(g.Text(push), Contains("trainer rank 0") && Contains("did not submit leased slot"));
  CHECK(g.FreeSlots() == 3);  // the rank may still be packing
  CHECK(g.group.NextDeadline() == std::nullopt);
  g.Open(g.trainer, 1);
  CHECK(g.FreeSlots() == 3);
  CHECK(g.Code(g.Release(g.trainer, lease.grant)) == kOk);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("a lease that outlives its update is no reason to give up the next one") {
  GroupLimits limits;
  limits.grant_limit = seconds(5);
  OneToLoader g(TestGroup::DefaultSpec(), limits);
  const auto lease = g.Get<LeaseSlotReply>(g.Lease(g.trainer, 1));
  g.Push(g.trainer, 1, 0, kModel);
  g.Settle();
  const CallId first = g.Commit(g.trainer, 1, 1);
  g.Settle();
  REQUIRE(g.Code(first) == kOk);
  CHECK(g.group.NextDeadline() == std::nullopt);
  g.Open(g.trainer, 2);
  g.Advance(seconds(6));
  CHECK(g.FreeSlots() == 3);
  BucketDraft b = g.MakeBucket(g.trainer, 2, 0, {kModel[0]});
  b.LieIn(lease.grant, {0});
  g.Push(b);
  g.Push(g.trainer, 2, 1, {kModel[1]});
  g.Settle();
  CHECK(g.Settled(g.Commit(g.trainer, 2, 2)) == kOk);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("a lease whose caller went away is not given to nobody") {
  OneToLoader g(SpecOf(1, 1, 3));
  g.Push(g.trainer, 1, 0, {Bytes("a", 1000)});
  g.Push(g.trainer, 1, 1, {Bytes("b", 500)});
  g.FinishAll();
  const CallId wait = g.Lease(g.trainer, 1);
  CHECK(g.Answer(wait) == nullptr);
  g.Do(CallGone{wait});
  CHECK(g.Code(wait) == kCancelled);
  g.Settle();
  CHECK(g.FreeSlots() == 3);
}

// ---- lateness, loss, eviction ----

TEST_CASE("an engine that never acknowledges aborts the update and is named") {
  OneToLoader g;
  g.Push(g.trainer, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(g.trainer, 1, 1);
  CHECK(g.group.NextDeadline() == g.now + seconds(30));
  g.Expire();
  CHECK(g.Code(commit) == kDeadline);
  CHECK_THAT(g.Text(commit),
             Contains("engine s rank 0 (pid 3000) did not acknowledge part 0 within 30 s"));
  CHECK(g.Instance("s").state == "dirty");
  CHECK(g.Instance("s").version == std::nullopt);
  CHECK(g.FreeSlots() == 3);  // the engine may still read its slot
  g.AckOne(0);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("with evict_late an engine that never acknowledges loses its instance only") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  const MemberId s = g.LoaderRank("s", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(1);
  e.evict_late = true;
  g.Open(e);
  g.Push(t, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(t, 1, 1);
  g.Expire();
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == s);
  CHECK(g.aborted[0].dirty);
  g.FinishVerify();
  const auto outcomes = g.Get<CommitReply>(commit).instances;
  CHECK(outcomes[0].committed);
  CHECK_THAT(outcomes[1].reason, Contains("acknowledge"));
  CHECK(g.FreeSlots() == 4);  // the others must not wait for it
}

TEST_CASE("parts without loader engines left need no slots any more") {
  TestGroup g(SpecOf(1, 1, 2));
  const std::vector<TensorSpec> big = {Bytes("big", 20'000)};
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", big);
  const MemberId s = g.LoaderRank("s", big);
  g.Open(t, 1);
  const CallId push = g.Push(t, 1, 0, big);
  CHECK(g.running.size() == 2);
  g.Lose(s);
  CHECK(g.running.size() == 5);
  CHECK(g.running[4].transfer.slot == std::nullopt);
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
  CHECK(g.FreeSlots() == 2);
  const CallId commit = g.Commit(t, 1, 1);
  g.Settle();
  CHECK(g.Get<CommitReply>(commit).instances[0].committed);
}

TEST_CASE("the death of an engine rank evicts its instance, and the update goes on") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  const MemberId tp0 = g.InPlaceRank("tp", kModel, 0, 2);
  const MemberId tp1 = g.InPlaceRank("tp", kModel, 1, 2);
  g.Open(t, 1);
  g.Push(t, 1, 0, {kModel[0]});
  g.Lose(tp1);
  // A copy still writes to both ranks of the instance.
  CHECK_FALSE(g.released.contains(tp1));
  CHECK(g.aborted.empty());
  g.Push(t, 1, 1, {kModel[1]});
  CHECK(g.running[1].transfer.skip == std::vector<bool>{false, true, true});
  g.FinishAll();
  CHECK(g.released.contains(tp1));
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == tp0);
  CHECK(g.aborted[0].dirty);
  CHECK_THAT(g.aborted[0].reason, Contains("engine tp rank 1 (pid 2001) was lost: killed"));
  const CallId commit = g.Commit(t, 1, 2);
  REQUIRE(g.verifying.has_value());
  CHECK(g.verifying->skip == std::vector<bool>{false, true, true});
  g.FinishVerify();
  const auto outcomes = g.Get<CommitReply>(commit).instances;
  CHECK(outcomes[0].committed);
  CHECK_FALSE(outcomes[1].committed);
  CHECK(g.Instance("tp").state == "forming_dirty");
  g.InPlaceRank("tp", kModel, 1, 2);
  CHECK(g.Instance("tp").state == "dirty");
  g.Install(t, 2, kModel);
  CHECK(g.Instance("tp").version == Version(2));
}

TEST_CASE("the death of the last engine aborts the update") {
  OneToOne g;
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  g.Lose(g.engine);
  CHECK(g.Answer(push) == nullptr);
  g.FinishAll();
  CHECK(g.Code(push) == kAborted);
  CHECK_THAT(g.Text(push), Contains("no instance is left") && Contains("engine r rank 0"));
  CHECK(g.released.contains(g.engine));
  CHECK(g.group.View(g.now).instances.empty());
}

TEST_CASE("a commit that comes before its buckets waits for them") {
  OneToOne g;
  const CallId commit = g.CommitAhead(g.trainer, 1, 2);
  CHECK(g.Code(g.Commit(g.trainer, 1, 2)) == kPrecondition);  // this commit does not wait
  CHECK(g.Code(g.CommitAhead(g.trainer, 1, 3)) == kPrecondition);
  CHECK(g.Code(g.Push(g.trainer, 1, 2, {Bytes("c", 1)})) == kPrecondition);
  CHECK(g.Answer(commit) == nullptr);
  const CallId again = g.CommitAhead(g.trainer, 1, 2);
  g.Push(g.trainer, 1, 1, {kModel[1]});
  g.FinishAll();
  CHECK(g.Answer(commit) == nullptr);
  g.Push(g.trainer, 1, 0, {kModel[0]});
  CHECK_FALSE(g.verifying.has_value());
  g.FinishAll();
  REQUIRE(g.verifying.has_value());
  g.FinishVerify();
  CHECK(g.Code(commit) == kOk);
  CHECK(g.Code(again) == kOk);
  CHECK(g.group.version() == Version(1));
}

TEST_CASE("a commit that waits for a bucket fails with it, and the update stays open") {
  OneToOne g;
  const CallId commit = g.CommitAhead(g.trainer, 1, 2);
  g.Push(g.trainer, 1, 0, {kModel[0]});
  CHECK(g.Code(g.Push(g.trainer, 1, 0, {kModel[0]})) ==
        absl::StatusCode::kAlreadyExists);  // the Commit does not wait for this bucket
  CHECK(g.Answer(commit) == nullptr);
  CHECK(g.Code(g.Push(g.trainer, 1, 1, {kModel[0]})) == absl::StatusCode::kAlreadyExists);
  CHECK(g.Code(commit) == kPrecondition);
  CHECK_THAT(g.Text(commit), Contains("seq 1 was refused") && Contains("'a'"));
  g.Push(g.trainer, 1, 1, {kModel[1]});
  g.Settle();
  CHECK(g.Settled(g.Commit(g.trainer, 1, 2)) == kOk);
}

TEST_CASE("a commit that waits is refused where its buckets cover too little, or are too many") {
  OneToOne g;
  const CallId commit = g.CommitAhead(g.trainer, 1, 1);
  g.Push(g.trainer, 1, 0, {kModel[0]});
  CHECK(g.Code(commit) == kPrecondition);
  CHECK_THAT(g.Text(commit), Contains("'b'"));
  CHECK(g.Code(g.CommitAhead(g.trainer, 1, 100'000)) == kExhausted);
  g.Push(g.trainer, 1, 1, {kModel[1]});
  g.Settle();
  const CallId later = g.CommitAhead(g.trainer, 1, 2);
  g.Settle();
  CHECK(g.Code(later) == kOk);
}

TEST_CASE("a commit that waits for buckets goes with its last caller") {
  OneToOne g;
  const CallId first = g.CommitAhead(g.trainer, 1, 1);
  const CallId second = g.CommitAhead(g.trainer, 1, 1);
  g.Do(CallGone{first});
  CHECK(g.Code(first) == kCancelled);
  CHECK(g.Answer(second) == nullptr);
  g.Do(CallGone{second});
  g.Push(g.trainer, 1, 0, {kModel[0]});
  g.Push(g.trainer, 1, 1, {kModel[1]});  // more than the rank announced
  g.FinishAll();
  CHECK_FALSE(g.verifying.has_value());
  CHECK(g.Settled(g.Commit(g.trainer, 1, 2)) == kOk);
}

TEST_CASE("a commit that waits ends with the update: idle limit, death, abort") {
  OneToOne g;
  const CallId commit = g.CommitAhead(g.trainer, 1, 1);
  switch (GENERATE(0, 1, 2)) {
    case 0:
      // The rank does not wait for this call alone, so the idle limit counts.
      CHECK(g.group.NextDeadline() == g.now + seconds(30));
      g.Expire();
      CHECK(g.Code(commit) == kAborted);
      CHECK_THAT(g.Text(commit), Contains("no call from any trainer rank"));
      break;
    case 1:
      g.Lose(g.trainer);
      break;
    default:
      g.Abort(g.trainer, 1);
      CHECK(g.Code(commit) == kAborted);
      break;
  }
  CHECK_FALSE(g.group.update_running());
  CHECK(g.Instance("r").version == std::nullopt);
}

TEST_CASE("an engine that dies while it is read back is released when that ended") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  const MemberId dies = g.InPlaceRank("a", kModel);
  const bool survivor = GENERATE(true, false);
  if (survivor) g.InPlaceRank("b", kModel);
  g.Open(t, 1);
  g.Push(t, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(t, 1, 1);
  REQUIRE(g.verifying.has_value());
  g.Lose(dies);
  CHECK_FALSE(g.released.contains(dies));
  CHECK(g.Answer(commit) == nullptr);
  if (survivor) {
    g.FinishVerify(absl::DataLossError("of the dead one"), {0});
    CHECK_FALSE(g.Get<CommitReply>(commit).instances[0].committed);
    CHECK(g.Instance("b").version == Version(1));
  } else {
    g.FinishVerify();
    CHECK(g.Code(commit) == kAborted);
  }
  CHECK(g.released.contains(dies));
}

TEST_CASE("the loss of a trainer rank aborts, after the copies that read its memory") {
  TestGroup g(SpecOf(2));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  g.Begin(t0, 1);
  g.Open(t1, 1);
  const CallId p0 = g.Push(t0, 1, 0, {kModel[0]});
  const CallId p1 = g.Push(t1, 1, 0, {kModel[1]});
  const CallId early = g.Push(WithoutElements(t1, 1, 2));
  const CallId c0 = g.Commit(t0, 1, 1);
  g.Lose(t1);
  CHECK(g.Answer(c0) == nullptr);
  CHECK(g.released.empty());
  CHECK(g.Code(g.Push(t0, 1, 1, {kModel[1]})) == kAborted);
  const CallId begin = g.Begin(t0, 2);
  CHECK(g.Code(begin) == kPrecondition);
  CHECK_THAT(g.Text(begin), Contains("given up"));
  g.FinishAll();
  for (const CallId call : {p0, p1, early, c0}) {
    CHECK(g.Code(call) == kAborted);
    CHECK_THAT(g.Text(call), Contains("trainer rank 1 (pid 1001) was lost"));
  }
  CHECK(g.released.contains(t1));
  CHECK(g.Instance("r").state == "dirty");
  CHECK(g.aborted.size() == 2);
  const MemberId again = g.AttachTrainer(1, 2);
  CHECK(g.welcome.contains(again));
  const CallId b0 = g.Begin(t0, 1);
  g.Open(again, 1);
  CHECK(g.Code(b0) == kOk);
}

TEST_CASE("Failed aborts and is named; with evict_late it evicts") {
  TestGroup g;
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  const MemberId s = g.LoaderRank("s", kModel);
  BeginEvent e;
  e.member = t;
  e.version = Version(1);
  e.evict_late = GENERATE(false, true);
  const CallId begin = g.Begin(e);
  g.Do(EngineFailed{s, UpdateId(77), "another update"});  // no effect
  g.Do(EngineFailed{s, g.prepares[0].update, "loader broke"});
  g.ReadyAll();
  if (e.evict_late) {
    CHECK(g.Get<BeginReply>(begin).instances == 1);
  } else {
    CHECK(g.Code(begin) == kAborted);
    CHECK_THAT(g.Text(begin), Contains("engine s rank 0") && Contains("loader broke"));
  }
  CHECK(g.Instance("s").state == "clean");
}

TEST_CASE("a failed transfer aborts whatever evict_late says, and names the destination") {
  OneToLoader g(TestGroup::DefaultSpec(), {}, true);
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  g.Finish(0, absl::DataLossError("tensor 'a' differs"));
  CHECK(g.Code(push) == kAborted);
  CHECK_THAT(g.Text(push), Contains("verification of part 0") && Contains("'a' differs"));
  CHECK(g.Instance("s").state == "clean");  // nothing was handed over
  CHECK(g.FreeSlots() == 4);
  CHECK(g.Code(g.Push(g.trainer, 1, 1, kModel)) == kAborted);
}

TEST_CASE("a failed readback aborts and names the rank") {
  OneToOne g;
  g.Push(g.trainer, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(g.trainer, 1, 1);
  g.FinishVerify(absl::DataLossError("tensor 'b' differs"), {0});
  CHECK(g.Code(commit) == kAborted);
  CHECK_THAT(g.Text(commit), Contains("engine r rank 0") && Contains("'b' differs"));
  CHECK(g.Instance("r").state == "dirty");
  CHECK(g.group.version() == std::nullopt);
}

TEST_CASE("a program that wrote too little does not commit") {
  OneToOne g;
  g.Push(g.trainer, 1, 0, kModel);
  const MovePart t = g.running[0].transfer;
  g.running.clear();
  g.Do(TransferDone{t.update, t.part, absl::OkStatus(), {1499}, -1, {}});
  const CallId commit = g.Commit(g.trainer, 1, 1);
  CHECK(g.Code(commit) == kAborted);
  CHECK_THAT(g.Text(commit), Contains("1499") && Contains("1500") && Contains("engine r rank 0"));
}

// ---- giving up ----

TEST_CASE(
    "Abort by a trainer rank ends the update, and before the first byte leaves it untouched") {
  OneToOne g;
  CHECK(g.Code(g.Abort(g.trainer, 2)) == kPrecondition);
  const CallId abort = g.Abort(g.trainer, 1, "no more");
  CHECK(g.Code(abort) == kOk);
  CHECK(g.Instance("r").state == "clean");
  CHECK(g.aborted.size() == 2);
  CHECK_THAT(g.group.Past(Version(1)).reason, Contains("trainer rank 0") && Contains("no more"));
  CHECK(g.Code(g.Abort(g.trainer, 1)) == kPrecondition);
}

TEST_CASE("an abort while a copy runs is answered when that ended, and leaves the instance dirty") {
  OneToOne g;
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  const CallId abort = g.Abort(g.trainer, 1);
  CHECK(g.Answer(abort) == nullptr);
  CHECK(g.aborted.empty());
  CHECK(g.group.NextDeadline() == g.now + seconds(1));
  g.Expire();
  CHECK_THAT(g.log.back().text, Contains("1 transfers"));
  CHECK(g.group.NextDeadline() == std::nullopt);
  g.FinishAll();
  CHECK(g.Code(abort) == kOk);
  CHECK(g.Code(push) == kAborted);
  CHECK(g.aborted.size() == 2);
  CHECK(g.Instance("r").state == "dirty");
}

TEST_CASE("an operator's abort ends the update; without one it is refused") {
  OneToOne g;
  const CallId push = g.Push(g.trainer, 1, 1, {kModel[0]});
  const CallId abort = g.NewCall();
  g.Do(OperatorAbort{abort, "maintenance"});
  CHECK(g.Code(abort) == kOk);
  CHECK(g.Code(push) == kAborted);
  CHECK_THAT(g.Text(push), Contains("operator") && Contains("maintenance"));
  const CallId again = g.NewCall();
  g.Do(OperatorAbort{again, ""});
  CHECK(g.Code(again) == kPrecondition);
}

TEST_CASE("an update whose trainers fall silent aborts after the idle limit") {
  OneToOne g;
  const CallId push = g.Push(g.trainer, 1, 0, kModel);
  g.Advance(seconds(40));
  CHECK(g.group.update_running());  // a call is outstanding
  g.FinishAll();
  CHECK(g.Code(push) == kOk);
  CHECK(g.group.NextDeadline() == g.now + seconds(30));
  g.Expire();
  CHECK_FALSE(g.group.update_running());
  CHECK_THAT(g.group.Past(Version(1)).reason,
             Contains("no call from any trainer rank") && Contains("trainer rank 0"));
}

TEST_CASE("a Begin whose caller went away leaves the update to the idle limit") {
  TestGroup g(SpecOf(1, 2));
  const MemberId t = g.AttachTrainer();
  g.InPlaceRank("r", kModel);
  const CallId begin = g.Begin(t, 1);
  g.Do(CallGone{begin});
  CHECK(g.group.update_running());
  g.Expire();
  CHECK_FALSE(g.group.update_running());
  CHECK(g.now == TimePoint(std::chrono::hours(1)) + seconds(30));
}

TEST_CASE("at the update's deadline every waiting call gets DEADLINE_EXCEEDED with the culprit") {
  TestGroup g(SpecOf(2));
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("r", kModel);
  BeginEvent e;
  e.member = t0;
  e.version = Version(1);
  e.duration = seconds(10);
  CHECK(g.Code(g.Lease(t0, 1)) == kPrecondition);
  g.Begin(e);
  e.member = t1;
  const CallId b1 = g.Begin(e);
  CHECK(g.prepares[0].remaining == seconds(10));
  g.ReadyAll();
  CHECK(g.Get<BeginReply>(b1).remaining == seconds(10));
  g.Push(t0, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(t0, 1, 1);
  const CallId early = g.Push(WithoutElements(t1, 1, 3));
  g.Expire();
  CHECK(g.now == TimePoint(std::chrono::hours(1)) + seconds(10));
  CHECK(g.Code(commit) == kDeadline);
  CHECK(g.Code(early) == kDeadline);
  CHECK_THAT(g.Text(commit), Contains("trainer rank 1 (pid 1001) to push seq 0"));
  CHECK(g.Instance("r").state == "dirty");
}

// ---- drain, replace, members that go ----

TEST_CASE("a draining group ends its update and opens no other") {
  OneToOne g;
  g.Do(DrainEvent{});
  g.Do(DrainEvent{});
  CHECK(g.draining.size() == 2);
  g.PushAndCommit(g.trainer, 1, kModel);
  CHECK(g.Code(g.Begin(g.trainer, 2)) == kUnavailable);
  g.LoaderRank("late");
  CHECK(g.draining.size() == 3);
}

TEST_CASE("an engine that reports an absurd version holds up no Begin") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId engine =
      AttachHolding(&g, "a", 0, 1, INT64_MAX, GENERATE(uint64_t{0}, uint64_t{0x55}));
  CHECK(g.Instance("a").version == Version(INT64_MAX));
  // Any version is greater than none: this is the first of an incarnation.
  g.Install(trainer, 1, kModel);
  CHECK(g.Instance("a").version == Version(1));
  CHECK(g.Instance("a").origin == 7);
  CHECK(g.group.version() == Version(1));
  g.Lose(engine);
  SECTION("one that lies about the group's own incarnation is refused") {
    const MemberId liar = AttachHolding(&g, "a", 0, 1, 2, 7);
    REQUIRE(g.refused.contains(liar));
    CHECK(g.refused.at(liar).code() == kInvalid);
    CHECK_THAT(std::string(g.refused.at(liar).message()),
               Contains("held_version: 2 of held_origin 7") &&
                   Contains("no version above 1 was committed"));
    CHECK(g.group.View(g.now).instances.empty());
  }
  SECTION("one that comes back with what the group committed is as it was") {
    AttachHolding(&g, "a", 0, 1, 1, 7);
    CHECK(g.Instance("a").state == "clean");
    CHECK(g.Instance("a").version == Version(1));
    const CallId begin = g.Begin(trainer, 1);
    CHECK(g.Code(begin) == kPrecondition);
    CHECK_THAT(g.Text(begin),
               Contains("version: 1 is not greater than the group's 1") &&
                   Contains("instance a holds it") &&
                   Contains("begin a greater version, such as a trainer's next_version") &&
                   Contains("CreateGroup(replace)"));
  }
  SECTION("without an instance that holds it, that is said") {
    CHECK_THAT(g.Text(g.Begin(trainer, 0)), Contains("no instance holds it any more"));
  }
}

TEST_CASE("an instance without weights is not ready beside one that holds an earlier version") {
  TestGroup g(SpecOf(1, 1));
  const auto standing = [&g](const std::string& name) {
    for (const InstanceStanding& each : g.group.Standings()) {
      if (each.instance == name) return each.standing;
    }
    return Standing::kGone;
  };
  g.InPlaceRank("first", kModel);
  g.LoaderRank("second", kModel);
  // All engines of a group that never had a version start with the same weights.
  CHECK(standing("first") == Standing::kClean);
  g.group.TakeStandings();
  const uint64_t origin = GENERATE(uint64_t{0}, uint64_t{0x55});
  const MemberId holder = AttachHolding(&g, "holder", 0, 1, 4, origin);
  CHECK(standing("holder") == Standing::kClean);
  CHECK(standing("first") == Standing::kEmpty);
  CHECK(standing("second") == Standing::kEmpty);
  CHECK(g.group.TakeStandings().size() == 3);  // all daemons are told
  // The standing stays the same while the holder is written to, and after the holder has left.
  g.Lose(holder);
  CHECK(standing("first") == Standing::kEmpty);
  g.InPlaceRank("late", kModel);
  CHECK(standing("late") == Standing::kEmpty);
  const MemberId trainer = g.AttachTrainer();
  g.Install(trainer, 1, kModel);
  for (const char* const name : {"first", "second", "late"}) {
    CAPTURE(name);
    CHECK(standing(name) == Standing::kClean);
  }
}

// Attaches an engine that claims version 4 of another incarnation, or of the group's, with
// `digest`. Its daemon then finds `content` in its memory.
MemberId Claiming(TestGroup* g, const std::string& instance, uint64_t digest, uint64_t content,
                  uint64_t origin = 0x55, int64_t held = 4) {
  EngineIdentity who{instance, 0, 1, DeliveryMode::kInPlace, 0, Version(held), {}};
  who.held_origin = origin;
  who.held_digest = digest;
  who.catch_up = true;
  const MemberId id = g->AttachEngine(std::move(who));
  g->engines[id].layout = LayoutOf(kModel);
  g->Do(LayoutRegistered{id, LayoutOf(kModel), CallId(), std::nullopt, content});
  return id;
}

std::map<std::string, Standing> StandingsOf(TestGroup* g) {
  g->group.TakeStandings();
  std::map<std::string, Standing> all;
  for (const InstanceStanding& each : g->group.Standings()) all[each.instance] = each.standing;
  return all;
}

TEST_CASE("an engine was ready whose memory does not hold the version that it claims") {
  TestGroup g(SpecOf(1, 1));
  Claiming(&g, "unknown", 0, 0);  // an older daemon, or a version that was not read back
  Claiming(&g, "same", 7, 7);     // its daemon found what the engine was given
  Claiming(&g, "changed", 7, 8);  // its memory was written to since
  CHECK(StandingsOf(&g).at("unknown") == Standing::kClean);
  CHECK(StandingsOf(&g).at("same") == Standing::kClean);
  CHECK(StandingsOf(&g).at("changed") == Standing::kEmpty);
  CHECK(g.Instance("changed").version == std::nullopt);
  const MemberId trainer = g.AttachTrainer();
  g.Install(trainer, 1, kModel);
  CHECK(StandingsOf(&g).at("changed") == Standing::kClean);
}

TEST_CASE("of engines with equal layouts and different bytes of one version, most are ready") {
  TestGroup g(SpecOf(1, 1));
  Claiming(&g, "b", 9, 9);
  CHECK(StandingsOf(&g).at("b") == Standing::kClean);
  Claiming(&g, "a", 7, 7);
  Claiming(&g, "c", 7, 7);
  Claiming(&g, "told", 0, 0);
  CHECK(StandingsOf(&g).at("a") == Standing::kClean);
  CHECK(StandingsOf(&g).at("b") == Standing::kStray);
  CHECK(StandingsOf(&g).at("c") == Standing::kClean);
  CHECK(StandingsOf(&g).at("told") == Standing::kClean);
}

TEST_CASE("an engine that comes back with other bytes than were read back is not ready") {
  TestGroup g(SpecOf(1, 1));
  const MemberId trainer = g.AttachTrainer();
  const MemberId a = g.MayCatchUp("a", kModel);
  g.Open(trainer, 4);
  g.Push(trainer, 4, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(trainer, 4, 1);
  g.FinishVerify(absl::OkStatus(), {}, {42});
  REQUIRE(g.Code(commit) == absl::StatusCode::kOk);
  const auto told = std::find_if(g.committed.begin(), g.committed.end(),
                                 [a](const SendCommitted& c) { return c.member == a; });
  REQUIRE(told != g.committed.end());
  CHECK(told->digest == 42);
  g.Lose(a);
  SECTION("the bytes that it was given") {
    Claiming(&g, "a", 42, 42, g.group.incarnation());
    CHECK(StandingsOf(&g).at("a") == Standing::kClean);
    CHECK(g.Instance("a").version == Version(4));
  }
  SECTION("other bytes, with the digest that it was given") {
    Claiming(&g, "a", 42, 43, g.group.incarnation());
    CHECK(g.Instance("a").version == std::nullopt);
  }
  SECTION("other bytes, with their digest") {
    Claiming(&g, "a", 43, 43, g.group.incarnation());
    CHECK(g.Instance("a").version == std::nullopt);
  }
}

// Attaches an engine that brings a version of another incarnation, which has the content of
// `content`.
MemberId AttachRolledBack(TestGroup* g, const std::string& instance, int64_t held, int64_t content,
                          uint64_t origin = 0x55) {
  EngineIdentity who{instance, 0, 1, DeliveryMode::kLoader, 0, Version(held), kModel};
  who.held_origin = origin;
  who.held_content = Version(content);
  return g->AttachEngine(std::move(who));
}

TEST_CASE("a group that was made again served what had been rolled back, if most held it") {
  GroupSpec spec = SpecOf(1, 1);
  spec.max_lag = GENERATE(0, 5);
  TestGroup g(spec);
  const bool first = GENERATE(false, true);
  if (first) AttachRolledBack(&g, "flipped", 4, 2);
  for (const char* const name : {"a", "b", "c"}) AttachHolding(&g, name, 0, 1, 3, 0x55);
  if (!first) AttachRolledBack(&g, "flipped", 4, 2);
  AttachHolding(&g, "before", 0, 1, 2, 0x55);
  const auto standings = StandingsOf(&g);
  CHECK(standings.at("flipped") == Standing::kClean);
  for (const char* const name : {"a", "b", "c"}) CHECK(standings.at(name) == Standing::kStray);
  CHECK(standings.at("before") == (spec.max_lag == 0 ? Standing::kStray : Standing::kClean));
  // The next version makes all of them ready.
  g.Install(g.AttachTrainer(), 1, kModel);
  for (const auto& [name, standing] : StandingsOf(&g)) CHECK(standing == Standing::kClean);
}

TEST_CASE("a rollback that was left behind, or is of another incarnation, undoes nothing else") {
  GroupSpec spec = SpecOf(1, 1);
  spec.max_lag = 5;
  TestGroup g(spec);
  for (const char* const name : {"a", "b"}) AttachHolding(&g, name, 0, 1, 7, 0x55);
  AttachRolledBack(&g, "behind", 4, 2);
  AttachRolledBack(&g, "elsewhere", 9, 2, 0x66);
  AttachRolledBack(&g, "nameless", 9, 2, 0);
  EngineIdentity dirty{"dirty", 0, 1, DeliveryMode::kLoader, 0, std::nullopt, kModel};
  dirty.dirty = true;
  g.AttachEngine(std::move(dirty));
  AttachHolding(&g, "undone", 0, 1, 3, 0x55);
  AttachHolding(&g, "before", 0, 1, 2, 0x55);
  const auto standings = StandingsOf(&g);
  CHECK(standings.at("a") == Standing::kClean);
  CHECK(standings.at("b") == Standing::kClean);
  CHECK(standings.at("behind") == Standing::kClean);  // as near as max_lag asks
  CHECK(standings.at("before") == Standing::kClean);
  CHECK(standings.at("undone") == Standing::kStray);
  CHECK(standings.at("elsewhere") == Standing::kStray);
  CHECK(standings.at("nameless") == Standing::kStray);
  CHECK(standings.at("dirty") == Standing::kDirty);
}

TEST_CASE("of rollbacks to the same content the last one counts, and none of them is undone") {
  GroupSpec spec = SpecOf(1, 1);
  spec.max_lag = 5;
  TestGroup g(spec);
  AttachRolledBack(&g, "last", 5, 1);
  for (const char* const name : {"a", "b"}) AttachRolledBack(&g, name, 3, 1);
  for (const char* const name : {"c", "d", "e"}) AttachHolding(&g, name, 0, 1, 4, 0x55);
  const auto standings = StandingsOf(&g);
  CHECK(standings.at("last") == Standing::kClean);
  for (const char* const name : {"a", "b"}) CHECK(standings.at(name) == Standing::kClean);
  for (const char* const name : {"c", "d", "e"}) CHECK(standings.at(name) == Standing::kStray);
}

TEST_CASE("of engines that bring versions of different incarnations one lineage is ready") {
  TestGroup g(SpecOf(1, 1));
  const auto standings = [&g] {
    g.group.TakeStandings();
    std::map<std::string, Standing> all;
    for (const InstanceStanding& each : g.group.Standings()) all[each.instance] = each.standing;
    return all;
  };
  AttachHolding(&g, "stale", 0, 1, 9, 0x44);
  CHECK(standings().at("stale") == Standing::kClean);
  const MemberId first = AttachHolding(&g, "a", 0, 1, 4, 0x55);
  // Of equal numbers the first stays: what is served does not change to and fro.
  CHECK(standings().at("stale") == Standing::kClean);
  CHECK(standings().at("a") == Standing::kStray);
  AttachHolding(&g, "b", 0, 1, 4, 0x55);
  CHECK(standings().at("stale") == Standing::kStray);
  CHECK(standings().at("a") == Standing::kClean);
  CHECK(standings().at("b") == Standing::kClean);
  // A version above that of the others, and one behind them, is another one as well (max_lag 0).
  AttachHolding(&g, "liar", 0, 1, 999, 0x55);
  AttachHolding(&g, "late", 0, 1, 3, 0x55);
  CHECK(standings().at("liar") == Standing::kStray);
  CHECK(standings().at("late") == Standing::kStray);
  CHECK(standings().at("a") == Standing::kClean);
  g.Lose(first);
  CHECK(standings().at("b") == Standing::kClean);
  // The next version makes all of them ready.
  const MemberId trainer = g.AttachTrainer();
  g.Install(trainer, 1, kModel);
  for (const auto& [name, standing] : standings()) {
    CAPTURE(name);
    CHECK(standing == Standing::kClean);
  }
}

TEST_CASE("a rank that says it holds a version which was never committed to it is not believed") {
  OneToOne g(5);
  g.PushAndCommit(g.trainer, 5, kModel);
  AttachHolding(&g, "other", 0, 1, 5, 7);
  CHECK(g.Instance("other").state == "clean");
  CHECK(g.Instance("other").version == std::nullopt);
}

TEST_CASE("a version that a replaced incarnation committed is not believed") {
  OneToOne g(5);
  g.PushAndCommit(g.trainer, 5, kModel);
  g.Do(ReplaceGroup{g.NewCall(), 8});
  g.dirty.insert("r");
  AttachHolding(&g, "away", 0, 1, 5, 7);
  CHECK(g.Instance("away").version == std::nullopt);
  g.group.TakeStandings();
  for (const InstanceStanding& each : g.group.Standings()) {
    if (each.instance == "away") CHECK(each.standing == Standing::kEmpty);
  }
}

TEST_CASE("a trainer that another owner's engine puts out leaves when its update is over") {
  TestGroup g(SpecOf(1, 1));
  g.puts_out = true;
  const auto attach = [&g](const std::string& identity) {
    const MemberId id = g.NewMember();
    TrainerIdentity who;
    who.identity = identity;
    g.Do(TrainerAttached{id, std::move(who)});
    return id;
  };
  const MemberId thief = attach("uid:666");
  CHECK(g.group.owner() == "uid:666");
  CHECK(g.refused.contains(attach("uid:7")));
  g.InPlaceRank("new", kModel);
  const CallId begin = g.Begin(thief, 4);
  EngineIdentity who{"old", 0, 1, DeliveryMode::kLoader, 0, Version(3), kModel};
  who.held_origin = 0x55;
  who.held_owner = "uid:7";
  g.AttachEngine(std::move(who));
  CHECK(g.group.owner() == "uid:7");
  CHECK(g.Code(begin) == absl::StatusCode::kAborted);
  CHECK_FALSE(g.group.update_running());
  REQUIRE(g.refused.contains(thief));
  CHECK(g.refused.at(thief).code() == absl::StatusCode::kPermissionDenied);
  CHECK_FALSE(g.group.has_trainers());
  const MemberId owner = attach("uid:7");
  CHECK_FALSE(g.refused.contains(owner));
  g.Install(owner, 4, kModel);
  CHECK(g.refused.contains(attach("uid:666")));
}

TEST_CASE("replacing a group marks every instance dirty and starts versions anew") {
  OneToOne g(5);
  const CallId refused = g.NewCall();
  g.Do(ReplaceGroup{refused, 8});
  CHECK(g.Code(refused) == kPrecondition);
  CHECK(g.group.incarnation() == 7);
  g.PushAndCommit(g.trainer, 5, kModel);
  const CallId call = g.NewCall();
  g.Do(ReplaceGroup{call, 8});
  g.dirty.insert("r");
  CHECK(g.Code(call) == kOk);
  CHECK(g.group.incarnation() == 8);
  CHECK(g.group.version() == std::nullopt);
  CHECK(g.Instance("r").state == "dirty");
  CHECK(g.Instance("r").version == std::nullopt);
  AttachHolding(&g, "old", 0, 1, 5, 7);
  CHECK(g.group.version() == std::nullopt);  // the version is of an earlier incarnation
  CHECK(g.Instance("old").origin == 0);      // which was replaced, so it is not believed
  g.Install(g.trainer, 1, kModel);
  CHECK(g.Instance("r").version == Version(1));
}

TEST_CASE("the loss of an unknown or refused member is ignored") {
  TestGroup g;
  g.AttachTrainer();
  const MemberId refused = g.AttachTrainer();
  g.lost.insert(refused);
  g.Do(MemberLost{refused, "x"});
  g.Do(MemberLost{MemberId(999), "x"});
  CHECK(g.released.empty());
  CHECK(g.group.has_members());
}

TEST_CASE("outcomes of the last updates are remembered, within a limit") {
  OneToOne g;
  g.Abort(g.trainer, 1);
  for (int64_t version = 2; version < 2 + kRememberedUpdates; ++version) {
    g.Begin(g.trainer, version);
    CHECK(g.group.Past(Version(version)).outcome == Outcome::kRunning);
    g.Abort(g.trainer, version);
  }
  CHECK(g.group.Past(Version(1)).outcome == Outcome::kUnknown);
  CHECK(g.group.Past(Version(2)).outcome == Outcome::kAborted);
  CHECK(g.group.View(g.now).aborted == 1 + kRememberedUpdates);
}

TEST_CASE("status shows the running update's progress") {
  OneToOne g;
  g.Push(g.trainer, 1, 0, {kModel[0]});
  g.FinishAll();
  g.now += seconds(2);
  const GroupView view = g.group.View(g.now);
  CHECK(view.state == "updating");
  REQUIRE(view.update.has_value());
  CHECK(view.update->state == "data");
  CHECK(view.update->bytes == 1000);
  CHECK(view.update->buckets == 1);
  CHECK(view.update->tensors == 1);
  CHECK(view.update->elapsed == seconds(2));
  CHECK(view.update->remaining == seconds(118));
  CHECK(view.members.size() == 2);
  CHECK(view.members[1].pieces == 2);
  CHECK(view.members[1].layout_digest == LayoutOf(kModel)->Digest());
}

TEST_CASE("the first note that a rank gives is shown with the update, also when it has ended") {
  TestGroup g(SpecOf(2));
  const MemberId trainers[] = {g.AttachTrainer(0, 2), g.AttachTrainer(1, 2)};
  g.InPlaceRank("r", kModel);
  for (const auto& [rank, note] : {std::pair(0, ""), std::pair(1, "step 1200")}) {
    BeginEvent e;
    e.member = trainers[rank];
    e.version = Version(1);
    e.note = note;
    g.Begin(e);
  }
  REQUIRE(g.group.View(g.now).update.has_value());
  CHECK(g.group.View(g.now).update->note == "step 1200");
  g.Abort(trainers[0], 1);
  REQUIRE(g.group.View(g.now).update.has_value());
  CHECK(g.group.View(g.now).update->note == "step 1200");
}

TEST_CASE("answers to an aborted update don't count for the next one to the same version") {
  OneToLoader g;
  const UpdateId first = g.prepares.back().update;
  g.Push(g.trainer, 1, 0, {kModel[0]});
  g.FinishAll();
  g.Abort(g.trainer, 1);
  // One slot is in use until its part is acknowledged, or the engine is ready for the next update.
  CHECK(g.FreeSlots() == 3);
  const CallId begin = g.Begin(g.trainer, 1);
  const MemberId engine = g.prepares.back().member;
  g.Do(ReadyEvent{engine, first});
  CHECK(g.Answer(begin) == nullptr);
  g.Do(EngineFailed{engine, first, "late"});
  CHECK(g.Answer(begin) == nullptr);
  g.ReadyAll();
  CHECK(g.Code(begin) == kOk);
  CHECK(g.FreeSlots() == 4);
  g.Push(g.trainer, 1, 0, kModel);
  g.FinishAll();
  const CallId commit = g.Commit(g.trainer, 1, 1);
  g.Do(AckEvent{engine, first, PartSeq(0)});
  CHECK(g.Answer(commit) == nullptr);
  g.AckOne(0);
  CHECK(g.Code(commit) == kOk);
  CHECK(g.FreeSlots() == 4);
}

TEST_CASE("Failed that comes after the commit marks the instance dirty until the next one") {
  OneToLoader g;
  const UpdateId first = g.prepares.back().update;
  const MemberId engine = g.prepares.back().member;
  const std::string name = g.engines.at(engine).instance;
  g.PushAndCommit(g.trainer, 1, kModel);
  REQUIRE(g.Instance(name).state == "clean");
  g.Do(EngineFailed{engine, UpdateId(77), "another update"});  // no effect
  CHECK(g.Instance(name).state == "clean");
  // The failure comes before the next update, or while that update asks who is ready.
  const bool asked = GENERATE(false, true);
  CallId begin;
  if (asked) begin = g.Begin(g.trainer, 2);
  g.Fail(engine, first, "the loader failed");
  CHECK(g.Instance(name).state == (asked ? "dirty_preparing" : "dirty"));
  CHECK(g.Instance(name).version == std::nullopt);
  CHECK_THAT(g.Instance(name).reason,
             Contains("failed after its update had committed") && Contains("the loader failed"));
  CHECK(g.group.version() == Version(1));
  if (!asked) begin = g.Begin(g.trainer, 2);
  g.ReadyAll();
  g.Abort(g.trainer, 2);           // nothing was written, so the instance stays dirty
  REQUIRE(g.aborted.size() == 2);  // each checked against `dirty`
  CHECK(g.Instance(name).state == "dirty");
  g.Install(g.trainer, 3, kModel);
  CHECK(g.Instance(name).state == "clean");
  g.Do(EngineFailed{engine, first, "late"});  // of an earlier update: no effect
  CHECK(g.Instance(name).state == "clean");
}

TEST_CASE("a bucket that would need absurdly many slots is refused by name") {
  TestGroup g;
  const std::vector<TensorSpec> huge = {
      Bytes("huge", (kMaxPartsPerBucket + 1) * g.group.spec().slot_bytes)};
  const MemberId t = g.AttachTrainer();
  g.LoaderRank("s", huge);
  g.Open(t, 1);
  const CallId push = g.Push(t, 1, 0, huge);
  CHECK(g.Code(push) == kExhausted);
  CHECK_THAT(g.Text(push), Contains("huge"));
}

TEST_CASE("an instance that nothing touched stayed paused while another's copy ran on") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId busy = g.InPlaceRank("busy", kModel);
  const MemberId quiet =
      g.LoaderRank("quiet", kModel);  // the rank is handed nothing before the copy has ended
  g.Open(trainer, 1);
  g.Push(trainer, 1, 0, {kModel[0]});
  const CallId abort = g.Abort(trainer, 1);
  CHECK(g.aborted.empty());
  g.Expire();
  CHECK(g.overdue.size() == 1);
  REQUIRE(g.aborted.size() == 1);
  CHECK(g.aborted[0].member == quiet);
  CHECK_FALSE(g.aborted[0].dirty);
  CHECK(g.Answer(abort) == nullptr);
  g.FinishAll();
  REQUIRE(g.aborted.size() == 3);  // the trainer, too
  CHECK(g.aborted[1].member == busy);
  CHECK(g.aborted[1].dirty);
  CHECK(g.Code(abort) == kOk);
  CHECK(g.Instance("quiet").state == "clean");
  CHECK(g.Instance("busy").state == "dirty");
}

}  // namespace
}  // namespace refitd
