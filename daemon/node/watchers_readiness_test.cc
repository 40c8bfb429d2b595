// Watchers of instances, and the readiness that is kept without a coordinator.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/watchers.h"
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
  PeerSessions sessions;
  PendingAttaches pending;
  Groups groups{{}, &sessions, &pending};
  Watchers readiness;
  uint64_t ids = 0;

  explicit World(Duration keep = seconds(60)) : readiness(keep, &groups, &pending) { Join("g"); }
  void Join(const std::string& group) {
    FollowerOptions options;
    options.name = group;
    options.coordinator_address = "b:1";
    options.next_update = [this] { return UpdateId(++ids); };
    groups.Follow(std::move(options));
    EngineIdentity engine;
    engine.instance = "here";
    Feed(GroupEvent(EngineAttached{kEngine, engine}), kNow, group);
    GroupSpec spec;
    spec.slots = 4;
    spec.slot_bytes = 4096;
    spec.max_lag = 1;
    Feed(LinkUp{7, spec, std::nullopt, "b"}, kNow, group);
  }
  void Feed(MachineEvent event, TimePoint now = kNow, const std::string& group = "g") {
    MachineActions actions;
    groups.Find(group)->machine->Handle(event, now, &actions);
    readiness.ReadinessChanged(group, now);
    readiness.CheckInvariants();
  }
  void Tell(Standing standing = Standing::kClean, const std::string& group = "g",
            std::optional<Version> version = Version(3)) {
    Feed(CommandReceived{PeerReadiness{
             .anew = true,
             .version = version,
             .instances = Shared({{"here", standing, version}, {"there", standing, version}})}},
         kNow, group);
  }
  // The coordinator is lost, and the follower's record goes.
  void Lose(TimePoint now = kNow, const std::string& group = "g") {
    Feed(LinkLost{absl::UnavailableError("gone")}, now, group);
    groups.Remove(group);
    readiness.ReadinessChanged(group, now);
    readiness.CheckInvariants();
  }
  // A rank of an instance waits to attach again.
  void Await(const std::string& group, const std::string& instance) {
    PendingAttaches::OfGroup waiting;
    waiting.record.id = kEngine;
    waiting.record.group = group;
    waiting.record.instance = instance;
    waiting.coordinator = "b:1";
    pending.Wait(std::move(waiting));
  }
  bool Ready(const std::string& instance, TimePoint now = kNow) const {
    const std::optional<Readiness> is = readiness.ReadinessOf("g", instance, now);
    return is.has_value() && is->ready;
  }
};

constexpr uint64_t kIncarnation = 7;  // of the group

EngineIdentity Again(std::optional<Version> held, bool dirty = false,
                     uint64_t origin = kIncarnation) {
  EngineIdentity engine;
  engine.instance = "here";
  engine.held_version = held;
  if (held.has_value()) engine.held_origin = origin;
  engine.dirty = dirty;
  return engine;
}

