#include "daemon/node/staging_pools.h"

#include <sys/mman.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/device_memory_test_util.h"
#include "daemon/node/session_test_util.h"
#include "transport/base/eventually_testing.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr int64_t kSlotBytes = 4096;
constexpr int64_t kPoolBytes = 4 * kSlotBytes;

// Gives tests what only the class itself does.
class OpenPools : public StagingPools {
 public:
  using StagingPools::Put;
  using StagingPools::SetWire;
  using StagingPools::StagingPools;
};

class World {
 public:
  // `demanding`: the daemon's own group demands encrypted_data.
  explicit World(bool has_wire = true, bool demanding = false)
      : pools({.daemon_id = "a",
               .memory = memory,
               .has_wire = has_wire,
               .no_wire = "no NCCL",
               .thread = thread},
              &mutex, {&groups, &members, &pending, &sessions}) {
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
  ~World() { thread->Stop(); }

  MemberRecord* Attach(const std::string& group, std::optional<int> ordinal, bool engine = true) {
    return members.Add(Record(group, ordinal, engine));
  }
  MemberRecord Record(const std::string& group, std::optional<int> ordinal, bool engine = true) {
    MemberRecord record;
    record.id = MemberId(++ids);
    record.group = group;
    record.engine = engine;
    record.ordinal = ordinal;
    record.device = ordinal.has_value() ? "GPU-" + std::to_string(*ordinal) : "host";
    return record;
  }
  void Detach(MemberRecord* member) {
    const std::optional<int> ordinal = member->ordinal;
    GroupRecord* const group = groups.Find(member->group);
    members.Remove(member->id);
    if (ordinal.has_value()) pools.DropUnused(*group, *ordinal);
    groups.CheckInvariants();
  }
  StagingPools::Missing On(const std::string& group, int ordinal) {
    return {group, groups.Find(group)->id, ordinal};
  }
  const GroupRecord& Group(const std::string& name) { return *groups.Find(name); }
  // Waits until the thread has done what it was given so far.
  void AwaitThread() {
    std::atomic<int> done{0};
    // Slots that a job destroys are given back by a job behind it, so two jobs are awaited.
    thread->Submit([&] { thread->Submit([&] { ++done; }); });
    REQUIRE(Eventually([&] { return done == 1; }));
  }

  std::shared_ptr<FakeMemory> memory = std::make_shared<FakeMemory>();
  std::shared_ptr<JobThreads> thread = std::make_shared<JobThreads>("refitd-regions");
  StateMutex mutex{{[](auto&, auto&, auto&) {}, [] {}}};
  uint64_t ids = 0;
  PeerSessions sessions;
  PendingAttaches pending;
  Groups groups{{}, &sessions, &pending};
  Members members;
  OpenPools pools;
};

TEST_CASE("a group's engines are all on GPUs or all in host memory, and trainers feed them") {
  World world;
  const GroupRecord& group = *world.groups.Find("own");
  CHECK(world.pools.CheckEntering(group, world.Record("own", 0)).ok());
  world.Attach("own", 0);
  CHECK(world.pools.CheckEntering(group, world.Record("own", 1)).ok());
  CHECK_THAT(std::string(world.pools.CheckEntering(group, world.Record("own", {})).message()),
             Contains("group 'own' has engine ranks on 'GPU-0'"));
  // Host memory can be copied into a GPU, but not the other way round.
  CHECK(world.pools.CheckEntering(group, world.Record("own", {}, /*engine=*/false)).ok());
  World host;
  host.Attach("own", {});
  CHECK_THAT(std::string(host.pools
                             .CheckEntering(*host.groups.Find("own"),
                                            host.Record("own", 0, /*engine=*/false))
                             .message()),
             Contains("nothing moves weights that way"));
}

TEST_CASE("a group that spans daemons has all members here on GPUs or none, and needs a wire") {
  World world;
  const GroupRecord& group = *world.groups.Find("joined");
  CHECK(world.pools.Spans(group));
  CHECK_FALSE(world.pools.Spans(*world.groups.Find("own")));
  world.Attach("joined", 0);
  CHECK(world.pools.CheckEntering(group, world.Record("joined", 1)).ok());
  CHECK_THAT(
      std::string(
          world.pools.CheckEntering(group, world.Record("joined", {}, /*engine=*/false)).message()),
      Contains("daemon a would have one on GPU-0 and one in host memory"));
  World without(/*has_wire=*/false);
  without.Attach("own", 0);
  CHECK(without.pools.CheckSpanning("own", nullptr).message() ==
        "group 'own' would span daemons, and device memory moves within daemon a only: no NCCL");
}

TEST_CASE(
    "members that are lost, and those of other groups, do not decide where a member may lie") {
  World world(/*has_wire=*/false);
  const GroupRecord& own = *world.groups.Find("own");
  const GroupRecord& joined = *world.groups.Find("joined");
  world.Attach("own", {});
  world.Attach("joined", {});
  CHECK(world.pools.CheckSpanning("own", nullptr).ok());  // host memory needs no wire for GPUs
  CHECK(world.pools.CheckEntering(joined, world.Record("joined", {})).ok());
  World lost(/*has_wire=*/false);
  lost.members.Lose(lost.Attach("own", 0));
  CHECK(lost.pools.CheckSpanning("own", nullptr).ok());
  CHECK(lost.pools.CheckEntering(*lost.groups.Find("own"), lost.Record("own", {})).ok());
  World other(/*has_wire=*/false);
  other.Attach("joined", 0);
  CHECK(other.pools.CheckSpanning("own", nullptr).ok());
  CHECK(other.pools.CheckEntering(*other.groups.Find("own"), other.Record("own", {})).ok());
  CHECK_FALSE(other.pools.CheckSpanning("joined", nullptr).ok());
  CHECK(world.pools.CheckEntering(own, world.Record("own", {}, /*engine=*/false)).ok());
}

TEST_CASE("a group of this daemon spans daemons once another has joined it") {
  World world;
  const GroupRecord& own = *world.groups.Find("own");
  world.Attach("own", 0);
  CHECK_FALSE(world.pools.Lacks(own));
  world.sessions.Join(HelloTo("own"), std::make_shared<KeptSession>(1));
  CHECK(world.pools.Spans(own));
  CHECK(world.pools.Lacks(own));
}

TEST_CASE(
    "a group that demands encryption has no GPUs once it spans daemons, since NCCL has none") {
  World world(/*has_wire=*/true, /*demanding=*/true);
  world.Attach("own", 0);
  CHECK(world.pools.CheckEntering(*world.groups.Find("own"), world.Record("own", 1)).ok());
  const absl::Status refused = world.pools.CheckSpanning("own", nullptr);
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(refused.message()),
             Contains("group 'own' would span daemons, and demands encrypted_data: NCCL") &&
                 Contains("daemon a has a member on GPU-0"));
}

