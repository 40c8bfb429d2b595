#include "daemon/policy/quota.h"

#include <catch2/catch.hpp>

namespace refitd {
namespace {

TEST_CASE(
    "An identity may have up to its limit; the error beyond names identity, limit and value") {
  CHECK(CheckQuota("groups", 2, 1, 1, "uid:7").ok());
  const absl::Status refused = CheckQuota("groups", 2, 2, 1, "uid:7");
  CHECK(absl::IsResourceExhausted(refused));
  CHECK(Message(refused) ==
        "limits.per_identity.groups: uid:7 has 2 at this daemon, asks for 1 more, and may have 2");
}

TEST_CASE("Without a limit an identity may have any number") {
  CHECK(CheckQuota("pool_bytes", 0, int64_t{1} << 62, int64_t{1} << 62, "uid:7").ok());
}

TEST_CASE("An amount beyond the limit by itself is refused, and does not overflow") {
  CHECK_FALSE(CheckQuota("pool_bytes", 1, 0, INT64_MAX, "uid:7").ok());
  CHECK_FALSE(CheckQuota("pool_bytes", INT64_MAX, INT64_MAX, INT64_MAX, "uid:7").ok());
}

TEST_CASE("One identity took all places that identities share") {
  CHECK(CheckPlace("callers watch", 4, 1, 1, "uid:7").ok());
  CHECK(Message(CheckPlace("callers watch", 4, 3, 2, "uid:7")) ==
        "3 callers watch already, of which uid:7 has 2, the most that one identity may have");
  CHECK(CheckPlace("callers watch", 4, 3, 1, "uid:8").ok());
  CHECK(Message(CheckPlace("callers watch", 4, 4, 1, "uid:8")) == "4 callers watch already");
}

}  // namespace
}  // namespace refitd
