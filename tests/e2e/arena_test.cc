// Engines whose weights lie in arenas, with a real daemon: versions are staged while they serve,
// and flipped when they are complete. The ranks check their memory, byte for byte and outside of
// their boxes too, whenever they are idle and before each flip (P1, P2).
#include <catch2/catch.hpp>

#include "tests/e2e/client_members.h"

namespace refitd::e2e {
namespace {

using std::chrono::milliseconds;

client::ConnectOptions ConnectTo(const Daemon& daemon, milliseconds reattach = milliseconds(0)) {
  client::ConnectOptions connect;
  connect.socket = daemon.socket();
  connect.group = "g";
  connect.reattach = reattach;
  return connect;
}

client::ConnectOptions WithSpec(client::ConnectOptions connect, int instances) {
  connect.spec = client::GroupSpec{
      .trainer_ranks = 1, .min_instances = instances, .slot_bytes = 65'536, .slots = 4};
  return connect;
}

client::EngineOptions Shadowed(client::ConnectOptions connect, const std::string& instance,
                               int rank = 0, int world_size = 1) {
  return {
      .connect = std::move(connect), .instance = instance, .rank = rank, .world_size = world_size};
}

void Committed(Rank* rank, int64_t version) {
  REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
}

// A trainer that pushes, and shadowed instances "a" (whole) and "b" (two ranks, strided).
struct Fixture {
  explicit Fixture(milliseconds reattach = milliseconds(0))
      : pusher(WithSpec(ConnectTo(daemon, reattach), 2), model),
        a(Shadowed(ConnectTo(daemon, reattach), "a"), model, HoldWhole(model), true),
        b0(Shadowed(ConnectTo(daemon, reattach), "b", 0, 2), model, HoldSlice(model, 0, 0, 2),
           true),
        b1(Shadowed(ConnectTo(daemon, reattach), "b", 1, 2), model, HoldSlice(model, 0, 1, 2),
           true) {}
  void Installed(int64_t version) {
    const absl::Status installed = pusher.Install(version);
    INFO(installed);
    REQUIRE(installed.ok());
    for (Rank* rank : ranks()) Committed(rank, version);
  }
  std::vector<Rank*> ranks() { return {&a, &b0, &b1}; }

  const Model model = MixedModel();
  Daemon daemon;
  Pusher pusher;
  Rank a;
  Rank b0;
  Rank b1;
};

TEST_CASE("versions are staged while engines serve, at addresses that stay") {
  Fixture f;
  const char* const memory = f.a.memory();
  for (int64_t version = 1; version <= 8; ++version) {
    int checks = 0;
    const absl::Status installed = f.pusher.Install(version, [&](Pusher::Step step) {
      if (step != Pusher::kAllBuckets) return;
      // The version lies in the backs; the rank has served, and checked, what it had before.
      checks = f.a.seen().checks;
      CHECK(f.a.Await([&](const Rank::Seen& s) { return s.checks > checks + 1; }));
      CHECK(f.a.seen().flips == version - 1);
    });
    INFO(installed);
    REQUIRE(installed.ok());
    for (Rank* rank : f.ranks()) Committed(rank, version);
  }
  CHECK(f.a.memory() == memory);
  for (Rank* rank : f.ranks()) {
    CHECK(rank->seen().flips == 8);
    CHECK(rank->seen().prepares == 8);
  }
}

TEST_CASE("compiled refits are staged too, and their moves are kept for each side") {
  const Model model = MixedModel();
  Daemon daemon;
  Shards trainer(ShardsOn(daemon), model, HoldWhole(model));
  REQUIRE(trainer.Register().ok());
  Rank whole(Shadowed(ConnectTo(daemon), "whole"), model, HoldWhole(model), true);
  Rank in_place(ConnectTo(daemon), "in_place", client::Delivery::kInPlace, model);
  for (int64_t version = 1; version <= 6; ++version) {
    trainer.Fill(version);
    const auto done = trainer.trainer().Refit({.version = Version(version)});
    INFO(done.status());
    REQUIRE(done.ok());
    Committed(&whole, version);
    Committed(&in_place, version);
  }
  CHECK(whole.seen().flips == 6);
  CHECK(in_place.seen().flips == 0);
}

TEST_CASE("an update that is given up before the flips is not seen by the engines") {
  Fixture f;
  f.Installed(1);
  const auto update = f.pusher.trainer().Begin({.version = Version(2)});
  REQUIRE(update.ok());
  REQUIRE((*update)->Abort("changed my mind").ok());
  f.Installed(3);
  for (Rank* rank : f.ranks()) {
    CHECK(rank->seen().aborts == 0);
    CHECK(rank->seen().prepares == 2);
  }
}

TEST_CASE("a rank that can't flip makes all flip back, to the version before") {
  Fixture f;
  f.Installed(1);
  f.b1.Flip(Rank::Flips::kFails);
  const absl::Status failed = f.pusher.Install(2);
  CHECK(absl::IsAborted(failed));
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.aborts == 1; }));
    CHECK_FALSE(rank->seen().aborted.dirty);
    CHECK(rank->engine().version() == Version(1));
  }
  f.b1.Flip(Rank::Flips::kWell);
  f.Installed(3);
  f.Installed(4);
}

