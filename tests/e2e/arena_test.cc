// Engines whose weights lie in arenas, with a real daemon: versions are staged while they serve,
// and flipped when they are complete. The ranks check their memory, byte for byte and outside of
// their boxes too, whenever they are idle and before each flip (P1, P2).
#include <signal.h>
#include <stdlib.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

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

std::shared_ptr<client::Arena> ArenaFor(const Held& held) {
  auto made = client::Arena::Make(held.region_bytes, {});
  REQUIRE(made.ok());
  return *std::move(made);
}

void Committed(Rank* rank, int64_t version) {
  REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
}

// A trainer that pushes, and shadowed instances "a" (whole) and "b" (two ranks, strided).
struct Fixture {
  explicit Fixture(milliseconds reattach = milliseconds(0))
      : pusher(WithSpec(ConnectTo(daemon, reattach), 2), model),
        a(Shadowed(ConnectTo(daemon, reattach), "a"), model, whole, ArenaFor(whole)),
        b0(Shadowed(ConnectTo(daemon, reattach), "b", 0, 2), model, first, ArenaFor(first)),
        b1(Shadowed(ConnectTo(daemon, reattach), "b", 1, 2), model, second, ArenaFor(second)) {}
  void Installed(int64_t version) {
    const absl::Status installed = pusher.Install(version);
    INFO(installed);
    REQUIRE(installed.ok());
    for (Rank* rank : ranks()) Committed(rank, version);
  }
  std::vector<Rank*> ranks() { return {&a, &b0, &b1}; }

  const Model model = MixedModel();
  const Held whole = HoldWhole(model);
  const Held first = HoldSlice(model, 0, 0, 2);
  const Held second = HoldSlice(model, 0, 1, 2);
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

// "slow" processes staged versions, "quick" does not ask for them and is at another daemon than the
// group. Both hold version 1.
struct OneProcesses {
  explicit OneProcesses(std::vector<std::string> limits = {}) : home(FlagsOf(std::move(limits))) {
    client::EngineOptions asks = Shadowed(ConnectTo(home), "slow");
    asks.wants_staged = true;
    slow.emplace(asks, model, whole, ArenaFor(whole));
    client::ConnectOptions connect = ConnectTo(away);
    connect.coordinator = home.address();
    quick.emplace(Shadowed(connect, "quick"), model, whole, ArenaFor(whole));
    Installed(1);
  }
  static std::vector<std::string> FlagsOf(std::vector<std::string> limits) {
    limits.push_back("--listen-tcp=" + OwnLoopback(1) + ":0");
    limits.push_back("--daemon-id=home");
    return limits;
  }
  void Installed(int64_t version) {
    const absl::Status installed = pusher.Install(version);
    INFO(installed);
    REQUIRE(installed.ok());
    Committed(&*slow, version);
    Committed(&*quick, version);
  }
  std::thread Begin(int64_t version, absl::Status* installed) {
    return std::thread([this, version, installed] { *installed = pusher.Install(version); });
  }
  v1::UpdateStatus update() { return home.Status().groups(0).update(); }

