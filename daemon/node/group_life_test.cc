#include "daemon/node/group_life.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <optional>
#include <string>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

TEST_CASE("a group is made once, and found by an equal spec alone") {
  DaemonParts parts;
  Turn turn(parts.state().turns);
  bool created = false;
  const absl::StatusOr<GroupRecord*> made =
      parts.life().Make("g", Spec(), 1, "uid:1", &created, turn);
  REQUIRE(made.ok());
  CHECK(created);
  CHECK((*made)->creator == "uid:1");
  const absl::StatusOr<GroupRecord*> again =
      parts.life().Make("g", Spec(), 1, "uid:2", &created, turn);
  REQUIRE(again.ok());
  CHECK_FALSE(created);
  CHECK(*again == *made);
  CHECK((*again)->creator == "uid:1");
  CHECK(parts.life().Make("g", Spec(5), 1, "", &created, turn).status().code() ==
        absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("no group is made for a trainer that could not join it, or by a daemon that drains") {
  DaemonParts parts;
  Turn turn(parts.state().turns);
  bool created = true;
  const absl::Status ranks = parts.life().Make("g", Spec(), 2, "", &created, turn).status();
  CHECK(ranks.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(ranks), Contains("world_size: 2 is not the spec's trainer_ranks 1"));
  CHECK_FALSE(created);
  parts.state().draining = true;
  CHECK(parts.life().Make("g", Spec(), 1, "", &created, turn).status().code() ==
        absl::StatusCode::kUnavailable);
  CHECK(parts.state().groups.all().empty());
  parts.state().draining = false;
}

TEST_CASE("the group that has been empty for longest gives way to a new one") {
  DaemonOptions options;
  options.max_groups = 2;
  DaemonParts parts("a", options);
  Turn turn(parts.state().turns);
  bool created = false;
  for (const char* name : {"first", "second", "third"}) {
    CHECK(parts.life().Make(name, Spec(), 1, "", &created, turn).ok());
  }
  CHECK(parts.state().groups.names() == std::vector<std::string>{"second", "third"});
}

TEST_CASE("a group expires when it has been empty for the limit, not before (P8)") {
  DaemonOptions options;
  options.group_idle = std::chrono::hours(1);
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("stays");
  Turn turn(parts.state().turns);
  bool created = false;
  REQUIRE(parts.life().Make("goes", Spec(), 1, "", &created, turn).ok());
  const TimePoint now = DaemonState::Now();
  parts.life().DropExpired(now + std::chrono::minutes(59), turn);
  CHECK(parts.state().groups.all().size() == 2);
  parts.life().DropExpired(now + std::chrono::minutes(61), turn);
  CHECK(parts.state().groups.names() == std::vector<std::string>{"stays"});
}

TEST_CASE("members are counted against limits.max_members") {
  DaemonOptions options;
  options.max_members = 2;
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("g");
  const auto room = [&parts] {
    const Turn turn(parts.state().turns);
    return parts.life().CheckMembers();
  };
  CHECK(room().ok());
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  CHECK(room().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(room()), Contains("daemon a has 2 members") && Contains("takes 2"));
}

}  // namespace
}  // namespace refitd