TEST_CASE("slots are made once for a GPU with members, and given back with the last (P8)") {
  World world;
  MemberRecord* const first = world.Attach("own", 1);
  MemberRecord* const second = world.Attach("own", 1);
  REQUIRE(world.pools.MissingOf(*first).has_value());
  CHECK(world.pools.MissingFor(first->group).size() == 1);
  CHECK(world.pools.MakeNow(world.On("own", 1)).ok());
  CHECK(world.pools.MakeNow(world.On("own", 1)).ok());
  CHECK(world.memory->asked() == 1);
  CHECK(world.pools.BytesOf(world.Group("own")) == 4 * 4096);
  CHECK_FALSE(world.pools.MissingOf(*first).has_value());
  world.Detach(first);
  CHECK(world.pools.Has(world.Group("own"), 1));
  world.Detach(second);
  CHECK_FALSE(world.pools.Has(world.Group("own"), 1));
  world.AwaitThread();
  CHECK(world.memory->open() == 0);
}

TEST_CASE("an update needs slots where the group's engines are") {
  World world;
  const MemberRecord* const trainer = world.Attach("own", 0, /*engine=*/false);
  world.Attach("own", 1);
  world.members.Lose(world.Attach("own", 2));
  world.Attach("own", 3, /*engine=*/false);
  world.Attach("joined", 4);
  std::vector<int> missing;
  for (const StagingPools::Missing& each : world.pools.MissingFor(trainer->group)) {
    missing.push_back(each.ordinal);
  }
  CHECK(missing == std::vector<int>{1});
}

