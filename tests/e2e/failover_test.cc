// Groups whose members name several candidates for their coordinator: real daemons are killed for
// good, stopped and continued, while the client library's engines and trainers reattach.
//
// The engines check their own memory whenever they would report good weights: it must hold exactly
// the version that they report, byte for byte (P2).
#include <fmt/format.h>
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/client_members.h"

namespace refitd::e2e {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFailover{500};
// This limit is longer than every wait of a test.
constexpr milliseconds kNoFailover{600'000};

std::vector<std::string> FlagsOf(const std::string& id, int loopback, milliseconds failover) {
  return {"--listen-tcp=" + OwnLoopback(loopback) + ":0", "--daemon-id=" + id,
          "--peer-silence-ms=2000", fmt::format("--failover-ms={}", failover.count())};
}

// Candidates a and b, in this order, and c, which is none. The trainer is at c, engines are at b
// and at c. Tests add an engine at a.
struct Fleet {
  explicit Fleet(milliseconds failover = kFailover)
      : a(FlagsOf("a", 1, failover)), b(FlagsOf("b", 2, failover)), c(FlagsOf("c", 3, failover)) {
    pusher = std::make_unique<Pusher>(ConnectTo(c, true), model);
    Add(b, "at-b", client::Delivery::kRegistered);
    Add(c, "at-c", client::Delivery::kStaged);
  }

  std::string named() const { return a.address() + "," + b.address(); }
  client::ConnectOptions ConnectTo(const Daemon& daemon, bool spec = false) const {
    client::ConnectOptions connect;
    connect.socket = daemon.socket();
    connect.group = "g";
    connect.coordinator = named();
    connect.reattach = kDeadline;
    if (spec) {
      connect.spec = client::GroupSpec{
          .trainer_ranks = 1, .min_instances = 2, .slot_bytes = 65'536, .slots = 4};
    }
    return connect;
  }
  Rank* Add(const Daemon& daemon, const std::string& name, client::Delivery delivery) {
    ranks.push_back(std::make_unique<Rank>(ConnectTo(daemon), name, delivery, model));
    return ranks.back().get();
  }
  // Installs the next version. Updates that the loss of a coordinator ends are begun again.
  void Install() {
    absl::Status last;
    const bool installed = Eventually([&] {
      last = pusher->Install(++version);
      return last.ok();
    });
    INFO("a's log:\n" << a.log() << "\nb's log:\n" << b.log() << "\nc's log:\n" << c.log());
    INFO(last);
    REQUIRE(installed);
    for (const auto& rank : ranks) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
    }
  }
  // Waits until all engines know that the coordinator is lost, and what that made of their weights.
  void Lost(Weights weights) {
    for (const auto& rank : ranks) {
      REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
      CHECK(rank->seen().lost_weights == weights);
    }
  }

  const Model model = MixedModel();
  int64_t version = 0;
  Daemon a;
  Daemon b;
  Daemon c;
  std::unique_ptr<Pusher> pusher;
  std::vector<std::unique_ptr<Rank>> ranks;
};

TEST_CASE("when its coordinator dies for good, the next candidate makes the group again") {
  Fleet f;
  f.Install();
  const v1::GroupStatus before = f.a.Group("g");
  REQUIRE(before.incarnation() != 0);
  CHECK(before.coordinator().empty());
  CHECK(before.candidates() == f.named());
  CHECK(f.c.Group("g").coordinator() == f.a.address());
  CHECK(f.c.Group("g").candidates() == f.named());

  f.a.Kill();
  f.Lost(Weights::kGood);
  // No engine loses the version that it holds.
  for (const auto& rank : f.ranks) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.reattached == 1; }));
    CHECK(rank->seen().held == Version(1));
  }
  f.Install();
  const v1::GroupStatus after = f.b.Group("g");
  CHECK(after.incarnation() > before.incarnation());
  CHECK(after.candidates() == f.named());
  CHECK(after.instances_size() == 2);
  CHECK(f.c.Group("g").coordinator() == f.b.address());

  // The first candidate comes back and joins.
  f.a.Restart();
  f.Add(f.a, "at-a", client::Delivery::kRegistered);
  CHECK(f.a.Group("g").coordinator() == f.b.address());
  f.Install();
  CHECK(f.b.Group("g").incarnation() == after.incarnation());
}

TEST_CASE("an update whose coordinator dies is lost, and the next one commits at the next one") {
  Fleet f;
  f.Install();
  Pusher::Step moment = Pusher::kBegun;
  SECTION("before any data") {}
  SECTION("after the first bucket") { moment = Pusher::kFirstBucket; }
  SECTION("after the last bucket") { moment = Pusher::kAllBuckets; }
  const absl::Status failed = f.pusher->Install(++f.version, [&](Pusher::Step step) {
    if (step == moment) f.a.Kill();
  });
  INFO(failed);
  CHECK((absl::IsUnavailable(failed) || absl::IsAborted(failed)));
  f.Lost(Weights::kInDoubt);
  f.Install();
  CHECK(f.b.Group("g").version() == f.version);
}

TEST_CASE("a coordinator that was stopped gives its group up for the next candidate's") {
  Fleet f;
  Rank* const at_a = f.Add(f.a, "at-a", client::Delivery::kRegistered);
  f.Install();
  const uint64_t before = f.a.Group("g").incarnation();
  SECTION("while nothing runs") { f.a.Signal(SIGSTOP); }
  SECTION("in an update") {
    const absl::Status failed = f.pusher->Install(++f.version, [&](Pusher::Step step) {
      if (step == Pusher::kFirstBucket) f.a.Signal(SIGSTOP);
    });
    INFO(failed);
    CHECK((absl::IsUnavailable(failed) || absl::IsAborted(failed)));
  }
  // The group goes on without the engine at a, which hears nothing.
  absl::Status last;
  REQUIRE(Eventually([&] {
    last = f.pusher->Install(++f.version);
    return last.ok();
  }));
  const uint64_t after = f.b.Group("g").incarnation();
  CHECK(after > before);
  CHECK(at_a->seen().committed == Version(1));

  f.a.Signal(SIGCONT);
  REQUIRE(at_a->Await([](const Rank::Seen& s) { return s.reattached >= 1; }));
  CHECK(f.a.Group("g").coordinator() == f.b.address());
  f.Install();
  CHECK(f.b.Group("g").incarnation() == after);
  CHECK(f.b.Group("g").instances_size() == 3);
}

TEST_CASE("a coordinator that comes back before the limit coordinates again") {
  Fleet f(kNoFailover);
  f.Install();
  const uint64_t before = f.a.Group("g").incarnation();
  f.a.Kill();
  f.Lost(Weights::kGood);
  f.a.Restart();
  f.Install();
  CHECK(f.a.Group("g").incarnation() > before);
  CHECK(f.c.Group("g").coordinator() == f.a.address());
}

TEST_CASE("members of one group name the same candidates") {
  Fleet f;
  client::ConnectOptions connect = f.ConnectTo(f.c);
  connect.reattach = milliseconds(0);
  connect.coordinator = f.b.address() + "," + f.a.address();
  const absl::Status refused =
      client::Engine::Attach({.connect = connect, .instance = "other"}).status();
  INFO(refused);
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK_THAT(Message(refused), Catch::Contains(connect.coordinator) && Catch::Contains(f.named()));
  // A member that knows one coordinator only enters the group there.
  connect.coordinator = f.a.address();
  const auto taken = client::Engine::Attach({.connect = connect, .instance = "other"});
  INFO(taken.status());
  CHECK(taken.ok());
}

}  // namespace
}  // namespace refitd::e2e