  const Model model = MixedModel();
  const Held whole = HoldWhole(model);
  Daemon home;
  Daemon away{{"--listen-tcp=" + OwnLoopback(2) + ":0", "--daemon-id=away"}};
  Pusher pusher{WithSpec(ConnectTo(home), 2), model};
  std::optional<Rank> slow;
  std::optional<Rank> quick;
};

TEST_CASE("no engine is asked to pause while another processes the staged version") {
  OneProcesses f;
  f.slow->Hold();
  absl::Status installed;
  std::thread install = f.Begin(2, &installed);
  const bool staged = f.slow->Await([](const Rank::Seen& s) { return s.staged == 2; });
  CHECK(f.update().state() == "staged");
  const int checks = f.quick->seen().checks;
  CHECK(f.quick->Await([&](const Rank::Seen& s) { return s.checks > checks + 2; }));
  CHECK(f.quick->seen().prepares == 1);
  CHECK(f.quick->engine().weights() == Weights::kClean);
  const auto held = std::chrono::steady_clock::now();
  f.slow->Let();
  install.join();
  const auto let = std::chrono::steady_clock::now() - held;
  REQUIRE(staged);
  CHECK(installed.ok());
  Committed(&*f.slow, 2);
  Committed(&*f.quick, 2);
  CHECK(f.quick->seen().staged == 0);
  // No pause began before the answer.
  const v1::UpdateStatus update = f.update();
  REQUIRE(update.instances_size() == 2);
  for (const v1::InstanceResult& instance : update.instances()) {
    CHECK(instance.pause_seconds() <= std::chrono::duration<double>(let).count());
  }
}

TEST_CASE("an update that is given up while an engine processes it is not seen by others") {
  OneProcesses f;
  f.slow->Hold();
  absl::Status installed;
  std::thread install = f.Begin(2, &installed);
  const bool staged = f.slow->Await([](const Rank::Seen& s) { return s.staged == 2; });
  v1::AbortUpdateRequest abort;
  abort.set_group("g");
  CHECK(f.home.Call(&v1::Operator::Stub::AbortUpdate, abort).status.ok());
  f.slow->Let();
  install.join();
  REQUIRE(staged);
  CHECK(absl::IsAborted(installed));
  REQUIRE(f.slow->Await([](const Rank::Seen& s) { return s.aborts == 1; }));
  CHECK_FALSE(f.slow->seen().aborted.dirty);
  CHECK(f.slow->engine().version() == Version(1));
  f.Installed(3);
  CHECK(f.quick->seen().aborts == 0);
  CHECK(f.quick->seen().prepares == 2);
}

TEST_CASE(
    "an engine that does not process a staged version in time gets its Prepare all the same") {
  OneProcesses f({"--limits-processing-ms=200"});
  f.slow->Hold();
  absl::Status installed;
  std::thread install = f.Begin(2, &installed);
  CHECK(f.quick->Await([](const Rank::Seen& s) { return s.prepares == 2; }));
  f.slow->Let();
  install.join();
  CHECK(installed.ok());
  Committed(&*f.slow, 2);
  Committed(&*f.quick, 2);
}

TEST_CASE("compiled refits are staged too, and their moves are kept for each side") {
  const Model model = MixedModel();
  Daemon daemon;
  Shards trainer(ShardsOn(daemon), model, HoldWhole(model));
  REQUIRE(trainer.Register().ok());
  Rank whole(Shadowed(ConnectTo(daemon), "whole"), model, HoldWhole(model),
             ArenaFor(HoldWhole(model)));
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
  const v1::UpdateStatus update = f.daemon.Status().groups(0).update();
  REQUIRE(update.instances_size() == 2);
  for (const v1::InstanceResult& instance : update.instances()) {
    CHECK(instance.flipped_back());
    CHECK(instance.pause_seconds() > 0);
  }
  f.b1.Flip(Rank::Flips::kWell);
  f.Installed(3);
  f.Installed(4);
}

TEST_CASE("a rank that is silent when it has to flip is evicted, and catches up") {
  const Model model = MixedModel();
  Daemon daemon({"--limits-ready-ms=300"});
  Pusher pusher(WithSpec(ConnectTo(daemon), 2), model);
  Rank a(Shadowed(ConnectTo(daemon), "a"), model, HoldWhole(model), ArenaFor(HoldWhole(model)));
  Rank b(Shadowed(ConnectTo(daemon), "b"), model, HoldWhole(model), ArenaFor(HoldWhole(model)));
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
  Rank a(Shadowed(WithSpec(ConnectTo(daemon), 1), "a"), model, HoldWhole(model),
         ArenaFor(HoldWhole(model)));
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

TEST_CASE("a layout that is refused costs no version") {
  Fixture f;
  f.Installed(1);
  const absl::Status installed = f.pusher.Install(2, [&](Pusher::Step step) {
    if (step == Pusher::kCommitted) return;
    CHECK(absl::IsFailedPrecondition(f.a.engine().Register(f.a.layout())));
    Layout outside = f.a.layout();
    outside.pieces[0].byte_offset = int64_t{1} << 40;
    CHECK(absl::IsInvalidArgument(f.a.engine().Register(outside)));
  });
  INFO(installed);
  REQUIRE(installed.ok());
  for (Rank* rank : f.ranks()) Committed(rank, 2);
  f.Installed(3);
}

TEST_CASE("a layout that comes between Ready and the outcome changes nothing") {
  Fixture f;
  f.Installed(1);
  const std::string before(f.a.memory(), static_cast<size_t>(f.whole.region_bytes));
  f.b0.Flip(Rank::Flips::kFails);
  f.b0.Hold();
  bool flipped = false;
  absl::Status refused;
  std::thread registers([&] {
    // Once "a" has flipped, it reads a version whose outcome it does not know.
    flipped =
        Eventually([&] { return std::memcmp(f.a.memory(), before.data(), before.size()) != 0; });
    refused = f.a.engine().Register(f.a.layout());
    f.b0.Let();
  });
  CHECK(absl::IsAborted(f.pusher.Install(2)));
  registers.join();
  CHECK(flipped);
  CHECK(absl::IsFailedPrecondition(refused));
  // The ranks compare what they go back to.
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.aborts == 1; }));
  }
  f.b0.Flip(Rank::Flips::kWell);
  f.Installed(3);
}

