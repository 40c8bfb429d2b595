// The planner of a compiled refit over several daemons, first level: which rank supplies which box
// to which node. node_program.h has the second: one node's part, as moves and streams. Pure: no
// I/O, no gRPC, no CUDA. The same plan whoever computes it, whatever the order of tensors and
// pieces in the layouts.
//
// Invariants of a plan
//  - To every destination node, every element that some engine rank there wants is supplied exactly
//    once: by a rank on that node where one holds it (*local*: straight into the engines' memory),
//    else over the wire, to be fanned out on the node (P1).
//  - Only holders supply an element; what several hold is shared out over nodes, and within them
//    over ranks, so that loads come out even: first what has no choice, then the rest by water
//    level.
//  - Boxes wanted by ranks of one node are joined where they form one box, then cut where holders
//    change, or where a box that is large beside what a source supplies is shared by several.
//
// Values; thread-safe as such.
#ifndef REFITD_TRANSPORT_PLAN_ROUTE_H_
#define REFITD_TRANSPORT_PLAN_ROUTE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/plan/layout.h"
#include "transport/plan/plan.h"

namespace refitd {

// Of a plan; statistics hold a matrix over them.
inline constexpr uint32_t kMaxRouteNodes = 1024;
// Of a plan: about 0.3 GiB. DeepSeek-V3 over 512 ranks has 0.2 million.
inline constexpr int64_t kMaxRoutes = int64_t{1} << 22;
// Listed in full in RoutePlan::unplaced.
inline constexpr size_t kMaxUnplacedListed = 1000;

// Where a section starts in a stream between nodes: a multiple of this many bytes, which every
// element size divides.
inline constexpr int64_t kSectionAlignment = 64;
constexpr int64_t AlignSection(int64_t bytes) {
  return (bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
}

// One rank. Ranks with equal layouts should share one object: work and memory go by distinct
// objects.
struct RouteMember {
  std::shared_ptr<const Layout> layout;  // null: holds, or wants, nothing
  uint32_t node = 0;
  uint32_t instance = 0;   // of an engine rank
  std::string label = {};  // for messages
};

struct RouteOptions {
  // Tensors that the trainers push: no part of the plan.
  std::vector<std::string> skip_tensors;
  // Tensors of engines that need no source.
  std::vector<std::string> uncovered_allowed;
  // Tensors of trainers that an instance may lack.
  std::vector<std::string> unwanted_allowed;
  // Instances to leave out (evicted), by index; empty: none.
  std::vector<bool> skip_instance;
  // What can't be placed is listed in RoutePlan::unplaced and is no error.
  bool list_unplaced = false;
  int64_t max_routes = kMaxRoutes;
  // A box of fewer bytes goes from one holder to a node as a whole; at least 1. So does one that is
  // less than a `split_share`th of what a source supplies on average (0: cut all the same): loads
  // come out even without cutting it, and the program is shorter and its pieces longer.
  int64_t split_bytes = kSplitBytes;
  int64_t split_share = 32;
  // Set to true by whoever does not want the plan any more, on any thread: planning then ends
  // within milliseconds with CANCELLED. Null: never.
  std::shared_ptr<const std::atomic<bool>> cancelled = nullptr;
};

// A box of one tensor, from one rank to some nodes.
struct Route {
  uint32_t tensor = 0;    // index into RoutePlan::tensors
  uint32_t source = 0;    // index into the sources
  uint32_t node_set = 0;  // index into RoutePlan::node_sets
  uint32_t box = 0;       // where its numbers start: RoutePlan::BoxOf
};

// Bytes on each link of a plan. `node * nodes + node` indexes the matrices.
struct LinkBytes {
  std::vector<int64_t> rank_supplies;  // per source: over the wire, and once for its own node
  std::vector<int64_t> node_sends;     // over the wire, once a destination node
  std::vector<int64_t> node_receives;  // over the wire
  std::vector<int64_t> node_stores;    // into the engines' memory there
  std::vector<int64_t> matrix;         // from node, to node; on the diagonal: local, once
  std::vector<int64_t> stream;         // as matrix, sections aligned; 0 on the diagonal
};

// What no plan can be below, in bytes.
struct RouteBound {
  int64_t rank_alone = 0;     // the most that a rank is the only holder of, once a destination node
  int64_t node_alone = 0;     // the same of a node's ranks together, its own node left out
  int64_t node_receives = 0;  // the most that a node wants and does not hold
  int64_t bytes() const;      // the largest of them
};

struct Unplaced {
  std::string tensor;
  std::string reason;
  bool operator==(const Unplaced&) const = default;
};

// Bytes a second of each kind of link; 0: never the limit.
struct LinkRates {
  double rank_out = 0;    // what one rank's memory gives
  double node_out = 0;    // what a node sends
  double node_in = 0;     // what a node receives
  double local_copy = 0;  // what a node stores into its engines
};

struct RouteEstimate {
  double seconds = 0;
  std::string limit;  // the slowest link: "node 3 sends"
};

class RoutePlan {
 public:
  // Canonical: by name.
  std::vector<TensorSpec> tensors;
  std::vector<std::string> source_labels;
  std::vector<std::string> destination_labels;
  std::vector<uint32_t> source_nodes;            // per source
  std::vector<uint32_t> destination_nodes;       // per destination
  std::vector<bool> destination_skipped;         // of an instance left out, or null
  std::vector<uint64_t> source_digests;          // of their layouts; 0: null
  std::vector<uint64_t> destination_digests;     // the same
  uint32_t nodes = 0;                            // one more than the highest node index
  std::vector<Route> routes;                     // by tensor, box, source
  std::vector<int64_t> box_numbers;              // offsets, then extents, of each box
  std::vector<std::vector<uint32_t>> node_sets;  // each ascending, none empty, no two equal
  int64_t bytes = 0;       // supplied: of every route, once a destination node
  int64_t wire_bytes = 0;  // those of them that leave their node
  LinkBytes links;
  int64_t longest_stream = 0;  // the largest of links.stream
  RouteBound bound;
  std::vector<Unplaced> unplaced;  // by name, at most kMaxUnplacedListed
  int64_t unplaced_tensors = 0;    // all of them, with those that options leave out

  Box BoxOf(const Route& route) const;
  absl::Span<const uint32_t> NodesOf(const Route& route) const { return node_sets[route.node_set]; }

  // HashChain from 0 over: number of nodes; then nodes and layout digests of sources, then of
  // destinations (and whether each is left out); then per route: tensor hash, source, offsets,
  // extents, number of nodes, nodes. Two daemons with equal digests derive equal streams.
  uint64_t Digest() const;

  const RouteBound& LowerBound() const { return bound; }

  // The link with the most bytes: "node 3 sends".
  struct Worst {
    int64_t bytes = 0;
    std::string link;
  };
  Worst WorstLink() const;

  // The largest of bytes over rate.
  RouteEstimate Estimate(const LinkRates& rates) const;
};

// For people: what each link carries, the bound, the worst link against it, and what has no place.
struct RouteExplanation {
  int64_t tensors = 0;
  int64_t routes = 0;
  int64_t bytes = 0;
  int64_t wire_bytes = 0;
  RouteBound bound;
  RoutePlan::Worst worst;
  double ratio =
      0;  // of the worst link to the bound; 1 where both are 0, 0 where only the bound is
  LinkBytes links;
  std::vector<std::string> source_labels;
  std::vector<uint32_t> source_nodes;
  std::vector<Unplaced> unplaced;
  int64_t unplaced_tensors = 0;
};
RouteExplanation Explain(const RoutePlan& plan);
// Lines of text; at most `rows` of each kind of link, those with the most bytes first.
std::string ToText(const RouteExplanation& explanation, size_t rows = 32);

// Of a plan that came from elsewhere (P10): every index inside its list, boxes inside their tensors
// and not empty, node sets ascending and not empty, lists of one length, sums that can't overflow.
// Labels may be left out. Nothing about layouts. INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for more
// routes or bytes than a plan may have, naming the field.
absl::Status ValidatePlan(const RoutePlan& plan);

// Layouts must be valid (ValidateLayout; destinations as such). Errors, each naming the tensor:
// FAILED_PRECONDITION: dtype or shape disagree (both labels); an element that an engine wants and
// no trainer holds (the first such); a tensor that a trainer has and an instance does not, or the
// other way round, unless allowed; boxes of one destination that overlap. INVALID_ARGUMENT: a node
// of kMaxRouteNodes and more. RESOURCE_EXHAUSTED: more than max_routes routes, or boxes so
// irregular that planning would take minutes. CANCELLED: options.cancelled.
absl::StatusOr<RoutePlan> CompileRoutes(const std::vector<RouteMember>& sources,
                                        const std::vector<RouteMember>& destinations,
                                        const RouteOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_ROUTE_H_
