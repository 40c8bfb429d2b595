#include "daemon/node/groups.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/session_test_util.h"
#include "tests/aborts.h"

namespace refitd {
namespace {

using Names = std::vector<std::string>;
using std::chrono::seconds;

const TimePoint kNow{std::chrono::hours(1)};
constexpr int64_t kPool = 4 * 4096;  // bytes of one group's pool

struct World {
  PeerSessions sessions;
  PendingAttaches pending;
  Groups groups{{.groups = 3, .pool_bytes = 3 * kPool, .idle = seconds(60)}, &sessions, &pending};
  uint64_t ids = 0;

  static GroupSpec Spec() {
    GroupSpec spec;
    spec.slots = 4;
    spec.slot_bytes = 4096;
    return spec;
  }
  // An engine rank waits for a slot of the group.
  void AwaitSlots(MemberId id, const std::string& group) {
    MemberRecord rank;
    rank.id = id;
    rank.group = group;
    rank.engine = true;
    rank.ordinal = 0;
    pending.Wait(PendingAttaches::OfSlots{std::move(rank), EngineAttached{}});
  }
  GroupRecord* Coordinate(const std::string& name, TimePoint now = kNow) {
    CoordinatorOptions options;
    options.name = name;
    options.incarnation = 1;
    options.spec = Spec();
    options.next_update = [this] { return UpdateId(++ids); };
    options.next_member = [this] { return MemberId(++ids); };
    options.next_call = [this] { return CallId(++ids); };
    GroupRecord* const group = groups.Coordinate(std::move(options), now);
    groups.CheckInvariants();
    return group;
  }
  GroupRecord* Follow(const std::string& name) {
    FollowerOptions options;
    options.name = name;
    options.coordinator_address = "b:1";
    options.next_update = [this] { return UpdateId(++ids); };
    GroupRecord* const group = groups.Follow(std::move(options));
    groups.CheckInvariants();
    return group;
  }
  void Feed(GroupRecord* group, const GroupEvent& event, TimePoint now = kNow) {
    MachineActions actions;
    group->machine->Handle(event, now, &actions);
    groups.NoteEmpty(group, now);
    groups.CheckInvariants();
  }
};

TEST_CASE("a group is found by its name, and by its number only as long as it is the same one") {
  World world;
  const uint64_t id = world.Coordinate("g")->id;
  CHECK(world.groups.Find("h") == nullptr);
  CHECK(world.groups.Find("g", id) == world.groups.Find("g"));
  const std::unique_ptr<GroupRecord> removed = world.groups.Remove("g");
  CHECK(removed->id == id);
  CHECK(world.groups.Find("g") == nullptr);
  const uint64_t again = world.Coordinate("g")->id;
  CHECK(again != id);
  CHECK(world.groups.Find("g", id) == nullptr);
  CHECK(world.groups.Find("g", again) != nullptr);
}

TEST_CASE("a record coordinates its group or follows another daemon") {
  World world;
  const GroupRecord* const own = world.Coordinate("a");
  const GroupRecord* const joined = world.Follow("b");
  CHECK(own->coordinator != nullptr);
  CHECK(own->empty_since == kNow);
  CHECK(joined->follower != nullptr);
  CHECK(joined->join.joining);
  CHECK(joined->join.address == "b:1");
  CHECK_FALSE(joined->empty_since.has_value());
  CHECK(world.groups.names() == Names{"a", "b"});
  CHECK(world.groups.machines().size() == 2);
}

TEST_CASE("groups that have been empty for longest make room, and none goes in vain (P10)") {
  World world;
  world.Coordinate("a", kNow + seconds(2));
  world.Coordinate("b", kNow + seconds(1));
  GroupSpec spec = World::Spec();
  CHECK(world.groups.RoomFor("n", &spec)->empty());
  GroupRecord* const c = world.Coordinate("c");
  CHECK(*world.groups.RoomFor("n", &spec) == Names{"c"});
  CHECK(*world.groups.RoomFor("n", nullptr) == Names{"c"});
  spec.slots = 8;
  CHECK(*world.groups.RoomFor("n", &spec) == Names{"c", "b"});
  world.Feed(c, TrainerAttached{MemberId(1), {}});
  CHECK(*world.groups.RoomFor("n", &spec) == Names{"b", "a"});
  spec.slots = 12;
  const absl::Status full = world.groups.RoomFor("n", &spec).status();
  CHECK(full.code() == absl::StatusCode::kResourceExhausted);
  CHECK(full.message() ==
        "group 'n': 12 slots of 4096 bytes do not fit: 16384 of max_pool_bytes 49152 are taken by "
        "other groups");
  world.Feed(world.groups.Find("a"), TrainerAttached{MemberId(2), {}});
  world.Feed(world.groups.Find("b"), TrainerAttached{MemberId(3), {}});
  CHECK(world.groups.RoomFor("n", nullptr).status().message() ==
        "group 'n': the daemon has max_groups (3) groups");
  CHECK(world.groups.RoomFor("a", nullptr)->empty());
}

TEST_CASE("a group expires when it has been empty for its time, not while someone comes (P8)") {
  World world;
  GroupRecord* const group = world.Coordinate("g");
  CHECK(world.groups.NextDeadline() == kNow + seconds(60));
  CHECK(world.groups.Expired(kNow + seconds(59)).empty());
  CHECK(world.groups.Expired(kNow + seconds(60)) == Names{"g"});

  world.Feed(group, TrainerAttached{MemberId(1), {}}, kNow + seconds(60));
  CHECK_FALSE(group->empty_since.has_value());
  CHECK(world.groups.Expired(kNow + seconds(200)).empty());
  world.Feed(group, MemberLost{MemberId(1), "killed"}, kNow + seconds(200));
  CHECK(group->empty_since == kNow + seconds(200));
  CHECK_FALSE(world.groups.NoteEmpty(group, kNow + seconds(201)));
  CHECK(world.groups.Expired(kNow + seconds(259)).empty());

  world.AwaitSlots(MemberId(2), "g");
  CHECK_FALSE(world.groups.Empty(*group));
  CHECK(world.groups.Expired(kNow + seconds(260)).empty());
  CHECK(group->empty_since == kNow + seconds(260));
  CHECK(world.pending.TakeOfSlots(MemberId(2)).has_value());
  CHECK(world.groups.Expired(kNow + seconds(320)) == Names{"g"});
}

TEST_CASE("a group that another daemon has joined is not empty") {
  World world;
  const GroupRecord* const group = world.Coordinate("g");
  CHECK(world.groups.Empty(*group));
  world.sessions.Join(HelloTo("h"), std::make_shared<KeptSession>(1));
  CHECK(world.groups.Empty(*group));
  world.sessions.Join(HelloTo("g"), std::make_shared<KeptSession>(2));
  CHECK_FALSE(world.groups.Empty(*group));
}

TEST_CASE("groups with a running update, and those whose machine is due, are known") {
  World world;
  GroupRecord* const group = world.Coordinate("g");
  world.Coordinate("h");
  CHECK_FALSE(world.groups.any_running());
  world.Feed(group, TrainerAttached{MemberId(1), {}});
  BeginEvent begin;
  begin.call = CallId(1000);
  begin.member = MemberId(1);
  begin.version = Version(1);
  begin.duration = seconds(5);
  begin.tensor_count = 1;
  world.Feed(group, begin);
  CHECK(world.groups.any_running());
  CHECK(world.groups.running() == Names{"g"});
  CHECK(world.groups.Due(kNow).empty());
  CHECK(world.groups.NextDeadline() == kNow + seconds(5));
  CHECK(world.groups.Due(kNow + seconds(5)) == Names{"g"});
}

TEST_CASE("the next try to join is a deadline") {
  World world;
  GroupRecord* const group = world.Follow("g");
  CHECK(world.groups.NextDeadline() == std::nullopt);
  group->join.redial = kNow + seconds(1);
  CHECK(world.groups.NextDeadline() == kNow + seconds(1));
}

TEST_CASE("CheckInvariants finds a record of two kinds, and a redial of a joined group") {
  World world;
  GroupRecord* const group = world.Follow("g");
  CHECK(Aborts([&] {
    group->empty_since = kNow;
    world.groups.CheckInvariants();
  }));
  CHECK(Aborts([&] {
    group->join.joining = false;
    group->join.redial = kNow;
    world.groups.CheckInvariants();
  }));
  CHECK(Aborts([&] {
    group->follower = nullptr;
    world.groups.CheckInvariants();
  }));
}

}  // namespace
}  // namespace refitd
