#include "daemon/node/pending_attaches.h"

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
  PendingAttaches pending;

  void Wait(const std::string& group, const std::string& coordinator, int wait_s,
            std::optional<GroupSpec> spec = {}) {
    sinks.push_back(std::make_shared<Sink>());
    pending.Wait(PendingAttaches::OfGroup{Rank(sinks.size(), sinks.back(), group), EngineAttached{},
                                          kNow + seconds(wait_s), wait_s > 0, coordinator,
                                          std::move(spec)});
    pending.CheckInvariants();
  }
  void WaitForSlots(const std::string& group, int ordinal) {
    sinks.push_back(std::make_shared<Sink>());
    pending.Wait(PendingAttaches::OfSlots{Rank(sinks.size(), sinks.back(), group, ordinal),
                                          EngineAttached{}});
    pending.CheckInvariants();
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
  CHECK(world.pending.size() == 4);
  CHECK(world.pending.Any("g", "b:1"));
  CHECK_FALSE(world.pending.Any("h", "b:1"));
  const std::vector<PendingAttaches::OfGroup> taken = world.pending.TakeAll("g", "");
  REQUIRE(taken.size() == 2);
  CHECK(taken[0].record.id == MemberId(1));
  CHECK(taken[1].record.id == MemberId(4));
  CHECK(world.pending.TakeOfGroup(MemberId(3)).has_value());
  CHECK_FALSE(world.pending.TakeOfGroup(MemberId(3)).has_value());
  CHECK(world.pending.size() == 1);
  CHECK(world.ended() == 0);
}

TEST_CASE("a try to join carries the first spec and the longest wait of its members") {
  World world;
  world.Wait("g", "b:1", 0);
  CHECK(world.pending.RequestOf("g", "b:1", kNow).wait == Duration(0));
  GroupSpec spec;
  spec.trainer_ranks = 3;
  world.Wait("g", "b:1", 5, spec);
  spec.trainer_ranks = 4;
  world.Wait("g", "b:1", 2, spec);
  world.Wait("g", "c:1", 9);
  const PendingAttaches::Request request = world.pending.RequestOf("g", "b:1", kNow);
  REQUIRE(request.spec.has_value());
  CHECK(request.spec->trainer_ranks == 3);
  CHECK(request.wait == seconds(5));
}

TEST_CASE("members that a failed try concerns end with its refusal; the others stay") {
  World world;
  world.Wait("g", "b:1", 0);
  world.Wait("g", "b:1", 5);
  world.Wait("g", "c:1", 0);
  const absl::Status refusal = absl::NotFoundError("no such group");
  CHECK(world.pending.Refuse(
      "g", "b:1", [](const auto& w) { return w.waits; }, refusal));
  REQUIRE(world.sinks[0]->ends.size() == 1);
  CHECK(world.sinks[0]->ends[0] == refusal);
  CHECK(world.ended() == 1);
  CHECK_FALSE(world.pending.Refuse(
      "g", "b:1", [](const auto&) { return false; }, refusal));
  CHECK(world.ended() == 2);
  CHECK(world.pending.Any("g", "c:1"));
}

TEST_CASE("each member is late by its own time (P4)") {
  World world;
  world.Wait("g", "", 5);
  world.Wait("g", "", 2);
  world.Wait("g", "b:1", 1);
  const PendingAttaches::Expiry expiry = [](const PendingAttaches::OfGroup& w) {
    return w.coordinator.empty() ? w.deadline : kNow + seconds(60);
  };
  CHECK(world.pending.NextExpiry(expiry) == kNow + seconds(2));
  CHECK(world.pending.TakeLate(kNow + seconds(1), expiry).empty());
  const std::vector<PendingAttaches::OfGroup> late =
      world.pending.TakeLate(kNow + seconds(2), expiry);
  REQUIRE(late.size() == 1);
  CHECK(late[0].record.id == MemberId(2));
  CHECK(world.pending.TakeLate(kNow + seconds(9), expiry).size() == 1);
  CHECK(world.pending.NextExpiry(expiry) == kNow + seconds(60));
  CHECK(world.pending.size() == 1);
}

TEST_CASE("ranks that wait for slots are known by group and GPU; a drain ends every member") {
  World world;
  world.WaitForSlots("g", 1);
  world.Wait("h", "", 5);
  CHECK(world.pending.AnyOfSlots("g"));
  CHECK(world.pending.AnyOfSlots("g", 1));
  CHECK_FALSE(world.pending.AnyOfSlots("g", 0));
  CHECK_FALSE(world.pending.AnyOfSlots("h"));
  const std::optional<PendingAttaches::OfSlots> taken = world.pending.TakeOfSlots(MemberId(1));
  REQUIRE(taken.has_value());
  CHECK_FALSE(world.pending.TakeOfSlots(MemberId(1)).has_value());
  world.WaitForSlots("g", 0);
  world.pending.RefuseAll(absl::UnavailableError("draining"));
  CHECK(world.pending.size() == 0);
  CHECK(world.sinks[0]->ends.empty());
  CHECK(world.ended() == 2);
}

TEST_CASE("CheckInvariants finds a member that waits twice, and one that has a token") {
  World world;
  world.Wait("g", "", 5);
  CHECK(Aborts([&] {
    world.pending.Wait(
        PendingAttaches::OfGroup{Rank(1, world.sinks[0]), EngineAttached{}, kNow, true, "", {}});
    world.pending.CheckInvariants();
  }));
  CHECK(Aborts([&] {
    MemberRecord record = Rank(2, world.sinks[0]);
    record.token = "a token";
    world.pending.Wait(
        PendingAttaches::OfGroup{std::move(record), EngineAttached{}, kNow, true, "", {}});
    world.pending.CheckInvariants();
  }));
}

}  // namespace
}  // namespace refitd
