// Fills through real daemons: a newcomer gets the group's version from engines that hold it, while
// a giver's daemon or an engine's process is killed before the newcomer has answered Prepare. An
// engine that is told committed holds every byte of the version (P1), and engines that give keep
// theirs (P2).
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/client_members.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using Catch::StartsWith;

constexpr int kMatrices = 4;
constexpr int kRows = 64;
constexpr int kColumns = 64;
constexpr int64_t kSlotBytes = 4096;
constexpr int kSlots = 4;
// A fill is given up for reasons that the test did not cause (a busy machine) at most so often.
constexpr int kMostAborts = 10;

std::vector<std::string> FlagsOf(const std::string& id, int loopback) {
  return {"--listen-tcp=" + OwnLoopback(loopback) + ":0", "--daemon-id=" + id};
}

// a coordinates and has no members. Instance "one" is a process at b, "two" is at c beside the
// trainer; newcomers are processes at d, which answer Prepare when the test says so.
struct Fleet {
  Fleet() : a(FlagsOf("a", 1)), b(FlagsOf("b", 2)), c(FlagsOf("c", 3)), d(FlagsOf("d", 4)) {
    client::ConnectOptions connect;
    connect.socket = c.socket();
    connect.group = "g";
    connect.coordinator = a.address();
    connect.reattach = kDeadline;
    client::ConnectOptions with_spec = connect;
    with_spec.spec = client::GroupSpec{
        .trainer_ranks = 1, .min_instances = 2, .slot_bytes = kSlotBytes, .slots = kSlots};
    pusher = std::make_unique<Pusher>(with_spec, model);
    one = Start(b, "one", true);
    two = std::make_unique<Rank>(connect, "two", client::Delivery::kRegistered, model);
  }

  // An engine process that is attached and registered.
  std::unique_ptr<MemberProcess> Start(const Daemon& daemon, const std::string& instance,
                                       bool answers, bool fill = true) {
    auto process = std::make_unique<MemberProcess>(
        daemon, "engine",
        std::vector<std::string>{
            "instance=" + instance, "coordinator=" + a.address(), "instances=2",
            fmt::format("slot_bytes={}", kSlotBytes), fmt::format("slots={}", kSlots),
            fmt::format("matrices={}", kMatrices), fmt::format("rows={}", kRows),
            fmt::format("columns={}", kColumns), fmt::format("auto={}", answers ? 1 : 0),
            fmt::format("fill={}", fill ? 1 : 0)});
    REQUIRE_ANSWER(*process, "attach", "ok");
    return process;
  }

