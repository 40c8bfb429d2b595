// Members and daemons that die, stop or stay silent: real processes, killed and stopped in every
// phase of an update.
#include <signal.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <future>

#include "client/engine.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using grpc::StatusCode;

v1::EngineHello EngineIn(const std::string& instance, const v1::GroupSpec& spec,
                         v1::Delivery delivery = v1::DELIVERY_IN_PLACE,
                         const Model* manifest = nullptr) {
  v1::EngineHello hello = RawEngine::Hello("g", instance, 0, 1, delivery, spec);
  if (manifest != nullptr) *hello.mutable_manifest() = ManifestOf(*manifest);
  return hello;
}

v1::BeginRequest BeginOf(int64_t version, bool evict_late = false, int64_t duration_ms = 0) {
  v1::BeginRequest request;
  request.set_version(version);
  request.set_evict_late(evict_late);
  request.set_duration_ms(duration_ms);
  return request;
}

// The limit in tests that wait until a limit has passed. Steps that must happen before have this
// long on a busy machine.
constexpr int64_t kLimitMs = 3'000;
std::string Limit(const std::string& name) {
  return "--limits-" + name + "-ms=" + std::to_string(kLimitMs);
}

// Pushes the mixed model in two buckets, and commits.
void Install(RawTrainer* trainer, const Model& model, int64_t version) {
  REQUIRE_OK(trainer->Begin(version));
  REQUIRE_OK(trainer->Push(version, InlineBucket(model, BytesOf(model, version), 0, false)));
  REQUIRE_OK(trainer->Commit(version, 1));
}

std::string Aborted(RawEngine* engine, bool dirty) {
  const auto event = engine->events().WaitFor(v1::EngineEvent::kAborted);
  REQUIRE(event.has_value());
  CHECK(event->aborted().dirty() == dirty);
  return event->aborted().reason();
}

// ---- engines ----

enum class Phase { kAttached, kPreparing, kReady, kWriting, kPartsOut };

// How an engine process ends in the test below.
enum class End { kKilled, kKilledWithChild };

std::string Name(Phase phase) {
  switch (phase) {
    case Phase::kAttached:
      return "before the update";
    case Phase::kPreparing:
      return "before Ready";
    case Phase::kReady:
      return "after Ready";
    case Phase::kWriting:
      return "after the first bucket";
    case Phase::kPartsOut:
      return "with parts unacknowledged";
  }
  return "";
}

TEST_CASE(
    "a killed engine costs its instance, in every phase, and the update commits for the rest") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon daemon;
  Holder survivor(daemon.Connect(), EngineIn("survivor", spec), HoldWhole(model));
  RawEngine loader(daemon.Connect(), EngineIn("loader", spec, v1::DELIVERY_LOADER, &model));
  REQUIRE(loader.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  int64_t version = 0;
  for (const std::string delivery : {"in_place", "loader"}) {
    for (const Phase phase :
         {Phase::kAttached, Phase::kPreparing, Phase::kReady, Phase::kWriting, Phase::kPartsOut}) {
      for (const End end : {End::kKilled, End::kKilledWithChild}) {
        if (phase == Phase::kPartsOut && delivery == "in_place") continue;
        ++version;
        INFO(delivery << " engine killed " << Name(phase)
                      << (end == End::kKilled ? "" : ", its child lives on"));
        const std::vector<std::string> bytes = BytesOf(model, version);
        MemberProcess victim(daemon, "engine", {"instance=victim", "delivery=" + delivery});
        REQUIRE_ANSWER(victim, "attach", "ok");
        if (end == End::kKilledWithChild) REQUIRE(victim.ForkChild());
        // Once the update asks nothing more of the engine, the update could end before the daemon
        // hears of the death, and would then commit for this engine too.
        const auto kill = [&] {
          victim.Kill();
          REQUIRE(Eventually([&] { return daemon.InstanceState("g", "victim").empty(); }));
        };
        if (phase == Phase::kAttached) kill();
        auto begun = std::async(std::launch::async, [&] { return trainer.Begin(version); });
        if (phase != Phase::kAttached)
          REQUIRE_ANSWER(victim, "prepare", "ok " + std::to_string(version));
        if (phase == Phase::kPreparing) {
          kill();
        } else if (phase != Phase::kAttached) {
          REQUIRE_ANSWER(victim, "ready " + std::to_string(version), "ok");
        }
        const auto begin = begun.get();
        REQUIRE_OK(begin);
        if (phase == Phase::kReady) kill();
        REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 0, true, {0, 1, 2})));
        if (phase == Phase::kWriting) kill();
        REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 1, false,
                                                      {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14})));
        if (phase == Phase::kPartsOut) {
          REQUIRE_ANSWER(victim, "part", "ok " + std::to_string(version) + " 0");
          kill();
        }
        const auto committed = trainer.Commit(version, 2);
        REQUIRE_OK(committed);
        for (const v1::InstanceResult& instance : committed.response.instances()) {
          CHECK(instance.committed() == (instance.instance() != "victim"));
          if (!instance.committed())
            CHECK_THAT(instance.reason(), Catch::Contains("engine victim rank 0"));
        }
        CHECK(committed.response.instances_size() == (phase == Phase::kAttached ? 2 : 3));
        for (RawEngine* engine : {&survivor.engine(), &loader}) {
          REQUIRE(engine->events().WaitFor(v1::EngineEvent::kCommitted).has_value());
        }
        CHECK(survivor.Difference(model, bytes) == "");
        CHECK(loader.LoadedDifference(model, bytes) == "");
      }
    }
  }
  CHECK(daemon.Group("g").updates_aborted() == 0);
}

