#include "daemon/process/log_limit.h"

#include <catch2/catch.hpp>

namespace refitd {
namespace {

TEST_CASE("A window has so many lines, and the next tells how many were left out") {
  LogLimit limit;
  const TimePoint start{};
  for (int i = 0; i < LogLimit::kLines; ++i) REQUIRE(limit.Admit(start) == 0);
  for (int i = 0; i < 3; ++i) REQUIRE(limit.Admit(start + std::chrono::seconds(9)) == std::nullopt);
  CHECK(limit.Admit(start + LogLimit::kWindow) == 3);
  CHECK(limit.Admit(start + LogLimit::kWindow) == 0);
}

}  // namespace
}  // namespace refitd
