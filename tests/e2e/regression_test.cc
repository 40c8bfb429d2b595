// Defects that were found once. Each test is named after its defect.
#include <signal.h>

#include <catch2/catch.hpp>

#include "proto/convert.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

TEST_CASE(
    "stale ready: the answer to an aborted update does not open the next one to its version") {
  const Model model = MixedModel();
  Daemon daemon;
  EngineOptions by_hand;
  by_hand.auto_ready = false;
  Holder engine(daemon.Connect(), RawEngine::Hello("g", "a"), HoldWhole(model), by_hand);
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());

  v1::BeginRequest request;
  request.set_version(1);
  std::thread lost([&] { trainer.Begin(request); });
  const auto first = engine.engine().events().WaitFor(v1::EngineEvent::kPrepare);
  REQUIRE(first.has_value());
  REQUIRE_OK(trainer.Abort(1, "tried"));
  lost.join();

  request.set_duration_ms(500);
  Outcome<v1::BeginResponse> second;
  std::thread again([&] { second = trainer.Begin(request); });
  REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kPrepare).has_value());
  v1::EngineMessage stale;
  stale.mutable_ready()->set_version(1);
  stale.mutable_ready()->set_update_id(first->prepare().update_id());
  engine.engine().events().Write(stale);
  again.join();
  CheckRefused(second.status, grpc::StatusCode::DEADLINE_EXCEEDED, {"engine a rank 0"});
}

TEST_CASE("cut short layout: a stream without its last chunk registers nothing") {
  const Model model = MixedModel();
  Daemon daemon;
  RawEngine engine(daemon.Connect(), RawEngine::Hello("g", "a"));
  REQUIRE(engine.attached().ok());
  Held held = HoldWhole(model);
  const SharedMemory memory = engine.NewMemory(held.region_bytes);
  for (Piece& piece : held.layout.pieces) piece.region = RegionId(memory.region_id);
  held.layout.binding_generation = 1;
  std::vector<v1::LayoutChunk> chunks = EncodeLayout(held.layout, engine.welcome().lease(), 1);
  REQUIRE(chunks.size() > 1);
  chunks.pop_back();
  CheckRefused(engine.RegisterChunks(chunks).status, grpc::StatusCode::INVALID_ARGUMENT, {"last"});
  CHECK(daemon.InstanceState("g", "a") == "forming");
}

TEST_CASE(
    "one memfd twice: an engine can't hide two tensors in the same bytes behind two regions") {
  Daemon daemon;
  RawEngine engine(daemon.Connect(), RawEngine::Hello("g", "a"));
  REQUIRE(engine.attached().ok());
  const SharedMemory memory = engine.NewMemory(4096);
  REQUIRE(memory.region_id != 0);
  const auto reply = engine.descriptors().Register(memory.fd.get(), 4096);
  REQUIRE(reply.has_value());
  CHECK(reply->code == grpc::StatusCode::ALREADY_EXISTS);
}

TEST_CASE("cut character: a long reason stays readable for everybody") {
  Daemon daemon;
  const Model model = MixedModel();
  EngineOptions by_hand;
  by_hand.auto_ready = false;
  Holder engine(daemon.Connect(), RawEngine::Hello("g", "a"), HoldWhole(model), by_hand);
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  std::thread failing([&] {
    if (engine.engine().events().WaitFor(v1::EngineEvent::kPrepare).has_value()) {
      engine.engine().Fail(1, std::string(511, 'a') + "\u00e9\u00e9");
    }
  });
  CheckRefused(trainer.Begin(1).status, grpc::StatusCode::ABORTED, {"aaaa"});
  failing.join();
  CHECK(daemon.Status().serving());
  CHECK(daemon.Group("g").update().outcome() == v1::UPDATE_OUTCOME_ABORTED);
}

TEST_CASE("patience: a second SIGTERM ends a drain that waits for an update") {
  const Model model = MixedModel();
  Daemon daemon;
  Holder engine(daemon.Connect(), RawEngine::Hello("g", "a"), HoldWhole(model));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  daemon.Signal(SIGTERM);
  REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kDraining).has_value());
  daemon.Signal(SIGTERM);
  CHECK(engine.engine().events().WaitFor(v1::EngineEvent::kAborted).has_value());
  CHECK(daemon.WaitExit() == 0);
}

}  // namespace
}  // namespace refitd::e2e