TEST_CASE(
    "a killed rank takes its whole instance out, and the other rank learns that it is dirty") {
  const Model model = MixedModel();
  Daemon daemon;
  const v1::GroupSpec spec = Spec();
  Holder survivor(daemon.Connect(), EngineIn("survivor", spec), HoldWhole(model));
  MemberProcess left(daemon, "engine", {"instance=pair", "rank=0", "world=2"});
  MemberProcess right(daemon, "engine", {"instance=pair", "rank=1", "world=2"});
  REQUIRE_ANSWER(left, "attach", "ok");
  REQUIRE_ANSWER(right, "attach", "ok");
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  auto begun = std::async(std::launch::async, [&] { return trainer.Begin(1); });
  for (MemberProcess* rank : {&left, &right}) {
    REQUIRE_ANSWER(*rank, "prepare", "ok 1");
    REQUIRE_ANSWER(*rank, "ready 1", "ok");
  }
  REQUIRE_OK(begun.get());
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 0, true, {0, 1, 2})));
  right.Kill();
  REQUIRE_ANSWER(left, "outcome", "ok aborted 1 dirty engine pair rank 1");
  REQUIRE_OK(trainer.Push(
      1, InlineBucket(model, bytes, 1, true, {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14})));
  REQUIRE_OK(trainer.Commit(1, 2));
  CHECK(survivor.Difference(model, bytes) == "");
  CHECK(daemon.InstanceState("g", "pair") == "forming_dirty");

  // A new process takes the rank's place: the next update makes the instance whole.
  MemberProcess again(daemon, "engine", {"instance=pair", "rank=1", "world=2"});
  REQUIRE_ANSWER(again, "attach", "ok");
  begun = std::async(std::launch::async, [&] { return trainer.Begin(2); });
  for (MemberProcess* rank : {&left, &again}) {
    REQUIRE_ANSWER(*rank, "prepare", "ok 2");
    REQUIRE_ANSWER(*rank, "ready 2", "ok");
  }
  REQUIRE_OK(begun.get());
  REQUIRE_OK(trainer.Push(2, InlineBucket(model, BytesOf(model, 2), 0, true)));
  REQUIRE_OK(trainer.Commit(2, 1));
  for (MemberProcess* rank : {&left, &again}) {
    REQUIRE_ANSWER(*rank, "outcome", "ok committed 2");
    REQUIRE_ANSWER(*rank, "check 2", "ok");
  }
  CHECK(daemon.InstanceState("g", "pair") == "clean");
}

