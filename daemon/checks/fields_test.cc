#include "daemon/checks/fields.h"

#include <catch2/catch.hpp>
#include <string>

namespace refitd {
namespace {

std::string Refusal(const std::string& text) {
  return Message(CheckCoordinator(text, "coordinator"));
}

TEST_CASE("a coordinator is one HOST:PORT, or empty (P10)") {
  for (const char* good : {"", "a:1", "refitd.jobs.svc:7411", "[::1]:80"}) {
    CHECK(CheckCoordinator(good, "coordinator").ok());
  }
  for (const char* bad : {"a", ":1", "a:", "a:x", "a:123456", "a/b:1", "a b:1"}) {
    CHECK(Refusal(bad) == "coordinator: '" + std::string(bad) + "' is not HOST:PORT");
  }
  CHECK(Refusal(std::string(kMaxCoordinatorBytes, 'a') + ":1") ==
        "coordinator: 264 bytes are more than 262");
  CHECK(Refusal("a\n:1") == "coordinator: a control character at byte 1");
}

TEST_CASE("several coordinators are refused by name: there is no choice among candidates") {
  CHECK(Refusal("a:1,b:1") ==
        "coordinator: 'a:1,b:1' names several daemons: name one HOST:PORT, which is resolved anew "
        "whenever a daemon joins");
}

}  // namespace
}  // namespace refitd
