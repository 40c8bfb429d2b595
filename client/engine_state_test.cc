#include "client/engine_state.h"

#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

namespace refitd::client {
namespace {

constexpr Version kOld(3);
constexpr Version kNew(4);
constexpr UpdateId kUpdate(7);

// Ways to reach each phase, from an engine that serves kOld.
struct Reached {
  std::string phase;
  bool in_update;
  bool ready_due;
  bool answered;  // Ready was sent and no outcome came
  bool given_up;
  std::function<void(EngineState*)> reach;
};

std::vector<Reached> Phases() {
  const auto prepared = [](EngineState* s) { s->OnPrepare(kNew, kUpdate); };
  const auto ready = [=](EngineState* s) {
    prepared(s);
    REQUIRE(s->Ready(kNew).ok());
  };
  return {
      {"Idle", false, false, false, false, [](EngineState*) {}},
      {"Prepared", true, true, false, false, prepared},
      {"Refused", true, false, false, true,
       [=](EngineState* s) {
         prepared(s);
         REQUIRE(s->Fail(kNew).ok());
       }},
      {"Ready", true, false, true, false, ready},
      {"Failed", true, false, true, true,
       [=](EngineState* s) {
         ready(s);
         REQUIRE(s->Fail(kNew).ok());
       }},
      {"Lost", false, false, false, false, [](EngineState* s) { s->OnLost(); }},
  };
}

EngineState At(const Reached& phase) {
  EngineState state(kOld);
  phase.reach(&state);
  return state;
}

TEST_CASE("an engine serves what it held at attach until it gets another outcome") {
  CHECK(EngineState(kOld).version() == kOld);
  CHECK(EngineState(kOld).weights() == Weights::kClean);
  CHECK_FALSE(EngineState(std::nullopt).version().has_value());
}

TEST_CASE("a staged version is answered once, until its update goes on or ends") {
  EngineState state(kOld);
  const UpdateId next(8);
  CHECK(absl::IsFailedPrecondition(state.Processed(kUpdate).status()));
  state.OnStaged(kNew, kUpdate);
  CHECK(state.weights() == Weights::kClean);
  CHECK(state.version() == kOld);
  CHECK(absl::IsFailedPrecondition(state.Processed(next).status()));
  CHECK(absl::IsFailedPrecondition(state.Fail(kNew)));
  CHECK(state.Processed(kUpdate).value() == kNew);
  CHECK(absl::IsFailedPrecondition(state.Processed(kUpdate).status()));
  // The outcome without a Prepare is for the caller all the same, once.
  CHECK(state.OnAborted(kNew, /*dirty=*/false));
  CHECK_FALSE(state.OnAborted(kNew, /*dirty=*/false));
  CHECK(state.version() == kOld);
  state.OnStaged(kNew, next);
  CHECK(absl::IsFailedPrecondition(state.Processed(kUpdate).status()));
  SECTION("Prepare") { state.OnPrepare(kNew, next); }
  SECTION("Aborted") { state.OnAborted(kNew, /*dirty=*/false); }
  SECTION("the lease's end") { state.OnLost(); }
  CHECK(absl::IsFailedPrecondition(state.Processed(next).status()));
}

TEST_CASE("what the daemon found in the memory counts until a commit, and on clean weights only") {
  EngineState engine(std::nullopt);
  CHECK(engine.OnRestored(kOld));
  CHECK(engine.version() == kOld);
  CHECK_FALSE(engine.OnRestored(kNew));
  CHECK(engine.version() == kOld);
  EngineState dirty(std::nullopt, /*dirty=*/true);
  CHECK_FALSE(dirty.OnRestored(kOld));
  CHECK_FALSE(dirty.version().has_value());
  EngineState paused(std::nullopt);
  paused.OnPrepare(kNew, kUpdate);
  CHECK(paused.OnRestored(kOld));
  CHECK(paused.OnAborted(kNew, /*dirty=*/false));
  CHECK(paused.version() == kOld);
}

TEST_CASE("in every phase each answer is taken exactly where it is due") {
  for (const Reached& phase : Phases()) {
    INFO(phase.phase);
    CHECK(At(phase).Ready(kNew).ok() == phase.ready_due);
    CHECK(absl::IsFailedPrecondition(At(phase).Ready(kOld)));
    CHECK(At(phase).Fail(kNew).ok() == (phase.in_update && !phase.given_up));
    CHECK(absl::IsFailedPrecondition(At(phase).Fail(kOld)));
    CHECK(absl::IsFailedPrecondition(At(phase).Ack(kUpdate, PartSeq(0))));
    CHECK(At(phase).failed() == phase.given_up);
    CHECK((At(phase).weights() == Weights::kPaused) == phase.in_update);
    CHECK(At(phase).version().has_value() == !phase.in_update);
  }
}

TEST_CASE("a lost lease leaves unknown weights exactly between Ready and the outcome") {
  for (const Reached& phase : Phases()) {
    INFO(phase.phase);
    EngineState state = At(phase);
    state.OnLost();
    CHECK(state.weights() == (phase.answered ? Weights::kUnknown : Weights::kClean));
    CHECK(state.version() == (phase.answered ? std::nullopt : std::optional(kOld)));
    state.OnLost();
    CHECK(state.weights() == (phase.answered ? Weights::kUnknown : Weights::kClean));
  }
}

TEST_CASE("attaching again changes no weights: unknown weights stay so until a commit") {
  for (const Reached& phase : Phases()) {
    INFO(phase.phase);
    EngineState state = At(phase);
    state.OnLost();
    const Weights lost = state.weights();
    const std::optional<Version> held = state.version();
    state.OnReattached();
    CHECK(state.weights() == lost);
    CHECK(state.version() == held);
    CHECK(held.has_value() == (lost == Weights::kClean));
    // Answers to the lost update are not due any more.
    CHECK(absl::IsFailedPrecondition(state.Ready(kNew)));
    CHECK_FALSE(state.OnCommitted(kNew));
    state.OnPrepare(kNew, kUpdate);
    REQUIRE(state.OnAborted(kNew, false));
    CHECK(state.weights() == lost);
    state.OnPrepare(kNew, kUpdate);
    REQUIRE(state.Ready(kNew).ok());
    REQUIRE(state.OnCommitted(kNew));
    CHECK(state.weights() == Weights::kClean);
    CHECK(state.version() == kNew);
  }
}

TEST_CASE("only a rank that answered Ready takes Committed, and after Fail it makes it dirty") {
  for (const Reached& phase : Phases()) {
    INFO(phase.phase);
    EngineState state = At(phase);
    CHECK_FALSE(state.OnCommitted(kOld));
    const bool taken = state.OnCommitted(kNew);
    CHECK(taken == phase.answered);
    if (!taken) continue;
    CHECK(state.weights() == (phase.given_up ? Weights::kDirty : Weights::kClean));
    CHECK(state.version() == (phase.given_up ? std::nullopt : std::optional(kNew)));
    CHECK_FALSE(state.OnCommitted(kNew));
    state.OnLost();
    CHECK(state.weights() == (phase.given_up ? Weights::kDirty : Weights::kClean));
  }
}

TEST_CASE("an abort before anything was written leaves the old version good, a dirty one none") {
  for (const Reached& phase : Phases()) {
    INFO(phase.phase);
    EngineState clean = At(phase);
    CHECK(clean.OnAborted(kNew, false) == phase.in_update);
    CHECK(clean.version() == kOld);
    EngineState dirty = At(phase);
    CHECK(dirty.OnAborted(kNew, true));
    CHECK(dirty.weights() == Weights::kDirty);
    CHECK_FALSE(dirty.version().has_value());
  }
}

TEST_CASE("a dirty rank stays dirty through a clean abort, and a commit heals it") {
  EngineState state(kOld);
  state.OnPrepare(kNew, kUpdate);
  REQUIRE(state.Ready(kNew).ok());
  REQUIRE(state.OnAborted(kNew, true));
  const Version next(5);
  state.OnPrepare(next, UpdateId(8));
  REQUIRE(state.OnAborted(next, false));
  CHECK(state.weights() == Weights::kDirty);
  state.OnPrepare(next, UpdateId(8));
  REQUIRE(state.Ready(next).ok());
  REQUIRE(state.OnCommitted(next));
  CHECK(state.weights() == Weights::kClean);
  CHECK(state.version() == next);
}

TEST_CASE("a rank that attached as dirty says so, through aborts and losses, until a commit") {
  EngineState state(std::nullopt, /*dirty=*/true);
  CHECK(state.weights() == Weights::kDirty);
  CHECK_FALSE(state.version().has_value());
  state.OnPrepare(kNew, kUpdate);
  CHECK(state.weights() == Weights::kPaused);
  SECTION("aborted clean") { REQUIRE(state.OnAborted(kNew, false)); }
  SECTION("aborted clean after Ready") {
    REQUIRE(state.Ready(kNew).ok());
    REQUIRE(state.OnAborted(kNew, false));
  }
  SECTION("lost before Ready, and attached again") {
    state.OnLost();
    state.OnReattached();
  }
  CHECK(state.weights() == Weights::kDirty);
  CHECK_FALSE(state.version().has_value());
  state.OnPrepare(kNew, kUpdate);
  REQUIRE(state.Ready(kNew).ok());
  REQUIRE(state.OnCommitted(kNew));
  CHECK(state.weights() == Weights::kClean);
  CHECK(state.version() == kNew);
}

TEST_CASE("a Prepare without the outcome of the update before makes the rank dirty") {
  EngineState state(kOld);
  state.OnPrepare(kNew, kUpdate);
  REQUIRE(state.Ready(kNew).ok());
  state.OnPrepare(Version(5), UpdateId(9));
  REQUIRE(state.OnAborted(Version(5), false));
  CHECK(state.weights() == Weights::kDirty);
}

TEST_CASE("each part is acknowledged once, also after the update was aborted") {
  EngineState state(kOld);
  state.OnPrepare(kNew, kUpdate);
  REQUIRE(state.Ready(kNew).ok());
  REQUIRE(state.OnPart(kUpdate, PartSeq(0)));
  REQUIRE(state.OnPart(kUpdate, PartSeq(1)));
  CHECK_FALSE(state.OnPart(kUpdate, PartSeq(1)));
  CHECK_FALSE(state.OnPart(UpdateId(6), PartSeq(2)));
  CHECK(state.Ack(kUpdate, PartSeq(1)).ok());
  CHECK(absl::IsFailedPrecondition(state.Ack(kUpdate, PartSeq(1))));
  REQUIRE(state.OnAborted(kNew, true));
  CHECK(state.Ack(kUpdate, PartSeq(0)).ok());
  CHECK(absl::IsFailedPrecondition(state.Ack(kUpdate, PartSeq(0))));
}

}  // namespace
}  // namespace refitd::client
