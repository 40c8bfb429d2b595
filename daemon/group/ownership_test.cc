#include "daemon/group/ownership.h"

#include <catch2/catch.hpp>
#include <string>

#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr char kVictim[] = "spiffe://prod/trainer/victim";
constexpr char kThief[] = "spiffe://prod/trainer/thief";

absl::Status Enter(Ownership* group, const std::string& identity, bool any_owner = false) {
  absl::Status status = group->CheckTrainer(identity, any_owner);
  if (status.ok()) group->EnterTrainer(identity);
  return status;
}

absl::Status EnterEngine(Ownership* group, const std::string& held,
                         const std::string& pattern = "") {
  absl::Status status = group->CheckEngine(pattern, held);
  if (status.ok()) group->EnterEngine(held);
  return status;
}

TEST_CASE("the first trainer owns the group, and another enters only by any_owner") {
  Ownership group("g");
  CHECK(Enter(&group, kVictim).ok());
  CHECK(group.owner() == kVictim);
  CHECK(Enter(&group, kVictim).ok());
  const absl::Status refused = Enter(&group, kThief);
  CHECK(absl::IsPermissionDenied(refused));
  CHECK_THAT(Message(refused), Contains("which another identity owns"));
  CHECK(Enter(&group, kThief, /*any_owner=*/true).ok());
  CHECK(Enter(&group, "").code() == absl::StatusCode::kPermissionDenied);
  CHECK(group.owner() == kVictim);
}

TEST_CASE("a group that is made again belongs to the owner of what its engines hold") {
  Ownership group("g");
  SECTION("an engine comes first") {
    REQUIRE(EnterEngine(&group, kVictim).ok());
    CHECK(absl::IsPermissionDenied(Enter(&group, kThief)));
  }
  SECTION("another trainer comes first") {
    REQUIRE(Enter(&group, kThief).ok());
    REQUIRE(EnterEngine(&group, "").ok());  // a new engine says nothing
    CHECK(group.owner() == kThief);
    CHECK(group.EnterEngine(kVictim));
    CHECK_FALSE(group.Stays(kThief, false));
    CHECK(group.Stays(kThief, true));
  }
  CHECK(group.owner() == kVictim);
  CHECK(Enter(&group, kVictim).ok());
  // It is settled now: one engine's word does not undo another's.
  const absl::Status other = EnterEngine(&group, kThief);
  CHECK(absl::IsPermissionDenied(other));
  CHECK_THAT(Message(other), Contains("held_owner"));
}

TEST_CASE("an engine of another owner's version is refused once the group has committed one") {
  Ownership group("g");
  REQUIRE(Enter(&group, kThief).ok());
  group.Committed();
  CHECK(absl::IsPermissionDenied(EnterEngine(&group, kVictim)));
  CHECK(EnterEngine(&group, kThief).ok());
  CHECK(EnterEngine(&group, "").ok());
  CHECK(group.owner() == kThief);
}

TEST_CASE("an engine may say whose weights it takes") {
  Ownership group("g");
  CHECK(EnterEngine(&group, "", kVictim).ok());
  REQUIRE(Enter(&group, kThief).ok());
  const absl::Status refused = EnterEngine(&group, "", "spiffe://prod/trainer/victim");
  CHECK(absl::IsPermissionDenied(refused));
  CHECK_THAT(Message(refused), Contains("trainer_identity"));
  CHECK(EnterEngine(&group, "", "spiffe://prod/trainer/*").ok());
  CHECK(absl::IsPermissionDenied(EnterEngine(&group, "", "uid:1000")));
}

TEST_CASE("where a rule names the owner nobody else enters or holds the group, before or after") {
  bool named = false;
  const auto rule = [&named](const std::string& identity) {
    if (!named) return OwnerRule::kNone;
    if (identity == kVictim) return OwnerRule::kNamed;
    return identity == "uid:0" ? OwnerRule::kExempt : OwnerRule::kOther;
  };
  Ownership group("g", rule);
  SECTION("before the owner comes") {
    named = true;
    const absl::Status refused = Enter(&group, kThief);
    CHECK(absl::IsPermissionDenied(refused));
    CHECK_THAT(Message(refused), Contains("whose owner a rule names"));
    CHECK(Enter(&group, "uid:0").ok());
    CHECK(Enter(&group, kThief, /*any_owner=*/true).ok());
    CHECK(group.owner().empty());
    // What engines say does not count.
    CHECK(EnterEngine(&group, kThief).ok());
    CHECK(group.owner().empty());
    CHECK(Enter(&group, kVictim).ok());
  }
  SECTION("a rule that comes later takes the group from who holds it") {
    REQUIRE(Enter(&group, kThief).ok());
    group.Committed();
    named = true;
    CHECK(group.CheckTrainer(kVictim, false).ok());
    CHECK(group.WouldOwn(kVictim));
    CHECK(group.EnterTrainer(kVictim));
    CHECK_FALSE(group.Stays(kThief, false));
  }
  CHECK(group.owner() == kVictim);
  CHECK(EnterEngine(&group, kThief).ok());
  CHECK(group.owner() == kVictim);
}

TEST_CASE("who replaces another's group leaves it to the next trainer, whatever engines say") {
  Ownership group("g");
  group.Replaced("uid:0");  // nobody owns it yet: engines are asked
  REQUIRE(EnterEngine(&group, kVictim).ok());
  group.Replaced(kVictim);
  CHECK(group.owner() == kVictim);
  group.Replaced("uid:0");
  CHECK(group.owner().empty());
  CHECK(EnterEngine(&group, kVictim).ok());
  CHECK(group.owner().empty());
  REQUIRE(Enter(&group, kThief).ok());
  group.Committed();
  CHECK(EnterEngine(&group, kVictim).ok());
  CHECK(group.owner() == kThief);
}

}  // namespace
}  // namespace refitd
