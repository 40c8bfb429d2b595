// Catch-ups through real daemons: a late instance gets the group's version from engines that hold
// it, while a source instance, the late instance, the daemon of either or the coordinator's daemon
// is killed: before the late instance has answered Prepare, and while bytes cross links that the
// test slows down. An engine that is told committed holds every byte of the version (P1), engines
// that give keep theirs (P2), and everybody hears of the loss in time (P4). Where the machine
// allows no network namespaces, the cases with slow links say so and pass.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/client_members.h"
#include "tests/e2e/network.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using Catch::StartsWith;

constexpr int kMatrices = 4;
constexpr int kSlots = 4;
// A busy machine may make a catch-up give up for reasons that the test did not cause, but at most
// so often.
constexpr int kMostAborts = 10;

// The network of the daemons, and the size of the model.
struct Place {
  const Star* net = nullptr;  // null: this host's loopback
  int rows = 64;
  int columns = 64;
  int64_t slot_bytes = 4096;
};

std::vector<std::string> FlagsOf(const Place& place, const std::string& id, size_t node) {
  if (place.net == nullptr) {
    return {"--listen-tcp=" + OwnLoopback(static_cast<int>(node) + 1) + ":0", "--daemon-id=" + id};
  }
  return {"--listen-tcp=" + Star::AddressOf(node) + ":7411", "--daemon-id=" + id,
          "--data-interface=v0"};
}
std::vector<std::string> LauncherOf(const Place& place, size_t node) {
  return place.net == nullptr ? std::vector<std::string>() : (*place.net)[node].launcher();
}

// a coordinates and has no members. Instance "one" is a process at b, "two" is at c beside the
// trainer; late instances are processes at d, which answer Prepare when the test says so.
struct Fleet {
  explicit Fleet(const Place& at = {})
      : place(at),
        a(FlagsOf(at, "a", 0), LauncherOf(at, 0)),
        b(FlagsOf(at, "b", 1), LauncherOf(at, 1)),
        c(FlagsOf(at, "c", 2), LauncherOf(at, 2)),
        d(FlagsOf(at, "d", 3), LauncherOf(at, 3)) {
    client::ConnectOptions connect;
    connect.socket = c.socket();
    connect.group = "g";
    connect.coordinator = a.address();
    connect.reattach = kDeadline;
    client::ConnectOptions with_spec = connect;
    with_spec.spec = client::GroupSpec{
        .trainer_ranks = 1, .min_instances = 2, .slot_bytes = place.slot_bytes, .slots = kSlots};
    pusher = std::make_unique<Pusher>(with_spec, model);
    one = Start(b, "one", true);
    two = std::make_unique<Rank>(connect, "two", client::Delivery::kInPlace, model);
  }