TEST_CASE("an arena goes from engine to engine with the weights in it") {
  const Model model = MixedModel();
  const Held held = HoldWhole(model);
  Daemon daemon;
  const std::shared_ptr<client::Arena> arena = ArenaFor(held);
  Pusher pusher(WithSpec(ConnectTo(daemon), 1), model);
  client::EngineOptions options = Shadowed(ConnectTo(daemon), "a");
  // An odd number of flips in each life, so that each engine has the other side as its front.
  for (int64_t version = 1; version <= 4; ++version) {
    Rank rank(options, model, held, arena);
    CHECK(rank.memory() == arena->data());
    const absl::Status second = rank.engine().AddArena(arena).status();
    CHECK(second.code() == absl::StatusCode::kFailedPrecondition);
    REQUIRE(pusher.Install(version).ok());
    Committed(&rank, version);
    CHECK(rank.seen().flips == 1);
    options.held_version = Version(version);
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

TEST_CASE("an operator rolls back, and in-place engines catch up from those that flipped") {
  const Model model = MixedModel();
  Daemon daemon;
  Pusher pusher(WithSpec(ConnectTo(daemon), 2), model);
  Rank a(Shadowed(ConnectTo(daemon), "a"), model, HoldWhole(model), ArenaFor(HoldWhole(model)));
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
  REQUIRE(done.response.instances_size() == 1);
  CHECK(done.response.instances(0).shadowed());
  CHECK(done.response.instances(0).pause_seconds() > 0);
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
  // "a" catches up from "b".
  Committed(&f.a, 2);
  RolledBack(&f, 3, 1);
}

TEST_CASE("a registration that is refused leaves the version before in the backs") {
  Fixture f;
  f.Installed(1);
  f.Installed(2);
  Layout outside = f.a.layout();
  outside.pieces[0].byte_offset = int64_t{1} << 40;
  CHECK_FALSE(f.a.engine().Register(outside).ok());
  RolledBack(&f, 3, 1);
  CHECK(f.a.seen().flips == 3);
}

TEST_CASE("the version before is held until it is released") {
  const Model model = MixedModel();
  Daemon daemon;
  client::ConnectOptions connect = WithSpec(ConnectTo(daemon), 1);
  connect.spec->hold_previous_seconds = 600;
  Pusher pusher(connect, model);
  Rank a(Shadowed(ConnectTo(daemon), "a"), model, HoldWhole(model), ArenaFor(HoldWhole(model)));
  REQUIRE(pusher.Install(1).ok());
  REQUIRE(pusher.Install(2).ok());
  const auto late = pusher.trainer().Begin({.version = Version(3), .duration = milliseconds(300)});
  CHECK(absl::IsDeadlineExceeded(late.status()));
  CHECK_THAT(std::string(late.status().message()), Catch::Contains("version 1, which is held for"));
  REQUIRE(pusher.trainer().ReleasePrevious().ok());
  REQUIRE(pusher.Install(3).ok());
  Committed(&a, 3);
}

// ---- engines that restart ----

constexpr std::string_view kMark = "rank: ";

// Instance "a" in a process of its own: this program runs the test "rank of a process" there.
class RankProcess {
 public:
  explicit RankProcess(const Daemon& daemon)
      : process_((setenv("REFITD_TEST_SOCKET", daemon.socket().c_str(), 1),
                  std::vector<std::string>{"/proc/self/exe", "rank of a process"})),
        version_(Answer()) {}
  // What it held when it had registered: a version, or "none".
  const std::string& version() const { return version_; }
  // Its answer to a command.
  std::string Do(const std::string& command) {
    process_.WriteLine(command);
    return Answer();
  }
  void Kill() {
    process_.Signal(SIGKILL);
    CHECK(process_.WaitExit() == 128 + SIGKILL);
  }

 private:
  // Catch prints lines of its own.
  std::string Answer() {
    while (std::optional<std::string> line = process_.ReadLine()) {
      if (line->starts_with(kMark)) return line->substr(kMark.size());
    }
    return "it ended: " + process_.Errors();
  }

  Process process_;
  const std::string version_;
};

TEST_CASE("rank of a process", "[.]") {
  const char* const socket = getenv("REFITD_TEST_SOCKET");
  REQUIRE(socket != nullptr);
  client::ConnectOptions connect;
  connect.socket = socket;
  connect.group = "g";
  client::EngineOptions options = Shadowed(connect, "a");
  options.restore = true;
  const Model model = MixedModel();
  const Held held = HoldWhole(model);
  Rank rank(options, model, held, /*arena=*/nullptr);
  const auto say = [](const std::string& line) { std::cout << kMark << line << std::endl; };
  const std::optional<Version> version = rank.engine().version();
  say(version.has_value() ? std::to_string(version->value()) : "none");
  for (std::string command; std::getline(std::cin, command);) {
    if (command == "hold") {
      rank.Hold();
    } else if (command == "prepared") {
      REQUIRE(rank.Await([](const Rank::Seen& s) { return s.prepares == 1; }));
    } else if (command == "scribble") {
      const_cast<char*>(rank.memory())[held.layout.pieces[0].byte_offset] ^= 1;
    } else {
      Committed(&rank, std::stoll(command));
    }
    say(command);
  }
}

std::vector<v1::ArenaStatus> KeptBy(Daemon* daemon) {
  std::vector<v1::ArenaStatus> kept;
  const v1::GetStatusResponse status = daemon->Status();
  for (const v1::ArenaStatus& arena : status.arenas()) {
    if (arena.kept()) kept.push_back(arena);
  }
  return kept;
}

// Engine "a" is killed, which held version 1.
struct Killed {
  explicit Killed(int keep_seconds = 600, const std::string& before = "1") {
    client::ConnectOptions connect = WithSpec(ConnectTo(daemon), 1);
    connect.spec->keep_seconds = keep_seconds;
    pusher = std::make_unique<Pusher>(connect, model);
    RankProcess rank(daemon);
    CHECK(rank.version() == "none");
    REQUIRE(pusher->Install(1).ok());
    CHECK(rank.Do("1") == "1");
    CHECK(KeptBy(&daemon).empty());
    CHECK(rank.Do(before) == before);
    rank.Kill();
    if (keep_seconds > 1) REQUIRE(Eventually([this] { return KeptBy(&daemon).size() == 1; }));
  }
  bool Logged(const std::string& text) {
    return Eventually([&] { return daemon.log().find(text) != std::string::npos; });
  }

  const Model model = MixedModel();
  Daemon daemon;
  std::unique_ptr<Pusher> pusher;
};

TEST_CASE("an engine that is killed and restarted is clean at its version at once") {
  Killed f;
  const v1::ArenaStatus kept = KeptBy(&f.daemon)[0];
  CHECK(kept.instance() == "a");
  CHECK(kept.version() == 1);
  CHECK(kept.seconds_left() > 0);
  CHECK(kept.front_bytes() >= HoldWhole(f.model).region_bytes);
  CHECK(kept.back_bytes() == kept.front_bytes());
  for (int64_t version = 1; version <= 4; ++version) {
    RankProcess rank(f.daemon);
    // The rank has checked every byte, also those between its tensors; no update or catch-up ran.
    CHECK(rank.version() == std::to_string(version));
    CHECK(f.daemon.Group("g").instances(0).version() == version);
    CHECK(f.daemon.Group("g").instances(0).ready());
    CHECK(KeptBy(&f.daemon).empty());
    REQUIRE(f.pusher->Install(version + 1).ok());
    CHECK(rank.Do(std::to_string(version + 1)) == std::to_string(version + 1));
    rank.Kill();
    REQUIRE(Eventually([&] { return KeptBy(&f.daemon).size() == 1; }));
  }
}

TEST_CASE(
    "an engine that is killed while a version is staged, or in its flip, has the one before") {
  Killed f;
  const bool flips = GENERATE(false, true);
  {
    RankProcess rank(f.daemon);
    if (flips) CHECK(rank.Do("hold") == "hold");
    std::thread killer;
    const absl::Status lost = f.pusher->Install(2, [&](Pusher::Step step) {
      if (step != Pusher::kAllBuckets) return;
      if (!flips) return rank.Kill();
      killer = std::thread([&rank] {
        (void)rank.Do("prepared");
        rank.Kill();
      });
    });
    CHECK_FALSE(lost.ok());
    if (killer.joinable()) killer.join();
  }
  REQUIRE(Eventually([&] { return KeptBy(&f.daemon).size() == 1; }));
  RankProcess again(f.daemon);
  CHECK(again.version() == "1");
  REQUIRE(f.pusher->Install(3).ok());
  CHECK(again.Do("3") == "3");
}

TEST_CASE(
    "an engine that wrote to its weights before it died leaves no version, and gets the next") {
  Killed f(600, "scribble");
  RankProcess again(f.daemon);
  CHECK(again.version() == "none");
  CHECK(f.Logged("its content differs"));
  CHECK_FALSE(f.daemon.Group("g").instances(0).ready());
  REQUIRE(f.pusher->Install(2).ok());
  CHECK(again.Do("2") == "2");
}

TEST_CASE("what was kept is lost with its daemon, which the next one says") {
  Killed f;
  f.pusher.reset();
  f.daemon.Kill();
  f.daemon.Restart();
  Pusher pusher(WithSpec(ConnectTo(f.daemon), 1), f.model);
  RankProcess again(f.daemon);
  CHECK(again.version() == "none");
  CHECK(f.Logged("no arenas are kept here of instance a rank 0"));
  REQUIRE(pusher.Install(1).ok());
}

TEST_CASE("nothing is kept of an engine that does not say that it restores") {
  const Model model = MixedModel();
  Daemon daemon;
  Pusher pusher(WithSpec(ConnectTo(daemon), 1), model);
  const Held held = HoldWhole(model);
  {
    Rank rank(Shadowed(ConnectTo(daemon), "a"), model, held, ArenaFor(held));
    REQUIRE(pusher.Install(1).ok());
    Committed(&rank, 1);
  }
  CHECK(Eventually([&] { return daemon.MemfdMappings() == 1; }));  // the pusher's region
  CHECK(KeptBy(&daemon).empty());
}

TEST_CASE("the memory of arenas is given back when they were kept for long enough, or not at all") {
  Killed f(GENERATE(0, 1));
  CHECK(Eventually([&] { return f.daemon.MemfdMappings() == 1; }));  // the pusher's region
  CHECK(KeptBy(&f.daemon).empty());
  CHECK(RankProcess(f.daemon).version() == "none");
}

TEST_CASE("layouts with backs that can't be are refused by name") {
  const Model model = PlainModel(1, 4, 8);
  Daemon daemon;
  auto attached = client::Engine::Attach(Shadowed(WithSpec(ConnectTo(daemon), 1), "a"));
  REQUIRE(attached.ok());
  client::Engine& engine = **attached;
  const client::ConnectOptions host;
  CHECK(client::Arena::Make(0, host).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(client::Arena::Make(-5, host).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_FALSE(client::Arena::Make(int64_t{1} << 50, host).ok());
  auto memory = client::Arena::Make(4096, host);
  REQUIRE(memory.ok());
  auto arena = engine.AddArena(*memory);
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
