#include "daemon/sockets/name_lookup.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <future>

namespace refitd {
namespace {

TEST_CASE("a name is looked up once for a while, and addresses are as the resolver found them") {
  std::atomic<int> asked{0};
  NameLookup lookup([&asked](const std::string& host) -> NameLookup::Addresses {
    ++asked;
    return {host + " found"};
  });
  CHECK(lookup.Of("a") == NameLookup::Addresses{"a found"});
  CHECK(lookup.Of("a") == NameLookup::Addresses{"a found"});
  CHECK(lookup.Of("b") == NameLookup::Addresses{"b found"});
  CHECK(asked >= 2);
}

TEST_CASE("nobody waits without an end for a resolver that does not answer (P4)") {
  std::promise<void> answer;
  std::promise<void> answered;
  std::atomic<int> asked{0};
  {
    NameLookup lookup([&](const std::string& /*host*/) -> NameLookup::Addresses {
      ++asked;
      answer.get_future().wait();
      answered.set_value();
      return {};
    });
    CHECK(lookup.Of("a").empty());
    CHECK(lookup.Of("a").empty());  // the lookup still runs, and no other one begins
    CHECK(asked == 1);
  }
  answer.set_value();  // the thread outlives the object
  answered.get_future().wait();
}

TEST_CASE("names of the machine itself resolve to addresses of its own") {
  NameLookup lookup;
  const NameLookup::Addresses found = lookup.Of("127.0.0.1");
  REQUIRE(found == NameLookup::Addresses{"127.0.0.1"});
  CHECK(IsOwnAddress("127.0.0.1"));
  CHECK(IsOwnAddress("127.0.0.9"));
  CHECK_FALSE(IsOwnAddress("192.0.2.1"));  // reserved for documents
  CHECK_FALSE(IsOwnAddress("a name"));
  CHECK(HostOfAddress("10.0.0.1:7411") == "10.0.0.1");
  CHECK(HostOfAddress("[::1]:7411") == "::1");
  CHECK(HostOfAddress("a.example:7411") == "a.example");
}

}  // namespace
}  // namespace refitd
