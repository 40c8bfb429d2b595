#include "daemon/group/readiness.h"

#include <catch2/catch.hpp>
#include <string>

namespace refitd {
namespace {

InstanceStanding Clean(const std::string& name, std::optional<int64_t> version) {
  InstanceStanding standing{.instance = name, .standing = Standing::kClean, .version = {}};
  if (version.has_value()) standing.version = Version(*version);
  return standing;
}

ReadinessBook Book(std::optional<int64_t> group, const InstanceStanding& standing) {
  ReadinessBook book;
  if (group.has_value()) book.SetVersion(Version(*group));
  book.Set(standing);
  return book;
}

TEST_CASE("an instance at the group's version is ready, and one that is dirty or forming is not") {
  CHECK(Book(7, Clean("i", 7)).Of("i", 0)->ready);
  for (const Standing standing : {Standing::kDirty, Standing::kForming}) {
    ReadinessBook book = Book(7, {"i", standing, Version(7)});
    CHECK_FALSE(book.Of("i", 5)->ready);
    CHECK_FALSE(book.Of("i", 5)->lag.has_value());
    CHECK(book.Of("i", 5)->reason == "it is " + std::string(Name(standing)));
  }
}

TEST_CASE("an instance may be max_lag behind the group's version, and no more") {
  const ReadinessBook book = Book(7, Clean("i", 5));
  CHECK_FALSE(book.Of("i", 0)->ready);
  CHECK_FALSE(book.Of("i", 1)->ready);
  CHECK(book.Of("i", 2)->ready);
  CHECK(book.Of("i", 1)->lag == 2);
  CHECK(book.Of("i", 1)->reason ==
        "its version 5 is 2 behind the group's version 7, where max_lag is 1");
}

TEST_CASE("an instance that can't be compared is ready only while the group has no version") {
  CHECK(Book(std::nullopt, Clean("i", std::nullopt)).Of("i", 0)->ready);
  const ReadinessBook book = Book(7, Clean("i", std::nullopt));
  CHECK_FALSE(book.Of("i", 1000)->ready);
  CHECK_FALSE(book.Of("i", 1000)->lag.has_value());
}

TEST_CASE("an instance that holds nothing is not ready in a group that had a version before") {
  for (const auto version : {std::optional<int64_t>(), std::optional<int64_t>(7)}) {
    ReadinessBook book = Book(version, {"i", Standing::kEmpty, std::nullopt});
    CHECK_FALSE(book.Of("i", 1000)->ready);
    CHECK_FALSE(book.Of("i", 1000)->lag.has_value());
    CHECK(book.Of("i", 0)->reason == "it holds no version, and the group had one before");
    book.LoseCoordinator();
    CHECK_FALSE(book.Of("i", 1000)->ready);
  }
}

TEST_CASE(
    "an instance that is not written to yet stays ready, and has unknown weights without "
    "coordinator") {
  ReadinessBook book = Book(7, {"i", Standing::kUpdating, Version(7)});
  book.Set(Clean("j", 7));
  CHECK(book.Of("i", 0)->ready);
  book.LoseCoordinator();
  CHECK_FALSE(book.Of("i", 0)->ready);
  CHECK(book.Of("j", 0)->ready);
}

TEST_CASE("an instance that is gone is not known") {
  ReadinessBook book = Book(7, Clean("i", 7));
  CHECK_FALSE(book.Of("j", 0).has_value());
  CHECK(book.Set({"i", Standing::kGone, std::nullopt}));
  CHECK_FALSE(book.Of("i", 0).has_value());
  CHECK_FALSE(book.Set({"i", Standing::kGone, std::nullopt}));
}

TEST_CASE(
    "a book is sent in messages of bounded size, of which the first clears the receiver's book") {
  ReadinessBook book;
  book.SetVersion(Version(3));
  for (size_t i = 0; i < 2 * kMaxStandings + 1; ++i) {
    book.Set(Clean("instance-" + std::to_string(i), 3));
  }
  ReadinessBook other = Book(9, Clean("old", 9));
  const auto all = book.All();
  CHECK(all.size() == 3);
  for (const PeerReadiness& each : all) {
    CHECK(each.instances->size() <= kMaxStandings);
    other.Take(each);
  }
  CHECK(other.instances() == book.instances());
  CHECK(other.version() == Version(3));
  CHECK(ReadinessBook().All().size() == 1);
}

TEST_CASE("only what changes counts as a change") {
  ReadinessBook book = Book(7, Clean("i", 7));
  CHECK_FALSE(book.Set(Clean("i", 7)));
  CHECK(book.Set(Clean("i", 8)));
  CHECK_FALSE(book.SetVersion(Version(7)));
  CHECK(book.SetVersion(Version(8)));
}

}  // namespace
}  // namespace refitd
