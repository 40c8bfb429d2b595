// Who owns a group over several daemons, and after it was made again (P9).
#include <atomic>
#include <catch2/catch.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr char kVictim[] = "spiffe://prod/trainer/victim";
constexpr char kThief[] = "spiffe://prod/trainer/thief";

Arrival As(Arrival arrival, const std::string& identity) {
  arrival.record.peer.identity = identity;
  return arrival;
}
// An engine that holds a version which was committed while `owner` owned the group.
Arrival Holder(const std::string& owner, const std::string& instance = "i") {
  Arrival arrival = As(DaemonParts::Engine(instance, DeliveryMode::kLoader), "uid:7");
  auto& engine = std::get<EngineIdentity>(arrival.identity);
  engine.held_version = Version(5);
  engine.held_origin = 0x55;
  engine.held_owner = owner;
  return arrival;
}
bool Welcomed(const Attached& member) {
  return Eventually([&] { return member.inbox->welcomed(); });
}
std::string OwnerOf(DaemonParts* parts) { return parts->daemon().operators().OwnerOf("g"); }
// The trainer's update reaches the engine, and is open where both are at one daemon. (Between
// daemons these tests have no wire.)
void Open(DaemonParts* of_trainer, const Attached& trainer, DaemonParts* of_engine,
          const Attached& engine, int64_t version) {
  const Answer begun = of_trainer->Begin(trainer, version);
  REQUIRE(Eventually([&] { return engine.inbox->Last<SendPrepare>().has_value(); }));
  if (of_trainer != of_engine) return;
  of_engine->Ready(engine);
  CHECK(begun.status().ok());
}

TEST_CASE("another identity at another daemon is refused: the coordinator keeps the owner") {
  DaemonParts a("a");
  DaemonParts b("b");
  DaemonParts c("c");
  const Attached first = b.Attach(As(DaemonParts::Trainer(0, 2), kVictim), "g", Spec(2, 2), &a);
  REQUIRE(Welcomed(first));
  CHECK(OwnerOf(&a) == kVictim);
  const Attached thief = c.Attach(As(DaemonParts::Trainer(1, 2), kThief), "g", Spec(2, 2), &a);
  const absl::Status refused = thief.inbox->Ended();
  CHECK(absl::IsPermissionDenied(refused));
  CHECK_THAT(Message(refused), Contains("which another identity owns"));
  CHECK_FALSE(thief.inbox->welcomed());
  const Attached second = c.Attach(As(DaemonParts::Trainer(1, 2), kVictim), "g", Spec(2, 2), &a);
  CHECK(Welcomed(second));
  // Every daemon of the group knows the owner, for which its authorizer asks.
  CHECK(Eventually([&] { return OwnerOf(&b) == kVictim && OwnerOf(&c) == kVictim; }));
  Arrival by_rule = As(DaemonParts::Trainer(1, 2), kThief);
  by_rule.record.peer.any_owner = true;
  c.calls().Detached(second.id);
  CHECK(Welcomed(c.Attach(std::move(by_rule), "g", Spec(2, 2), &a)));
}

TEST_CASE("a squatter of the daemon that makes the group again gives way to its engines' owner") {
  DaemonParts a("a");
  DaemonParts b("b");
  const Attached thief = a.Attach(As(DaemonParts::Trainer(), kThief), "g");
  REQUIRE(thief.inbox->welcomed());
  const Answer begun = a.Begin(thief, 9);
  CHECK(OwnerOf(&a) == kThief);
  // The engine comes with what it holds, at this daemon or at another one.
  const bool joined = GENERATE(false, true);
  DaemonParts& at = joined ? b : a;
  const Attached engine = at.Attach(Holder(kVictim), "g", Spec(), joined ? &a : nullptr);
  REQUIRE(Welcomed(engine));
  CHECK(OwnerOf(&a) == kVictim);
  CHECK(absl::IsAborted(begun.status()));
  CHECK(absl::IsPermissionDenied(thief.inbox->Ended()));
  CHECK(engine.inbox->All<SendPrepare>().empty());
  CHECK(absl::IsPermissionDenied(a.Attach(As(DaemonParts::Trainer(), kThief), "g").inbox->Ended()));
  const Attached victim = a.Attach(As(DaemonParts::Trainer(), kVictim), "g");
  REQUIRE(victim.inbox->welcomed());
  Open(&a, victim, &at, engine, 6);
}