  // Installs the next version. An update that a loss ends is begun again.
  void Install() {
    absl::Status last;
    const bool installed = Eventually([&] {
      last = pusher->Install(++version);
      return last.ok();
    });
    INFO(Logs() << last);
    REQUIRE(installed);
    REQUIRE(two->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
  }

  // Starts a newcomer, and returns when it has heard Prepare of its fill, which waits for its
  // answer.
  void OpenFill() {
    newcomer = Start(d, "late", false);
    REQUIRE_ANSWER(*newcomer, "prepare", fmt::format("ok {}", version));
  }

  // The newcomer answers each Prepare until it is told committed, and then has every byte (P1).
  // Answers how often its fills were given up.
  int AwaitFilled() {
    for (int aborts = 0; aborts <= kMostAborts; ++aborts) {
      REQUIRE_ANSWER(*newcomer, fmt::format("ready {}", version), "ok");
      const std::string outcome = newcomer->Do("outcome");
      INFO(Logs() << outcome);
      if (outcome == fmt::format("ok committed {}", version)) {
        REQUIRE_ANSWER(*newcomer, fmt::format("check {}", version), "ok");
        return aborts;
      }
      REQUIRE_THAT(outcome, StartsWith(fmt::format("ok aborted {}", version)));
      REQUIRE_ANSWER(*newcomer, "prepare", fmt::format("ok {}", version));
    }
    FAIL("the newcomer was not filled");
    return 0;
  }

  // Givers hear nothing of a fill, and keep their version.
  void CheckTwoUndisturbed(int prepares) {
    CHECK(two->seen().wrong.empty());
    CHECK(two->seen().prepares == prepares);
    CHECK(two->seen().losses == 0);
    CHECK(two->engine().weights() == Weights::kGood);
  }

  bool Has(const std::string& instance) {
    const v1::GroupStatus group = a.Group("g");
    for (const v1::InstanceStatus& i : group.instances()) {
      if (i.name() == instance && i.attached() > 0) return true;
    }
    return false;
  }
  std::vector<std::string> Givers() {
    const v1::GroupStatus group = a.Group("g");
    return {group.fill().givers().begin(), group.fill().givers().end()};
  }
  v1::InstanceStatus Of(const std::string& instance) {
    const v1::GroupStatus group = a.Group("g");
    for (const v1::InstanceStatus& i : group.instances()) {
      if (i.name() == instance) return i;
    }
    return {};
  }
  std::string Logs() { return "a's log:\n" + a.log() + "\nd's log:\n" + d.log() + "\n"; }

  const Model model = PlainModel(kMatrices, kRows, kColumns);
  int64_t version = 0;
  Daemon a;
  Daemon b;
  Daemon c;
  Daemon d;
  std::unique_ptr<Pusher> pusher;
  std::unique_ptr<MemberProcess> one;
  std::unique_ptr<Rank> two;
  std::unique_ptr<MemberProcess> newcomer;
};

using Names = std::vector<std::string>;

TEST_CASE("a giver's death in a fill is made up for by another giver") {
  Fleet f;
  f.Install();
  const bool daemon = GENERATE(false, true);
  CAPTURE(daemon);
  f.OpenFill();
  CHECK(f.Givers() == Names{"one", "two"});
  if (daemon) {
    f.b.Kill();
  } else {
    f.one->Kill();
  }
  // A fill whose giver is gone is given up: the newcomer hears Aborted, and takes from "two" next.
  CHECK(Eventually([&] { return !f.Has("one"); }));
  CHECK(f.AwaitFilled() >= 1);
  CHECK(f.Givers() == Names{"two"});
  f.CheckTwoUndisturbed(1);
  CHECK(f.Of("two").state() == "clean");
  CHECK(f.Of("late").version() == 1);
}

TEST_CASE("a newcomer's death in a fill costs the newcomer only") {
  Fleet f;
  f.Install();
  f.OpenFill();
  f.newcomer->Kill();
  CHECK(Eventually([&] { return !f.Has("late"); }));
  f.CheckTwoUndisturbed(1);
  REQUIRE_ANSWER(*f.one, "check 1", "ok");
  // Another newcomer is filled, by both.
  f.newcomer = f.Start(f.d, "later", false);
  REQUIRE_ANSWER(*f.newcomer, "prepare", "ok 1");
  CHECK(f.AwaitFilled() == 0);
  CHECK(f.Givers() == Names{"one", "two"});
}

TEST_CASE("a client that does not take part in fills is not filled and does not give") {
  Fleet f;
  // "old" holds the version as "one" and "two" do, and "old-late" lacks it as "new-late" does.
  const auto old = f.Start(f.d, "old", true, /*fill=*/false);
  f.Install();
  const auto old_late = f.Start(f.d, "old-late", true, /*fill=*/false);
  f.newcomer = f.Start(f.d, "new-late", false);
  REQUIRE_ANSWER(*f.newcomer, "prepare", "ok 1");
  CHECK(f.AwaitFilled() == 0);
  CHECK(f.Givers() == Names{"one", "two"});
  CHECK(f.Of("old").state() == "clean");
  CHECK(f.Of("old").version() == 1);
  CHECK_FALSE(f.Of("old-late").has_version());
  CHECK(f.Of("old-late").fill().empty());
  REQUIRE_ANSWER(*old_late, "check 0", "ok");  // no byte of it was written

  // With those that take part gone, nobody gives to one that would be filled.
  f.one->Kill();
  f.two.reset();
  f.newcomer->Kill();
  REQUIRE(Eventually([&] { return !f.Has("one") && !f.Has("two") && !f.Has("new-late"); }));
  const auto alone = f.Start(f.d, "alone", true);
  CHECK(Eventually([&] {
    return f.Of("alone").fill() == "waits for the next version: no clean instance gives version 1";
  }));
}

}  // namespace
}  // namespace refitd::e2e
