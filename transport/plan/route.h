// The first level of the planner of a compiled refit over several daemons: which rank supplies
// which box to which node. node_program.h has the second level: one node's part, as moves and
// streams. Pure: no I/O, no gRPC, no CUDA. Deterministic: every process computes the same plan,
// whatever the order of tensors and pieces in the layouts.
//
// Invariants of a plan
//  - Every element that some engine rank of a node wants is supplied to that node exactly once: by
//    a rank on that node if one holds it (*local*: copied directly into the engines' memory), else
//    over the wire, after which the node copies it to all its ranks that want it (P1).
//  - Only holders supply an element. Elements that several ranks hold are divided among nodes, and
//    within nodes among ranks, so that loads are even: elements with one possible supplier are
//    placed first, then the rest by water level.
//  - Boxes wanted by ranks of one node are joined if they form one box. They are then cut where
//    holders change, and a box that is large compared with what a source supplies is cut to divide
//    it among several holders.
//  - With chains (RouteOptions::relay_lag), a source sends a box over the wire once, to the first
//    of the nodes that want it; each node forwards it to the next, and the last node sends nothing.
//    The orders of chains are chosen so that nodes send equally much and every node sends to every
//    other. A plan without chains is the same whether chains are allowed or not.
//
// Values; thread-safe as such.
#ifndef REFITD_TRANSPORT_PLAN_ROUTE_H_
#define REFITD_TRANSPORT_PLAN_ROUTE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/plan/chains.h"
#include "transport/plan/layout.h"
#include "transport/plan/plan.h"

namespace refitd {

// The most nodes of a plan; statistics hold a matrix over nodes.
inline constexpr uint32_t kMaxRouteNodes = 1024;
// The most routes of a plan: about 0.3 GiB. DeepSeek-V3 over 512 ranks has 0.2 million.
inline constexpr int64_t kMaxRoutes = int64_t{1} << 22;
// A box with fewer bytes is read from one holder as a whole, because cutting costs a move.
inline constexpr int64_t kSplitBytes = int64_t{1} << 20;

// One rank. Ranks with equal layouts should share one Layout object, because work and memory grow
// with the number of distinct objects.
struct RouteMember {
  std::shared_ptr<const Layout> layout;  // null: holds, or wants, nothing
  uint32_t node = 0;
  uint32_t instance = 0;   // of an engine rank
  std::string label = {};  // for messages
};

struct RouteOptions {
  // Tensors that the trainers push; the plan leaves them out.
  std::vector<std::string> skip_tensors;
  // Tensors that no refit writes, though engines may declare them; the plan leaves them out.
  std::vector<std::string> engine_only;
  // Tensors of trainers that an instance may lack: patterns of names (name_patterns.h), sorted.
  std::vector<std::string> unwanted_allowed;
  // Instances to leave out (evicted), by index; empty: none.
  std::vector<bool> skip_instance;
  int64_t max_routes = kMaxRoutes;
  // A box of fewer bytes than split_bytes (at least 1) goes from one holder to a node as a whole.
  // So does a box of less than a `split_share`th of what a source supplies on average (0: no such
  // limit): loads are even without cutting it, and the program has fewer and longer pieces.
  int64_t split_bytes = kSplitBytes;
  int64_t split_share = 32;
  // 0: each node that wants a box is sent it by a source. 1 to kMaxRelayLag: boxes that several
  // nodes want may go along chains, and a node forwards what it received that number of rounds
  // before.
  uint32_t relay_lag = 0;
  // The slots in which nodes send and receive rounds: chains whose streams do not fit are not used.
  int64_t relay_slot_bytes = int64_t{64} << 20;
  // Chains are used if some node would otherwise send more than this many times the bytes that its
  // sources hold. 0: chains are used wherever several nodes want the same.
  double relay_excess = 1.05;
  // A caller that no longer wants the plan sets this to true, on any thread: planning then ends
  // within milliseconds with CANCELLED. Null: planning can't be cancelled.
  std::shared_ptr<const std::atomic<bool>> cancelled = nullptr;
};

// A box of one tensor that goes from one rank to a set of nodes.
struct Route {
  uint32_t tensor = 0;    // index into RoutePlan::tensors
  uint32_t source = 0;    // index into the sources
  uint32_t node_set = 0;  // index into RoutePlan::node_sets
  uint32_t box = 0;       // index of its first number in RoutePlan::box_numbers (RoutePlan::BoxOf)
};

// Bytes on each link of a plan. `node * nodes + node` indexes the matrices.
struct RouteBytes {
  // Per source: bytes that it sends over the wire, plus bytes for its own node, counted once.
  std::vector<int64_t> rank_supplies;
  std::vector<int64_t> node_sends;     // over the wire to any node, forwarded bytes too
  std::vector<int64_t> node_forwards;  // of node_sends: bytes that the node had received
  std::vector<int64_t> node_receives;  // over the wire
  std::vector<int64_t> node_stores;    // into the memory of the node's engines
  std::vector<int64_t> matrix;  // from node to node; on the diagonal local bytes, counted once
  std::vector<int64_t> stream;  // the same with sections aligned; 0 on the diagonal
};

// Lower bounds, in bytes, that hold for every plan without chains, or for every plan with chains.
// In the latter, "for each destination node" means once for all other nodes.
struct RouteBound {
  // The most bytes that one rank alone holds, counted once for each destination node.
  int64_t rank_alone = 0;
  // The same for all ranks of a node together, without bytes for the node itself.
  int64_t node_alone = 0;
  int64_t node_receives = 0;  // the most bytes that a node wants and does not hold
  int64_t bytes() const;      // the largest of these bounds
};

class RoutePlan {
 public:
  // Sorted by name, so that the order does not depend on layouts.
  std::vector<TensorSpec> tensors;
  std::vector<std::string> source_labels;
  std::vector<std::string> destination_labels;
  std::vector<uint32_t> source_nodes;       // per source
  std::vector<uint32_t> destination_nodes;  // per destination
  // Per destination: its instance is left out, or its layout is null.
  std::vector<bool> destination_skipped;
  std::vector<uint64_t> source_digests;       // per source, of its layout; 0: null
  std::vector<uint64_t> destination_digests;  // the same
  uint32_t nodes = 0;                         // one more than the highest node index
  std::vector<Route> routes;                  // by tensor, box, source
  std::vector<int64_t> box_numbers;           // offsets, then extents, of each box
  // The sets of nodes that routes go to; none is empty, and no two are equal. In a plan without
  // chains each set is ascending. In a plan with chains each set is in the order of its chain; the
  // source's own node is no part of the chain, wherever it stands in the set.
  std::vector<std::vector<uint32_t>> node_sets;
  int64_t bytes = 0;       // bytes of all routes, counted once for each destination node
  int64_t wire_bytes = 0;  // those of `bytes` that leave their node
  RouteBytes links;
  int64_t longest_stream = 0;  // the largest of links.stream
  RelayShape relay;
  RouteBound bound;

