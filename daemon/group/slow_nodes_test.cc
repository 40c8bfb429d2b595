#include "daemon/group/slow_nodes.h"

#include <catch2/catch.hpp>
#include <chrono>

namespace refitd {
namespace {

using std::chrono::milliseconds;
using Nodes = std::set<NodeId>;

constexpr int64_t kMiB = int64_t{1} << 20;

// Every node of `engines` (from 1) receives `mib` MiB from node 0 and from each other node, over
// links that carry 100 MiB/s. Links into, or out of, `slow` carry `part` of that.
struct Run {
  int engines = 4;
  int64_t mib = 50;
  uint64_t slow = 2;
  double part = 0.25;
  bool out = false;  // what it sends is slow, too
  bool in = true;

  std::vector<SlowNodes::Use> Uses() const {
    std::vector<SlowNodes::Use> uses;
    for (uint64_t from = 0; from <= static_cast<uint64_t>(engines); ++from) {
      for (uint64_t to = 1; to <= static_cast<uint64_t>(engines); ++to) {
        if (from == to) continue;
        const bool slowed = (in && to == slow) || (out && from == slow);
        const double seconds = static_cast<double>(mib) / 100 / (slowed ? part : 1);
        uses.push_back({NodeId(from), NodeId(to), mib * kMiB,
                        milliseconds(static_cast<int64_t>(1000 * seconds))});
      }
    }
    return uses;
  }
};

Nodes Judge(SlowNodes* nodes, const Run& run,
            const Nodes& candidates = {NodeId(1), NodeId(2), NodeId(3), NodeId(4)}) {
  return nodes->Judge(run.Uses(), candidates);
}

TEST_CASE("a node is slow if all that it receives comes slowly, and for longer than the limit") {
  for (const int engines : {2, 3, 4}) {
    for (const bool out : {false, true}) {
      CAPTURE(engines, out);
      SlowNodes nodes(milliseconds(1000));
      CHECK(Judge(&nodes, {.engines = engines, .out = out}) == Nodes{NodeId(2)});
      REQUIRE(nodes.slow().contains(NodeId(2)));
      // 2 s at 25 MiB/s, and 0.5 s at the others' rate.
      CHECK(nodes.slow().at(NodeId(2)).held == milliseconds(1500));
      CHECK(SlowNodes::Describe(nodes.slow().at(NodeId(2))) ==
            "it received 26.2 MB/s, the others 104.9 MB/s");
      // The node is slow already.
      CHECK(Judge(&nodes, {.engines = engines, .out = out}).empty());
    }
  }
}

TEST_CASE("a node is not slow below the limit, near the usual rate, or where it is needed") {
  SlowNodes nodes(milliseconds(1500));
  CHECK(Judge(&nodes, {}).empty());
  CHECK(Judge(&nodes, {.mib = 51}) == Nodes{NodeId(2)});
  SlowNodes strict(milliseconds(1));
  CHECK(Judge(&strict, {.part = 0.52}).empty());
  CHECK(Judge(&strict, {}, {NodeId(1), NodeId(3)}).empty());
  CHECK(strict.slow().empty());
  SlowNodes off(milliseconds(0));
  CHECK(Judge(&off, {.mib = 5000}).empty());
}

TEST_CASE("a node that only sends slowly is not slow, nor are those that it sends to") {
  SlowNodes nodes(milliseconds(1));
  for (const int engines : {2, 3, 4}) {
    CHECK(Judge(&nodes, {.engines = engines, .out = true, .in = false}).empty());
  }
  // All links are slow alike, or nothing is known of the others.
  CHECK(nodes.Judge({{NodeId(0), NodeId(1), kMiB, milliseconds(9000)}}, {NodeId(1)}).empty());
  CHECK(nodes.Judge({}, {NodeId(1)}).empty());
}

TEST_CASE("a node is not slow because a slow node is all that sends to it") {
  const auto link = [](uint64_t from, uint64_t to, int64_t ms) {
    return SlowNodes::Use{NodeId(from), NodeId(to), 50 * kMiB, milliseconds(ms)};
  };
  const Nodes all = {NodeId(1), NodeId(2), NodeId(3), NodeId(4)};
  // The chain 0, 1, 3, 4, 2, in which node 4 is slow both ways.
  std::vector<SlowNodes::Use> chain = {link(0, 1, 500), link(1, 3, 500), link(3, 4, 2000),
                                       link(4, 2, 2000)};
  SlowNodes nodes(milliseconds(1000));
  CHECK(nodes.Judge(chain, all) == Nodes{NodeId(4)});
  // A slow node that may not be left out is to blame all the same.
  SlowNodes needed(milliseconds(1000));
  CHECK(needed.Judge(chain, {NodeId(1), NodeId(2), NodeId(3)}).empty());
  // Node 2 receives slowly from another node as well.
  chain.push_back(link(1, 2, 2000));
  SlowNodes both(milliseconds(1000));
  CHECK(both.Judge(chain, all) == Nodes{NodeId(2), NodeId(4)});
}

TEST_CASE("links that carried little, or were not measured, tell nothing") {
  SlowNodes nodes(milliseconds(1));
  std::vector<SlowNodes::Use> uses = Run{.slow = 9}.Uses();
  // The slow link to node 2 carried little; its other link was not measured.
  std::erase_if(uses, [](const SlowNodes::Use& use) { return use.to == NodeId(2); });
  uses.push_back({NodeId(0), NodeId(2), kMiB - 1, milliseconds(9000)});
  uses.push_back({NodeId(1), NodeId(2), 50 * kMiB, Duration(0)});
  CHECK(nodes.Judge(uses, {NodeId(2)}).empty());
}

TEST_CASE(
    "a slow node stays slow until a run, if only a catch-up, shows more than half of the rate") {
  SlowNodes nodes(milliseconds(1000));
  REQUIRE(Judge(&nodes, {}) == Nodes{NodeId(2)});
  const auto catch_up = [](int64_t ms) {
    return std::vector<SlowNodes::Use>{
        {NodeId(1), NodeId(2), 50 * kMiB, milliseconds(ms)},
        {NodeId(3), NodeId(2), 50 * kMiB, milliseconds(ms)},
    };
  };
  CHECK(nodes.Review(catch_up(2000)).empty());
  CHECK(nodes.Review(catch_up(1000)).empty());
  CHECK(nodes.Review({}).empty());
  CHECK(nodes.slow().size() == 1);
  CHECK(nodes.Review(catch_up(990)) == Nodes{NodeId(2)});
  CHECK(nodes.slow().empty());
  REQUIRE(Judge(&nodes, {}) == Nodes{NodeId(2)});
  nodes.Forget(NodeId(2));
  CHECK(nodes.slow().empty());
}

}  // namespace
}  // namespace refitd
