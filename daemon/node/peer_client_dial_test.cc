// Tries to join a group, without links and machines.
#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/peer_client.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;
using std::chrono::minutes;

constexpr Duration kWait = std::chrono::hours(1);

class Sink : public MemberSink {
 public:
  void Send(MemberNews /*news*/) override {}
  void End(absl::Status status) override { end = std::move(status); }
  std::optional<absl::Status> end;
};

// A group "g" that is being joined at "b:1". No link is really made: the test itself reports what
// links would report, and no machine handles an event.
struct World {
  World()
      : state(OptionsOf(), {}, processes.get(), {[this](auto&, auto&, auto&) { ++events; }, [] {}}),
        client(&state, [this](PeerDial dial, PeerLinkCallbacks callbacks) {
          dials.push_back({std::move(dial), std::move(callbacks)});
          return nullptr;
        }) {
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "b:1";
    options.next_update = [] { return UpdateId(1); };
    const StateLock lock(&state.mutex);
    group = state.groups.Follow(std::move(options));
  }
  static DaemonOptions OptionsOf() {
    DaemonOptions options;
    options.daemon_id = "a";
    options.message_bytes = 1 << 20;
    return options;
  }

  // `wait` 0: the member does not wait. Less: its wait has ended.
  std::shared_ptr<Sink> Wait(Duration wait, std::optional<GroupSpec> spec = {}) {
    auto sink = std::make_shared<Sink>();
    MemberRecord record;
    record.id = state.NewMember();
    record.group = "g";
    record.engine = true;
    record.sink = sink;
    const StateLock lock(&state.mutex);
    state.pending.Wait(PendingAttaches::OfGroup{std::move(record), EngineAttached{},
                                                DaemonState::Now() + wait, wait != Duration(0),
                                                "b:1", std::move(spec)});
    return sink;
  }
  void Dial() {
    const StateLock lock(&state.mutex);
    client.Dial(group);
  }
  // The last try fails. Returns whether a member still waits.
  bool Fail(const absl::Status& status) {
    const auto on_lost = dials.back().callbacks.on_lost;  // a new try may move the others
    on_lost(status);
    const StateLock lock(&state.mutex);
    state.groups.CheckInvariants();
    state.pending.CheckInvariants();
    return group->join.joining;
  }
  bool LateAt(TimePoint now) {
    StateLock lock(&state.mutex);
    const size_t before = state.pending.size();
    client.RefuseLateMembers(now, lock);
    return state.pending.size() < before;
  }

  struct Dialled {
    PeerDial dial;
    PeerLinkCallbacks callbacks;
  };
  std::vector<Dialled> dials;
  int events = 0;  // for the group's machine
  const std::unique_ptr<ProcessWatch> processes = *ProcessWatch::Create();
  DaemonState state;
  PeerClient client;
  GroupRecord* group = nullptr;
};

TEST_CASE("a try names this daemon, and carries what its waiting members bring") {
  World world;
  GroupSpec spec;
  spec.trainer_ranks = 2;
  world.Wait(kWait, spec);
  world.Dial();
  REQUIRE(world.dials.size() == 1);
  const PeerDial& dial = world.dials[0].dial;
  CHECK(dial.address == "b:1");
  CHECK(dial.group == "g");
  CHECK(dial.daemon_id == "a");
  CHECK(dial.boot_id == world.state.boot_id);
  CHECK(dial.limits.message_bytes == 1 << 20);
  CHECK(dial.wait > kWait - minutes(1));
  REQUIRE(dial.spec.has_value());
  CHECK(dial.spec->trainer_ranks == 2);
  CHECK(world.group->join.dialled_spec);
}

TEST_CASE("what an earlier try of the group reports is ignored") {
  World world;
  world.Wait(kWait);
  world.Dial();
  world.Dial();
  world.dials[0].callbacks.on_command(PeerPing{1});
  CHECK(world.events == 0);
  world.dials[1].callbacks.on_command(PeerPing{1});
  CHECK(world.events == 1);
  std::unique_ptr<GroupRecord> gone;
  {
    const StateLock lock(&world.state.mutex);
    gone = world.state.groups.Remove("g");
  }
  world.dials[1].callbacks.on_command(PeerPing{1});
  CHECK(world.events == 1);
}