TEST_CASE("slots that were made while their last member went, or twice, are given back (P8)") {
  World world;
  MemberRecord* const member = world.Attach("own", 0);
  const StagingPools::Missing missing = world.On("own", 0);
  SECTION("went") {
    world.memory->on_make = [&world, member] { world.members.Remove(member->id); };
    CHECK(absl::IsCancelled(world.pools.MakeNow(missing)));
    CHECK_FALSE(world.pools.Has(world.Group("own"), 0));
    world.AwaitThread();
    CHECK(world.memory->open() == 0);
  }
  SECTION("twice") {
    world.memory->on_make = [&world, &missing] {
      world.memory->on_make = nullptr;
      CHECK(world.pools.MakeNow(missing).ok());
    };
    CHECK(world.pools.MakeNow(missing).ok());
    CHECK(world.memory->asked() == 2);
    CHECK(world.pools.Has(world.Group("own"), 0));
    world.AwaitThread();
    CHECK(world.memory->open() == 1);
  }
}

TEST_CASE("slots are not made for members that went, nor for a group that is gone") {
  World world;
  CHECK(absl::IsCancelled(world.pools.MakeNow(world.On("own", 0))));
  StagingPools::Missing stale = world.On("own", 0);
  ++stale.id;
  CHECK(absl::IsNotFound(world.pools.MakeNow(stale)));
  CHECK(world.memory->asked() == 0);
  world.Attach("own", 0);
  world.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  CHECK(world.pools.MakeNow(world.On("own", 0)).message() ==
        "group 'own': staging slots: too little memory is free");
}

TEST_CASE("a rank that waits for slots counts as a member on its GPU") {
  World world;
  world.pending.Wait(PendingAttaches::OfSlots{world.Record("own", 0), EngineAttached{}});
  CHECK(world.pools.MakeNow(world.On("own", 0)).ok());
  world.pools.DropUnused(world.Group("own"), 0);
  CHECK(world.pools.Has(world.Group("own"), 0));
  CHECK(world.pending.TakeOfSlots(MemberId(1)).has_value());
  world.pools.DropUnused(world.Group("own"), 0);
  CHECK_FALSE(world.pools.Has(world.Group("own"), 0));
}

TEST_CASE("slots that cross daemons are on the lowest GPU, as long as a member is on any (P1)") {
  World world;
  GroupRecord* const group = world.groups.Find("joined");
  CHECK_FALSE(world.pools.Lacks(*group));
  CHECK(world.pools.Ensure(*group).ok());  // in host memory
  CHECK(world.pools.HasHost(world.Group("joined")));
  MemberRecord* const high = world.Attach("joined", 1);
  MemberRecord* const low = world.Attach("joined", 0);
  CHECK(world.pools.Lacks(*group));
  CHECK(world.pools.Ensure(*group).code() == absl::StatusCode::kUnavailable);
  std::atomic<int> told{0};
  {
    MutexLock lock(world.mutex.raw());
    world.pools.Make(*group, [&](GroupRecord* found, const absl::Status& made, StateLock&) {
      if (found == group && made.ok()) ++told;
    });
  }
  REQUIRE(Eventually([&] { return told == 1; }));
  CHECK(world.pools.WireOf(world.Group("joined")) == 0);
  CHECK_FALSE(world.pools.Lacks(*group));
  CHECK(world.pools.Ensure(*group).ok());
  world.Detach(low);
  CHECK(world.pools.Has(world.Group("joined"), 0));
  world.Detach(high);
  CHECK_FALSE(world.pools.WireOf(world.Group("joined")).has_value());
  CHECK_FALSE(world.pools.Has(world.Group("joined"), 0));
}

