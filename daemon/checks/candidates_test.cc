#include "daemon/checks/candidates.h"

#include <catch2/catch.hpp>

#include "transport/base/status.h"

namespace refitd {
namespace {

std::string Refusal(const std::string& text) {
  return Message(CheckCandidates(text, "coordinator"));
}

TEST_CASE("one address, several and none are taken, in their order") {
  CHECK(CheckCandidates("", "coordinator").ok());
  CHECK(CheckCandidates("a:1", "coordinator").ok());
  CHECK(CheckCandidates("a:7411,b:7411,[::1]:80", "coordinator").ok());
  CHECK(SplitCandidates("").empty());
  CHECK(SplitCandidates("a:1") == std::vector<std::string>{"a:1"});
  CHECK(SplitCandidates("b:1,a:2") == std::vector<std::string>{"b:1", "a:2"});
}

TEST_CASE("an address that is none is refused by field and value (P10)") {
  CHECK(Refusal("b") == "coordinator: 'b' is not HOST:PORT");
  CHECK(Refusal("a:1,") == "coordinator: '' is not HOST:PORT");
  CHECK(Refusal(",a:1") == "coordinator: '' is not HOST:PORT");
  CHECK(Refusal("a:1, b:1") == "coordinator: ' b:1' is not HOST:PORT");
  CHECK(Refusal("a:1,b:123456") == "coordinator: 'b:123456' is not HOST:PORT");
  CHECK(Refusal("a:1,b:1,a:1") == "coordinator: 'a:1' is there twice");
}

TEST_CASE("the number of candidates and their length are limited (P10)") {
  std::string eight;
  for (size_t i = 0; i < kMaxCandidates; ++i) eight += (i > 0 ? ",a:" : "a:") + std::to_string(i);
  CHECK(CheckCandidates(eight, "coordinator").ok());
  CHECK(Refusal(eight + ",b:1") == "coordinator: 9 addresses are more than 8");
  CHECK(Refusal(std::string(kMaxAddressBytes, 'a') + ":1") ==
        "coordinator: 257 bytes are more than 255");
  CHECK(Refusal(std::string(1 << 20, ',')) == "coordinator: 1048576 bytes are more than 2048");
}

}  // namespace
}  // namespace refitd
