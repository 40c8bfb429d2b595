// Compiled refits as the group decides them: the call, the life of a program, replicas, and mixing
// with pushes.
#include <catch2/catch.hpp>

#include "daemon/group/group_test_util.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

const std::vector<TensorSpec> kModel = {Bytes("a", 8), Bytes("b", 16)};

// A trainer rank with the whole model and one in-place engine.
struct Pair {
  explicit Pair(GroupSpec spec = TestGroup::DefaultSpec(), GroupLimits limits = {})
      : g(std::move(spec), limits), trainer(g.AttachTrainer()), engine(g.InPlaceRank("x", kModel)) {
    g.Shards(trainer, kModel);
  }
  // Refits up to the point where the program runs.
  CallId Run(int64_t version) {
    const CallId call = g.Refit(trainer, version);
    if (g.compiling.has_value()) g.FinishCompile();
    g.ReadyAll();
    return call;
  }
  TestGroup g;
  MemberId trainer;
  MemberId engine;
};

TEST_CASE("Refit is Begin, the program and Commit in one call") {
  Pair p;
  const CallId call = p.g.Refit(p.trainer, 1);
  // No engine hears of an update whose program is not ready.
  REQUIRE(p.g.compiling.has_value());
  CHECK(p.g.prepared.empty());
  CHECK(p.g.compiling->sources.size() == 1);
  CHECK(p.g.compiling->destinations.size() == 1);
  p.g.FinishCompile();
  REQUIRE(p.g.prepared.size() == 1);
  CHECK(p.g.prepares[0].tensor_count == 2);
  CHECK_FALSE(p.g.refitting.has_value());
  p.g.ReadyAll();
  REQUIRE(p.g.refitting.has_value());
  CHECK(p.g.refitting->slots.empty());
  CHECK(p.g.Instance("x").state == "dirty_ready");
  p.g.FinishRefit();
  p.g.FinishVerify();
  const auto reply = p.g.Get<CommitReply>(call);
  CHECK(reply.version == Version(1));
  CHECK(reply.bytes == 24);
  CHECK(p.g.Instance("x").version == Version(1));
  CHECK(p.g.group.View(p.g.now).update->tensors == 2);
}

