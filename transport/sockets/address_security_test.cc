#include "transport/sockets/address_security.h"

#include <catch2/catch.hpp>

#include "transport/base/status.h"
#include "transport/sockets/frames.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr char kAlice[] = "spiffe://prod/refitd/alice";
constexpr char kBob[] = "spiffe://prod/refitd/bob";

std::string AddressOf(const std::string& identity) {
  SocketAddress address;
  address.communicator = 9;
  address.rank = 1;
  address.size = 3;
  address.host.family = AF_INET;
  address.host.ip = {10, 0, 0, 1};
  address.port = 4000;
  address.tls = !identity.empty();
  address.identity = identity;
  return EncodeSocketAddress(address);
}

TEST_CASE("an address says whether its rank is encrypted, and as whom") {
  const auto alice = SecurityOfAddress(AddressOf(kAlice));
  REQUIRE(alice.ok());
  CHECK(alice->encrypted);
  CHECK(alice->identity == kAlice);
  const auto clear = SecurityOfAddress(AddressOf(""));
  REQUIRE(clear.ok());
  CHECK_FALSE(clear->encrypted);
  CHECK(clear->identity.empty());
  for (const std::string other : {"", "RFW1 and more", "here"}) {
    const auto unknown = SecurityOfAddress(other);
    REQUIRE(unknown.ok());
    CHECK_FALSE(unknown->encrypted);
  }
}

TEST_CASE("a daemon may give no address that names another identity than its link (P9)") {
  CHECK(CheckAddressOwner(AddressOf(kAlice), kAlice).ok());
  CHECK(CheckAddressOwner(AddressOf(""), kAlice).ok());
  CHECK(CheckAddressOwner(AddressOf(""), "").ok());
  CHECK(CheckAddressOwner("here", "").ok());
  const absl::Status other = CheckAddressOwner(AddressOf(kBob), kAlice);
  CHECK(other.code() == absl::StatusCode::kPermissionDenied);
  CHECK_THAT(Message(other), Contains(kAlice) && Contains(kBob));
  const absl::Status clear = CheckAddressOwner(AddressOf(kBob), "");
  CHECK(clear.code() == absl::StatusCode::kPermissionDenied);
  CHECK_THAT(Message(clear), Contains(kBob) && Contains("in the clear"));
}

TEST_CASE("an address of this wire that is malformed is refused (P10)") {
  const std::string whole = AddressOf(kAlice);
  for (size_t bytes = 4; bytes < whole.size(); ++bytes) {
    INFO(bytes);
    CHECK(SecurityOfAddress(whole.substr(0, bytes)).status().code() ==
          absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace refitd