TEST_CASE("an engine that never answers Ready ends Begin by name, and nothing was written") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  const bool stopped = GENERATE(false, true);
  Daemon daemon({Limit("ready")});
  Holder good(daemon.Connect(), EngineIn("good", spec), HoldWhole(model));
  MemberProcess late(daemon, "engine", {"instance=late"});
  REQUIRE_ANSWER(late, "attach", "ok");
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  if (stopped) late.Signal(SIGSTOP);

  CheckRefused(trainer.Begin(1).status, StatusCode::DEADLINE_EXCEEDED,
               {"engine late rank 0", "pid " + std::to_string(late.pid()), "Ready"});
  CHECK_THAT(Aborted(&good.engine(), false), Catch::Contains("engine late rank 0"));
  CHECK(good.DifferenceFromEmpty() == "");
  CHECK(daemon.InstanceState("g", "good") == "clean");

  // With evict_late the late engine is left out and the update commits.
  REQUIRE_OK(trainer.Begin(BeginOf(2, true)));
  REQUIRE_OK(trainer.Push(2, InlineBucket(model, BytesOf(model, 2), 0, true)));
  const auto committed = trainer.Commit(2, 1);
  REQUIRE_OK(committed);
  for (const v1::InstanceResult& instance : committed.response.instances()) {
    CHECK(instance.committed() == (instance.instance() == "good"));
  }
  CHECK(good.Difference(model, BytesOf(model, 2)) == "");
  if (stopped) late.Signal(SIGCONT);
  REQUIRE_ANSWER(late, "outcome", "ok aborted 1 clean engine late rank 0");
  REQUIRE_ANSWER(late, "outcome", "ok aborted 2 clean engine late rank 0");
  REQUIRE_ANSWER(late, "check 0", "ok");
}

TEST_CASE(
    "an engine that never acknowledges ends the update by name, dirty, and the next one commits") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  Daemon daemon({Limit("ack")});
  Holder registered(daemon.Connect(), EngineIn("in_place", spec), HoldWhole(model));
  MemberProcess late(daemon, "engine", {"instance=late", "delivery=loader"});
  REQUIRE_ANSWER(late, "attach", "ok");
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  const auto prepare = [&](int64_t version, bool evict_late) {
    auto begun = std::async(std::launch::async, [&trainer, version, evict_late] {
      return trainer.Begin(BeginOf(version, evict_late));
    });
    REQUIRE_ANSWER(late, "prepare", "ok");
    REQUIRE_ANSWER(late, "ready " + std::to_string(version), "ok");
    REQUIRE_OK(begun.get());
    REQUIRE_OK(trainer.Push(version, InlineBucket(model, BytesOf(model, version), 0, true)));
  };
  prepare(1, false);
  CheckRefused(trainer.Commit(1, 1).status, StatusCode::DEADLINE_EXCEEDED,
               {"engine late rank 0", "acknowledge part 0"});
  CHECK_THAT(Aborted(&registered.engine(), true), Catch::Contains("engine late rank 0"));
  REQUIRE_ANSWER(late, "outcome", "ok aborted 1 dirty");
  CHECK(daemon.InstanceState("g", "in_place") == "dirty");
  CHECK(trainer.GetUpdate("g", 1).response.outcome() == v1::UPDATE_OUTCOME_ABORTED);

  // An engine that is stopped, not only silent; it is evicted, and the update goes on.
  prepare(2, true);
  late.Signal(SIGSTOP);
  const auto committed = trainer.Commit(2, 1);
  REQUIRE_OK(committed);
  for (const v1::InstanceResult& instance : committed.response.instances()) {
    CHECK(instance.committed() == (instance.instance() == "in_place"));
    if (!instance.committed()) CHECK_THAT(instance.reason(), Catch::Contains("engine late rank 0"));
  }
  CHECK(registered.Difference(model, BytesOf(model, 2)) == "");
  CHECK(daemon.InstanceState("g", "late") == "dirty");
  late.Signal(SIGCONT);
  REQUIRE_ANSWER(late, "outcome", "ok aborted 2 dirty");
}

