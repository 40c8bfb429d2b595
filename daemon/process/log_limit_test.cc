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

TEST_CASE("One identity's refusals took the lines of all others") {
  LogLimits limits;
  const TimePoint start{};
  for (int i = 0; i < 3 * LogLimit::kLines; ++i) limits.Admit("dns:loud", start);
  CHECK(limits.Admit("dns:loud", start) == std::nullopt);
  CHECK(limits.Admit("dns:quiet", start) == 0);
  // Identities beyond those that have a limit of their own share one.
  for (size_t i = 0; i < LogLimits::kIdentities; ++i) limits.Admit(std::to_string(i), start);
  for (int i = 0; i < LogLimit::kLines; ++i) limits.Admit("dns:late", start);
  CHECK(limits.Admit("dns:later", start) == std::nullopt);
  CHECK(limits.Admit("dns:later", start + LogLimit::kWindow) == 0);
}

}  // namespace
}  // namespace refitd
