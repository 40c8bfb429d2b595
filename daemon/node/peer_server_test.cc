#include "daemon/node/peer_server.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

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
    hello.protocol = Protocol::kV0;
    return hello;
  }
  std::shared_ptr<KeptSession> Hello(PeerGreeting hello) {
    auto session = std::make_shared<KeptSession>(++sessions);
    parts.peer_server().Hello(std::move(hello), "10.0.0.2:7000", session);
    return session;
  }
  size_t nodes() { return parts.operators().Group("g")->machine.nodes.size(); }

  DaemonParts parts;
  uint64_t sessions = 1000;  // numbers that no real link of the test has
};

TEST_CASE("a daemon that joins a group gets the group's spec") {
  World world;
  const Attached trainer = world.parts.AttachTrainer("g");
  const auto session = world.Hello(World::Greeting());
  REQUIRE(session->accepted.has_value());
  CHECK(session->accepted->spec == Spec());
  CHECK(session->accepted->coordinator_id == "a");
  CHECK(session->accepted->protocol == Protocol::kV0);
  CHECK(session->accepted->incarnation == trainer.inbox->welcome().incarnation);
  CHECK(world.nodes() == 2);
  world.parts.peer_server().Gone(session->id(), "its link ended");
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
    const StateLock lock(&world.parts.state().mutex);
    world.parts.state().sessions.RefuseLate(DaemonState::Now() + std::chrono::minutes(61));
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
  world.parts.peer_server().Gone(given_up->id(), "it was closed");
  CHECK(successor->ends.empty());
  CHECK(world.nodes() == 2);
}

TEST_CASE("a daemon that answers to its coordinator's name itself coordinates the group") {
  // The daemon does not know that it listens there, as behind a name of DNS.
  DaemonParts a("a");
  const Attached waits = a.AttachEngine("g", "i", std::nullopt, &a);
  const Attached trainer = a.AttachTrainer("g", Spec(), &a);
  REQUIRE(Eventually([&] { return waits.inbox->welcomed() && trainer.inbox->welcomed(); }));
  REQUIRE(a.AttachEngine("g", "j", std::nullopt, &a).inbox->welcomed());
  REQUIRE(a.AttachEngine("g", "k", std::nullopt).inbox->welcomed());
  CHECK(a.operators().Group("g")->machine.coordinator_address.empty());
  CHECK(a.operators().Group("g")->machine.nodes.size() == 1);
  CHECK_THAT(Message(a.AttachTrainer("h", Spec(2, 2), &a).inbox->Ended()),
             Contains("world_size: 1 is not the spec's trainer_ranks 2"));
  const Attached nobody = a.AttachEngine("none", "i", std::nullopt, &a, Duration(0));
  CHECK(nobody.inbox->Ended().code() == absl::StatusCode::kNotFound);
}

TEST_CASE("a daemon whose coordinator's name was pointed at it is joined once it knows that") {
  DaemonParts a("a");
  const Attached waits = a.AttachEngine("g", "i", std::nullopt, &a);
  REQUIRE(Eventually([&] { return !a.Has("g"); }));  // it has found itself, and knows no spec yet
  PeerGreeting hello = World::Greeting();
  hello.coordinator = a.address();
  hello.spec = Spec();
  hello.wait = kPatience;
  const auto session = std::make_shared<KeptSession>(1001);
  a.peer_server().Hello(hello, "10.0.0.2:7000", session);
  CHECK(session->accepted.has_value());
  REQUIRE(waits.inbox->welcomed());
  // Members here may name the coordinator as the others do.
  CHECK(a.AttachEngine("g", "j", std::nullopt, &a).inbox->welcomed());
}

TEST_CASE("a daemon that follows another under the same name asks to try again") {
  DaemonParts a("a");
  DaemonParts b("b");
  const Attached engine = b.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));
  const auto session = std::make_shared<KeptSession>(1000);
  PeerGreeting hello = World::Greeting("c");
  hello.coordinator = a.address();
  b.peer_server().Hello(hello, "10.0.0.3:7000", session);
  CHECK(absl::IsUnavailable(session->ends.back()));
}

TEST_CASE("a coordinator's name is resolved anew once its group has no member here") {
  DaemonParts a("a");
  const Attached first = a.AttachTrainer("g", Spec(), &a);
  REQUIRE(Eventually([&] { return first.inbox->welcomed(); }));
  a.calls().Detached(first.id);
  REQUIRE(a.Has("g"));
  const Attached again = a.AttachTrainer("g", Spec(), &a);
  REQUIRE(Eventually([&] { return again.inbox->welcomed(); }));
  CHECK(again.inbox->welcome().incarnation != first.inbox->welcome().incarnation);
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
  b.peer_server().Hello(World::Greeting("c"), "10.0.0.3:7000", session);
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
  world.parts.peer_server().Report(session->id() + 1, attach);
  const size_t before = session->commands.size();
  world.parts.peer_server().Report(session->id(), attach);
  CHECK(session->commands.size() > before);
}

}  // namespace
}  // namespace refitd
