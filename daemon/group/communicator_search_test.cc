#include "daemon/group/communicator_search.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <set>
#include <utility>

namespace refitd {
namespace {

// Updates of daemons 1..n, some of which are broken.
class Plane {
 public:
  Plane(uint64_t daemons, std::set<NodeId> broken) : broken_(std::move(broken)) {
    for (uint64_t n = 1; n <= daemons; ++n) all_.insert(NodeId(n));
  }
  // One update; returns the daemons of the communicator that came up.
  std::set<NodeId> Update(const std::set<NodeId>& absent = {}) {
    std::set<NodeId> in = Without(Without(all_, found), absent);
    if (search.active()) {
      search.Restrict(in);
      in = Without(in, search.LeftOut());
    }
    while (!in.empty()) {
      ++communicators;
      const bool fails =
          std::any_of(in.begin(), in.end(), [this](NodeId node) { return broken_.contains(node); });
      if (!fails) break;
      const size_t before = in.size();
      in = Without(in, search.Failed(in));
      REQUIRE(in.size() < before);
    }
    if (in.empty()) return in;
    for (const NodeId node : search.CameUp(in)) {
      CHECK(broken_.contains(node));  // no innocent daemon loses its place
      CHECK(found.insert(node).second);
    }
    return in;
  }

  CommunicatorSearch search;
  std::set<NodeId> found;
  int communicators = 0;

 private:
  static std::set<NodeId> Without(std::set<NodeId> all, const std::set<NodeId>& some) {
    for (const NodeId node : some) all.erase(node);
    return all;
  }
  std::set<NodeId> all_;
  const std::set<NodeId> broken_;
};

TEST_CASE("A proven daemon that goes may have been the fault, so nobody else is blamed for it") {
  const std::set<NodeId> all = {NodeId(1), NodeId(2), NodeId(3), NodeId(4)};
  const auto without = [&all](const std::set<NodeId>& some) {
    std::set<NodeId> rest = all;
    for (const NodeId node : some) rest.erase(node);
    return rest;
  };
  CommunicatorSearch search;
  const std::set<NodeId> proven = without(search.Failed(all));
  REQUIRE(proven.size() == 2);
  REQUIRE(search.CameUp(proven).empty());
  const std::set<NodeId> suspected = without(search.LeftOut());
  REQUIRE(suspected.size() == 3);
  search.Failed(suspected);
  search.Forget(*proven.begin());
  CHECK(search.CameUp({*proven.rbegin()}).empty());
}

TEST_CASE("One broken daemon of a thousand is found in some twenty updates, and nobody else") {
  for (const uint64_t broken : {1, 2, 500, 501, 777, 999, 1000}) {
    Plane plane(1000, {NodeId(broken)});
    int updates = 0;
    for (; plane.found.empty(); ++updates) {
      REQUIRE(updates < 25);
      plane.Update();
    }
    CHECK(plane.communicators <= 40);
    CHECK(plane.found == std::set{NodeId(broken)});
    CHECK(plane.Update().size() == 999);  // everybody else is back at once
    CHECK_FALSE(plane.search.active());
  }
}

TEST_CASE("From the second update on most daemons are served while one broken daemon is searched") {
  for (uint64_t broken = 1; broken <= 16; ++broken) {
    INFO("broken " << broken);
    Plane plane(16, {NodeId(broken)});
    plane.Update();
    while (plane.found.empty()) CHECK(plane.Update().size() >= 8);
    CHECK(plane.Update().size() == 15);
  }
}

TEST_CASE("Any number of broken daemons is found, also while daemons come and go") {
  for (uint32_t seed = 1; seed <= 500; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    const uint64_t daemons = 2 + random() % 30;
    std::set<NodeId> broken;
    for (uint64_t n = 1; n <= daemons; ++n) {
      if (random() % 6 == 0) broken.insert(NodeId(n));
    }
    if (broken.size() + 1 > daemons) continue;
    Plane plane(daemons, broken);
    for (int i = 0; i < 30; ++i) {
      std::set<NodeId> absent;
      for (uint64_t n = 1; n <= daemons; ++n) {
        if (random() % 10 == 0) absent.insert(NodeId(n));
      }
      plane.Update(absent);
      if (random() % 10 == 0) plane.search.Forget(NodeId(1 + random() % daemons));
    }
    // All daemons stay from now on.
    for (int i = 0; i < 400 && (plane.found != broken || plane.search.active()); ++i) {
      plane.Update();
    }
    CHECK(plane.found == broken);
    CHECK(plane.Update().size() == daemons - broken.size());
  }
}

TEST_CASE("If the update's own daemon is at fault, no other daemon is called broken") {
  CommunicatorSearch search;
  for (int i = 0; i < 50; ++i) {
    std::set<NodeId> in = {NodeId(1), NodeId(2), NodeId(3)};
    search.Restrict(in);
    for (const NodeId node : search.LeftOut()) in.erase(node);
    while (!in.empty()) {
      for (const NodeId node : search.Failed(std::set<NodeId>(in))) in.erase(node);
    }
    CHECK(search.active());
    CHECK(search.LeftOut().size() < 3);  // the next update tries some of them again
  }
}

}  // namespace
}  // namespace refitd
