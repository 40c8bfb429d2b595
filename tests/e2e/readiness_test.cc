// Readiness of instances over two real daemons, as probes and load balancers ask for it: gRPC's
// health service under the names of instances.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <string>

#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using grpc::StatusCode;
using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

HealthCheckRequest RequestOf(const std::string& instance) {
  HealthCheckRequest request;
  request.set_service("refitd.v1.Engine/g/" + instance);
  return request;
}

// "SERVING", "NOT_SERVING", or gRPC's code of a refusal.
std::string HealthAt(const Daemon& daemon, const std::string& instance) {
  const auto stub = Health::NewStub(daemon.Connect());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, RequestOf(instance), &response);
  if (status.error_code() == StatusCode::NOT_FOUND) return "NOT_FOUND";
  if (!status.ok()) return fmt::format("code {}", static_cast<int>(status.error_code()));
  return HealthCheckResponse::ServingStatus_Name(response.status());
}

bool Becomes(const Daemon& daemon, const std::string& instance, const std::string& health) {
  return Eventually([&] { return HealthAt(daemon, instance) == health; });
}

// A watch of one instance.
class Watch {
 public:
  Watch(const Daemon& daemon, const std::string& instance)
      : stub_(Health::NewStub(daemon.Connect())) {
    context_.set_deadline(std::chrono::system_clock::now() + kDeadline);
    reader_ = stub_->Watch(&context_, RequestOf(instance));
  }
  ~Watch() {
    context_.TryCancel();
    reader_->Finish();
  }
  // "END": the stream has ended.
  std::string Next() {
    HealthCheckResponse response;
    if (!reader_->Read(&response)) return "END";
    return HealthCheckResponse::ServingStatus_Name(response.status());
  }

 private:
  const std::unique_ptr<Health::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> reader_;
};

std::vector<std::string> Flags(const std::string& daemon_id) {
  return {"--listen-tcp=127.0.0.1:0", "--daemon-id=" + daemon_id, "--limits-ready-ms=500"};
}

v1::EngineHello HelloOf(const std::string& instance, const v1::GroupSpec& spec) {
  return RawEngine::Hello("g", instance, 0, 1, v1::DELIVERY_IN_PLACE, spec);
}

template <typename Hello>
Hello In(Hello hello, const Daemon& coordinator) {
  hello.set_coordinator(coordinator.address());
  return hello;
}

v1::GroupSpec SpecWithLag(int64_t max_lag) {
  v1::GroupSpec spec = Spec();
  spec.set_max_lag(max_lag);
  return spec;
}

// Begins the version and pushes all of it.
void PushAll(RawTrainer* trainer, const Model& model, int64_t version, bool evict_late = false) {
  v1::BeginRequest begin;
  begin.set_version(version);
  begin.set_evict_late(evict_late);
  const auto begun = trainer->Begin(begin);
  INFO(begun.status.error_message());
  REQUIRE(begun.ok());
  REQUIRE(trainer->Push(version, InlineBucket(model, BytesOf(model, version), 0, false)).ok());
}

TEST_CASE(
    "every daemon of a group tells every instance's readiness, before, in and after updates") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = SpecWithLag(0);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  CHECK(HealthAt(a, "near") == "NOT_FOUND");
  Watch watch(b, "near");
  CHECK(watch.Next() == "SERVICE_UNKNOWN");

  auto near = std::make_unique<Holder>(a.Connect(), HelloOf("near", spec), HoldWhole(model));
  Holder far(b.Connect(), In(HelloOf("far", spec), a), HoldWhole(model));
  for (const Daemon* daemon : {&a, &b}) {
    CHECK(Becomes(*daemon, "near", "SERVING"));
    CHECK(Becomes(*daemon, "far", "SERVING"));
  }
  std::string told = watch.Next();
  while (told == "NOT_SERVING") told = watch.Next();  // until the layout has come
  CHECK(told == "SERVING");

  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  PushAll(&trainer, model, 1);
  CHECK(HealthAt(a, "near") == "NOT_SERVING");  // its bytes are being written
  CHECK(watch.Next() == "NOT_SERVING");
  CHECK(Becomes(b, "far", "NOT_SERVING"));
  REQUIRE(trainer.Commit(1, 1).ok());
  CHECK(watch.Next() == "SERVING");
  CHECK(HealthAt(a, "far") == "SERVING");
  CHECK(Becomes(b, "far", "SERVING"));

  // An instance that came late does not hold the group's version.
  Holder late(b.Connect(), In(HelloOf("late", spec), a), HoldWhole(model));
  CHECK(Becomes(b, "late", "NOT_SERVING"));
  PushAll(&trainer, model, 2);
  REQUIRE(trainer.Commit(2, 1).ok());
  CHECK(Becomes(b, "late", "SERVING"));

  // The process of an instance ends.
  near.reset();
  CHECK(Becomes(a, "near", "NOT_FOUND"));
  CHECK(Becomes(b, "near", "NOT_FOUND"));
  do {
    told = watch.Next();
  } while (told == "NOT_SERVING" || told == "SERVING");
  CHECK(told == "SERVICE_UNKNOWN");
}

TEST_CASE("an aborted update makes the instance unready only if it wrote to the instance") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = SpecWithLag(5);
  Daemon a(Flags("a"));
  Holder near(a.Connect(), HelloOf("near", spec), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  REQUIRE(trainer.Begin(1).ok());
  CHECK(HealthAt(a, "near") == "SERVING");
  REQUIRE(trainer.Abort(1, "on purpose").ok());
  CHECK(HealthAt(a, "near") == "SERVING");
  PushAll(&trainer, model, 2);
  REQUIRE(trainer.Abort(2, "on purpose").ok());
  CHECK(HealthAt(a, "near") == "NOT_SERVING");
}