TEST_CASE("slots that an engine never gives back end the buckets that wait for one, by its name") {
  const Model model = PlainModel(1, 64, 64);  // one tensor as large as two slots
  const v1::GroupSpec spec = Spec(1, 1, 4096, 2);
  Daemon daemon({Limit("ack")});
  RawEngine engine(daemon.Connect(), EngineIn("slow", spec, v1::DELIVERY_LOADER, &model),
                   {.auto_ack = false});
  REQUIRE(engine.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  const auto rows = [&](int64_t seq, int64_t first, int64_t count) {
    v1::Bucket bucket = Describe(model, seq, {0});
    bucket.add_starts(first * 64);
    bucket.add_sizes(count * 64);
    bucket.mutable_inline_bytes()->add_chunks(BytesOf(model, 1)[0].substr(
        static_cast<size_t>(first * 128), static_cast<size_t>(count * 128)));
    return bucket;
  };
  REQUIRE_OK(trainer.Push(1, rows(0, 0, 32)));
  REQUIRE_OK(trainer.Push(1, rows(1, 32, 16)));
  CheckRefused(trainer.Push(1, rows(2, 48, 16)).status, StatusCode::ABORTED,
               {"engine slow rank 0", "acknowledge part 0"});
  CHECK_THAT(Aborted(&engine, true), Catch::Contains("engine slow rank 0"));
  // Slots are in use until they are given back, even late; then the next update can use them.
  REQUIRE(engine.Ack(1, 0));
  REQUIRE(engine.Ack(1, 1));
  REQUIRE_OK(trainer.Begin(2));
  auto pushed = std::async(std::launch::async, [&] {
    return trainer.Push(2, InlineBucket(model, BytesOf(model, 2), 0, true));
  });
  for (int64_t part = 0; part < 2; ++part) {
    REQUIRE(engine.events().WaitFor(v1::EngineEvent::kBucket).has_value());
    REQUIRE(engine.Ack(2, part));
  }
  REQUIRE_OK(pushed.get());
  REQUIRE_OK(trainer.Commit(2, 1));
  CHECK(engine.LoadedDifference(model, BytesOf(model, 2)) == "");
}

TEST_CASE("an in-place engine that is stopped after Ready is written all the same") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  Daemon daemon;
  MemberProcess engine(daemon, "engine", {});
  REQUIRE_ANSWER(engine, "attach", "ok");
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  auto begun = std::async(std::launch::async, [&] { return trainer.Begin(1); });
  REQUIRE_ANSWER(engine, "prepare", "ok 1");
  REQUIRE_ANSWER(engine, "ready 1", "ok");
  REQUIRE_OK(begun.get());
  engine.Signal(SIGSTOP);
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, true)));
  REQUIRE_OK(trainer.Commit(1, 1));
  engine.Signal(SIGCONT);
  REQUIRE_ANSWER(engine, "outcome", "ok committed 1");
  REQUIRE_ANSWER(engine, "check 1", "ok");
}

TEST_CASE("an engine that reports a failure ends the update with its words") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  Daemon daemon;
  RawEngine engine(daemon.Connect(), EngineIn("i", spec, v1::DELIVERY_LOADER, &model),
                   {.auto_ack = false});
  REQUIRE(engine.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, true)));
  REQUIRE(engine.events().WaitFor(v1::EngineEvent::kBucket).has_value());
  auto committed = std::async(std::launch::async, [&] { return trainer.Commit(1, 1); });
  REQUIRE(engine.Fail(1, "out of device memory"));
  CheckRefused(committed.get().status, StatusCode::ABORTED,
               {"engine i rank 0", "out of device memory"});
  CHECK_THAT(Aborted(&engine, true), Catch::Contains("out of device memory"));
}

// ---- trainers ----

