// The plan of a refit, which the coordinator compiles from the layouts of all ranks: the routes
// (route.h), and the elements that several source ranks hold, on whose bytes these ranks must
// agree.
//
// Pure; values, thread-safe as such.
#ifndef REFITD_TRANSPORT_PLAN_REFIT_PLAN_H_
#define REFITD_TRANSPORT_PLAN_REFIT_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/plan/layout.h"
#include "transport/plan/route.h"

namespace refitd {

// A part of the replicas, so that one refit need not compare all: the boxes whose hash
// (ReplicaHash) is from `first` to `last`.
struct ReplicaFraction {
  uint64_t first = 0;
  uint64_t last = UINT64_MAX;
  bool Has(uint64_t hash) const { return first <= hash && hash <= last; }
  bool Overlaps(const ReplicaFraction& other) const {
    return first <= other.last && other.first <= last;
  }
  bool operator==(const ReplicaFraction&) const = default;
};

// HashChain from the tensor's hash over the box's offsets and extents. It is equal on every node,
// since it needs no other part of the plan.
uint64_t ReplicaHash(uint64_t tensor_hash, const Box& box);

// A box that several source ranks hold completely.
struct Replica {
  uint32_t tensor = 0;      // index into RoutePlan::tensors
  uint32_t holder_set = 0;  // index into Replicas::holder_sets
  Box box;                  // global coordinates, not empty
  uint64_t hash = 0;        // ReplicaHash
};

// Two names of one memory of a destination, both of which the sources hold: the refit writes the
// values of `same_as`, and those of `tensor` must be equal (P11).
struct TiedTensors {
  uint32_t tensor = 0;  // index into RoutePlan::tensors
  uint32_t same_as = 0;
  std::string destination;  // the label of a destination that ties them
  // Boxes of Replicas that cover `tensor` once, from `begin` to before `middle`, and those that
  // cover `same_as`, from `middle` to before `end`.
  uint32_t begin = 0;
  uint32_t middle = 0;
  uint32_t end = 0;
};

// The boxes that are compared before anything is written. Every element that more than one source
// rank holds is in exactly one of the first `replicated` boxes, which are sorted by tensor, then by
// BoxLess. The other boxes are those of ties; each has one holder.
struct Replicas {
  std::vector<Replica> boxes;
  uint32_t replicated = 0;
  std::vector<TiedTensors> ties;
  // The hash of each box, ascending, with the bytes of the boxes up to this one.
  std::vector<std::pair<uint64_t, int64_t>> by_hash;
  int64_t tensors = 0;  // the number of tensors with a box
  // Sources of each set ascend; no two sets are equal.
  std::vector<std::vector<uint32_t>> holder_sets;
  absl::Span<const uint32_t> HoldersOf(const Replica& replica) const {
    return holder_sets[replica.holder_set];
  }
};

// Up to this many replicated tensors, every version compares all of them.
inline constexpr int64_t kTensorsComparedAlways = 256;

// Chooses the replicas that a version compares: all of them if there are ties, or at most
// kTensorsComparedAlways tensors. Otherwise those from `cursor` on, in the order of their hashes,
// that together have at least 1/`every` of the replicas' bytes. If each version begins after the
// `last` of the one before (and at 0 after UINT64_MAX), `every` versions compare every box.
ReplicaFraction NextFraction(const Replicas& replicas, uint64_t cursor, int64_t every);

// The most replicas of one node; the limit exists because their digests travel in one message.
inline constexpr int64_t kMaxNodeShares = 900'000;

// The bytes and tensors that a plan moves, and those that it leaves out.
struct RefitContent {
  // The number of the sources' tensors of which a destination stores an element, or an element of a
  // tensor that is derived from them, without those that the options leave out; and the bytes of
  // these tensors.
  int64_t tensors = 0;
  int64_t bytes = 0;
  // The number of the destinations' tensors, by name, that these tensors fill.
  int64_t stored = 0;
  // Tensors that a source has, that are not pushed, and that the refit writes nowhere: no
  // destination stores an element of them, or the options leave them out. Sorted.
  std::vector<std::string> unwanted;
  int64_t unwanted_bytes = 0;
};
// Looks up every tensor of every distinct layout object.
RefitContent ContentOf(const std::vector<RouteMember>& sources,
                       const std::vector<RouteMember>& destinations, const RouteOptions& options);

struct RefitPlan {
  RoutePlan routes;
  Replicas replicas;
  RefitContent content;
};

// Compiles the plan, with the errors of CompileRoutes. It also returns FAILED_PRECONDITION, naming
// the rank and the tensor, where a destination can't apply its block scales (CheckFloat8Scales),
// and RESOURCE_EXHAUSTED if a node has more than kMaxNodeShares replicas.
absl::StatusOr<std::shared_ptr<const RefitPlan>> CompileRefit(
    const std::vector<RouteMember>& sources, const std::vector<RouteMember>& destinations,
    const RouteOptions& options);

// The part of a plan that one node needs: the routes that begin or end there, and the tensors that
// `local` (the layouts of its members) name. Sources, destinations and nodes keep their numbers;
// labels and statistics are left out, except `longest_stream` and `relay`. CompileNode gives the
// same node program for this part as for the whole plan.
RoutePlan ShareOfNode(const RoutePlan& plan, uint32_t node,
                      absl::Span<const std::shared_ptr<const Layout>> local);

// A box that a rank of one node holds and other ranks hold too; its digest is compared with theirs.
struct ReplicaShare {
  uint32_t source = 0;  // index into the plan's sources
  uint32_t tensor = 0;  // index into RoutePlan::tensors
  Box box;
};
// Returns the shares of the sources for which `on_node` is true, in the order of Replicas::boxes,
// and for one box by holder.
std::vector<ReplicaShare> SharesOf(const Replicas& replicas, const std::vector<bool>& on_node);

// Compares the replicas in `part`, and all ties if that is all. `digests[node]` has the digests of
// the shares of that node's sources that are in `part`, in the order of SharesOf. DATA_LOSS names
// the tensor and the ranks (RoutePlan::source_labels) of the first box whose holders differ, and
// the likely cause; FAILED_PRECONDITION names two tied tensors that differ; INTERNAL if a node's
// list has another length.
absl::Status CompareReplicas(const RefitPlan& plan,
                             const std::vector<std::vector<uint64_t>>& digests,
                             ReplicaFraction part = {});

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_REFIT_PLAN_H_
