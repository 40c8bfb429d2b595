#include "daemon/node/readiness.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/status.h"

namespace refitd {
namespace {

using std::chrono::seconds;

const TimePoint kNow{std::chrono::hours(1)};
constexpr MemberId kEngine{7};

class Sink : public ReadinessSink {
 public:
  void Send(InstanceHealth health) override { told.push_back(health); }
  void End(absl::Status status) override { end = std::move(status); }

  std::vector<InstanceHealth> told;
  std::optional<absl::Status> end;
};

// A daemon that joined group "g", of which instance "here" has a rank on this daemon, and instance
// "there" has none.
struct World {
  Peers peers;
  Waiters waiters;
  Groups groups{{}, &peers, &waiters};
  InstanceReadiness readiness{seconds(60), &groups, &waiters};
  uint64_t ids = 0;

  World() {
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "b:1";
    options.next_update = [this] { return UpdateId(++ids); };
    groups.Follow(std::move(options));
    EngineIdentity engine;
    engine.instance = "here";
    Feed(GroupEvent(EngineAttached{kEngine, engine}));
    GroupSpec spec;
    spec.slots = 4;
    spec.slot_bytes = 4096;
    spec.max_lag = 1;
    Feed(LinkUp{7, spec, std::nullopt, "b"});
  }
  void Feed(MachineEvent event, TimePoint now = kNow) {
    MachineActions actions;
    groups.Find("g")->machine->Handle(event, now, &actions);
    readiness.Changed("g", now);
    readiness.CheckInvariants();
  }
  void Tell(Standing standing = Standing::kClean) {
    Feed(CommandReceived{PeerReadiness{
        .anew = true,
        .version = Version(3),
        .instances = {{"here", standing, Version(3)}, {"there", standing, Version(3)}}}});
  }
  // The coordinator is lost, and the follower's record goes.
  void Lose() {
    Feed(LinkLost{absl::UnavailableError("gone")});
    groups.Remove("g");
    readiness.Changed("g", kNow);
    readiness.CheckInvariants();
  }
  bool Ready(const std::string& instance, TimePoint now = kNow) const {
    const std::optional<Readiness> is = readiness.Of("g", instance, now);
    return is.has_value() && is->ready;
  }
};

EngineIdentity Again(std::optional<Version> held, bool dirty = false) {
  EngineIdentity engine;
  engine.instance = "here";
  engine.held_version = held;
  engine.dirty = dirty;
  return engine;
}

TEST_CASE("a joined daemon tells what the coordinator told, by the group's max_lag") {
  World world;
  CHECK_FALSE(world.readiness.Of("g", "here", kNow).has_value());
  world.Tell();
  CHECK(world.Ready("here"));
  CHECK(world.Ready("there"));
  CHECK_FALSE(world.readiness.Of("g", "other", kNow).has_value());
  CHECK_FALSE(world.readiness.Of("other", "here", kNow).has_value());
  world.Feed(CommandReceived{PeerReadiness{.version = Version(4), .instances = {}}});
  CHECK(world.Ready("here"));
  world.Feed(CommandReceived{PeerReadiness{.version = Version(5), .instances = {}}});
  CHECK_FALSE(world.Ready("here"));
}

TEST_CASE("the loss of the coordinator alone takes no instance out of service") {
  World world;
  world.Tell();
  world.Lose();
  CHECK(world.Ready("here"));
  CHECK(world.Ready("there"));
  world.readiness.Arrived("g", Again(Version(3)), kNow + seconds(10));
  CHECK(world.Ready("here", kNow + seconds(20)));
}

TEST_CASE("what was known last does not count for ever") {
  World world;
  world.Tell();
  world.Lose();
  CHECK(world.Ready("there", kNow + seconds(59)));
  CHECK_FALSE(world.Ready("there", kNow + seconds(60)));
}

TEST_CASE("an instance of this daemon of which no rank comes again is not ready any more") {
  World world;
  world.Tell();
  world.Lose();
  const TimePoint later = kNow + kReattachLimit;
  CHECK_FALSE(world.Ready("here", later));
  CHECK(world.readiness.Of("g", "here", later)->reason ==
        "the coordinator is lost, and no rank has attached again");
  SECTION("a rank that waits for the coordinator shows that it lives") {
    Waiters::OfGroup waiting;
    waiting.record.id = kEngine;
    waiting.record.group = "g";
    waiting.record.instance = "here";
    waiting.coordinator = "b:1";
    world.waiters.Wait(std::move(waiting));
    CHECK(world.Ready("here", later));
  }
}

TEST_CASE("a rank that comes again with other weights than were known makes its instance unready") {
  World world;
  world.Tell();
  world.Lose();
  SECTION("none") { world.readiness.Arrived("g", Again(std::nullopt), kNow); }
  SECTION("another version") { world.readiness.Arrived("g", Again(Version(2)), kNow); }
  SECTION("dirty ones") { world.readiness.Arrived("g", Again(std::nullopt, true), kNow); }
  CHECK_FALSE(world.Ready("here"));
  CHECK(world.Ready("there"));
}

TEST_CASE("an instance whose update was running when the coordinator was lost is in doubt") {
  World world;
  world.Tell(Standing::kUpdating);
  CHECK(world.Ready("there"));
  world.Lose();
  CHECK_FALSE(world.Ready("here"));
  CHECK_FALSE(world.Ready("there"));
}

TEST_CASE("a watcher is told each change once, also that an instance comes, goes, or gets stale") {
  World world;
  const auto sink = std::make_shared<Sink>();
  const auto watch = world.readiness.Watch("g", "there", sink, kNow);
  REQUIRE(watch.ok());
  using enum InstanceHealth;
  std::vector<InstanceHealth> expected = {kUnknown};
  CHECK(sink->told == expected);
  CHECK_FALSE(world.readiness.NextDue().has_value());
  world.Tell();
  world.Tell();
  expected.push_back(kServing);
  CHECK(sink->told == expected);
  world.Tell(Standing::kDirty);
  world.Tell();
  expected.insert(expected.end(), {kNotServing, kServing});
  CHECK(sink->told == expected);
  world.Lose();
  CHECK(sink->told == expected);
  CHECK(world.readiness.NextDue().has_value());
  world.readiness.Look(kNow + seconds(60));
  expected.push_back(kUnknown);
  CHECK(sink->told == expected);
  CHECK_FALSE(world.readiness.NextDue().has_value());
  world.readiness.StopWatching(*watch);
  CHECK_FALSE(sink->end.has_value());
}

TEST_CASE("watchers are bounded, and end with the daemon") {
  World world;
  const auto sink = std::make_shared<Sink>();
  for (size_t i = 0; i < InstanceReadiness::kMaxWatchers; ++i) {
    REQUIRE(world.readiness.Watch("g", "here", sink, kNow).ok());
  }
  CHECK(world.readiness.Watch("g", "here", sink, kNow).status().code() ==
        absl::StatusCode::kResourceExhausted);
  world.readiness.EndAll(absl::UnavailableError("the daemon stops"));
  REQUIRE(sink->end.has_value());
  CHECK(sink->end->code() == absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace refitd
