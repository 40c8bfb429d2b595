// The planner of pushes: a bucket and layouts in, plan of moves out. Pure: no I/O, no gRPC, no
// CUDA. Deterministic: every process computes the same plan. route.h has the planner of compiled
// refits.
//
// A plan says, for every destination element, which source element it comes from, exactly once
// (P1). Executors turn a move into addresses with the pieces' regions, byte offsets and strides.
#ifndef REFITD_TRANSPORT_PLAN_PLAN_H_
#define REFITD_TRANSPORT_PLAN_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "transport/plan/layout.h"

namespace refitd {

// A move of one box of a tensor from one piece to another.
struct CopyMove {
  uint32_t source = 0;             // index into the sources given to the planner; of a push 0
  uint32_t source_piece = 0;       // index into that source's pieces
  uint32_t destination = 0;        // index into the destinations given to the planner
  uint32_t destination_piece = 0;  // index into that destination's pieces
  Box box;                         // global coordinates, not empty
  int64_t source_byte_offset =
      0;  // of the box's first element, from the start of the source piece's region
  int64_t destination_byte_offset = 0;
  bool operator==(const CopyMove&) const = default;
};

struct MovePlan {
  // Ordered by (source, source_piece, box offset, destination), so that a source chunk is read once
  // for all its destinations.
  std::vector<CopyMove> moves;
  int64_t bytes = 0;  // sum over moves
};

// An index of destinations by tensor name, made once and used for every bucket of an update.
// Immutable, so thread-safe. It keeps the layouts alive by shared_ptr.
class DestinationIndex {
 public:
  struct Entry {
    uint32_t destination = 0;
    uint32_t piece = 0;
  };
  struct Tensor {
    const TensorSpec* spec = nullptr;  // of a layout
    // The destination that declared the tensor first, for error messages.
    uint32_t first_destination = 0;
    absl::InlinedVector<Entry, 8> entries;  // ascending
  };

  // A null layout is allowed (for a destination that takes loader delivery) and has no entries.
  // FAILED_PRECONDITION if two layouts disagree about a tensor's dtype, shape or derivation; the
  // message has both, and the destination's label for each.
  static absl::StatusOr<std::shared_ptr<const DestinationIndex>> Make(
      std::vector<std::shared_ptr<const Layout>> destinations, std::vector<std::string> labels);

  const Tensor* Find(std::string_view name) const;
  // Indices into tensors() of those that are derived from `source`; ascending.
  absl::Span<const uint32_t> DerivedFrom(std::string_view source) const;
  const std::vector<std::shared_ptr<const Layout>>& destinations() const { return destinations_; }
  const std::vector<std::string>& labels() const { return labels_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<std::shared_ptr<const Layout>> destinations_;
  std::vector<std::string> labels_;
  std::vector<Tensor> tensors_;
  // Places in `tensors_`. The keys are names in the layouts, so that an entry copies nothing.
  absl::flat_hash_map<absl::string_view, uint32_t> places_;
  absl::flat_hash_map<absl::string_view, std::vector<uint32_t>> derived_;  // by source
};

// The most moves of a plan, about 0.5 GiB.
inline constexpr int64_t kMaxMoves = int64_t{1} << 22;

struct PlanOptions {
  // Destinations to leave out (evicted instances), by index; empty: none.
  std::vector<bool> skip_destination;
  int64_t max_moves = kMaxMoves;
};

// What a trainer pushes at once: tensors, and pieces whose `tensor` is an index into them. Both
// must outlive the call.
struct PlanSource {
  absl::Span<const TensorSpec> tensors;
  absl::Span<const Piece> pieces;
};

// Computes the plan of a push: all elements of the source that destinations want; derived tensors
// come with pieces of their own. No two pieces may
// share an element (UpdateCoverage takes each element once), and layouts must be valid
// (ValidateLayout, with `destination`). Errors, naming the tensor: FAILED_PRECONDITION: the source
// and a destination disagree about dtype or shape. RESOURCE_EXHAUSTED: more than max_moves moves,
// or boxes so irregular that planning would take minutes. A tensor that no destination has is not
// an error here.
absl::StatusOr<MovePlan> Compile(const PlanSource& source, const DestinationIndex& destinations,
                                 const PlanOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_PLAN_H_
