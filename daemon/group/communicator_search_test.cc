#include "daemon/group/communicator_search.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <set>
#include <utility>

namespace refitd {
namespace {

using Instance = CommunicatorSearch::Instance;
using Instances = CommunicatorSearch::Instances;

std::set<NodeId> DaemonsOf(const Instances& instances) {
  std::set<NodeId> daemons;
  for (const Instance& instance : instances) daemons.insert(instance.begin(), instance.end());
  return daemons;
}

// Each daemon has an instance of its own.
Instances Alone(const std::set<NodeId>& daemons) {
  Instances instances;
  for (const NodeId daemon : daemons) instances.insert({daemon});
  return instances;
}

// Updates of instances, some of whose daemons are broken.
class Plane {
 public:
  Plane(Instances instances, std::set<NodeId> broken)
      : instances_(std::move(instances)), broken_(std::move(broken)) {}
  // Daemons 1..n have an instance each.
  Plane(uint64_t daemons, std::set<NodeId> broken) : broken_(std::move(broken)) {
    for (uint64_t n = 1; n <= daemons; ++n) instances_.insert({NodeId(n)});
  }
  // One update; returns the daemons of the communicator that came up.
  std::set<NodeId> Update(const std::set<NodeId>& absent = {}) {
    Instances in = Without(Without(instances_, found), absent);
    if (search.active()) {
      search.Restrict(in);
      in = Without(in, search.LeftOut());
    }
    while (!in.empty()) {
      ++communicators;
      const std::set<NodeId> daemons = DaemonsOf(in);
      if (!Fails(daemons)) break;
      const size_t before = daemons.size();
      in = Without(in, search.Failed(in));
      REQUIRE(DaemonsOf(in).size() < before);
    }
    if (in.empty()) return {};
    const std::set<NodeId> up = DaemonsOf(in);
    for (const NodeId node : search.CameUp(up)) {
      CHECK(!CouldServe(node));  // no daemon loses its place that an instance could use
      CHECK(found.insert(node).second);
    }
    return up;
  }
  // Whether an instance with a rank on the daemon could do with the daemons that work.
  bool CouldServe(NodeId daemon) const {
    return std::any_of(instances_.begin(), instances_.end(), [&](const Instance& instance) {
      return instance.contains(daemon) && !Fails(instance);
    });
  }
  // The daemons of the instances that could have every update.
  std::set<NodeId> Served() const { return DaemonsOf(Without(instances_, broken_)); }

  CommunicatorSearch search;
  std::set<NodeId> found;
  int communicators = 0;

 private:
  bool Fails(const std::set<NodeId>& daemons) const {
    return std::any_of(daemons.begin(), daemons.end(),
                       [this](NodeId node) { return broken_.contains(node); });
  }
  static Instances Without(Instances all, const std::set<NodeId>& some) {
    std::erase_if(all, [&some](const Instance& instance) {
      return std::any_of(instance.begin(), instance.end(),
                         [&some](NodeId node) { return some.contains(node); });
    });
    return all;
  }
  Instances instances_;
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
  const std::set<NodeId> proven = without(search.Failed(Alone(all)));
  REQUIRE(proven.size() == 2);
  REQUIRE(search.CameUp(proven).empty());
  const std::set<NodeId> suspected = without(search.LeftOut());
  REQUIRE(suspected.size() == 3);
  search.Failed(Alone(suspected));
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

TEST_CASE(
    "an instance got no version where another shared its daemon and had one on a broken one") {
  SECTION("a sound instance is on one of the two daemons") {
    const uint64_t sound = GENERATE(1, 2);
    Plane plane({{NodeId(sound)}, {NodeId(1), NodeId(2)}}, {NodeId(3 - sound)});
    CHECK(plane.Update() == std::set{NodeId(sound)});
    CHECK(plane.found == std::set{NodeId(3 - sound)});
  }
  SECTION("and an instance is on the broken daemon alone") {
    const uint64_t sound = GENERATE(1, 2);
    Plane plane({{NodeId(1)}, {NodeId(2)}, {NodeId(1), NodeId(2)}}, {NodeId(3 - sound)});
    plane.Update();
    for (int i = 0; i < 3; ++i) CHECK(plane.Update() == std::set{NodeId(sound)});
    CHECK(plane.found == std::set{NodeId(3 - sound)});
  }
  SECTION("each two of three daemons have an instance") {
    const uint64_t broken = GENERATE(1, 2, 3);
    Plane plane({{NodeId(1), NodeId(2)}, {NodeId(2), NodeId(3)}, {NodeId(1), NodeId(3)}},
                {NodeId(broken)});
    for (int i = 0; i < 3; ++i) plane.Update();
    CHECK(plane.Update().size() == 2);
    CHECK(plane.found == std::set{NodeId(broken)});
  }
}

TEST_CASE(
    "Of instances that share daemons all that need no broken daemon get every later version") {
  for (uint32_t seed = 1; seed <= 2000; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    const uint64_t daemons = 2 + random() % 12;
    std::set<NodeId> broken;
    for (uint64_t n = 1; n <= daemons; ++n) {
      if (random() % 6 == 0) broken.insert(NodeId(n));
    }
    Instances instances;
    for (uint64_t count = 1 + random() % 12; count > 0; --count) {
      Instance instance;
      for (uint64_t ranks = 1 + random() % 4; ranks > 0; --ranks) {
        instance.insert(NodeId(1 + random() % daemons));
      }
      instances.insert(instance);
    }
    Plane plane(instances, broken);
    const std::set<NodeId> served = plane.Served();
    if (served.empty()) continue;
    int lost = 0;
    for (int i = 0; i < 200 && (i == 0 || plane.search.active()); ++i) {
      lost += plane.Update().empty() ? 1 : 0;
    }
    CHECK_FALSE(plane.search.active());
    CHECK(lost <= static_cast<int>(instances.size()));
    CHECK(plane.Update() == served);
  }
}

TEST_CASE("If the update's own daemon is at fault, no other daemon is called broken") {
  CommunicatorSearch search;
  for (int i = 0; i < 50; ++i) {
    std::set<NodeId> in = {NodeId(1), NodeId(2), NodeId(3)};
    search.Restrict(Alone(in));
    for (const NodeId node : search.LeftOut()) in.erase(node);
    while (!in.empty()) {
      for (const NodeId node : search.Failed(Alone(in))) in.erase(node);
    }
    CHECK(search.active());
    CHECK(search.LeftOut().size() < 3);  // the next update tries some of them again
  }
}

}  // namespace
}  // namespace refitd
