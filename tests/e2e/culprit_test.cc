// The trainer's daemon goes away in the data phase: engines of other daemons, the group's status
// and GetUpdate must name that daemon.
#include <fmt/format.h>
#include <signal.h>

#include <catch2/catch.hpp>
#include <future>
#include <string>
#include <vector>

#include "proto/grpc_status.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

constexpr int kTensors = 8;

std::vector<std::string> Flags(const std::string& id, int silence_ms) {
  return {"--daemon-id=" + id, "--listen-tcp=127.0.0.1:0",
          fmt::format("--peers-silence-ms={}", silence_ms), "--peers-wire-ms=2000"};
}

template <typename Hello>
Hello In(Hello hello, const Daemon& coordinator) {
  hello.set_coordinator(coordinator.address());
  return hello;
}

// What a program decides by: the daemon is a suspect, or the trainer rank on it is.
void CheckSuspect(const v1::Failure& failure) {
  REQUIRE(failure.suspects_size() > 0);
  CHECK(failure.suspects(0).daemon() == "source");
  CHECK(failure.weights() == v1::WEIGHTS_DIRTY);
}

enum class When {
  kBetween,  // a bucket has passed, nothing is on the wire
  kMoving,   // a bucket is most likely on the wire
};

// The coordinator "home" and the daemon "sink" have an engine each; "source" has the trainer.
void Check(int signal, When when, int silence_ms) {
  const Model model = PlainModel(kTensors, 1024, 4096);  // 64 MiB
  const v1::GroupSpec spec = Spec(1, 2, int64_t{1} << 20, 4);
  Daemon home(Flags("home", silence_ms));
  Daemon source(Flags("source", silence_ms));
  Daemon sink(Flags("sink", silence_ms));
  Holder near(home.Connect(), RawEngine::Hello("g", "near", 0, 1, v1::DELIVERY_IN_PLACE, spec),
              HoldWhole(model));
  Holder far(sink.Connect(),
             In(RawEngine::Hello("g", "far", 0, 1, v1::DELIVERY_IN_PLACE, spec), home),
             HoldWhole(model));
  RawTrainer trainer(source.Connect(), In(RawTrainer::Hello("g", spec), home));
  REQUIRE(trainer.attached().ok());
  const int64_t tensor_bytes = TensorBytes(model[0]);
  SharedMemory memory = trainer.NewMemory(ModelBytes(model));
  REQUIRE(memory.region_id != 0);
  const auto bucket = [&](int64_t seq, int first, int count) {
    std::vector<int> indices;
    for (int t = first; t < first + count; ++t) indices.push_back(t);
    v1::Bucket b = Describe(model, seq, indices);
    for (const int t : indices) {
      v1::RegionRef* ref = b.mutable_regions()->add_refs();
      ref->set_region_id(memory.region_id);
      ref->set_byte_offset(t * tensor_bytes);
    }
    return b;
  };
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, bucket(0, 0, 1)));
  std::future<grpc::Status> rest;
  if (when == When::kMoving) {
    rest = std::async(std::launch::async,
                      [&] { return trainer.Push(1, bucket(1, 1, kTensors - 1)).status; });
    const int64_t before = home.Resources().wire_bytes_received();
    REQUIRE(Eventually([&] { return home.Resources().wire_bytes_received() > before; }));
  }
  if (signal == SIGKILL) {
    source.Kill();
  } else {
    source.Signal(SIGSTOP);
  }
  // Both instances are dirty: the lost daemon may have sent more to one than to the other.
  for (Holder* engine : {&near, &far}) {
    const auto event = engine->engine().events().WaitFor(v1::EngineEvent::kAborted);
    REQUIRE(event.has_value());
    CHECK_THAT(event->aborted().reason(), Catch::Contains("daemon source"));
    CheckSuspect(event->aborted().failure());
    CHECK(event->aborted().failure().dirty_count() == 1);  // the rank's own instance
  }
  const v1::UpdateStatus update = home.Group("g").update();
  CHECK(update.state() == "aborted");
  CHECK_THAT(update.reason(), Catch::Contains("daemon source"));
  for (Daemon* told : {&home, &sink}) {
    RawTrainer asker(told->Connect(), RawTrainer::Hello("other"));
    Outcome<v1::GetUpdateResponse> past;
    // A joined daemon may hear of the end after its engine.
    CHECK(Eventually([&] {
      past = asker.GetUpdate("g", 1);
      return past.response.outcome() == v1::UPDATE_OUTCOME_ABORTED;
    }));
    REQUIRE_OK(past);
    CHECK_THAT(past.response.reason(), Catch::Contains("daemon source"));
    CheckSuspect(past.response.failure());
    CHECK(past.response.failure().dirty_count() == 2);
    CHECK(past.response.failure().version() == 1);
  }
  if (signal != SIGKILL) source.Signal(SIGCONT);
  if (rest.valid()) CHECK_FALSE(rest.get().ok());
}