TEST_CASE(
    "a killed trainer aborts the update in every phase with the right dirty flag, and the next one "
    "commits") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  Daemon daemon;
  Holder registered(daemon.Connect(), EngineIn("in_place", spec), HoldWhole(model),
                    {.auto_ready = false});
  RawEngine loader(daemon.Connect(), EngineIn("loader", spec, v1::DELIVERY_LOADER, &model));
  REQUIRE(loader.attached().ok());
  int64_t version = 0;
  std::string last_image;
  for (const Phase phase : {Phase::kPreparing, Phase::kReady, Phase::kWriting, Phase::kPartsOut}) {
    for (const End end : {End::kKilled, End::kKilledWithChild}) {
      INFO("trainer killed " << Name(phase) << (end == End::kKilled ? "" : ", its child lives on"));
      ++version;
      REQUIRE(Eventually([&] { return daemon.Group("g").trainers() == 0; }));
      const bool was_dirty = daemon.InstanceState("g", "in_place") == "dirty";
      REQUIRE(!was_dirty);
      MemberProcess victim(daemon, "trainer", {});
      REQUIRE_ANSWER(victim, "attach", "ok");
      if (end == End::kKilledWithChild) REQUIRE(victim.ForkChild());
      victim.Send("begin " + std::to_string(version));
      REQUIRE(registered.engine().events().WaitFor(v1::EngineEvent::kPrepare).has_value());
      const bool written = phase == Phase::kWriting || phase == Phase::kPartsOut;
      if (phase != Phase::kPreparing) {
        REQUIRE(registered.engine().Ready(version));
        REQUIRE_THAT(victim.Answer(), Catch::StartsWith("ok"));
      }
      if (written) {
        REQUIRE_ANSWER(victim, "push " + std::to_string(version) + " 0 0 3", "ok");
        REQUIRE(loader.events().WaitFor(v1::EngineEvent::kBucket).has_value());
      }
      if (phase == Phase::kPartsOut) {
        REQUIRE_ANSWER(victim, "push " + std::to_string(version) + " 1 3 12", "ok");
      }
      const std::string pid = std::to_string(victim.pid());
      victim.Kill();
      for (RawEngine* engine : {&registered.engine(), &loader}) {
        const std::string reason = Aborted(engine, written);
        CHECK_THAT(reason, Catch::Contains("trainer rank 0") && Catch::Contains(pid));
        // While a child holds the socket open no end of stream comes, so the process itself is
        // watched.
        if (end == End::kKilledWithChild) CHECK_THAT(reason, Catch::Contains("process died"));
      }
      CHECK(daemon.InstanceState("g", "in_place") == (written ? "dirty" : "clean"));
      if (!written && version == 1) CHECK(registered.DifferenceFromEmpty() == "");

      // The rank is free again, and the next update makes the instances whole.
      ++version;
      RawTrainer next(daemon.Connect(), RawTrainer::Hello("g", spec));
      REQUIRE(next.attached().ok());
      auto begun = std::async(std::launch::async, [&] { return next.Begin(version); });
      REQUIRE(registered.engine().events().WaitFor(v1::EngineEvent::kPrepare).has_value());
      REQUIRE(registered.engine().Ready(version));
      REQUIRE_OK(begun.get());
      REQUIRE_OK(next.Push(version, InlineBucket(model, BytesOf(model, version), 0, true)));
      REQUIRE_OK(next.Commit(version, 1));
      REQUIRE(loader.events().WaitFor(v1::EngineEvent::kCommitted).has_value());
      CHECK(registered.Difference(model, BytesOf(model, version)) == "");
      CHECK(loader.LoadedDifference(model, BytesOf(model, version)) == "");
      CHECK(daemon.InstanceState("g", "in_place") == "clean");
    }
  }
}

TEST_CASE("the other trainer ranks of a killed one get ABORTED with its name") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(2);
  Daemon daemon;
  Holder engine(daemon.Connect(), EngineIn("i", spec), HoldWhole(model));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec, 0, 2));
  REQUIRE(trainer.attached().ok());
  MemberProcess victim(daemon, "trainer", {"rank=1", "trainers=2"});
  REQUIRE_ANSWER(victim, "attach", "ok");
  auto begun = std::async(std::launch::async, [&] { return trainer.Begin(1); });
  REQUIRE_ANSWER(victim, "begin 1", "ok");
  REQUIRE_OK(begun.get());
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, true)));
  auto committed = std::async(std::launch::async, [&] { return trainer.Commit(1, 1); });
  victim.Kill();
  CheckRefused(committed.get().status, StatusCode::ABORTED,
               {"trainer rank 1", std::to_string(victim.pid()), "lost"});
  const auto event = trainer.events().WaitFor(v1::TrainerEvent::kAborted);
  REQUIRE(event.has_value());
  CHECK_THAT(event->aborted().reason(), Catch::Contains("trainer rank 1"));
  CHECK_THAT(Aborted(&engine.engine(), true), Catch::Contains("trainer rank 1"));
}