TEST_CASE("a group that does not exist yet is tried again for those who wait (P4)") {
  World world;
  const auto at_once = world.Wait(Duration(0));
  const auto late = world.Wait(-kWait);
  const auto patient = world.Wait(kWait);
  world.Dial();
  CHECK(world.Fail(absl::NotFoundError("no such group")));
  CHECK(world.dials.size() == 2);
  REQUIRE(at_once->end.has_value());
  CHECK(at_once->end->code() == absl::StatusCode::kNotFound);
  CHECK_THAT(std::string(at_once->end->message()),
             Contains("group g: the coordinator at b:1 could not be joined: no such group"));
  CHECK(late->end.has_value());
  CHECK_FALSE(patient->end.has_value());
}

TEST_CASE("a refused spec ends the members that brought one, and the others try without") {
  World world;
  const auto brings = world.Wait(kWait, GroupSpec());
  const auto without = world.Wait(kWait);
  world.Dial();
  CHECK(world.Fail(absl::FailedPreconditionError("another spec")));
  CHECK(brings->end.has_value());
  CHECK_FALSE(without->end.has_value());
  REQUIRE(world.dials.size() == 2);
  CHECK_FALSE(world.dials[1].dial.spec.has_value());
  CHECK(world.dials[1].dial.number > world.dials[0].dial.number);
}

TEST_CASE("a daemon whose id is still linked pauses before the next try, and says why it waits") {
  World world;
  const auto patient = world.Wait(kWait);
  world.Dial();
  CHECK(world.Fail(absl::AlreadyExistsError("an older link")));
  CHECK(world.dials.size() == 1);
  REQUIRE(world.group->join.redial.has_value());
  const TimePoint redial = *world.group->join.redial;
  {
    const StateLock lock(&world.state.mutex);
    CHECK(world.state.groups.NextDeadline() == redial);
    world.client.RedialIfDue(redial - milliseconds(1));
    CHECK(world.dials.size() == 1);
    world.client.RedialIfDue(redial);
  }
  CHECK(world.dials.size() == 2);
  CHECK_FALSE(world.group->join.redial.has_value());
  CHECK(world.LateAt(DaemonState::Now() + 2 * kWait));
  CHECK(patient->end->code() == absl::StatusCode::kAlreadyExists);
}

TEST_CASE("a daemon that ends lets nobody wait on") {
  World world;
  const auto patient = world.Wait(kWait);
  world.Dial();
  {
    const StateLock lock(&world.state.mutex);
    world.state.stopping = true;
  }
  CHECK_FALSE(world.Fail(absl::NotFoundError("no such group")));
  CHECK(patient->end.has_value());
}

TEST_CASE("while a try waits for the group itself, its members are not late before it (P4)") {
  World world;
  world.Wait(kWait);
  world.Dial();
  TimePoint deadline;
  const auto expiry = [&world] {
    const StateLock lock(&world.state.mutex);
    return *world.client.NextExpiry();
  };
  {
    const StateLock lock(&world.state.mutex);
    deadline = world.state.pending.of_group()[0].deadline;
  }
  // The try may end with the patient member's wait, and its end refuses that member, unless it
  // comes later than clients wait for an answer (5 s).
  const Duration grace = std::chrono::seconds(4);
  CHECK(expiry() == deadline + grace);
  CHECK(world.Fail(absl::AlreadyExistsError("an older link")));
  CHECK(expiry() == deadline);
  // A member that does not wait gets the time that joining takes, and hears that it was too short.
  World hasty;
  const auto at_once = hasty.Wait(Duration(0));
  hasty.Dial();
  CHECK_FALSE(hasty.LateAt(DaemonState::Now()));
  CHECK(hasty.LateAt(DaemonState::Now() + grace + kWait));
  CHECK(at_once->end->code() == absl::StatusCode::kNotFound);
}

TEST_CASE("the last link's report ends the wait for links") {
  World world;
  world.Wait(kWait);
  world.Dial();
  world.dials[0].callbacks.on_lost(absl::UnavailableError("gone"));
  MutexLock lock(world.state.mutex.raw());
  world.client.AwaitLinks(world.state.mutex.raw());
}

}  // namespace
}  // namespace refitd
