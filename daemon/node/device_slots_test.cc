#include "daemon/node/device_slots.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/device_memory_test_util.h"
#include "daemon/node/session_test_util.h"
#include "transport/base/eventually.h"

namespace refitd {
namespace {

using Catch::Contains;

class World : public TurnHost {
 public:
  // `demanding`: the daemon's own group demands encrypted_data.
  explicit World(bool has_wire = true, bool demanding = false)
      : slots({.daemon_id = "a",
               .memory = memory,
               .has_wire = has_wire,
               .no_wire = "no NCCL",
               .thread = thread},
              this, &mutex, {&groups, &leases, &waiters, &peers}) {
    CoordinatorOptions own;
    own.name = "own";
    own.incarnation = 1;
    own.spec.slots = 4;
    own.spec.slot_bytes = 4096;
    own.spec.encrypted_data = demanding;
    own.next_update = [] { return UpdateId(1); };
    groups.Coordinate(std::move(own), TimePoint());
    FollowerOptions joined;
    joined.name = "joined";
    joined.coordinator_address = "b:1";
    joined.next_update = [] { return UpdateId(1); };
    LinkUp up;
    up.spec.slots = 4;
    up.spec.slot_bytes = 4096;
    MachineActions actions;
    groups.Follow(std::move(joined))->machine->Handle(PeerEvent(up), TimePoint(), &actions);
  }
  ~World() override { thread->Stop(); }

  void Dispatch(Turn& /*turn*/, const std::string& /*group*/, MachineEvent& /*event*/) override {}
  void Drained() override {}

  MemberRecord* Attach(const std::string& group, std::optional<int> ordinal, bool engine = true) {
    return leases.Add(Record(group, ordinal, engine));
  }
  MemberRecord Record(const std::string& group, std::optional<int> ordinal, bool engine = true) {
    MemberRecord record;
    record.id = MemberId(++members);
    record.group = group;
    record.engine = engine;
    record.ordinal = ordinal;
    record.device = ordinal.has_value() ? "GPU-" + std::to_string(*ordinal) : "host";
    return record;
  }
  void Detach(MemberRecord* member) {
    const std::optional<int> ordinal = member->ordinal;
    GroupRecord* const group = groups.Find(member->group);
    leases.Remove(member->id);
    if (ordinal.has_value()) slots.DropUnused(group, *ordinal);
    groups.CheckInvariants();
  }
  DeviceSlots::Missing On(const std::string& group, int ordinal) {
    return {group, groups.Find(group)->id, ordinal};
  }
  Pools& PoolsOf(const std::string& group) { return groups.Find(group)->pools; }
  // Waits until the thread has done what it was given so far.
  void AwaitThread() {
    std::atomic<int> done{0};
    // Slots that a job destroys are given back by a job behind it, so two jobs are awaited.
    thread->Submit([&] { thread->Submit([&] { ++done; }); });
    REQUIRE(Eventually([&] { return done == 1; }));
  }