TEST_CASE("slots that cross daemons lie on a GPU of the group's own members, and nowhere else") {
  World world;
  GroupRecord* const group = world.groups.Find("joined");
  world.Attach("own", 0);
  world.Attach("joined", 1);
  std::vector<absl::Status> told;
  std::atomic<int> count{0};
  const auto make = [&] {
    MutexLock lock(world.mutex.raw());
    world.pools.Make(*group, [&](GroupRecord*, const absl::Status& made, StateLock&) {
      told.push_back(made);
      ++count;
    });
  };
  world.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  make();
  REQUIRE(Eventually([&] { return count == 1; }));
  CHECK(told[0].code() == absl::StatusCode::kResourceExhausted);
  CHECK(world.pools.Lacks(*group));
  world.AwaitThread();
  world.memory->can_make = absl::OkStatus();
  make();
  REQUIRE(Eventually([&] { return count == 2; }));
  CHECK(told[1].ok());
  CHECK(world.pools.WireOf(world.Group("joined")) == 1);
  CHECK(world.pools.Ensure(*group).ok());
  CHECK_FALSE(world.pools.HasHost(world.Group("joined")));
}

TEST_CASE("no callback runs when slots are ready for a group that is gone") {
  World world;
  MemberRecord* const member = world.Attach("joined", 0);
  std::atomic<int> told{0};
  std::unique_ptr<GroupRecord> gone;
  {
    MutexLock lock(world.mutex.raw());
    world.pools.Make(*world.groups.Find("joined"),
                     [&](GroupRecord*, const absl::Status&, StateLock&) { ++told; });
    world.members.Remove(member->id);
    gone = world.groups.Remove("joined");
    world.pools.CheckInvariants();
  }
  world.AwaitThread();
  CHECK(told == 0);
}

TEST_CASE("slots that cross daemons stay while an update runs, though no member is on a GPU (P1)") {
  World world;
  GroupRecord* const group = world.groups.Find("own");
  MemberRecord* const member = world.Attach("own", 0);
  REQUIRE(world.pools.MakeNow(world.On("own", 0)).ok());
  world.pools.SetWire(*group, 0);
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
  CHECK(world.pools.WireOf(*group) == 0);
  CHECK(world.pools.Has(*group, 0));
  feed(MemberLost{trainer, "it left"});
  REQUIRE_FALSE(group->machine->update_running());
  world.pools.DropUnused(*group, 0);
  CHECK_FALSE(world.pools.Has(*group, 0));
}

TEST_CASE("when the members on the lowest GPU went meanwhile, another GPU gets the slots") {
  World world;
  GroupRecord* const group = world.groups.Find("joined");
  world.Attach("joined", 1);
  MemberRecord* const low = world.Attach("joined", 0);
  std::atomic<int> told{0};
  {
    MutexLock lock(world.mutex.raw());
    world.pools.Make(*group, [&](GroupRecord*, const absl::Status& made, StateLock&) {
      if (made.ok()) ++told;
    });
    world.members.Remove(low->id);
  }
  REQUIRE(Eventually([&] { return told == 1; }));
  CHECK(world.pools.WireOf(world.Group("joined")) == 1);
}

// ---- places ----

// Host memory in place of a GPU's.
StagingPools::Device OnGpu(std::shared_ptr<std::vector<char>> memory) {
  StagingPools::Device device;
  device.memory = {memory->data(), static_cast<int64_t>(memory->size()), memory};
  return device;
}
std::shared_ptr<std::vector<char>> Bytes(int64_t bytes) {
  return std::make_shared<std::vector<char>>(static_cast<size_t>(bytes));
}