TEST_CASE("an instance that misses versions stays ready up to max_lag") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = SpecWithLag(1);
  Daemon a(Flags("a"));
  Holder good(a.Connect(), HelloOf("good", spec), HoldWhole(model));
  Holder late(a.Connect(), HelloOf("late", spec), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  PushAll(&trainer, model, 1);
  REQUIRE(trainer.Commit(1, 1).ok());
  late.engine().Hold(/*ready=*/true, /*ack=*/false);
  for (const int64_t version : {2, 3}) {
    PushAll(&trainer, model, version, /*evict_late=*/true);
    REQUIRE(trainer.Commit(version, 1).ok());
    CHECK(HealthAt(a, "good") == "SERVING");
    CHECK(HealthAt(a, "late") == (version == 2 ? "SERVING" : "NOT_SERVING"));
    const v1::GroupStatus group = a.Group("g");
    for (const v1::InstanceStatus& instance : group.instances()) {
      CHECK(instance.lag() == (instance.name() == "late" ? version - 1 : 0));
      CHECK(instance.ready() == instance.unready_reason().empty());
    }
  }
}

TEST_CASE("the loss of the coordinator leaves engines in service that hold what they held") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = SpecWithLag(0);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder far(b.Connect(), In(HelloOf("far", spec), a), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  PushAll(&trainer, model, 1);
  REQUIRE(trainer.Commit(1, 1).ok());
  REQUIRE(Becomes(b, "far", "SERVING"));
  Watch watch(b, "far");
  CHECK(watch.Next() == "SERVING");
  const std::string address = a.address();
  const uint64_t incarnation = a.Group("g").incarnation();
  a.Kill();
  REQUIRE(far.engine().events().WaitEnd().has_value());

  // The rank comes again, as clients do, and waits for the coordinator.
  v1::EngineHello hello = HelloOf("far", spec);
  hello.clear_spec();
  hello.set_coordinator(address);
  hello.set_wait_ms(60'000);
  hello.set_held_version(1);
  hello.set_held_origin(incarnation);
  {
    RawEngine again(b.Connect(), hello);
    CHECK(HealthAt(b, "far") == "SERVING");
  }
  // Another process without these weights takes the rank's place.
  hello.clear_held_version();
  hello.clear_held_origin();
  RawEngine fresh(b.Connect(), hello);
  CHECK(Becomes(b, "far", "NOT_SERVING"));
  CHECK(watch.Next() == "NOT_SERVING");
}

// Attaches an engine that claims version 1, over memory that holds `bytes`.
struct Claimant {
  Claimant(const Daemon& daemon, const v1::EngineHello& hello, const Model& model,
           const std::vector<std::string>& bytes)
      : engine(daemon.Connect(), hello) {
    REQUIRE(engine.attached().ok());
    Held held = HoldWhole(model);
    memory = engine.NewMemory(held.region_bytes);
    for (Piece& piece : held.layout.pieces) {
      piece.region = RegionId(memory.region_id);
      std::memcpy(memory.data() + piece.byte_offset, bytes[piece.tensor].data(),
                  bytes[piece.tensor].size());
    }
    held.layout.binding_generation = 1;
    REQUIRE(engine.Register(held.layout).ok());
  }
  RawEngine engine;
  SharedMemory memory;
};

TEST_CASE("an engine was ready whose memory did not hold the version that it claimed") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = SpecWithLag(0);
  Daemon a({"--listen-tcp=" + OwnLoopback(1) + ":0", "--daemon-id=a"});
  Daemon b(Flags("b"));
  // "far" claims at a joined daemon, and the others at the coordinator's.
  auto far = std::make_unique<Holder>(b.Connect(), In(HelloOf("far", spec), a), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  PushAll(&trainer, model, 1);
  REQUIRE(trainer.Commit(1, 1).ok());
  const auto committed = far->engine().events().WaitFor(v1::EngineEvent::kCommitted);
  REQUIRE(committed.has_value());
  REQUIRE(committed->committed().digest() != 0);
  const uint64_t incarnation = a.Group("g").incarnation();
  a.Kill();
  far.reset();
  a.Restart();

  const auto claims = [&](const std::string& instance) {
    v1::EngineHello hello = HelloOf(instance, spec);
    hello.set_held_version(1);
    hello.set_held_origin(incarnation);
    hello.set_held_digest(committed->committed().digest());
    hello.set_catch_up(true);
    return hello;
  };
  std::vector<std::string> changed = BytesOf(model, 1);
  changed[0][0] ^= 1;
  const Claimant same(a, claims("same"), model, BytesOf(model, 1));
  const Claimant other(a, claims("other"), model, changed);
  const Claimant far_same(b, In(claims("far"), a), model, BytesOf(model, 1));
  const Claimant far_other(b, In(claims("far-other"), a), model, changed);
  for (Daemon* daemon : {&a, &b}) {
    CHECK(Becomes(*daemon, "same", "SERVING"));
    CHECK(Becomes(*daemon, "far", "SERVING"));
    CHECK(Becomes(*daemon, "other", "NOT_SERVING"));
    CHECK(Becomes(*daemon, "far-other", "NOT_SERVING"));
  }
  CHECK_FALSE(a.Group("g").has_version());
}

TEST_CASE("names that no service has are refused") {
  Daemon a(Flags("a"));
  CHECK(HealthAt(a, "") == fmt::format("code {}", static_cast<int>(StatusCode::INVALID_ARGUMENT)));
  CHECK(HealthAt(a, "x/y") ==
        fmt::format("code {}", static_cast<int>(StatusCode::INVALID_ARGUMENT)));
}

}  // namespace
}  // namespace refitd::e2e
