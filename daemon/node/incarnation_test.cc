#include "daemon/node/incarnation.h"

#include <catch2/catch.hpp>
#include <set>

namespace refitd {
namespace {

TEST_CASE("an incarnation has the next term after the one that it follows, and is greater") {
  uint64_t last = NewIncarnation(0);
  CHECK(TermOf(last) == 0);
  for (uint64_t term = 1; term < 1'000; ++term) {
    const uint64_t next = NewIncarnation(last);
    REQUIRE(next > last);
    REQUIRE(TermOf(next) == term);
    last = next;
  }
}

TEST_CASE("incarnations of one term differ, and none is 0") {
  std::set<uint64_t> drawn;
  for (int i = 0; i < 1'000; ++i) drawn.insert(NewIncarnation(0));
  CHECK(drawn.size() == 1'000);
  CHECK_FALSE(drawn.contains(0));
}

TEST_CASE("the last term stays") {
  const uint64_t last = NewIncarnation(kMaxTerm << (64 - kTermBits));
  CHECK(TermOf(last) == kMaxTerm);
  CHECK(TermOf(NewIncarnation(last)) == kMaxTerm);
}

TEST_CASE("an engine's claim can't use the terms up (P10)") {
  const uint64_t most = kMaxClaimedTerm << (64 - kTermBits);
  CHECK(CountedClaim(most) == most);
  CHECK(CountedClaim(~uint64_t{0}) == 0);
  CHECK(TermOf(NewIncarnation(CountedClaim(~uint64_t{0}))) == 0);
}

}  // namespace
}  // namespace refitd
