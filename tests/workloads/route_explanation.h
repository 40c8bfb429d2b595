// A plan of routes explained for people, and an estimate of its time.
#ifndef REFITD_TESTS_WORKLOADS_ROUTE_EXPLANATION_H_
#define REFITD_TESTS_WORKLOADS_ROUTE_EXPLANATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "transport/plan/chains.h"
#include "transport/plan/route.h"

namespace refitd {

inline constexpr int64_t kRelaySlotBytes = int64_t{64} << 20;  // a daemon's default

// The link with the most bytes: "node 3 sends".
struct WorstLink {
  int64_t bytes = 0;
  std::string link;
};
WorstLink WorstLinkOf(const RoutePlan& plan);

// Bytes per second of each kind of link; 0: the link is never the limit.
struct RouteRates {
  double rank_out = 0;    // reading one rank's memory
  double node_out = 0;    // sending over the wire from a node
  double node_in = 0;     // receiving over the wire at a node
  double local_copy = 0;  // storing into the memory of a node's engines
};

struct RouteEstimate {
  double seconds = 0;
  std::string limit;  // the slowest link: "node 3 sends"
};
// The time of the link for which bytes divided by rate is largest. With chains, links between nodes
// also wait while chains fill, in rounds of kRelaySlotBytes.
RouteEstimate Estimate(const RoutePlan& plan, const RouteRates& rates);

// All routes of a plan that go from one node along one chain.
struct ChainUse {
  uint32_t source_node = 0;
  std::vector<uint32_t> nodes;  // in order
  int64_t routes = 0;
  int64_t bytes = 0;  // that the source's node sends
};
// Returns the chains of a plan, those with the most bytes first. A plan without chains has none.
std::vector<ChainUse> ChainsOf(const RoutePlan& plan);

// A plan explained for people: the bytes of each link, the lower bound, the worst link compared
// with it and chains.
struct RouteExplanation {
  int64_t tensors = 0;
  int64_t routes = 0;
  int64_t bytes = 0;
  int64_t wire_bytes = 0;
  RouteBound bound;
  WorstLink worst;
  double ratio =
      0;  // bytes of the worst link divided by the bound; 1 if both are 0, 0 if only the bound is 0
  RouteBytes links;
  RelayShape relay;
  RelayRounds rounds;  // in slots of kRelaySlotBytes
  std::vector<ChainUse> chains;
  std::vector<std::string> source_labels;
  std::vector<uint32_t> source_nodes;
};
RouteExplanation Explain(const RoutePlan& plan);
// The explanation as lines of text, with at most `rows` links of each kind, those with the most
// bytes first.
std::string ToText(const RouteExplanation& explanation, size_t rows = 32);

}  // namespace refitd

#endif  // REFITD_TESTS_WORKLOADS_ROUTE_EXPLANATION_H_