TEST_CASE("a joined daemon shows the readiness that the coordinator sent, by the group's max_lag") {
  World world;
  CHECK_FALSE(world.readiness.ReadinessOf("g", "here", kNow).has_value());
  world.Tell();
  CHECK(world.Ready("here"));
  CHECK(world.Ready("there"));
  CHECK_FALSE(world.readiness.ReadinessOf("g", "other", kNow).has_value());
  CHECK_FALSE(world.readiness.ReadinessOf("other", "here", kNow).has_value());
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

TEST_CASE("an engine that comes back with the same version of another incarnation is not ready") {
  World world;
  world.Tell();
  world.Lose();
  world.readiness.Arrived("g", Again(Version(3), /*dirty=*/false, 8), kNow + seconds(10));
  CHECK_FALSE(world.Ready("here", kNow + seconds(20)));
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
  CHECK(world.readiness.ReadinessOf("g", "here", later)->reason ==
        "the coordinator is lost, and no rank has attached again");
  SECTION("a rank that waits for the coordinator shows that it lives") {
    world.Await("g", "here");
    CHECK(world.Ready("here", later));
  }
  SECTION("a rank of another instance does not show that") {
    world.Await("g", "there");
    CHECK_FALSE(world.Ready("here", later));
  }
  SECTION("nor does a rank of another group's instance of that name") {
    world.Await("other", "here");
    CHECK_FALSE(world.Ready("here", later));
  }
}

TEST_CASE("a rank that comes again with other weights than were known makes its instance unready") {
  World world;
  world.Tell();
  world.Lose();
  SECTION("none") { world.readiness.Arrived("g", Again(std::nullopt), kNow); }
  SECTION("another version") { world.readiness.Arrived("g", Again(Version(2)), kNow); }
  SECTION("dirty ones") { world.readiness.Arrived("g", Again(std::nullopt, true), kNow); }
  SECTION("dirty ones, though it names the version") {
    world.readiness.Arrived("g", Again(Version(3), true), kNow);
  }
  CHECK_FALSE(world.Ready("here"));
  CHECK(world.Ready("there"));
}

TEST_CASE("where no version was known, a rank comes again with any weights") {
  World world;
  world.Tell(Standing::kClean, "g", std::nullopt);
  world.Lose();
  world.readiness.Arrived("g", Again(Version(2)), kNow);
  CHECK(world.Ready("here"));
}

TEST_CASE("the lag that a group allows is kept with what was known last") {
  World world;
  world.Feed(CommandReceived{
      PeerReadiness{.anew = true,
                    .version = Version(4),
                    .instances = Shared({{"there", Standing::kClean, Version(3)}})}});
  REQUIRE(world.Ready("there"));
  world.Lose();
  CHECK(world.Ready("there"));
}

TEST_CASE("what was known last counts from the loss on, however often the follower is seen") {
  World world;
  world.Tell();
  world.Feed(LinkLost{absl::UnavailableError("gone")});
  world.Lose(kNow + seconds(30));
  CHECK(world.Ready("there", kNow + seconds(59)));
  CHECK_FALSE(world.Ready("there", kNow + seconds(60)));
}

TEST_CASE("a daemon that joins again tells what the coordinator tells, and keeps nothing") {
  World world;
  world.Tell();
  world.Lose();
  REQUIRE(world.readiness.NextLook().has_value());
  world.Join("g");
  world.Tell(Standing::kDirty);
  CHECK_FALSE(world.Ready("there"));
  CHECK_FALSE(world.readiness.NextLook().has_value());
}

TEST_CASE("a daemon that keeps no readiness knows no instance without the coordinator") {
  World world(Duration(0));
  world.Tell();
  world.Lose();
  CHECK_FALSE(world.readiness.ReadinessOf("g", "there", kNow).has_value());
  CHECK_FALSE(world.readiness.NextLook().has_value());
}

TEST_CASE("the readiness of at most kMaxKept groups is kept") {
  World world;
  for (size_t i = 0; i <= Watchers::kMaxKept; ++i) {
    const std::string group = fmt::format("g{:03}", i);
    world.Join(group);
    world.Tell(Standing::kClean, group);
    world.Lose(kNow, group);
    const bool kept = world.readiness.ReadinessOf(group, "there", kNow).has_value();
    REQUIRE(kept == (i < Watchers::kMaxKept));
  }
}

TEST_CASE("what is kept is looked after when it ends, and more often while somebody watches") {
  World world;
  world.Join("h");
  for (const char* group : {"g", "h"}) world.Tell(Standing::kClean, group);
  world.Lose(kNow, "g");
  world.Lose(kNow + seconds(7), "h");
  REQUIRE(world.readiness.NextLook() == kNow + seconds(60));
  const auto sink = std::make_shared<Sink>();
  REQUIRE(world.readiness.AddInstance("uid:1", "g", "there", sink, kNow).ok());
  world.readiness.Look(kNow + seconds(20));
  CHECK(world.readiness.NextLook() == kNow + seconds(20) + Watchers::kLookInterval);
}

TEST_CASE("a watcher gets the change at once when a rank comes again with other weights") {
  World world;
  world.Tell();
  world.Lose();
  const auto sink = std::make_shared<Sink>();
  REQUIRE(world.readiness.AddInstance("uid:1", "g", "here", sink, kNow).ok());
  world.readiness.Arrived("g", Again(Version(2)), kNow);
  using enum InstanceHealth;
  CHECK(sink->told == std::vector<InstanceHealth>{kServing, kNotServing});
}

TEST_CASE(
    "an instance whose update was running when the coordinator was lost has unknown weights") {
  World world;
  world.Tell(Standing::kUpdating);
  CHECK(world.Ready("there"));
  world.Lose();
  CHECK_FALSE(world.Ready("here"));
  CHECK_FALSE(world.Ready("there"));
}

TEST_CASE("a watcher gets each change once, also when an instance comes, goes, or gets stale") {
  World world;
  const auto sink = std::make_shared<Sink>();
  const auto watch = world.readiness.AddInstance("uid:1", "g", "there", sink, kNow);
  REQUIRE(watch.ok());
  using enum InstanceHealth;
  std::vector<InstanceHealth> expected = {kUnknown};
  CHECK(sink->told == expected);
  CHECK_FALSE(world.readiness.NextLook().has_value());
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
  CHECK(world.readiness.NextLook().has_value());
  world.readiness.Look(kNow + seconds(60));
  expected.push_back(kUnknown);
  CHECK(sink->told == expected);
  CHECK_FALSE(world.readiness.NextLook().has_value());
  world.readiness.RemoveInstance(*watch);
  CHECK_FALSE(sink->end.has_value());
}

TEST_CASE("watchers are bounded, and end with the daemon") {
  World world;
  const auto sink = std::make_shared<Sink>();
  for (size_t i = 0; i < Watchers::kMaxInstanceWatchers; ++i) {
    const std::string identity = i % 2 == 0 ? "uid:1" : "uid:2";
    REQUIRE(world.readiness.AddInstance(identity, "g", "here", sink, kNow).ok());
    if (i + 2 != Watchers::kMaxInstanceWatchers) continue;
    CHECK_FALSE(
        world.readiness.AddInstance("uid:1", "g", "here", sink, kNow).ok());  // it has its half
  }
  CHECK(world.readiness.AddInstance("uid:3", "g", "here", sink, kNow).status().code() ==
        absl::StatusCode::kResourceExhausted);
  world.readiness.EndInstances(absl::UnavailableError("the daemon stops"));
  REQUIRE(sink->end.has_value());
  CHECK(sink->end->code() == absl::StatusCode::kUnavailable);
  const size_t told = sink->told.size();
  world.Tell();
  CHECK(sink->told.size() == told);
}

}  // namespace
}  // namespace refitd
