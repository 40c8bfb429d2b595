#include "transport/base/identity.h"

#include <catch2/catch.hpp>
#include <string>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr char kTrainer[] = "spiffe://prod/trainer/a";

TEST_CASE("a SPIFFE ID with '..', '?' or '%' could be read in two ways and is none") {
  for (const char* good : {kTrainer, "spiffe://prod.example-1/a", "spiffe://p/A.b-c_d/..e"}) {
    CAPTURE(good);
    CHECK(IsSpiffeId(good));
  }
  for (const char* bad :
       {"", "spiffe://", "spiffe://prod", "spiffe://prod/", "spiffe:///a", "spiffe://prod/a/",
        "spiffe://prod//a", "spiffe://prod/a/../b", "spiffe://prod/.", "spiffe://prod/..",
        "spiffe://prod/a?b", "spiffe://prod/a#b", "spiffe://prod/%61", "spiffe://prod/a b",
        "spiffe://prod/*", "spiffe://Prod/a", "spiffe://prod:1/a", "spiffe://u@prod/a",
        "https://prod/a"}) {
    CAPTURE(bad);
    CHECK_FALSE(IsSpiffeId(bad));
  }
  CHECK_FALSE(IsSpiffeId("spiffe://prod/" + std::string(kMaxIdentityBytes, 'a')));
}

TEST_CASE("A pattern matches exactly, or all below a path, or one more label") {
  CHECK(MatchesIdentity(kTrainer, kTrainer));
  CHECK_FALSE(MatchesIdentity(kTrainer, std::string(kTrainer) + "/b"));
  CHECK(MatchesIdentity("spiffe://prod/trainer/*", kTrainer));
  CHECK(MatchesIdentity("spiffe://prod/*", kTrainer));
  CHECK_FALSE(MatchesIdentity("spiffe://prod/trainer/*", "spiffe://prod/trainer/"));
  CHECK_FALSE(MatchesIdentity("spiffe://prod/trainer/*", "spiffe://prod/trainers/a"));
  CHECK_FALSE(MatchesIdentity("spiffe://prod/*", "spiffe://production/a"));
  CHECK(MatchesIdentity("dns:*.example", "dns:a.example"));
  CHECK_FALSE(MatchesIdentity("dns:*.example", "dns:b.a.example"));
  CHECK_FALSE(MatchesIdentity("dns:*.example", "dns:.example"));
  CHECK_FALSE(MatchesIdentity("dns:*.example", "dns:example"));
  CHECK_FALSE(MatchesIdentity("", ""));
}

TEST_CASE("Patterns that can't be meant are refused") {
  for (const char* good :
       {"spiffe://prod/a", "spiffe://prod/*", "spiffe://prod/a/*", "dns:a.b", "dns:*.a"}) {
    CAPTURE(good);
    CHECK(CheckIdentityPattern(good, "f").ok());
    CHECK(CheckOwnerPattern(good, "f").ok());
  }
  for (const char* bad : {"", "a", "spiffe://", "spiffe://prod", "spiffe://prod/", "spiffe:///a",
                          "spiffe://*/a", "spiffe://prod/a*", "spiffe://prod/*/a", "dns:", "dns:*",
                          "dns:a.*", "dns:A.b", "spiffe://prod/a b", "spiffe://prod/../*",
                          "spiffe://prod/a?b/*", "spiffe://prod/%2e%2e/b"}) {
    CAPTURE(bad);
    CHECK_THAT(Message(CheckIdentityPattern(bad, "f")), Catch::StartsWith("f is \""));
    CHECK_THAT(Message(CheckOwnerPattern(bad, "f")), Catch::StartsWith("f is \""));
  }
  CHECK_THAT(Message(CheckIdentityPattern("uid:0", "f")), Catch::StartsWith("f is \""));
}

TEST_CASE("A pattern of owners may be a user") {
  CHECK(CheckOwnerPattern("uid:1000", "f").ok());
  CHECK_FALSE(CheckOwnerPattern("uid:*", "f").ok());
  CHECK_FALSE(CheckOwnerPattern("gid:1000", "f").ok());
  CHECK(MatchesOwner("uid:1000", "uid:1000"));
  CHECK_FALSE(MatchesOwner("uid:1000", "uid:100"));
  CHECK_FALSE(MatchesOwner("uid:1000", kAnonymous));
  CHECK(MatchesOwner("spiffe://prod/*", kTrainer));
}

}  // namespace
}  // namespace refitd