  // An engine process that is attached and registered.
  std::unique_ptr<MemberProcess> Start(const Daemon& daemon, const std::string& instance,
                                       bool answers, bool catch_up = true) {
    auto process = std::make_unique<MemberProcess>(
        daemon, "engine",
        std::vector<std::string>{
            "instance=" + instance, "coordinator=" + a.address(), "instances=2",
            fmt::format("slot_bytes={}", place.slot_bytes), fmt::format("slots={}", kSlots),
            fmt::format("matrices={}", kMatrices), fmt::format("rows={}", place.rows),
            fmt::format("columns={}", place.columns), fmt::format("auto={}", answers ? 1 : 0),
            fmt::format("catch_up={}", catch_up ? 1 : 0)});
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

  // Starts a late instance, and returns when it has heard Prepare of its catch-up, which waits for
  // its answer.
  void OpenCatchUp() {
    late_instance = Start(d, "late", false);
    REQUIRE_ANSWER(*late_instance, "prepare", fmt::format("ok {}", version));
  }

  // The late instance of an open catch-up answers. Returns when it has received a part of the
  // model, with most of it still to come: the links are slow.
  void AwaitBytes() {
    const int64_t before = LinkBytesOf(d.pid()).received;
    REQUIRE_ANSWER(*late_instance, fmt::format("ready {}", version), "ok");
    REQUIRE(
        Eventually([&] { return LinkBytesOf(d.pid()).received > before + ModelBytes(model) / 8; }));
    CHECK(a.Group("g").catch_up().outcome() == v1::UPDATE_OUTCOME_RUNNING);
  }

  // Has the late instance answer each Prepare until it is told committed; then it must have every
  // byte (P1). Returns how often its catch-ups were given up.
  int AwaitCaughtUp() {
    for (int aborts = 0; aborts <= kMostAborts; ++aborts) {
      REQUIRE_ANSWER(*late_instance, fmt::format("ready {}", version), "ok");
      const std::string outcome = late_instance->Do("outcome");
      INFO(Logs() << outcome);
      if (outcome == fmt::format("ok committed {}", version)) {
        REQUIRE_ANSWER(*late_instance, fmt::format("check {}", version), "ok");
        return aborts;
      }
      REQUIRE_THAT(outcome, StartsWith(fmt::format("ok aborted {}", version)));
      REQUIRE_ANSWER(*late_instance, "prepare", fmt::format("ok {}", version));
    }
    FAIL("the late instance did not catch up");
    return 0;
  }

  // Source instances hear nothing of a catch-up, and keep their version.
  void CheckTwoUndisturbed(int prepares) {
    CHECK(two->seen().wrong.empty());
    CHECK(two->seen().prepares == prepares);
    CHECK(two->seen().losses == 0);
    CHECK(two->engine().weights() == Weights::kClean);
  }

  bool Has(const std::string& instance) {
    const v1::GroupStatus group = a.Group("g");
    for (const v1::InstanceStatus& i : group.instances()) {
      if (i.name() == instance && i.attached() > 0) return true;
    }
    return false;
  }
  std::vector<std::string> SourceInstances() {
    const v1::GroupStatus group = a.Group("g");
    return {group.catch_up().source_instances().begin(), group.catch_up().source_instances().end()};
  }
  v1::InstanceStatus Of(const std::string& instance) {
    const v1::GroupStatus group = a.Group("g");
    for (const v1::InstanceStatus& i : group.instances()) {
      if (i.name() == instance) return i;
    }
    return {};
  }
  std::string Logs() { return "a's log:\n" + a.log() + "\nd's log:\n" + d.log() + "\n"; }

  const Place place;
  const Model model = PlainModel(kMatrices, place.rows, place.columns);
  int64_t version = 0;
  Daemon a;
  Daemon b;
  Daemon c;
  Daemon d;
  std::unique_ptr<Pusher> pusher;
  std::unique_ptr<MemberProcess> one;
  std::unique_ptr<Rank> two;
  std::unique_ptr<MemberProcess> late_instance;
};

using Names = std::vector<std::string>;

TEST_CASE("a source instance's death in a catch-up is made up for by another source instance") {
  Fleet f;
  f.Install();
  const bool daemon = GENERATE(false, true);
  CAPTURE(daemon);
  f.OpenCatchUp();
  CHECK(f.SourceInstances() == Names{"one", "two"});
  if (daemon) {
    f.b.Kill();
  } else {
    f.one->Kill();
  }
  // A catch-up whose source instance is gone is given up: the late instance hears Aborted, and
  // takes from "two" next.
  CHECK(Eventually([&] { return !f.Has("one"); }));
  CHECK(f.AwaitCaughtUp() >= 1);
  CHECK(f.SourceInstances() == Names{"two"});
  f.CheckTwoUndisturbed(1);
  CHECK(f.Of("two").state() == "clean");
  CHECK(f.Of("late").version() == 1);
}

TEST_CASE("a late instance's death in a catch-up costs the late instance only") {
  Fleet f;
  f.Install();
  f.OpenCatchUp();
  f.late_instance->Kill();
  CHECK(Eventually([&] { return !f.Has("late"); }));
  f.CheckTwoUndisturbed(1);
  REQUIRE_ANSWER(*f.one, "check 1", "ok");
  // Both instances give to another late instance.
  f.late_instance = f.Start(f.d, "later", false);
  REQUIRE_ANSWER(*f.late_instance, "prepare", "ok 1");
  CHECK(f.AwaitCaughtUp() == 0);
  CHECK(f.SourceInstances() == Names{"one", "two"});
}

// ---- while bytes move ----

// Links on which the model takes four seconds. Empty: they are there; else why this machine can
// have none.
constexpr int kMegabits = 4;
std::string MakeSlowLinks(const Star& net) {
  std::string failed = net.Make();
  return failed.empty() ? net.Slow(kMegabits) : failed;
}

#define SLOW_LINKS_OR_RETURN(net)                                 \
  const Star net(4);                                              \
  if (const std::string why = MakeSlowLinks(net); !why.empty()) { \
    WARN("SKIPPED: " << why);                                     \
    return;                                                       \
  }

Place On(const Star& net) { return {&net, 1024, 256, 64 << 10}; }

// Installs a version over fast links, and has a catch-up move bytes over slow ones.
void OpenSlowCatchUp(Fleet* f) {
  f->place.net->Fast();
  f->Install();
  REQUIRE(f->place.net->Slow(kMegabits).empty());
  f->OpenCatchUp();
  f->AwaitBytes();
}

TEST_CASE(
    "a source instance that dies while its bytes cross is made up for by another source instance") {
  SLOW_LINKS_OR_RETURN(net);
  Fleet f(On(net));
  const bool daemon = GENERATE(false, true);
  CAPTURE(daemon);
  OpenSlowCatchUp(&f);
  CHECK(f.SourceInstances() == Names{"one", "two"});
  if (daemon) {
    f.b.Kill();
  } else {
    f.one->Kill();
  }
  REQUIRE_THAT(f.late_instance->Do("outcome"), StartsWith("ok aborted 1 dirty"));
  net.Fast();
  REQUIRE_ANSWER(*f.late_instance, "prepare", "ok 1");
  f.AwaitCaughtUp();
  CHECK(f.SourceInstances() == Names{"two"});
  f.CheckTwoUndisturbed(1);
  CHECK(f.Of("two").state() == "clean");
  CHECK(f.Of("late").version() == 1);
}

TEST_CASE("a late instance that dies while bytes cross to it costs the late instance only") {
  SLOW_LINKS_OR_RETURN(net);
  Fleet f(On(net));
  const bool daemon = GENERATE(false, true);
  CAPTURE(daemon);
  OpenSlowCatchUp(&f);
  if (daemon) {
    f.d.Kill();
    CHECK_THAT(f.late_instance->Do("believe 1"), StartsWith("ok unknown gone"));
  }
  f.late_instance->Kill();
  CHECK(Eventually([&] { return !f.Has("late"); }));
  net.Fast();
  if (daemon) f.d.Restart();
  f.CheckTwoUndisturbed(1);
  REQUIRE_ANSWER(*f.one, "check 1", "ok");
  // Both instances give to another late instance.
  f.late_instance = f.Start(f.d, "later", false);
  REQUIRE_ANSWER(*f.late_instance, "prepare", "ok 1");
  f.AwaitCaughtUp();
  CHECK(f.SourceInstances() == Names{"one", "two"});
  f.CheckTwoUndisturbed(1);
}

TEST_CASE(
    "the coordinator's death while a catch-up's bytes cross leaves only the late instance with "
    "unknown "
    "weights") {
  SLOW_LINKS_OR_RETURN(net);
  Fleet f(On(net));
  OpenSlowCatchUp(&f);
  f.a.Kill();
  CHECK_THAT(f.late_instance->Do("believe 1"), StartsWith("ok unknown gone"));
  CHECK_THAT(f.one->Do("believe 1"), StartsWith("ok good 1 gone"));
  REQUIRE(f.two->Await([](const Rank::Seen& s) { return s.losses == 1; }));
  CHECK(f.two->seen().lost_weights == Weights::kClean);
  net.Fast();
  f.a.Restart();
  // A source instance comes back with its version, and yet nobody gives a version that the new
  // group has not verified.
  REQUIRE(f.two->Await([](const Rank::Seen& s) { return s.reattached == 1; }));
  CHECK(f.two->seen().held == Version(1));
  f.one = f.Start(f.b, "one", true);
  f.late_instance = f.Start(f.d, "late", true);
  f.Install();
  for (MemberProcess* engine : {f.one.get(), f.late_instance.get()}) {
    REQUIRE_ANSWER(*engine, fmt::format("believe {}", f.version),
                   fmt::format("ok good {}", f.version));
  }
  CHECK(f.a.Group("g").version() == f.version);
}

TEST_CASE("a client that does not take part in catch-ups does not catch up and does not give") {
  Fleet f;
  // "old" holds the version as "one" and "two" do, and "old-late" lacks it as "new-late" does.
  const auto old = f.Start(f.d, "old", true, /*catch_up=*/false);
  f.Install();
  const auto old_late = f.Start(f.d, "old-late", true, /*catch_up=*/false);
  f.late_instance = f.Start(f.d, "new-late", false);
  REQUIRE_ANSWER(*f.late_instance, "prepare", "ok 1");
  CHECK(f.AwaitCaughtUp() == 0);
  CHECK(f.SourceInstances() == Names{"one", "two"});
  CHECK(f.Of("old").state() == "clean");
  CHECK(f.Of("old").version() == 1);
  CHECK_FALSE(f.Of("old-late").has_version());
  CHECK(f.Of("old-late").catch_up().empty());
  REQUIRE_ANSWER(*old_late, "check 0", "ok");  // the catch-up wrote no byte of it

  // When the instances that take part in catch-ups are gone, nobody gives to an instance that would
  // be brought up to date.
  f.one->Kill();
  f.two.reset();
  f.late_instance->Kill();
  REQUIRE(Eventually([&] { return !f.Has("one") && !f.Has("two") && !f.Has("new-late"); }));
  const auto alone = f.Start(f.d, "alone", true);
  CHECK(Eventually([&] {
    return f.Of("alone").catch_up() ==
           "waits for the next version: no clean instance gives version 1";
  }));
}

}  // namespace
}  // namespace refitd::e2e
