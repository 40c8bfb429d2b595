#include "daemon/node/device_slots.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/eventually.h"

namespace refitd {
namespace {

using Catch::Contains;

class Region : public DeviceRegion {
 public:
  Region(int device, std::vector<char> memory)
      : DeviceRegion(device, memory.data(), static_cast<int64_t>(memory.size())),
        memory_(std::move(memory)) {}
  absl::StatusOr<char*> On(int /*device*/) const override { return data(); }

 private:
  const std::vector<char> memory_;
};

// Stands in for the memory of GPUs. Counts what was made and not given back yet.
class FakeMemory : public DeviceMemory {
 public:
  absl::StatusOr<int> DeviceOf(std::string_view /*name*/) const override { return 0; }
  std::string NameOf(int device) const override { return "GPU-" + std::to_string(device); }
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> OpenBlock(
      int /*device*/, std::string_view /*handle*/) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> ImportDescriptor(int /*device*/,
                                                                       UniqueFd /*fd*/,
                                                                       int64_t /*bytes*/) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<DevicePool> MakePool(int device, int64_t bytes) override {
    MutexLock lock(&mutex_);
    ++asked_;
    if (!can_make.ok()) return can_make;
    ++open_;
    return DevicePool{
        std::make_shared<Region>(device, std::vector<char>(static_cast<size_t>(bytes))),
        UniqueFd()};
  }
  void GiveBack(DevicePool /*pool*/) override {
    MutexLock lock(&mutex_);
    --open_;
  }
  int asked() {
    MutexLock lock(&mutex_);
    return asked_;
  }
  int open() {
    MutexLock lock(&mutex_);
    return open_;
  }
  absl::Status can_make;

 private:
  Mutex mutex_;
  int asked_ = 0;
  int open_ = 0;
};

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