  std::shared_ptr<FakeMemory> memory = std::make_shared<FakeMemory>();
  std::shared_ptr<JobThreads> thread = std::make_shared<JobThreads>("refitd-regions");
  Mutex mutex;
  uint64_t members = 0;
  Peers peers;
  Waiters waiters;
  Groups groups{{}, &peers, &waiters};
  Leases leases;
  DeviceSlots slots;
};

TEST_CASE("a group's engines are all on GPUs or all in host memory, and trainers feed them") {
  World world;
  const GroupRecord& group = *world.groups.Find("own");
  CHECK(world.slots.CheckEntering(group, world.Record("own", 0)).ok());
  world.Attach("own", 0);
  CHECK(world.slots.CheckEntering(group, world.Record("own", 1)).ok());
  CHECK_THAT(std::string(world.slots.CheckEntering(group, world.Record("own", {})).message()),
             Contains("group 'own' has engine ranks on 'GPU-0'"));
  // Host memory can be copied into a GPU, but not the other way round.
  CHECK(world.slots.CheckEntering(group, world.Record("own", {}, /*engine=*/false)).ok());
  World host;
  host.Attach("own", {});
  CHECK_THAT(std::string(host.slots
                             .CheckEntering(*host.groups.Find("own"),
                                            host.Record("own", 0, /*engine=*/false))
                             .message()),
             Contains("nothing moves weights that way"));
}

TEST_CASE("a group that spans daemons has all members here on GPUs or none, and needs a wire") {
  World world;
  const GroupRecord& group = *world.groups.Find("joined");
  CHECK(world.slots.Spans(group));
  CHECK_FALSE(world.slots.Spans(*world.groups.Find("own")));
  world.Attach("joined", 0);
  CHECK(world.slots.CheckEntering(group, world.Record("joined", 1)).ok());
  CHECK_THAT(
      std::string(
          world.slots.CheckEntering(group, world.Record("joined", {}, /*engine=*/false)).message()),
      Contains("daemon a would have one on GPU-0 and one in host memory"));
  World without(/*has_wire=*/false);
  without.Attach("own", 0);
  CHECK(without.slots.CheckSpanning("own", nullptr).message() ==
        "group 'own' would span daemons, and device memory moves within daemon a only: no NCCL");
}

TEST_CASE(
    "members that are lost, and those of other groups, do not decide where a member may lie") {
  World world(/*has_wire=*/false);
  const GroupRecord& own = *world.groups.Find("own");
  const GroupRecord& joined = *world.groups.Find("joined");
  world.Attach("own", {});
  world.Attach("joined", {});
  CHECK(world.slots.CheckSpanning("own", nullptr).ok());  // host memory needs no wire for GPUs
  CHECK(world.slots.CheckEntering(joined, world.Record("joined", {})).ok());
  World lost(/*has_wire=*/false);
  lost.leases.Lose(lost.Attach("own", 0));
  CHECK(lost.slots.CheckSpanning("own", nullptr).ok());
  CHECK(lost.slots.CheckEntering(*lost.groups.Find("own"), lost.Record("own", {})).ok());
  World other(/*has_wire=*/false);
  other.Attach("joined", 0);
  CHECK(other.slots.CheckSpanning("own", nullptr).ok());
  CHECK(other.slots.CheckEntering(*other.groups.Find("own"), other.Record("own", {})).ok());
  CHECK_FALSE(other.slots.CheckSpanning("joined", nullptr).ok());
  CHECK(world.slots.CheckEntering(own, world.Record("own", {}, /*engine=*/false)).ok());
}

TEST_CASE("a group of this daemon spans daemons once another has joined it") {
  World world;
  const GroupRecord& own = *world.groups.Find("own");
  world.Attach("own", 0);
  CHECK_FALSE(world.slots.Lacks(own));
  world.peers.Join(HelloTo("own"), std::make_shared<KeptSession>(1));
  CHECK(world.slots.Spans(own));
  CHECK(world.slots.Lacks(own));
}

TEST_CASE(
    "a group that demands encryption has no GPUs once it spans daemons, since NCCL has none") {
  World world(/*has_wire=*/true, /*demanding=*/true);
  world.Attach("own", 0);
  CHECK(world.slots.CheckEntering(*world.groups.Find("own"), world.Record("own", 1)).ok());
  const absl::Status refused = world.slots.CheckSpanning("own", nullptr);
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(refused.message()),
             Contains("group 'own' would span daemons, and demands encrypted_data: NCCL") &&
                 Contains("daemon a has a member on GPU-0"));
}

TEST_CASE("slots are made once for a GPU with members, and given back with the last (P8)") {
  World world;
  MemberRecord* const first = world.Attach("own", 1);
  MemberRecord* const second = world.Attach("own", 1);
  REQUIRE(world.slots.MissingOf(*first).has_value());
  CHECK(world.slots.MissingFor(*first).size() == 1);
  CHECK(world.slots.MakeNow(world.On("own", 1)).ok());
  CHECK(world.slots.MakeNow(world.On("own", 1)).ok());
  CHECK(world.memory->asked() == 1);
  CHECK(world.PoolsOf("own").bytes() == 4 * 4096);
  CHECK_FALSE(world.slots.MissingOf(*first).has_value());
  world.Detach(first);
  CHECK(world.PoolsOf("own").Has(1));
  world.Detach(second);
  CHECK_FALSE(world.PoolsOf("own").Has(1));
  world.AwaitThread();
  CHECK(world.memory->open() == 0);
}

TEST_CASE("an update needs slots where its trainer and the group's engines are") {
  World world;
  const MemberRecord* const trainer = world.Attach("own", 0, /*engine=*/false);
  world.Attach("own", 1);
  world.leases.Lose(world.Attach("own", 2));
  world.Attach("own", 3, /*engine=*/false);
  world.Attach("joined", 4);
  std::vector<int> missing;
  for (const DeviceSlots::Missing& each : world.slots.MissingFor(*trainer)) {
    missing.push_back(each.ordinal);
  }
  CHECK(missing == std::vector<int>{0, 1});
}

TEST_CASE("slots that were made while their last member went, or twice, are given back (P8)") {
  World world;
  MemberRecord* const member = world.Attach("own", 0);
  const DeviceSlots::Missing missing = world.On("own", 0);
  SECTION("went") {
    world.memory->on_make = [&world, member] { world.leases.Remove(member->id); };
    CHECK(absl::IsCancelled(world.slots.MakeNow(missing)));
    CHECK_FALSE(world.PoolsOf("own").Has(0));
    world.AwaitThread();
    CHECK(world.memory->open() == 0);
  }
  SECTION("twice") {
    world.memory->on_make = [&world, &missing] {
      world.memory->on_make = nullptr;
      CHECK(world.slots.MakeNow(missing).ok());
    };
    CHECK(world.slots.MakeNow(missing).ok());
    CHECK(world.memory->asked() == 2);
    CHECK(world.PoolsOf("own").Has(0));
    world.AwaitThread();
    CHECK(world.memory->open() == 1);
  }
}

TEST_CASE("slots are not made for members that went, nor for a group that is gone") {
  World world;
  CHECK(absl::IsCancelled(world.slots.MakeNow(world.On("own", 0))));
  DeviceSlots::Missing stale = world.On("own", 0);
  ++stale.id;
  CHECK(absl::IsNotFound(world.slots.MakeNow(stale)));
  CHECK(world.memory->asked() == 0);
  world.Attach("own", 0);
  world.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  CHECK(world.slots.MakeNow(world.On("own", 0)).message() ==
        "group 'own': staging slots: too little memory is free");
}

TEST_CASE("a rank that waits for slots counts as a member on its GPU") {
  World world;
  world.waiters.Wait(Waiters::OfSlots{world.Record("own", 0), EngineAttached{}});
  CHECK(world.slots.MakeNow(world.On("own", 0)).ok());
  world.slots.DropUnused(world.groups.Find("own"), 0);
  CHECK(world.PoolsOf("own").Has(0));
  CHECK(world.waiters.TakeOfSlots(MemberId(1)).has_value());
  world.slots.DropUnused(world.groups.Find("own"), 0);
  CHECK_FALSE(world.PoolsOf("own").Has(0));
}

TEST_CASE("slots that cross daemons are on the lowest GPU, as long as a member is on any (P1)") {
  World world;
  GroupRecord* const group = world.groups.Find("joined");
  CHECK_FALSE(world.slots.Lacks(*group));
  CHECK(world.slots.Ensure(group).ok());  // in host memory
  CHECK(world.PoolsOf("joined").has_host());
  MemberRecord* const high = world.Attach("joined", 1);
  MemberRecord* const low = world.Attach("joined", 0);
  CHECK(world.slots.Lacks(*group));
  CHECK(world.slots.Ensure(group).code() == absl::StatusCode::kUnavailable);
  std::atomic<int> told{0};
  {
    MutexLock lock(&world.mutex);
    world.slots.Make(*group, [&](GroupRecord* found, const absl::Status& made, Turn&) {
      if (found == group && made.ok()) ++told;
    });
  }
  REQUIRE(Eventually([&] { return told == 1; }));
  CHECK(world.PoolsOf("joined").wire() == 0);
  CHECK_FALSE(world.slots.Lacks(*group));
  CHECK(world.slots.Ensure(group).ok());
  world.Detach(low);
  CHECK(world.PoolsOf("joined").Has(0));
  world.Detach(high);
  CHECK_FALSE(world.PoolsOf("joined").wire().has_value());
  CHECK_FALSE(world.PoolsOf("joined").Has(0));
}

TEST_CASE("slots that cross daemons lie on a GPU of the group's own members, and nowhere else") {
  World world;
  GroupRecord* const group = world.groups.Find("joined");
  world.Attach("own", 0);
  world.Attach("joined", 1);
  std::vector<absl::Status> told;
  std::atomic<int> count{0};
  const auto make = [&] {
    MutexLock lock(&world.mutex);
    world.slots.Make(*group, [&](GroupRecord*, const absl::Status& made, Turn&) {
      told.push_back(made);
      ++count;
    });
  };
  world.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  make();
  REQUIRE(Eventually([&] { return count == 1; }));
  CHECK(told[0].code() == absl::StatusCode::kResourceExhausted);
  CHECK(world.slots.Lacks(*group));
  world.AwaitThread();
  world.memory->can_make = absl::OkStatus();
  make();
  REQUIRE(Eventually([&] { return count == 2; }));
  CHECK(told[1].ok());
  CHECK(world.PoolsOf("joined").wire() == 1);
  CHECK(world.slots.Ensure(group).ok());
  CHECK_FALSE(world.PoolsOf("joined").has_host());
}

TEST_CASE("nobody is told of slots for a group that is gone") {
  World world;
  MemberRecord* const member = world.Attach("joined", 0);
  std::atomic<int> told{0};
  std::unique_ptr<GroupRecord> gone;
  {
    MutexLock lock(&world.mutex);
    world.slots.Make(*world.groups.Find("joined"),
                     [&](GroupRecord*, const absl::Status&, Turn&) { ++told; });
    world.leases.Remove(member->id);
    gone = world.groups.Remove("joined");
  }
  world.AwaitThread();
  CHECK(told == 0);
}

TEST_CASE("slots that cross daemons stay while an update runs, though no member is on a GPU (P1)") {
  World world;
  GroupRecord* const group = world.groups.Find("own");
  MemberRecord* const member = world.Attach("own", 0);
  REQUIRE(world.slots.MakeNow(world.On("own", 0)).ok());
  group->pools.SetWire(0);
  const auto feed = [group](GroupEvent event) {
    MachineActions actions;
    MachineEvent fed = std::move(event);
    group->machine->Handle(fed, TimePoint(), &actions);
  };
  const MemberId trainer(100);
  feed(TrainerAttached{trainer, {0, 1, 100, {}, ""}});
  BeginEvent begin;
  begin.call = CallId(1);
  begin.member = trainer;
  begin.version = Version(1);
  begin.duration = std::chrono::minutes(1);
  feed(begin);
  REQUIRE(group->machine->update_running());
  world.Detach(member);
  CHECK(group->pools.wire() == 0);
  CHECK(group->pools.Has(0));
  feed(MemberLost{trainer, "it left"});
  REQUIRE_FALSE(group->machine->update_running());
  world.slots.DropUnused(group, 0);
  CHECK_FALSE(group->pools.Has(0));
}

TEST_CASE("when the members on the lowest GPU went meanwhile, another GPU gets the slots") {
  World world;
  GroupRecord* const group = world.groups.Find("joined");
  world.Attach("joined", 1);
  MemberRecord* const low = world.Attach("joined", 0);
  std::atomic<int> told{0};
  {
    MutexLock lock(&world.mutex);
    world.slots.Make(*group, [&](GroupRecord*, const absl::Status& made, Turn&) {
      if (made.ok()) ++told;
    });
    world.leases.Remove(low->id);
  }
  REQUIRE(Eventually([&] { return told == 1; }));
  CHECK(world.PoolsOf("joined").wire() == 1);
}

}  // namespace
}  // namespace refitd