  Box BoxOf(const Route& route) const;
  absl::Span<const uint32_t> NodesOf(const Route& route) const { return node_sets[route.node_set]; }
  // The nodes that the route reaches over the wire, in order.
  std::vector<uint32_t> RemoteNodesOf(const Route& route) const;
  // Whether these remote nodes form a chain.
  bool IsChain(absl::Span<const uint32_t> remote) const {
    return relay.lag > 0 && remote.size() > 1;
  }
};

// Checks a plan that came from another process (P10): every index is inside its list, boxes are
// inside their tensors and not empty, node sets are not empty and have no node twice (without
// chains they are ascending), lists have equal lengths, sums can't overflow. Labels may be left
// out. Layouts are not looked at. INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for more routes or bytes
// than a plan may have, naming the field.
absl::Status ValidatePlan(const RoutePlan& plan);

// Computes the plan. Layouts must be valid (ValidateLayout; those of destinations with
// `destination`). Errors, each naming the tensor: FAILED_PRECONDITION: dtype or shape disagree
// (with both labels); an element that an engine wants and no trainer holds (the first such
// element); a tensor that a trainer has and an instance does not, or the other way round, unless
// allowed; boxes of one destination that overlap. INVALID_ARGUMENT: a node number of kMaxRouteNodes
// or more. RESOURCE_EXHAUSTED: more than max_routes routes, or boxes so irregular that planning
// would take minutes. CANCELLED: options.cancelled.
absl::StatusOr<RoutePlan> CompileRoutes(const std::vector<RouteMember>& sources,
                                        const std::vector<RouteMember>& destinations,
                                        const RouteOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_ROUTE_H_