TEST_CASE("a race after a restart ends with the owner of what the engines hold, 100 times") {
  std::minstd_rand random(7);
  for (int round = 0; round < 100; ++round) {
    CAPTURE(round);
    DaemonParts a("a");
    const bool slow_engine = random() % 2 == 0;
    std::atomic<bool> over = false;
    std::thread thief([&] {
      // It tries again and again, and begins as soon as it is let in.
      while (!over) {
        const Attached tries = a.Attach(As(DaemonParts::Trainer(), kThief), "g");
        if (tries.inbox->welcomed()) a.Begin(tries, 1'000);
        if (tries.inbox->end().has_value()) std::this_thread::yield();
      }
    });
    if (slow_engine) REQUIRE(Eventually([&] { return OwnerOf(&a) == kThief; }));
    const Attached engine = a.Attach(Holder(kVictim), "g");
    REQUIRE(engine.inbox->welcomed());
    CHECK(OwnerOf(&a) == kVictim);
    std::optional<Attached> victim;
    REQUIRE(Eventually([&] {
      victim = a.Attach(As(DaemonParts::Trainer(), kVictim), "g");
      return victim->inbox->welcomed();
    }));
    CHECK(engine.inbox->All<SendPrepare>().empty());
    Open(&a, *victim, &a, engine, 6);
    CHECK(engine.inbox->All<SendPrepare>().size() == 1);
    over = true;
    thief.join();
    CHECK(OwnerOf(&a) == kVictim);
  }
}

TEST_CASE("an engine refuses a group that another identity owns than the one that it names") {
  DaemonParts a("a");
  DaemonParts b("b");
  const auto engine = [](const std::string& takes, const std::string& instance) {
    Arrival arrival = DaemonParts::Engine(instance, DeliveryMode::kLoader);
    std::get<EngineIdentity>(arrival.identity).trainer_identity = takes;
    return arrival;
  };
  const bool joined = GENERATE(false, true);
  DaemonParts& at = joined ? b : a;
  DaemonParts* const coordinator = joined ? &a : nullptr;
  SECTION("the other comes first") {
    REQUIRE(a.Attach(As(DaemonParts::Trainer(), kThief), "g").inbox->welcomed());
    const absl::Status refused =
        at.Attach(engine(kVictim, "i"), "g", std::nullopt, coordinator).inbox->Ended();
    CHECK(absl::IsPermissionDenied(refused));
    CHECK_THAT(Message(refused), Contains("trainer_identity"));
    CHECK(Welcomed(
        at.Attach(engine("spiffe://prod/trainer/*", "j"), "g", std::nullopt, coordinator)));
  }
  SECTION("the engine comes first") {
    REQUIRE(Welcomed(at.Attach(engine(kVictim, "i"), "g", Spec(), coordinator)));
    const absl::Status refused = a.Attach(As(DaemonParts::Trainer(), kThief), "g").inbox->Ended();
    CHECK(absl::IsPermissionDenied(refused));
    CHECK_THAT(Message(refused), Contains("takes weights of") && Contains("trainer_identity"));
    CHECK(a.Attach(As(DaemonParts::Trainer(), kVictim), "g").inbox->welcomed());
  }
}

TEST_CASE("where a rule names the owner nobody else makes or enters the group at any daemon") {
  DaemonOptions ruled;
  ruled.owner_rule = [](const std::string& group, const std::string& identity) {
    if (group != "g") return OwnerRule::kNone;
    return identity == kVictim ? OwnerRule::kNamed : OwnerRule::kOther;
  };
  DaemonParts a("a", ruled);
  DaemonParts b("b");  // knows no such rule
  CHECK(b.Attach(As(DaemonParts::Trainer(), kThief), "h", Spec(), &a).inbox->end() == std::nullopt);
  const absl::Status elsewhere =
      b.Attach(As(DaemonParts::Trainer(), kThief), "g", Spec(), &a).inbox->Ended();
  CHECK(absl::IsPermissionDenied(elsewhere));
  CHECK_THAT(Message(elsewhere), Contains("may not make group 'g', whose owner a rule names"));
  // Engines with a spec, of either daemon, wait for the owner.
  const Attached here = a.Attach(As(DaemonParts::Engine("i", DeliveryMode::kLoader), kThief), "g");
  const Attached there =
      b.Attach(As(DaemonParts::Engine("j", DeliveryMode::kLoader), kThief), "g", Spec(), &a);
  // The owner is not kept from the group by others who wait beside it.
  const Attached thief = b.Attach(As(DaemonParts::Trainer(), kThief), "g", Spec(), &a);
  CHECK_FALSE(a.Has("g"));
  const Attached owner = b.Attach(As(DaemonParts::Trainer(), kVictim), "g", Spec(), &a);
  REQUIRE(Welcomed(owner));
  CHECK(absl::IsPermissionDenied(thief.inbox->Ended()));
  CHECK(Welcomed(here));
  CHECK(Welcomed(there));
  CHECK(OwnerOf(&a) == kVictim);
  // A rule of the other daemon does not count against this one's, nor what engines say.
  Arrival by_rule = As(DaemonParts::Trainer(), kThief);
  by_rule.record.peer.any_owner = true;
  CHECK(absl::IsPermissionDenied(b.Attach(std::move(by_rule), "g", Spec(), &a).inbox->Ended()));
  CHECK(Welcomed(a.Attach(Holder(kThief, "k"), "g")));
  CHECK(OwnerOf(&a) == kVictim);
}

TEST_CASE("a forgotten coordinator does not end a live group") {
  DaemonParts a("a");
  DaemonParts b("b");
  DaemonParts c("c");
  const Attached trainer = a.Attach(As(DaemonParts::Trainer(), kVictim), "g");
  const Attached engine = b.AttachEngine("g", "i", std::nullopt, &a);
  REQUIRE(Welcomed(engine));
  // At a daemon of the group it is refused; at another one it makes a group of its own.
  CHECK(
      absl::IsFailedPrecondition(b.Attach(As(DaemonParts::Trainer(), kThief), "g").inbox->Ended()));
  const Attached other = c.Attach(As(DaemonParts::Trainer(), kThief), "g");
  REQUIRE(other.inbox->welcomed());
  CHECK(a.operators().Group("g")->machine.group.incarnation !=
        c.operators().Group("g")->machine.group.incarnation);
  Open(&a, trainer, &b, engine, 1);
  CHECK_FALSE(trainer.inbox->end().has_value());
  CHECK_FALSE(engine.inbox->end().has_value());
}

}  // namespace
}  // namespace refitd
