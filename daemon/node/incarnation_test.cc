#include "daemon/node/incarnation.h"

#include <catch2/catch.hpp>
#include <set>

namespace refitd {
namespace {

TEST_CASE("incarnations differ, and none is 0") {
  std::set<uint64_t> drawn;
  for (int i = 0; i < 1'000; ++i) drawn.insert(NewIncarnation());
  CHECK(drawn.size() == 1'000);
  CHECK_FALSE(drawn.contains(0));
}

}  // namespace
}  // namespace refitd