TEST_CASE("slots in host memory are made once, shared by descriptor, and given up as a whole") {
  World world;
  OpenPools& pools = world.pools;
  const GroupRecord& group = world.Group("own");
  CHECK(pools.WireSlot(group, SlotIndex(0)).status().code() == absl::StatusCode::kInternal);
  FollowerOptions early;
  early.name = "early";
  early.coordinator_address = "b:1";
  early.next_update = [] { return UpdateId(1); };
  CHECK(pools.EnsureHost(*world.groups.Follow(std::move(early))).code() ==
        absl::StatusCode::kUnavailable);
  REQUIRE(pools.EnsureHost(group).ok());
  pools.CheckInvariants();
  CHECK(pools.BytesOf(group) == kPoolBytes);
  const char* const first = pools.WireSlot(group, SlotIndex(0))->data;
  REQUIRE(pools.EnsureHost(group).ok());
  CHECK(pools.WireSlot(group, SlotIndex(0))->data == first);
  CHECK(pools.WireSlot(group, SlotIndex(1))->data == first + kSlotBytes);

  const absl::StatusOr<PoolHandle> shared = pools.Share(group, std::nullopt, /*read_only=*/false);
  REQUIRE(shared.ok());
  CHECK(shared->bytes == kPoolBytes);
  void* const mapped =
      mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared->fd.get(), 0);
  REQUIRE(mapped != MAP_FAILED);
  std::memset(pools.WireSlot(group, SlotIndex(1))->data, 'x', 4);
  CHECK(std::memcmp(static_cast<char*>(mapped) + kSlotBytes, "xxxx", 4) == 0);
  munmap(mapped, kPoolBytes);

  const StagingPools::Host taken = pools.TakeHost(group);
  CHECK(taken.memory != nullptr);
  CHECK_FALSE(pools.HasHost(group));
  CHECK(pools.BytesOf(group) == 0);
  pools.CheckInvariants();
}

TEST_CASE("an engine's descriptor of the slots can't be mapped for writing") {
  World world;
  OpenPools& pools = world.pools;
  const GroupRecord& group = world.Group("own");
  REQUIRE(pools.EnsureHost(group).ok());
  const absl::StatusOr<PoolHandle> shared = pools.Share(group, std::nullopt, /*read_only=*/true);
  REQUIRE(shared.ok());
  CHECK(mmap(nullptr, kSlotBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared->fd.get(), 0) ==
        MAP_FAILED);
  void* const mapped = mmap(nullptr, kSlotBytes, PROT_READ, MAP_SHARED, shared->fd.get(), 0);
  CHECK(mapped != MAP_FAILED);
  munmap(mapped, kSlotBytes);
}

TEST_CASE("slots lie at the same offsets on every GPU, and what crosses daemons in one place") {
  World world;
  OpenPools& pools = world.pools;
  const GroupRecord& group = world.Group("own");
  const auto first = Bytes(2 * kSlotBytes);
  const auto second = Bytes(2 * kSlotBytes);
  pools.Put(group, 0, OnGpu(first));
  pools.Put(group, 3, OnGpu(second));
  pools.CheckInvariants();
  CHECK(pools.BytesOf(group) == 4 * kSlotBytes);
  CHECK(pools.Slot(group, 0, SlotIndex(1))->data == first->data() + kSlotBytes);
  CHECK(pools.Slot(group, 0, SlotIndex(1))->bytes == kSlotBytes);
  CHECK(pools.Slot(group, 3, SlotIndex(1))->data == second->data() + kSlotBytes);
  CHECK(pools.Slot(group, 1, SlotIndex(0)).status().code() == absl::StatusCode::kInternal);

  MemberRecord* const member = world.Attach("own", 3);
  pools.SetWire(group, 3);
  CHECK(pools.WireOf(group) == 3);
  CHECK(pools.WireSlot(group, SlotIndex(0))->data == second->data());
  CHECK(pools.Slot(group, std::nullopt, SlotIndex(0))->data == second->data());
  pools.DropUnused(group, 0);
  CHECK_FALSE(pools.Has(group, 0));
  CHECK(first.use_count() == 1);
  world.Detach(member);
  CHECK(second.use_count() == 1);
  pools.CheckInvariants();
}

TEST_CASE("whoever still uses a slot on a GPU holds its memory") {
  World world;
  OpenPools& pools = world.pools;
  const GroupRecord& group = world.Group("own");
  const auto memory = Bytes(kSlotBytes);
  pools.Put(group, 0, OnGpu(memory));
  absl::StatusOr<MemorySpan> used = pools.Slot(group, 0, SlotIndex(0));
  REQUIRE(used.ok());
  pools.DropUnused(group, 0);
  CHECK(memory.use_count() == 2);
  used = absl::CancelledError("done");
  CHECK(memory.use_count() == 1);
}

}  // namespace
}  // namespace refitd
