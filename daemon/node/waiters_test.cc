#include "daemon/node/waiters.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/aborts.h"

namespace refitd {
namespace {

using std::chrono::seconds;

class Sink : public MemberSink {
 public:
  void Send(MemberNews /*news*/) override {}
  void End(absl::Status status) override { ends.push_back(std::move(status)); }
  std::vector<absl::Status> ends;
};

MemberRecord Rank(uint64_t id, const std::shared_ptr<Sink>& sink, const std::string& group = "g",
                  std::optional<int> ordinal = {}) {
  MemberRecord record;
  record.id = MemberId(id);
  record.group = group;
  record.engine = true;
  record.sink = sink;
  record.ordinal = ordinal;
  return record;
}

const TimePoint kNow{std::chrono::hours(1)};

struct World {
  // Each member's sink, by id - 1.
  std::vector<std::shared_ptr<Sink>> sinks;
  Waiters waiters;

  void Wait(const std::string& group, const std::string& coordinator, int wait_s,
            std::optional<GroupSpec> spec = {}) {
    sinks.push_back(std::make_shared<Sink>());
    waiters.Wait(Waiters::OfGroup{Rank(sinks.size(), sinks.back(), group), EngineAttached{},
                                  kNow + seconds(wait_s), wait_s > 0, coordinator,
                                  std::move(spec)});
    waiters.CheckInvariants();
  }
  void WaitForSlots(const std::string& group, int ordinal) {
    sinks.push_back(std::make_shared<Sink>());
    waiters.Wait(
        Waiters::OfSlots{Rank(sinks.size(), sinks.back(), group, ordinal), EngineAttached{}});
    waiters.CheckInvariants();
  }
  size_t ended() const {
    size_t ended = 0;
    for (const auto& sink : sinks) ended += sink->ends.size();
    return ended;
  }
};

TEST_CASE("members that wait for a group are taken in their order, by group and coordinator") {
  World world;
  world.Wait("g", "", 1);
  world.Wait("g", "b:1", 1);
  world.Wait("h", "", 1);
  world.Wait("g", "", 1);
  CHECK(world.waiters.size() == 4);
  CHECK(world.waiters.Any("g", "b:1"));
  CHECK_FALSE(world.waiters.Any("h", "b:1"));
  const std::vector<Waiters::OfGroup> taken = world.waiters.TakeAll("g", "");
  REQUIRE(taken.size() == 2);
  CHECK(taken[0].record.id == MemberId(1));
  CHECK(taken[1].record.id == MemberId(4));
  CHECK(world.waiters.TakeOfGroup(MemberId(3)).has_value());
  CHECK_FALSE(world.waiters.TakeOfGroup(MemberId(3)).has_value());
  CHECK(world.waiters.size() == 1);
  CHECK(world.ended() == 0);
}

TEST_CASE("a try to join carries the first spec and the longest wait of its members") {
  World world;
  world.Wait("g", "b:1", 0);
  CHECK(world.waiters.WishOf("g", "b:1", kNow).wait == Duration(0));
  GroupSpec spec;
  spec.trainer_ranks = 3;
  world.Wait("g", "b:1", 5, spec);
  spec.trainer_ranks = 4;
  world.Wait("g", "b:1", 2, spec);
  world.Wait("g", "c:1", 9);
  const Waiters::Wish wish = world.waiters.WishOf("g", "b:1", kNow);
  REQUIRE(wish.spec.has_value());
  CHECK(wish.spec->trainer_ranks == 3);
  CHECK(wish.wait == seconds(5));
}

TEST_CASE("members that a failed try concerns end with its refusal; the others stay") {
  World world;
  world.Wait("g", "b:1", 0);
  world.Wait("g", "b:1", 5);
  world.Wait("g", "c:1", 0);
  const absl::Status refusal = absl::NotFoundError("no such group");
  CHECK(world.waiters.Refuse(
      "g", "b:1", [](const auto& w) { return w.waits; }, refusal));
  REQUIRE(world.sinks[0]->ends.size() == 1);
  CHECK(world.sinks[0]->ends[0] == refusal);
  CHECK(world.ended() == 1);
  CHECK_FALSE(world.waiters.Refuse(
      "g", "b:1", [](const auto&) { return false; }, refusal));
  CHECK(world.ended() == 2);
  CHECK(world.waiters.Any("g", "c:1"));
}

TEST_CASE("each member is late by its own time (P4)") {
  World world;
  world.Wait("g", "", 5);
  world.Wait("g", "", 2);
  world.Wait("g", "b:1", 1);
  const Waiters::Expiry expiry = [](const Waiters::OfGroup& w) {
    return w.coordinator.empty() ? w.deadline : kNow + seconds(60);
  };
  CHECK(world.waiters.NextExpiry(expiry) == kNow + seconds(2));
  CHECK(world.waiters.TakeLate(kNow + seconds(1), expiry).empty());
  const std::vector<Waiters::OfGroup> late = world.waiters.TakeLate(kNow + seconds(2), expiry);
  REQUIRE(late.size() == 1);
  CHECK(late[0].record.id == MemberId(2));
  CHECK(world.waiters.TakeLate(kNow + seconds(9), expiry).size() == 1);
  CHECK(world.waiters.NextExpiry(expiry) == kNow + seconds(60));
  CHECK(world.waiters.size() == 1);
}

TEST_CASE("ranks that wait for slots are known by group and GPU; a drain ends every member") {
  World world;
  world.WaitForSlots("g", 1);
  world.Wait("h", "", 5);
  CHECK(world.waiters.AnyOfSlots("g"));
  CHECK(world.waiters.AnyOfSlots("g", 1));
  CHECK_FALSE(world.waiters.AnyOfSlots("g", 0));
  CHECK_FALSE(world.waiters.AnyOfSlots("h"));
  const std::optional<Waiters::OfSlots> taken = world.waiters.TakeOfSlots(MemberId(1));
  REQUIRE(taken.has_value());
  CHECK_FALSE(world.waiters.TakeOfSlots(MemberId(1)).has_value());
  world.WaitForSlots("g", 0);
  world.waiters.RefuseAll(absl::UnavailableError("draining"));
  CHECK(world.waiters.size() == 0);
  CHECK(world.sinks[0]->ends.empty());
  CHECK(world.ended() == 2);
}

TEST_CASE("CheckInvariants finds a member that waits twice, and one that has a token") {
  World world;
  world.Wait("g", "", 5);
  CHECK(Aborts([&] {
    world.waiters.Wait(
        Waiters::OfGroup{Rank(1, world.sinks[0]), EngineAttached{}, kNow, true, "", {}});
    world.waiters.CheckInvariants();
  }));
  CHECK(Aborts([&] {
    MemberRecord record = Rank(2, world.sinks[0]);
    record.token = "a token";
    world.waiters.Wait(Waiters::OfGroup{std::move(record), EngineAttached{}, kNow, true, "", {}});
    world.waiters.CheckInvariants();
  }));
}

}  // namespace
}  // namespace refitd