constexpr int kSoon = 1'000;
constexpr int kLater = 6'000;  // the wire's own limit passes first

TEST_CASE("a killed source daemon is named to all that are left") {
  Check(SIGKILL, When::kBetween, kSoon);
  Check(SIGKILL, When::kMoving, kSoon);
}

TEST_CASE("a stopped source daemon is named to all that are left") {
  Check(SIGSTOP, When::kBetween, kSoon);
  Check(SIGSTOP, When::kMoving, kSoon);
}

TEST_CASE("a source daemon that stopped sending was named by its rank only") {
  Check(SIGSTOP, When::kMoving, kLater);
}

// What a daemon answers at once where an engine's tensors are too many.
void CheckTooMany(const grpc::Status& status) {
  INFO(status.error_message());
  CHECK(status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  CHECK_THAT(status.error_message(), Catch::Contains("engine far rank 0") &&
                                         Catch::Contains("on sink") && Catch::Contains("262145") &&
                                         Catch::Contains("262144 (kMaxTensorsPerLayout)"));
  const auto failure = FailureOf(FromGrpc(status));
  REQUIRE(failure.suspects.size() == 1);
  CHECK(failure.suspects[0].instance == "far");
}

Layout ManyTensors(RegionId region) {
  Layout layout;
  for (int64_t t = 0; t <= kMaxTensorsPerLayout; ++t) {
    layout.tensors.push_back({fmt::format("t{}", t), DType::kUint8, {1}});
    layout.pieces.push_back({static_cast<uint32_t>(t), {{0}, {1}}, region, t * 64, {1}});
  }
  layout.binding_generation = 1;
  return layout;
}

TEST_CASE("a trainer waited out its deadline for another daemon's engine with too many tensors") {
  Daemon home(Flags("home", kLater));
  Daemon sink(Flags("sink", kLater));
  const v1::GroupSpec spec = Spec();
  RawTrainer trainer(home.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  std::future<grpc::Status> begin;
  // The update waits for instances before any engine is refused.
  const auto begin_and_wait = [&](int64_t version) {
    begin = std::async(std::launch::async, [&, version] { return trainer.Begin(version).status; });
    REQUIRE(Eventually([&] { return home.Group("g").update().version() == version; }));
  };
  SECTION("of its layout") {
    RawEngine far(sink.Connect(), In(RawEngine::Hello("g", "far"), home));
    REQUIRE(far.attached().ok());
    SharedMemory memory = far.NewMemory((kMaxTensorsPerLayout + 1) * 64);
    begin_and_wait(1);
    const auto registered = far.Register(ManyTensors(RegionId(memory.region_id)));
    CHECK(registered.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
    CheckTooMany(begin.get());
    CheckTooMany(trainer.Begin(2).status);
  }
  SECTION("of its manifest") {
    begin_and_wait(1);
    v1::EngineHello hello = In(RawEngine::Hello("g", "far", 0, 1, v1::DELIVERY_LOADER), home);
    hello.set_manifest_tensors(kMaxTensorsPerLayout + 1);
    RawEngine far(sink.Connect(), hello);
    CHECK(far.attached().error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
    CheckTooMany(begin.get());
  }
}

}  // namespace
}  // namespace refitd::e2e