TEST_CASE(
    "a stopped trainer loses its update after the idle limit, by name, and is told so when it goes "
    "on") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  Daemon daemon({Limit("idle")});
  Holder engine(daemon.Connect(), EngineIn("i", spec), HoldWhole(model));
  MemberProcess trainer(daemon, "trainer", {});
  REQUIRE_ANSWER(trainer, "attach", "ok");
  REQUIRE_ANSWER(trainer, "begin 1", "ok");
  REQUIRE_ANSWER(trainer, "push 1 0 0 3", "ok");
  trainer.Signal(SIGSTOP);
  CHECK_THAT(Aborted(&engine.engine(), true), Catch::Contains("trainer rank 0"));
  trainer.Signal(SIGCONT);
  REQUIRE_ANSWER(trainer, "push 1 1 3 12", "error 10 ");
  REQUIRE_ANSWER(trainer, "begin 2", "ok");
  REQUIRE_ANSWER(trainer, "push 2", "ok");
  REQUIRE_ANSWER(trainer, "commit 2 1", "ok");
  CHECK(engine.Difference(model, BytesOf(model, 2)) == "");
}

TEST_CASE("an update's own deadline names who was waited for") {
  const Model model = MixedModel();
  const v1::GroupSpec two = Spec(2, 2);
  Daemon daemon;
  Holder engine(daemon.Connect(), EngineIn("i", two), HoldWhole(model));
  RawTrainer first(daemon.Connect(), RawTrainer::Hello("g", two, 0, 2));
  RawTrainer second(daemon.Connect(), RawTrainer::Hello("g", two, 1, 2));
  REQUIRE(first.attached().ok());
  REQUIRE(second.attached().ok());
  CheckRefused(first.Begin(BeginOf(1, false, 200)).status, StatusCode::DEADLINE_EXCEEDED,
               {"trainer rank 1", "1 of 2 instances"});
  Holder other(daemon.Connect(), EngineIn("j", two), HoldWhole(model));
  auto begun =
      std::async(std::launch::async, [&] { return first.Begin(BeginOf(2, false, kLimitMs)); });
  REQUIRE_OK(second.Begin(BeginOf(2, false, kLimitMs)));
  REQUIRE_OK(begun.get());
  REQUIRE_OK(first.Push(2, InlineBucket(model, BytesOf(model, 2), 0, true)));
  CheckRefused(first.Commit(2, 1).status, StatusCode::DEADLINE_EXCEEDED,
               {"trainer rank 1", "commit"});
  CheckRefused(second.Commit(2, 0).status, StatusCode::ABORTED, {"trainer rank 1"});
}

TEST_CASE("an operator can give an update up") {
  const Model model = MixedModel();
  Daemon daemon;
  Holder engine(daemon.Connect(), EngineIn("i", Spec()), HoldWhole(model));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  v1::AbortUpdateRequest request;
  request.set_group("g");
  request.set_reason("maintenance window");
  REQUIRE_OK(daemon.Call(&v1::Operator::Stub::AbortUpdate, request));
  CheckRefused(trainer.Commit(1, 0).status, StatusCode::ABORTED,
               {"operator", "maintenance window"});
  CHECK_THAT(Aborted(&engine.engine(), false), Catch::Contains("maintenance window"));
  Install(&trainer, model, 2);
}

// ---- the daemon ----

