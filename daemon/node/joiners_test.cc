#include "daemon/node/joiners.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/parts_test_util.h"
#include "daemon/node/session_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

struct World {
  static PeerGreeting Greeting(const std::string& daemon = "b") {
    PeerGreeting hello;
    hello.group = "g";
    hello.daemon_id = daemon;
    hello.boot_id = "boot of " + daemon;
    hello.protocol = Protocol::kV2;
    return hello;
  }
  std::shared_ptr<KeptSession> Hello(PeerGreeting hello) {
    auto session = std::make_shared<KeptSession>(++sessions);
    parts.joiners().Hello(std::move(hello), "10.0.0.2:7000", session);
    return session;
  }
  size_t nodes() { return parts.operators().Group("g")->machine.nodes.size(); }

  DaemonParts parts;
  uint64_t sessions = 1000;  // numbers that no real link of the test has
};

TEST_CASE("a daemon joins a group that exists, and is told what the group is like") {
  World world;
  const Attached trainer = world.parts.AttachTrainer("g");
  const auto session = world.Hello(World::Greeting());
  REQUIRE(session->accepted.has_value());
  CHECK(session->accepted->spec == Spec());
  CHECK(session->accepted->coordinator_id == "a");
  CHECK(session->accepted->protocol == Protocol::kV2);
  CHECK(session->accepted->incarnation == trainer.inbox->welcome().incarnation);
  CHECK(world.nodes() == 2);
  world.parts.joiners().Gone(session->id(), "its link ended");
  CHECK(world.nodes() == 1);
}

TEST_CASE("a daemon whose hello has a spec makes the group, and lets in who waits for it") {
  World world;
  const Attached waits = world.parts.AttachEngine("g", "i", std::nullopt);
  PeerGreeting hello = World::Greeting();
  hello.spec = Spec();
  CHECK(world.Hello(std::move(hello))->accepted.has_value());
  CHECK(waits.inbox->welcomed());
}

TEST_CASE("a daemon waits for its group only as long as it says (P4)") {
  World world;
  CHECK(world.Hello(World::Greeting())->ends.back().code() == absl::StatusCode::kNotFound);
  PeerGreeting hello = World::Greeting();
  hello.wait = std::chrono::hours(1);
  const auto earlier = world.Hello(hello);
  CHECK(earlier->ends.empty());
  // The same process dials again: its earlier link waits no more.
  const auto again = world.Hello(hello);
  CHECK(earlier->ends.back().code() == absl::StatusCode::kAborted);
  {
    const Turn turn(world.parts.state().turns);
    world.parts.state().peers.RefuseLate(DaemonState::Now() + std::chrono::minutes(61));
  }
  CHECK(again->ends.back().code() == absl::StatusCode::kNotFound);

  const auto waits = world.Hello(hello);
  const Attached trainer = world.parts.AttachTrainer("g");
  CHECK(waits->accepted.has_value());
}

TEST_CASE("a link that was given up does not displace its successor by a late hello") {
  World world;
  const Attached trainer = world.parts.AttachTrainer("g");
  PeerGreeting later = World::Greeting();
  later.dial = 2;
  const auto successor = world.Hello(later);
  REQUIRE(successor->accepted.has_value());
  PeerGreeting earlier = World::Greeting();
  earlier.dial = 1;
  const auto given_up = world.Hello(earlier);
  REQUIRE(given_up->ends.size() == 1);
  CHECK(given_up->ends.back().code() == absl::StatusCode::kAborted);
  world.parts.joiners().Gone(given_up->id(), "it was closed");
  CHECK(successor->ends.empty());
  CHECK(world.nodes() == 2);
}

TEST_CASE("a daemon does not join itself, nor one that drains") {
  World world;
  PeerGreeting hello = World::Greeting();
  hello.boot_id = world.parts.state().boot_id;
  CHECK_THAT(Message(world.Hello(hello)->ends.back()), Contains("the daemon joins itself"));
  world.parts.daemon().Drain();
  CHECK(world.Hello(World::Greeting())->ends.back().code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("a second daemon with a live daemon's id is refused") {
  World world;
  const Attached trainer = world.parts.AttachTrainer("g");
  const auto live = world.Hello(World::Greeting());
  PeerGreeting other = World::Greeting();
  other.boot_id = "another boot";
  CHECK(world.Hello(other)->ends.back().code() == absl::StatusCode::kAlreadyExists);
  CHECK(live->ends.empty());
}

TEST_CASE("a daemon that follows a coordinator names it to those who would join here") {
  DaemonParts a("a");
  World world;  // its daemon has the same id, but is in no group of `a`
  DaemonParts b("b");
  const Attached engine = b.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));
  const auto session = std::make_shared<KeptSession>(1000);
  b.joiners().Hello(World::Greeting("c"), "10.0.0.3:7000", session);
  CHECK_THAT(Message(session->ends.back()), Contains("is coordinated by " + a.address()));
}

TEST_CASE("reports reach the group of a session that has joined, and no other") {
  World world;
  const Attached trainer = world.parts.AttachTrainer("g");
  const auto session = world.Hello(World::Greeting());
  PeerAttach attach;
  attach.member = MemberId(1);
  attach.identity = TrainerIdentity();
  // The group's only trainer rank is taken, so the daemon is told to refuse its member.
  world.parts.joiners().Report(session->id() + 1, attach);
  const size_t before = session->commands.size();
  world.parts.joiners().Report(session->id(), attach);
  CHECK(session->commands.size() > before);
}

}  // namespace
}  // namespace refitd