TEST_CASE("a rank that is silent when it has to flip is evicted, and catches up") {
  const Model model = MixedModel();
  Daemon daemon({"--limits-ready-ms=300"});
  Pusher pusher(WithSpec(ConnectTo(daemon), 2), model);
  Rank a(Shadowed(ConnectTo(daemon), "a"), model, HoldWhole(model), true);
  Rank b(Shadowed(ConnectTo(daemon), "b"), model, HoldWhole(model), true);
  REQUIRE(pusher.Install(1).ok());
  b.Flip(Rank::Flips::kNever);
  const absl::Status installed = pusher.Install(2);
  INFO(installed);
  REQUIRE(installed.ok());
  Committed(&a, 2);
  REQUIRE(b.Await([](const Rank::Seen& s) { return s.aborts == 1; }));
  CHECK_FALSE(b.seen().aborted.dirty);
  b.Flip(Rank::Flips::kWell);
  Committed(&b, 2);  // by a catch-up
}

TEST_CASE("a trainer that dies while it stages changes nothing") {
  const Model model = MixedModel();
  Daemon daemon;
  Rank a(Shadowed(WithSpec(ConnectTo(daemon), 1), "a"), model, HoldWhole(model), true);
  {
    Pusher first(ConnectTo(daemon), model);
    REQUIRE(first.Install(1).ok());
  }
  Committed(&a, 1);
  {
    Pusher second(ConnectTo(daemon), model);
    const absl::Status given_up = second.Install(2, [&](Pusher::Step step) {
      if (step == Pusher::kFirstBucket) (void)second.trainer().Abort(Version(2), "gone");
    });
    CHECK_FALSE(given_up.ok());
  }
  Pusher third(ConnectTo(daemon), model);
  REQUIRE(third.Install(3).ok());
  Committed(&a, 3);
  CHECK(a.seen().aborts == 0);
}

TEST_CASE(
    "the daemon is killed while it stages, again and again: engines go on with what they have") {
  Fixture f(kDeadline);
  int64_t version = 0;
  f.Installed(++version);
  constexpr int kKills = 20;
  for (int kill = 1; kill <= kKills; ++kill) {
    const absl::Status lost = f.pusher.Install(version + 1, [&](Pusher::Step step) {
      if (step == (kill % 2 == 0 ? Pusher::kFirstBucket : Pusher::kAllBuckets)) f.daemon.Kill();
    });
    CHECK_FALSE(lost.ok());
    for (Rank* rank : f.ranks()) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.losses == kill; }));
      CHECK(rank->seen().lost_weights == Weights::kClean);
      CHECK(rank->engine().version() == Version(version));
    }
    f.daemon.Restart();
    for (Rank* rank : f.ranks()) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.reattached == kill; }));
      CHECK(rank->seen().held == Version(version));
    }
    REQUIRE(Eventually([&] { return f.pusher.trainer().reattachments() == kill; }));
    // An odd number of flips in each life, so that each daemon is given the other side as the
    // front.
    f.Installed(++version);
  }
}

TEST_CASE("an engine that registers again after flips is written where it does not read") {
  Fixture f;
  for (int64_t version = 1; version <= 6; ++version) {
    f.Installed(version);
    // After an odd and after an even number of flips.
    if (version % 3 != 0) REQUIRE(f.a.engine().Register(f.a.layout()).ok());
  }
}

// Rolls back, and waits until every rank serves that.
void RolledBack(Fixture* f, int64_t version, int64_t content) {
  const auto done = f->pusher.trainer().Rollback();
  INFO(done.status());
  REQUIRE(done.ok());
  CHECK(done->version == Version(version));
  CHECK(done->content == Version(content));
  for (Rank* rank : f->ranks()) {
    Committed(rank, version);
    CHECK(rank->seen().content == Version(content));
  }
}

TEST_CASE("a rollback serves the version before again, byte for byte, time after time") {
  Fixture f;
  const char* const memory = f.a.memory();
  f.Installed(1);
  f.Installed(2);
  RolledBack(&f, 3, 1);
  f.Installed(4);
  RolledBack(&f, 5, 1);
  f.Installed(6);
  f.Installed(7);
  RolledBack(&f, 8, 6);
  CHECK(f.pusher.trainer().group_version() == Version(8));
  // What was rolled back is gone, and so are backs that an update has begun to write.
  CHECK(absl::IsFailedPrecondition(f.pusher.trainer().Rollback().status()));
  f.Installed(9);
  const absl::Status given_up = f.pusher.Install(10, [&](Pusher::Step step) {
    if (step == Pusher::kFirstBucket) (void)f.pusher.trainer().Abort(Version(10), "no");
  });
  CHECK_FALSE(given_up.ok());
  REQUIRE(Eventually([&] {
    const absl::Status refused = f.pusher.trainer().Rollback().status();
    return absl::IsFailedPrecondition(refused) &&
           refused.message().find("no instance holds version 8") != std::string_view::npos;
  }));
  f.Installed(11);
  f.Installed(12);
  RolledBack(&f, 13, 11);
  CHECK(f.a.memory() == memory);
}