TEST_CASE("a program that runs shows how far it is, by bytes or by rounds of the wire") {
  Pair p;
  const auto moved = [&p](const RunProgress& run) {
    return p.g.group.ViewLatest(p.g.now, run)->bytes;
  };
  p.g.Refit(p.trainer, 1);
  p.g.FinishCompile();
  CHECK(moved({.bytes = 12}) == 0);  // it does not run yet
  p.g.ReadyAll();
  REQUIRE(p.g.refitting.has_value());
  CHECK(moved({}) == 0);
  CHECK(moved({.bytes = 12}) == 12);
  CHECK(moved({.rounds = 0.75}) == 18);
  CHECK(moved({.bytes = 12, .rounds = 0.25}) == 12);
  CHECK(moved({.bytes = 1'000}) == 24);
  p.g.FinishRefit();
  CHECK(moved({.bytes = 12}) == 24);
}

TEST_CASE("the program is compiled once and kept while layouts stay the same") {
  Pair p;
  for (int64_t version = 1; version <= 5; ++version) {
    const CallId call = p.Run(version);
    p.g.FinishRefit();
    p.g.FinishVerify();
    CHECK(p.g.Code(call) == StatusCode::kOk);
  }
  CHECK(p.g.compiled == 1);
  SECTION("the same structure elsewhere is the same program") {
    p.g.Shards(p.trainer, kModel);
    p.g.Register(p.engine, LayoutOf(kModel));
    p.Run(6);
    CHECK(p.g.compiled == 1);
  }
  SECTION("another structure of the trainer is another program") {
    p.g.Shards(p.trainer, {Bytes("a", 8), Bytes("b", 16), Bytes("c", 1)});
    p.Run(6);
    CHECK(p.g.compiled == 2);
  }
  SECTION("another instance is another program") {
    p.g.InPlaceRank("y", kModel);
    p.Run(6);
    CHECK(p.g.compiled == 2);
  }
}

TEST_CASE("what can't be compiled fails the call, and no engine hears of it") {
  Pair p;
  const CallId call = p.g.Refit(p.trainer, 1);
  p.g.FinishCompile(absl::FailedPreconditionError("tensor c: no source holds it"));
  CHECK(p.g.Code(call) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(call), Contains("tensor c: no source holds it"));
  CHECK(p.g.prepared.empty());
  CHECK(p.g.Instance("x").state == "clean");
  // The same layouts give the same answer at once.
  const CallId again = p.g.Refit(p.trainer, 1);
  CHECK_FALSE(p.g.compiling.has_value());
  CHECK(p.g.Code(again) == StatusCode::kFailedPrecondition);
}

TEST_CASE("a layout that changes while the program is compiled has it compiled again") {
  Pair p;
  p.g.Refit(p.trainer, 1);
  p.g.InPlaceRank("y", kModel);
  REQUIRE(p.g.compiling.has_value());
  CHECK(p.g.compiling->destinations.size() == 1);
  p.g.FinishCompile();
  REQUIRE(p.g.compiling.has_value());
  CHECK(p.g.compiling->destinations.size() == 2);
  CHECK(p.g.prepared.empty());
  p.g.FinishCompile();
  CHECK(p.g.prepared.size() == 2);
}

TEST_CASE("a program that comes after its update's end is kept for the next") {
  Pair p;
  const CallId call = p.g.Refit(p.trainer, 1);
  p.g.Advance(std::chrono::seconds(121));
  CHECK(p.g.Code(call) == StatusCode::kDeadlineExceeded);
  CHECK_THAT(p.g.Text(call), Contains("waited for the program to be compiled"));
  p.g.FinishCompile();
  p.g.Refit(p.trainer, 1);
  CHECK_FALSE(p.g.compiling.has_value());
  CHECK(p.g.prepared.size() == 1);
}

TEST_CASE("a program that comes while another runs does not touch the running update") {
  Pair p;
  p.Run(1);
  p.g.FinishRefit();
  p.g.FinishVerify();
  // Another instance needs another program, and leaves before that program is ready.
  const CallId call = p.g.Refit(p.trainer, 2);
  p.g.ReadyAll();
  p.g.FinishRefit(absl::InternalError("the copy failed"));
  CHECK(p.g.Code(call) == StatusCode::kAborted);
  const MemberId other = p.g.InPlaceRank("y", kModel);
  const CallId waits = p.g.Refit(p.trainer, 2);
  REQUIRE(p.g.compiling.has_value());
  p.g.Lose(other);
  CHECK(p.g.prepared.size() == 1);  // the previous program can run
  p.g.ReadyAll();
  p.g.FinishCompile(absl::FailedPreconditionError("tensor z: no source holds it"));
  p.g.FinishRefit();
  p.g.FinishVerify();
  CHECK(p.g.Get<CommitReply>(waits).bytes == 24);
}

TEST_CASE("a plan whose update is over is cancelled, and the next update asks for its own") {
  Pair p;
  const CallId call = p.g.Refit(p.trainer, 1);
  REQUIRE(p.g.compiling.has_value());
  const auto cancelled = p.g.compiling->options.cancelled;
  CHECK_FALSE(cancelled->load());
  p.g.Do(OperatorAbort{p.g.NewCall(), "no longer wanted"});
  CHECK(p.g.Code(call) == StatusCode::kAborted);
  CHECK(cancelled->load());
  const CallId next = p.g.Refit(p.trainer, 2);
  p.g.FinishCompile(absl::CancelledError("the plan was cancelled"));
  REQUIRE(p.g.compiling.has_value());  // `next` does not get the error of the call before
  CHECK_FALSE(p.g.compiling->options.cancelled->load());
  p.g.FinishCompile();
  p.g.ReadyAll();
  p.g.FinishRefit();
  p.g.FinishVerify();
  CHECK(p.g.Code(next) == StatusCode::kOk);
}

TEST_CASE("several trainer ranks, one update: all must call") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.trainer_ranks = 2;
  TestGroup g(spec);
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("x", kModel);
  g.Shards(t0, kModel, 0, 2);
  g.Shards(t1, kModel, 1, 2);
  const CallId first = g.Refit(t0, 1);
  CHECK_FALSE(g.compiling.has_value());
  const CallId second = g.Refit(t1, 1);
  REQUIRE(g.compiling.has_value());
  CHECK(g.compiling->sources.size() == 2);
  g.FinishCompile();
  SECTION("both are answered") {
    g.ReadyAll();
    g.FinishRefit();
    g.FinishVerify();
    CHECK(g.Code(first) == StatusCode::kOk);
    CHECK(g.Code(second) == StatusCode::kOk);
  }
  SECTION("the death of one aborts, when its memory is not read any more") {
    g.ReadyAll();
    g.Lose(t1);
    CHECK_FALSE(g.released.contains(t1));
    CHECK(g.Answer(first) == nullptr);
    g.FinishRefit(absl::CancelledError("given up"));
    CHECK(g.released.contains(t1));
    CHECK(g.Code(first) == StatusCode::kAborted);
    CHECK(g.Instance("x").state == "dirty");
  }
}

TEST_CASE("Refit without a layout, with buckets never pushed, or of an old version is refused") {
  Pair p;
  CHECK(p.g.Code(p.g.Refit(p.trainer, 1, 2)) == StatusCode::kFailedPrecondition);
  p.g.Lose(p.trainer);
  p.trainer = p.g.AttachTrainer();
  const CallId none = p.g.Refit(p.trainer, 1);
  CHECK(p.g.Code(none) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(none), Contains("has no layout"));
  p.g.Shards(p.trainer, {});
  const CallId nobody = p.g.Refit(p.trainer, 1);
  CHECK(p.g.Code(nobody) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(nobody), Contains("no trainer rank has a piece"));
  CHECK(p.g.prepared.empty());
  CHECK_FALSE(p.g.group.update_running());
  p.g.Shards(p.trainer, kModel);
  p.Run(3);
  p.g.FinishRefit();
  p.g.FinishVerify();
  CHECK(p.g.Code(p.g.Refit(p.trainer, 3)) == StatusCode::kFailedPrecondition);
}

TEST_CASE("a Refit that ends a lost update fails with who lost it, and opens no other") {
  const int ranks = GENERATE(2, 3);
  const bool pushes = GENERATE(false, true);
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.trainer_ranks = ranks;
  TestGroup g(spec);
  const std::vector<TensorSpec> all = {kModel[0], kModel[1], Bytes("c", 4)};
  g.InPlaceRank("x", all);
  std::vector<MemberId> trainers;
  for (int rank = 0; rank < ranks; ++rank) {
    trainers.push_back(g.AttachTrainer(rank, ranks));
    g.Shards(trainers.back(), all, rank, ranks,
             pushes ? std::vector<uint32_t>{2} : std::vector<uint32_t>{});
  }
  const auto begin_all = [&](int64_t version) {
    CallId last;
    for (const MemberId trainer : trainers) last = g.Begin(trainer, version);
    if (g.compiling.has_value()) g.FinishCompile();
    g.ReadyAll();
    return g.Get<BeginReply>(last).update;
  };
  const UpdateId lost = begin_all(5);
  if (pushes) g.Push(trainers[1], 5, 0, {all[2]});
  RefitEvent refit;
  refit.member = trainers[1];
  refit.version = Version(5);
  refit.bucket_count = pushes ? 1 : 0;
  refit.update = lost;
  const auto is_told = [&](CallId call) {
    CHECK(g.Code(call) == StatusCode::kAborted);
    CHECK_THAT(g.Text(call),
               Contains("trainer rank 0 (pid 1000) gave the update up: out of memory"));
  };
  const CallId abort = g.Abort(trainers[0], 5, "out of memory");
  SECTION("while its copies end") {
    if (!pushes) return;
    REQUIRE(g.Answer(abort) == nullptr);
    is_told(g.Refit(refit));
  }
  g.FinishAll();
  REQUIRE(g.Code(abort) == StatusCode::kOk);
  SECTION("nothing else runs") {
    is_told(g.Refit(refit));
    CHECK_FALSE(g.group.update_running());
    // A rank that gave the update up can go on, though the other rank has not heard of it.
    CHECK(g.Answer(g.Begin(trainers[0], 6)) == nullptr);
  }
  SECTION("another update to the same or a greater version is open") {
    const int64_t version = GENERATE(5, 6);
    const CallId begin = g.Begin(trainers[0], version);
    is_told(g.Refit(refit));
    CHECK(g.Answer(begin) == nullptr);
    CHECK(g.group.update_running());
  }
  SECTION("the rank is in another update to the same version") {
    const UpdateId other = begin_all(5);
    is_told(g.Refit(refit));
    CommitEvent commit{g.NewCall(), trainers[1], "", Version(5), 0, false, lost};
    g.Do(commit);
    is_told(commit.call);
    BucketDraft bucket = TestGroup::MakeBucket(trainers[1], 5, 0, {all[2]});
    bucket.update = lost;
    is_told(g.Push(bucket));
    LeaseSlotEvent lease{g.NewCall(), trainers[1], Version(5), {}, lost};
    g.Do(lease);
    is_told(lease.call);
    AbortEvent stale{g.NewCall(), trainers[1], "", Version(5), "an old handle goes", lost};
    g.Do(stale);
    CHECK(g.Code(stale.call) == StatusCode::kFailedPrecondition);
    CHECK(g.group.update_running());
    // The call that names the running update ends it.
    refit.update = other;
    if (pushes) {
      bucket.update = other;
      g.Push(bucket);
    }
    CHECK(g.Answer(g.Refit(refit)) == nullptr);
  }
  SECTION("it is forgotten what became of it") {
    for (int i = 0; i < kRememberedUpdates; ++i) {
      g.Begin(trainers[0], 5);
      g.Abort(trainers[0], 5);
    }
    const CallId call = g.Refit(refit);
    CHECK(g.Code(call) == StatusCode::kAborted);
    CHECK_THAT(g.Text(call), Contains("what became of it is not remembered"));
    CHECK_FALSE(g.group.update_running());
  }
}

TEST_CASE("a rank whose layout has no pieces refits as the others do") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.trainer_ranks = 2;
  TestGroup g(spec);
  const MemberId t0 = g.AttachTrainer(0, 2);
  const MemberId t1 = g.AttachTrainer(1, 2);
  g.InPlaceRank("x", kModel);
  g.Shards(t0, kModel);
  g.Shards(t1, {});
  const CallId empty = g.Refit(t1, 1);
  const CallId whole = g.Refit(t0, 1);
  REQUIRE(g.compiling.has_value());
  CHECK(g.compiling->sources.size() == 1);
  g.FinishCompile();
  g.ReadyAll();
  g.FinishRefit();
  g.FinishVerify();
  CHECK(g.Get<CommitReply>(empty).bytes == 24);
  CHECK(g.Code(whole) == StatusCode::kOk);
}

TEST_CASE("a rank with a layout pushes one version and refits the next without registering anew") {
  Pair p;
  p.Run(1);
  p.g.FinishRefit();
  p.g.FinishVerify();
  BeginEvent begin;
  begin.member = p.trainer;
  begin.version = Version(2);
  begin.without_layout = true;
  const CallId begun = p.g.Begin(begin);
  p.g.ReadyAll();
  CHECK(p.g.Code(begun) == StatusCode::kOk);
  CHECK_FALSE(p.g.assembled->use.has_value());
  p.g.Push(p.trainer, 2, 0, kModel);
  p.g.FinishAll();
  const CallId refit = p.g.Refit(p.trainer, 2, 1);
  CHECK(p.g.Code(refit) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(refit), Contains("without its layout"));
  const CallId commit = p.g.Commit(p.trainer, 2, 1);
  p.g.FinishVerify();
  CHECK(p.g.Get<CommitReply>(commit).bytes == 24);
  const CallId next = p.Run(3);
  CHECK(p.g.compiled == 1);
  p.g.FinishRefit();
  p.g.FinishVerify();
  CHECK(p.g.Code(next) == StatusCode::kOk);
}

TEST_CASE("what only trainers have is left out where the spec allows it, and counted") {
  GroupSpec spec = TestGroup::DefaultSpec();
  spec.unwanted_tensors = {"b", "opt.*"};
  Pair p(spec);
  const std::vector<TensorSpec> more = {kModel[0], kModel[1], Bytes("opt.m", 5), Bytes("opt.v", 7)};
  p.g.Shards(p.trainer, more);
  const CallId call = p.g.Refit(p.trainer, 1);
  REQUIRE(p.g.compiling.has_value());
  // An engine wants "b"; the planner decides which tensors may be left out.
  CHECK(p.g.compiling->options.unwanted_allowed == spec.unwanted_tensors);
  p.g.FinishCompile();
  CHECK(p.g.prepares.back().tensor_count == 2);
  p.g.ReadyAll();
  p.g.FinishRefit();
  p.g.FinishVerify();
  const auto reply = p.g.Get<CommitReply>(call);
  CHECK(reply.bytes == 24);
  CHECK(reply.left_out.tensors == 2);
  CHECK(reply.left_out.bytes == 12);
}

// "head" shares the memory of "embed": the layout has its name without a piece.
std::shared_ptr<const Layout> TiedLayout() {
  auto layout = std::make_shared<Layout>(*LayoutOf({Bytes("embed", 8)}));
  layout->tensors.push_back(Bytes("head", 8));
  layout->ties = {{1, 0}};
  return layout;
}

TEST_CASE("an engine with tied weights takes both names, and is written once") {
  TestGroup g;
  const MemberId trainer = g.AttachTrainer();
  const MemberId tied =
      g.AttachEngine({"x", 0, 1, DeliveryMode::kInPlace, 2000, std::nullopt, std::nullopt});
  g.Register(tied, TiedLayout());
  const std::vector<TensorSpec> both = {Bytes("embed", 8), Bytes("head", 8)};
  SECTION("pushed under one name or both") {
    const bool one = GENERATE(false, true);
    g.tensor_count = GENERATE(0, 2);
    g.Open(trainer, 1);
    g.Push(trainer, 1, 0, one ? std::vector<TensorSpec>{both[0]} : both);
    g.FinishAll();
    const CallId commit = g.Commit(trainer, 1, 1);
    g.FinishVerify();
    CHECK(g.Code(commit) == StatusCode::kOk);
    const auto reply = g.Get<CommitReply>(commit);
    CHECK(reply.left_out.tensors == (one ? 0 : 1));
    CHECK(reply.left_out.bytes == (one ? 0 : 8));
    if (!one) CHECK(reply.left_out.names == std::vector<std::string>{"head"});
    CHECK(g.group.ViewUpdate(g.now)->left_out.names == reply.left_out.names);
    const bool logged = std::any_of(g.log.begin(), g.log.end(), [](const LogLine& line) {
      return line.text == "version 1 leaves out 1 tensors, 8 bytes: head";
    });
    CHECK(logged == !one);
  }
  SECTION("pushed by a trainer that has not tied them: values that differ are not committed") {
    g.digests = {{"embed", 5}, {"head", 6}};
    g.Open(trainer, 1);
    g.Push(trainer, 1, 0, both);
    REQUIRE(g.running.at(0).transfer.digests);
    g.FinishAll();
    const CallId commit = g.Commit(trainer, 1, 1);
    if (g.verifying.has_value()) g.FinishVerify();
    CHECK(g.Code(commit) == StatusCode::kFailedPrecondition);
    CHECK_THAT(g.Text(commit),
               Contains("tensor 'head' and tensor 'embed' are one memory in engine x"));
    CHECK(g.Instance("x").state == "dirty");
  }
  SECTION("pushed in part: what layouts bring can't be compared with it, and is refused by name") {
    g.Shards(trainer, both, 0, 1, {1});
    g.Open(trainer, 1);
    if (g.compiling.has_value()) g.FinishCompile();
    g.ReadyAll();
    const CallId push = g.Push(trainer, 1, 0, {both[1]});
    CHECK(g.Code(push) == StatusCode::kFailedPrecondition);
    CHECK_THAT(g.Text(push), Contains("tensor 'head'") && Contains("tensor 'embed'"));
  }
  SECTION("pushed under the name that has no memory alone: the other is missed") {
    g.Open(trainer, 1);
    g.Push(trainer, 1, 0, {both[1]});
    g.FinishAll();
    const CallId commit = g.Commit(trainer, 1, 1);
    CHECK(g.Code(commit) == StatusCode::kFailedPrecondition);
    CHECK_THAT(g.Text(commit), Contains("tensor 'embed' of instance x was never pushed"));
  }
  SECTION("of another shape is refused") {
    g.Open(trainer, 1);
    const CallId push = g.Push(trainer, 1, 0, {Bytes("head", 9)});
    CHECK(g.Code(push) == StatusCode::kFailedPrecondition);
  }
  SECTION("refitted from a trainer with one name or both") {
    const bool one = GENERATE(false, true);
    g.Shards(trainer, one ? std::vector<TensorSpec>{both[0]} : both);
    const CallId call = g.Refit(trainer, 1);
    g.FinishCompile();
    g.ReadyAll();
    g.FinishRefit();
    g.FinishVerify();
    const auto reply = g.Get<CommitReply>(call);
    CHECK(reply.bytes == 8);
    CHECK(reply.left_out.tensors == (one ? 0 : 1));
    if (!one) CHECK(reply.left_out.names == std::vector<std::string>{"head"});
  }
  SECTION("beside an engine that stores both") {
    g.InPlaceRank("y", both);
    g.Shards(trainer, both);
    const CallId call = g.Refit(trainer, 1);
    g.FinishCompile();
    g.ReadyAll();
    g.FinishRefit();
    g.FinishVerify();
    const auto reply = g.Get<CommitReply>(call);
    CHECK(reply.bytes == 16);
    CHECK(reply.left_out.tensors == 0);
  }
}

TEST_CASE("a repeated Refit has no second effect and gets the first answer") {
  Pair p;
  const CallId first = p.g.Refit(p.trainer, 1, 0, "once");
  const CallId second = p.g.Refit(p.trainer, 1, 0, "once");
  p.g.FinishCompile();
  p.g.ReadyAll();
  p.g.FinishRefit();
  p.g.FinishVerify();
  CHECK(p.g.Code(first) == StatusCode::kOk);
  CHECK(p.g.Code(second) == StatusCode::kOk);
  CHECK(p.g.Code(p.g.Refit(p.trainer, 1, 0, "once")) == StatusCode::kOk);
  CHECK(p.g.ended.size() == 1);
}

TEST_CASE("Refit and push in one version") {
  Pair p;
  const std::vector<TensorSpec> all = {kModel[0], kModel[1], Bytes("c", 4)};
  p.g.Register(p.engine, LayoutOf(all));
  p.g.Shards(p.trainer, all, 0, 1, {2});
  const CallId begin = p.g.Begin(p.trainer, 1);
  p.g.FinishCompile();
  p.g.ReadyAll();
  CHECK(p.g.Code(begin) == StatusCode::kOk);
  CHECK_FALSE(p.g.refitting.has_value());
  SECTION("what the layouts bring is not pushed") {
    const CallId pushed = p.g.Push(p.trainer, 1, 0, {kModel[0]});
    CHECK(p.g.Code(pushed) == StatusCode::kFailedPrecondition);
    CHECK_THAT(p.g.Text(pushed), Contains("tensor 'a' comes with the registered layouts"));
  }
  p.g.Push(p.trainer, 1, 0, {all[2]});
  SECTION("the rank ends with Refit, not with Commit") {
    const CallId commit = p.g.Commit(p.trainer, 1, 1);
    CHECK(p.g.Code(commit) == StatusCode::kFailedPrecondition);
    CHECK_THAT(p.g.Text(commit), Contains("ends an update with Refit"));
  }
  SECTION("buckets are counted") {
    CHECK(p.g.Code(p.g.Refit(p.trainer, 1, 0)) == StatusCode::kFailedPrecondition);
    CHECK(p.g.Code(p.g.Refit(p.trainer, 1, 2)) == StatusCode::kFailedPrecondition);
  }
  const CallId refit = p.g.Refit(p.trainer, 1, 1);
  REQUIRE(p.g.refitting.has_value());
  CHECK(p.g.refitting->part == PartSeq(1));
  p.g.FinishRefit();
  CHECK_FALSE(p.g.verifying.has_value());
  p.g.FinishAll();
  p.g.FinishVerify();
  CHECK(p.g.Get<CommitReply>(refit).bytes == 28);
}

TEST_CASE("a pushed tensor that nobody pushed aborts a Refit that opened the update") {
  Pair p;
  const std::vector<TensorSpec> all = {kModel[0], Bytes("c", 4)};
  p.g.Register(p.engine, LayoutOf(all));
  p.g.Shards(p.trainer, all, 0, 1, {1});
  const CallId call = p.g.Refit(p.trainer, 1);
  p.g.FinishCompile();
  p.g.ReadyAll();
  CHECK(p.g.Code(call) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(call), Contains("tensor 'c' of instance x was never pushed"));
  CHECK(p.g.Instance("x").state == "clean");
}

TEST_CASE("an update with a loader rank is not refitted") {
  Pair p;
  const MemberId staged = p.g.LoaderRank("y", kModel);
  // True: buckets are pushed beside the refit, so that Begin is refused.
  const bool pushes = GENERATE(false, true);
  const CallId call = pushes ? p.g.Begin(p.trainer, 1) : p.g.Refit(p.trainer, 1);
  CHECK(p.g.Code(call) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(call), Contains("engine y rank 0 (pid 3000) takes loader delivery"));
  CHECK(p.g.prepared.empty());
  p.g.Lose(staged);
  p.Run(1);
  CHECK(p.g.refitting.has_value());
}

TEST_CASE("all replicas are compared on a registration's first version, then a part each version") {
  GroupLimits limits;
  limits.compare_every = 3;
  Pair p(TestGroup::DefaultSpec(), limits);
  std::vector<uint64_t> compared;  // how many of 300 boxes were compared; 0: none
  const auto version = [&](int64_t number) {
    p.g.Refit(p.trainer, number);
    if (p.g.compiling.has_value()) p.g.FinishCompile(absl::OkStatus(), /*replicas=*/true);
    p.g.ReadyAll();
    compared.push_back(0);
    for (uint64_t i = 0; i < 300 && p.g.comparing.has_value(); ++i) {
      compared.back() += p.g.comparing->part.Has(i << 32) ? 1 : 0;
    }
    if (p.g.comparing.has_value()) {
      CHECK_FALSE(p.g.refitting.has_value());
      CHECK(p.g.Instance("x").state == "clean_ready");  // nothing is written yet
      p.g.FinishCompare();
    }
    p.g.FinishRefit();
    p.g.FinishVerify();
  };
  for (int64_t v = 1; v <= 7; ++v) version(v);
  CHECK(compared == std::vector<uint64_t>{300, 100, 100, 100, 100, 100, 100});
  p.g.Shards(p.trainer, kModel);  // in other memory
  version(8);
  CHECK(compared.back() == 300);
}

TEST_CASE("tensors that can't be right are refused before a byte is written") {
  Pair p;
  const CallId call = p.g.Refit(p.trainer, 1);
  p.g.FinishCompile(absl::OkStatus(), /*replicas=*/true);
  p.g.ReadyAll();
  p.g.FinishCompare(absl::FailedPreconditionError("tensor a and tensor b overlap"));
  CHECK(p.g.Code(call) == StatusCode::kFailedPrecondition);
  CHECK_THAT(p.g.Text(call),
             Contains("tensor a and tensor b overlap") && Contains("weights are whole"));
  CHECK(p.g.Instance("x").state == "clean");
}

TEST_CASE("a binding's first version asks the daemons, whether or not there are replicas") {
  Pair p;
  const auto asked = [&](int64_t version) {
    int before = p.g.compares;
    p.g.Refit(p.trainer, version);
    if (p.g.compiling.has_value()) p.g.FinishCompile();
    p.g.ReadyAll();
    p.g.FinishRefit();
    p.g.FinishVerify();
    return p.g.compares - before;
  };
  CHECK(asked(1) == 1);
  CHECK(asked(2) == 0);
  p.g.Shards(p.trainer, kModel);  // in other memory
  CHECK(asked(3) == 1);
  p.g.Register(p.engine, LayoutOf(kModel));  // likewise
  CHECK(asked(4) == 1);
  CHECK(asked(5) == 0);
}

// A pair whose first version is installed, so that the next compares a share of the replicas.
struct Replayed : Pair {
  Replayed() {
    g.Refit(trainer, 1);
    g.FinishCompile(absl::OkStatus(), /*replicas=*/true);
    // All replicas are compared when every engine is ready, since that takes long.
    CHECK_FALSE(g.comparing.has_value());
    g.ReadyAll();
    g.FinishCompare();
    g.FinishRefit();
    g.FinishVerify();
    g.comparing.reset();
    g.refitting.reset();
  }
};

TEST_CASE("a share is compared while engines get ready, once no rank can change it") {
  Replayed p;
  const int before = p.g.compares;
  SECTION("all ranks called Refit alone") {
    const CallId call = p.g.Refit(p.trainer, 2);
    CHECK(p.g.comparing.has_value());
    const bool first = GENERATE(false, true);  // the comparison ends before the engine is ready
    if (first) p.g.FinishCompare();
    CHECK_FALSE(p.g.refitting.has_value());
    p.g.ReadyAll();
    if (!first) {
      CHECK_FALSE(p.g.refitting.has_value());
      p.g.FinishCompare();
    }
    CHECK(p.g.compares == before + 1);
    CHECK(p.g.refitting.has_value());
    p.g.FinishRefit();
    p.g.FinishVerify();
    CHECK(p.g.Code(call) == StatusCode::kOk);
  }
  SECTION("a difference aborts, and no engine was written") {
    const CallId call = p.g.Refit(p.trainer, 2);
    p.g.FinishCompare(absl::DataLossError("tensor 'a': trainer ranks 0 and 1 differ"));
    CHECK(p.g.Code(call) == StatusCode::kAborted);
    CHECK(p.g.Instance("x").state == "clean");
  }
  SECTION("a death meanwhile waits for the reading to end (P6)") {
    p.g.Refit(p.trainer, 2);
    p.g.Lose(p.trainer);
    CHECK_FALSE(p.g.released.contains(p.trainer));
    p.g.FinishCompare(absl::CancelledError("given up"));
    CHECK(p.g.released.contains(p.trainer));
  }
  SECTION("a rank called Begin, and may write until it calls Refit") {
    p.g.Begin(p.trainer, 2);
    CHECK_FALSE(p.g.comparing.has_value());
    p.g.ReadyAll();
    CHECK_FALSE(p.g.comparing.has_value());
    p.g.Refit(p.trainer, 2);
    CHECK(p.g.comparing.has_value());
  }
}

TEST_CASE("replicas that differ abort before a byte is written") {
  Pair p;
  const CallId call = p.g.Refit(p.trainer, 1);
  p.g.FinishCompile(absl::OkStatus(), /*replicas=*/true);
  p.g.ReadyAll();
  SECTION("the tensor and the ranks are named") {
    p.g.FinishCompare(absl::DataLossError("tensor 'a': trainer ranks 0 and 1 differ"));
    CHECK(p.g.Code(call) == StatusCode::kAborted);
    CHECK_THAT(p.g.Text(call), Contains("tensor 'a': trainer ranks 0 and 1 differ"));
    CHECK(p.g.Instance("x").state == "clean");
    CHECK_FALSE(p.g.aborted.back().dirty);
  }
  SECTION("a death meanwhile waits for the reading to end") {
    p.g.Lose(p.trainer);
    CHECK_FALSE(p.g.released.contains(p.trainer));
    p.g.FinishCompare(absl::CancelledError("given up"));
    CHECK(p.g.released.contains(p.trainer));
    CHECK(p.g.Instance("x").state == "clean");
  }
}

TEST_CASE("bytes between daemons take slots in pairs and give them back") {
  Pair p;
  p.g.Refit(p.trainer, 1);
  p.g.FinishCompile(absl::OkStatus(), false, /*wire_bytes=*/100);
  p.g.ReadyAll();
  REQUIRE(p.g.refitting.has_value());
  CHECK(p.g.refitting->slots.size() == 4);
  CHECK(p.g.FreeSlots() == 0);
  p.g.FinishRefit();
  CHECK(p.g.FreeSlots() == 4);
}

TEST_CASE("an engine that dies while the program runs is evicted, the others commit") {
  Pair p;
  const MemberId other = p.g.InPlaceRank("y", kModel);
  const CallId call = p.Run(1);
  p.g.Lose(other);
  CHECK_FALSE(p.g.released.contains(other));
  p.g.FinishRefit();
  CHECK(p.g.released.contains(other));
  p.g.FinishVerify();
  const auto reply = p.g.Get<CommitReply>(call);
  REQUIRE(reply.instances.size() == 2);
  CHECK(reply.instances[0].committed);
  CHECK_FALSE(reply.instances[1].committed);
}

TEST_CASE("a program that fails, or writes too little, aborts and leaves the instance dirty") {
  Pair p;
  const CallId call = p.Run(1);
  SECTION("failed") {
    p.g.FinishRefit(absl::InternalError("the copy failed"), 0);
    CHECK_THAT(p.g.Text(call), Contains("transfer of the refit to engine x rank 0"));
  }
  SECTION("wrong bytes") {
    p.g.FinishRefit(absl::DataLossError("tensor 'a'"), 0);
    CHECK_THAT(p.g.Text(call), Contains("verification of the refit to engine x rank 0"));
  }
  SECTION("too few bytes") {
    const UpdateId update = p.g.refitting->update;
    p.g.refitting.reset();
    p.g.Do(RefitDone{update, absl::OkStatus(), {7}, -1});
    CHECK_THAT(p.g.Text(call), Contains("7 bytes were written"));
  }
  CHECK(p.g.Code(call) == StatusCode::kAborted);
  CHECK(p.g.Instance("x").state == "dirty");
}

}  // namespace
}  // namespace refitd