TEST_CASE("an engine whose daemon is killed between Ready and the outcome has unknown weights") {
  Daemon daemon;
  const Model model = PlainModel(1, 4, 4);
  const auto attach = [&](const std::string& instance) {
    client::EngineOptions options;
    options.connect.socket = daemon.socket();
    options.connect.group = "g";
    options.connect.spec =
        client::GroupSpec{.trainer_ranks = 1, .min_instances = 2, .slot_bytes = 65'536, .slots = 4};
    options.instance = instance;
    auto engine = client::Engine::Attach(options);
    REQUIRE(engine.ok());
    auto region = (*engine)->NewRegion(4096);
    REQUIRE(region.ok());
    Layout layout = HoldWhole(model).layout;
    for (Piece& piece : layout.pieces) piece.region = (*region)->id();
    REQUIRE((*engine)->Register(layout).ok());
    return *std::move(engine);
  };
  const std::unique_ptr<client::Engine> ready = attach("ready");
  const std::unique_ptr<client::Engine> unready = attach("unready");
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", Spec(1, 2)));
  REQUIRE(trainer.attached().ok());
  auto begun = std::async(std::launch::async, [&] { return trainer.Begin(1); });
  for (client::Engine* engine : {ready.get(), unready.get()}) {
    const auto event = engine->Next(kDeadline);
    REQUIRE(event.ok());
    REQUIRE(std::holds_alternative<client::Prepare>(*event));
    CHECK(engine->weights() == client::Weights::kPaused);
  }
  REQUIRE(ready->Ready(Version(1)).ok());
  REQUIRE(Eventually([&] {
    v1::ListMembersRequest request;
    request.set_group("g");
    const auto members = daemon.Call(&v1::Operator::Stub::ListMembers, request);
    for (const v1::MemberStatus& member : members.response.members()) {
      if (member.instance() == "ready") return member.state() == "ready";
    }
    return false;
  }));
  daemon.Signal(SIGKILL);
  CHECK(begun.get().status.error_code() == StatusCode::UNAVAILABLE);
  for (client::Engine* engine : {ready.get(), unready.get()}) {
    CHECK(!engine->Next(kDeadline).ok());
    CHECK(!engine->version().has_value());
  }
  CHECK(ready->weights() == client::Weights::kUnknown);
  // An engine that did not say Ready was not written.
  CHECK(unready->weights() == client::Weights::kClean);
}

TEST_CASE("SIGTERM lets the running update end, takes no new one, and ends with exit code 0") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec();
  Daemon daemon;
  Holder engine(daemon.Connect(), EngineIn("i", spec), HoldWhole(model));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  Holder other_engine(daemon.Connect(), RawEngine::Hello("other", "i"), HoldWhole(model));
  RawTrainer other(daemon.Connect(), RawTrainer::Hello("other"));
  REQUIRE(trainer.attached().ok());
  REQUIRE(other.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, true, {0, 1, 2})));

  daemon.Signal(SIGTERM);
  REQUIRE(trainer.events().WaitFor(v1::TrainerEvent::kDraining).has_value());
  REQUIRE(other.events().WaitFor(v1::TrainerEvent::kDraining).has_value());
  REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kDraining).has_value());
  CheckRefused(other.Begin(1).status, StatusCode::UNAVAILABLE, {"drain"});
  RawTrainer newcomer(daemon.Connect(), RawTrainer::Hello("fresh"));
  CheckRefused(newcomer.attached(), StatusCode::UNAVAILABLE, {"drain"});
  CHECK(!daemon.Status().serving());

  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 1, true,
                                          {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14})));
  REQUIRE_OK(trainer.Commit(1, 2));
  REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kCommitted).has_value());
  CHECK(engine.Difference(model, BytesOf(model, 1)) == "");
  CHECK(daemon.WaitExit() == 0);
  CheckRefused(trainer.events().WaitEnd().value_or(grpc::Status::OK), StatusCode::UNAVAILABLE,
               {"stops"});
  CHECK(access(daemon.socket().c_str(), F_OK) != 0);
}

TEST_CASE("SIGTERM with an update that nobody ends waits for its deadline and no longer") {
  const Model model = MixedModel();
  Daemon daemon;
  Holder engine(daemon.Connect(), EngineIn("i", Spec()), HoldWhole(model));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(BeginOf(1, false, kLimitMs)));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, true, {0})));
  CHECK(daemon.Stop() == 0);
  CHECK_THAT(Aborted(&engine.engine(), true), Catch::Contains("deadline"));
}

}  // namespace
}  // namespace refitd::e2e