TEST_CASE("an operator rolls back, and in-place engines are filled from those that flipped") {
  const Model model = MixedModel();
  Daemon daemon;
  Pusher pusher(WithSpec(ConnectTo(daemon), 2), model);
  Rank a(Shadowed(ConnectTo(daemon), "a"), model, HoldWhole(model), true);
  Rank p(ConnectTo(daemon), "p", client::Delivery::kInPlace, model);
  REQUIRE(pusher.Install(1).ok());
  REQUIRE(pusher.Install(2).ok());
  v1::RollbackRequest request;
  request.set_group("g");
  request.set_version(2);
  const auto done = daemon.Call(&v1::Operator::Stub::Rollback, request);
  INFO(done.status.error_message());
  REQUIRE(done.status.ok());
  CHECK(done.response.version() == 3);
  CHECK(done.response.content_version() == 1);
  Committed(&a, 3);
  Committed(&p, 3);  // by a catch-up
  CHECK(p.seen().content == Version(1));
  v1::GetGroupRequest ask;
  ask.set_group("g");
  const auto group = daemon.Call(&v1::Operator::Stub::GetGroup, ask);
  REQUIRE(group.status.ok());
  CHECK(group.response.group().version() == 3);
  CHECK(group.response.group().content_version() == 1);
  CHECK_FALSE(group.response.group().has_previous());
  // The same call again, as after an answer that was lost.
  const auto again = daemon.Call(&v1::Operator::Stub::Rollback, request);
  REQUIRE(again.status.ok());
  CHECK(again.response.version() == 3);
}

TEST_CASE("a registration makes the backs copies: such a rank does not roll back") {
  Fixture f;
  f.Installed(1);
  f.Installed(2);
  REQUIRE(f.a.engine().Register(f.a.layout()).ok());
  // "a" is filled from "b".
  Committed(&f.a, 2);
  RolledBack(&f, 3, 1);
}

TEST_CASE("a registration that is refused has copied the backs: the rank does not flip to them") {
  Fixture f;
  f.Installed(1);
  f.Installed(2);
  Layout outside = f.a.layout();
  outside.pieces[0].byte_offset = int64_t{1} << 40;
  CHECK_FALSE(f.a.engine().Register(outside).ok());
  f.a.Flip(Rank::Flips::kRefused);
  const absl::Status refused = f.pusher.trainer().Rollback().status();
  CHECK(absl::IsAborted(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("a layout was registered"));
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.aborts == 1; }));
    CHECK(rank->engine().version() == Version(2));
  }
  f.a.Flip(Rank::Flips::kWell);
  RolledBack(&f, 3, 1);  // "b" flips, and "a" is filled from it
}

TEST_CASE("the version before is held until it is released") {
  const Model model = MixedModel();
  Daemon daemon;
  client::ConnectOptions connect = WithSpec(ConnectTo(daemon), 1);
  connect.spec->hold_previous_seconds = 600;
  Pusher pusher(connect, model);
  Rank a(Shadowed(ConnectTo(daemon), "a"), model, HoldWhole(model), true);
  REQUIRE(pusher.Install(1).ok());
  REQUIRE(pusher.Install(2).ok());
  const auto late = pusher.trainer().Begin({.version = Version(3), .duration = milliseconds(300)});
  CHECK(absl::IsDeadlineExceeded(late.status()));
  CHECK_THAT(std::string(late.status().message()), Catch::Contains("version 1, which is held for"));
  REQUIRE(pusher.trainer().ReleasePrevious().ok());
  REQUIRE(pusher.Install(3).ok());
  Committed(&a, 3);
}

TEST_CASE("layouts with backs that can't be are refused by name") {
  const Model model = PlainModel(1, 4, 8);
  Daemon daemon;
  auto attached = client::Engine::Attach(Shadowed(WithSpec(ConnectTo(daemon), 1), "a"));
  REQUIRE(attached.ok());
  client::Engine& engine = **attached;
  CHECK(engine.NewArena(0).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(engine.NewArena(-5).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_FALSE(engine.NewArena(int64_t{1} << 50).ok());
  auto arena = engine.NewArena(4096);
  auto region = engine.NewRegion(4096);
  REQUIRE(arena.ok());
  REQUIRE(region.ok());
  // Half of the tensor in an arena, half in memory without a back.
  Layout layout;
  layout.tensors = model;
  for (int64_t half = 0; half < 2; ++half) {
    Piece piece;
    piece.box = {{half * 2, 0}, {2, 8}};
    piece.region = half == 0 ? (*arena)->id() : (*region)->id();
    piece.strides = RowMajorStrides(piece.box.extent);
    layout.pieces.push_back(piece);
  }
  const absl::Status refused = engine.Register(layout);
  CHECK(refused.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(refused.message()), Catch::Contains("has no back"));
}

}  // namespace
}  // namespace refitd::e2e
