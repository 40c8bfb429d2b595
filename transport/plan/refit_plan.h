// What the coordinator compiles for a refit from the layouts of all ranks: the routes (route.h),
// and which source ranks hold the same elements and so must agree about them.
//
// Pure; values, thread-safe as such.
#ifndef REFITD_TRANSPORT_PLAN_REFIT_PLAN_H_
#define REFITD_TRANSPORT_PLAN_REFIT_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/plan/layout.h"
#include "transport/plan/route.h"

namespace refitd {

inline constexpr uint32_t kMaxReplicaParts = 1'000'000;  // more versions than a run has

// One of `parts` parts of the replicas, or of all that several nodes have of them: the boxes whose
// hash (ReplicaHash) is `part` modulo `parts`.
struct ReplicaPart {
  uint32_t part = 0;   // less than `parts`
  uint32_t parts = 1;  // at least 1; 1: all boxes
  bool Has(uint64_t hash) const { return hash % parts == part; }
};

// The same on every node, whatever it knows of the plan: HashChain from the tensor's hash over the
// box's offsets and extents.
uint64_t ReplicaHash(uint64_t tensor_hash, const Box& box);

// A box that several source ranks hold, each of them all of it.
struct Replica {
  uint32_t tensor = 0;      // index into RoutePlan::tensors
  uint32_t holder_set = 0;  // index into Replicas::holder_sets
  Box box;                  // global coordinates, not empty
  uint64_t hash = 0;        // ReplicaHash
};

// Every element that more than one source rank holds is in exactly one box; boxes are by tensor,
// then BoxLess.
struct Replicas {
  std::vector<Replica> boxes;
  // Sources, ascending, at least two; no two sets equal.
  std::vector<std::vector<uint32_t>> holder_sets;
  absl::Span<const uint32_t> HoldersOf(const Replica& replica) const {
    return holder_sets[replica.holder_set];
  }
};

// Of one node: their digests travel in one message.
inline constexpr int64_t kMaxNodeShares = 900'000;

struct RefitPlan {
  RoutePlan routes;
  Replicas replicas;
};

// Errors as CompileRoutes; FAILED_PRECONDITION naming the rank and the tensor also where a
// destination can't apply its block scales (CheckFloat8Scales); RESOURCE_EXHAUSTED also: a node
// with more than kMaxNodeShares replicas.
absl::StatusOr<std::shared_ptr<const RefitPlan>> CompileRefit(
    const std::vector<RouteMember>& sources, const std::vector<RouteMember>& destinations,
    const RouteOptions& options);

// What one node needs of a plan: the routes that begin or end there, with the tensors that `local`
// (the layouts of its members) name. Numbers of sources, destinations and nodes stay the same;
// labels and statistics are left out, but for `longest_stream`. CompileNode of it gives the same
// node program as of the whole.
RoutePlan PartOf(const RoutePlan& plan, uint32_t node,
                 absl::Span<const std::shared_ptr<const Layout>> local);

// A box that a rank of one node holds and others hold as well: its digest is compared with theirs.
struct ReplicaShare {
  uint32_t source = 0;  // index into the plan's sources
  uint32_t tensor = 0;  // index into RoutePlan::tensors
  Box box;
};
// Of the sources for which `on_node` is true: by box in the order of Replicas::boxes, then by
// holder.
std::vector<ReplicaShare> SharesOf(const Replicas& replicas, const std::vector<bool>& on_node);

// `digests[node]`: of the shares of that node's sources that are in `part`, or of all of them, in
// the order of SharesOf; those outside the part are not looked at. DATA_LOSS naming the tensor and
// the ranks (RoutePlan::source_labels) of the first box whose holders differ; INTERNAL where a
// node's list has another length.
absl::Status CompareReplicas(const RefitPlan& plan,
                             const std::vector<std::vector<uint64_t>>& digests,
                             ReplicaPart part = {});

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_REFIT_PLAN_H_
