#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>

#include "daemon/node/life.h"
#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

TEST_CASE("a group is made once, and found by an equal spec alone") {
  DaemonParts parts;
  StateLock lock(&parts.state().mutex);
  bool created = false;
  const absl::StatusOr<GroupRecord*> made =
      MakeGroup(parts.state(), "g", Spec(), 1, "uid:1", &created, lock);
  REQUIRE(made.ok());
  CHECK(created);
  CHECK((*made)->creator == "uid:1");
  const absl::StatusOr<GroupRecord*> again =
      MakeGroup(parts.state(), "g", Spec(), 1, "uid:2", &created, lock);
  REQUIRE(again.ok());
  CHECK_FALSE(created);
  CHECK(*again == *made);
  CHECK((*again)->creator == "uid:1");
  CHECK(MakeGroup(parts.state(), "g", Spec(5), 1, "", &created, lock).status().code() ==
        absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("no group is made for a trainer that could not join it, or by a daemon that drains") {
  DaemonParts parts;
  StateLock lock(&parts.state().mutex);
  bool created = true;
  const absl::Status ranks = MakeGroup(parts.state(), "g", Spec(), 2, "", &created, lock).status();
  CHECK(ranks.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(ranks), Contains("world_size: 2 is not the spec's trainer_ranks 1"));
  CHECK_FALSE(created);
  parts.state().draining = true;
  CHECK(MakeGroup(parts.state(), "g", Spec(), 1, "", &created, lock).status().code() ==
        absl::StatusCode::kUnavailable);
  CHECK(parts.state().groups.all().empty());
  parts.state().draining = false;
}

TEST_CASE("the group that has been empty for longest gives way to a new one") {
  DaemonOptions options;
  options.max_groups = 2;
  DaemonParts parts("a", options);
  StateLock lock(&parts.state().mutex);
  bool created = false;
  for (const char* name : {"first", "second", "third"}) {
    CHECK(MakeGroup(parts.state(), name, Spec(), 1, "", &created, lock).ok());
  }
  CHECK(parts.state().groups.names() == std::vector<std::string>{"second", "third"});
}

TEST_CASE("a group expires when it has been empty for the limit, not before (P8)") {
  DaemonOptions options;
  options.group_idle = std::chrono::hours(1);
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("stays");
  StateLock lock(&parts.state().mutex);
  bool created = false;
  REQUIRE(MakeGroup(parts.state(), "goes", Spec(), 1, "", &created, lock).ok());
  const TimePoint now = DaemonState::Now();
  DropExpiredGroups(parts.state(), now + std::chrono::minutes(59), lock);
  CHECK(parts.state().groups.all().size() == 2);
  DropExpiredGroups(parts.state(), now + std::chrono::minutes(61), lock);
  CHECK(parts.state().groups.names() == std::vector<std::string>{"stays"});
}

TEST_CASE("members are counted against limits.max_members") {
  DaemonOptions options;
  options.max_members = 2;
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("g");
  const auto room = [&parts] {
    const StateLock lock(&parts.state().mutex);
    return CheckMemberCount(parts.state());
  };
  CHECK(room().ok());
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  CHECK(room().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(room()), Contains("daemon a has 2 members") && Contains("takes 2"));
}

TEST_CASE("incarnations differ, and none is 0") {
  std::set<uint64_t> drawn;
  for (int i = 0; i < 1'000; ++i) drawn.insert(NewIncarnation());
  CHECK(drawn.size() == 1'000);
  CHECK_FALSE(drawn.contains(0));
}

}  // namespace
}  // namespace refitd
