#include "daemon/policy/byte_ledger.h"

#include <catch2/catch.hpp>
#include <optional>
#include <utility>

namespace refitd {
namespace {

TEST_CASE("Bytes are counted until their hold ends, for each identity and for all") {
  ByteLedger ledger("mapped_bytes", 100, 60);
  std::optional<ByteLedger::Hold> a = *ledger.Take("uid:1", 60);
  CHECK(Message(ledger.Take("uid:1", 1).status()) ==
        "limits.per_identity.mapped_bytes: uid:1 has 60 at this daemon, asks for 1 more, and may "
        "have 60");
  ByteLedger::Hold b = *ledger.Take("uid:2", 40);
  const absl::Status full = ledger.Take("uid:3", 1).status();
  CHECK(absl::IsResourceExhausted(full));
  CHECK(Message(full) ==
        "limits.mapped_bytes: all identities have 100 at this daemon, uid:3 asks for 1 more, and "
        "all may have 100");
  a.reset();
  CHECK(ledger.held() == 40);
  CHECK(ledger.Take("uid:1", 60).ok());
}

TEST_CASE("A hold grows, moves, and is given back once") {
  ByteLedger ledger("held_bytes", 100, 0);
  {
    ByteLedger::Hold hold = *ledger.Take("uid:1", 10);
    CHECK(hold.GrowTo(80).ok());
    CHECK(hold.GrowTo(5).ok());
    CHECK(ledger.held() == 80);
    CHECK(absl::IsResourceExhausted(hold.GrowTo(101)));
    CHECK(ledger.held() == 80);
    ByteLedger::Hold moved = std::move(hold);
    hold = *ledger.Take("uid:1", 1);
    CHECK(ledger.held() == 81);
  }
  CHECK(ledger.held() == 0);
  CHECK_FALSE(ledger.Take("uid:1", INT64_MAX).ok());
}

TEST_CASE("A hold may outlive its ledger") {
  ByteLedger::Hold hold;
  {
    ByteLedger ledger("held_bytes", 100, 0);
    hold = *ledger.Take("uid:1", 10);
  }
  CHECK(hold.GrowTo(20).ok());
}

}  // namespace
}  // namespace refitd
