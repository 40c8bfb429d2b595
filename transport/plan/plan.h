// The planner: layouts in, plan of moves out. Pure: no I/O, no gRPC, no CUDA. Deterministic:
// every process computes the same plan.
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
  uint32_t source = 0;             // index into the sources given to the planner
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
  // HashChain from 0 over: the number of moves, then all fields of each move, in the order of their
  // declaration (rank before the box's offsets and extents).
  uint64_t Digest() const;
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
    DType dtype = DType::kUint8;
    Dims shape;
    // The destination that declared the tensor first, for error messages.
    uint32_t first_destination = 0;
    absl::InlinedVector<Entry, 8> entries;  // ascending
  };

  // A null layout is allowed (for a destination that takes loader delivery) and has no entries.
  // FAILED_PRECONDITION if two layouts disagree about a tensor's dtype or shape; the message has
  // both, and the destination's label for each.
  static absl::StatusOr<std::shared_ptr<const DestinationIndex>> Make(
      std::vector<std::shared_ptr<const Layout>> destinations, std::vector<std::string> labels);

  const Tensor* Find(std::string_view name) const;
  const std::vector<std::shared_ptr<const Layout>>& destinations() const { return destinations_; }
  const std::vector<std::string>& labels() const { return labels_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<std::shared_ptr<const Layout>> destinations_;
  std::vector<std::string> labels_;
  std::vector<Tensor> tensors_;
  // Places in `tensors_`. The keys are names in the layouts, so that an entry copies nothing.
  absl::flat_hash_map<absl::string_view, uint32_t> places_;
};

// A box with fewer bytes is read from one holder as a whole, because cutting costs a move.
inline constexpr int64_t kSplitBytes = int64_t{1} << 20;

// The most moves of a plan, about 0.5 GiB.
inline constexpr int64_t kMaxMoves = int64_t{1} << 22;

struct PlanOptions {
  // Destinations to leave out (evicted instances), by index; empty: none.
  std::vector<bool> skip_destination;
  // True: every element of every destination must be covered, else FAILED_PRECONDITION names the
  // tensor and the first missing element. False (for one bucket of a push): only elements that the
  // sources hold are moved.
  bool require_cover = true;
  // Names that need no cover (engine-only tensors).
  std::vector<std::string> uncovered_allowed;
  int64_t max_moves = kMaxMoves;
};

// The part of a source that the planner reads: its tensors, and pieces whose `tensor` is an index
// into them. Both must outlive the call.
struct PlanSource {
  absl::Span<const TensorSpec> tensors;
  absl::Span<const Piece> pieces;
};

// Computes the plan. Each element is read from exactly one source, whatever the number of its
// destinations. Boxes that several sources hold (equal or partly overlapping) are divided among
// these sources deterministically, so that the bytes read from each are balanced; boxes of
// kSplitBytes and more are cut for that. Null sources hold nothing. Layouts must be valid
// (ValidateLayout; those of destinations with `destination`). Errors: FAILED_PRECONDITION naming
// the tensor: dtype or shape disagree between sources, or a source and a destination; not covered.
// RESOURCE_EXHAUSTED: more than max_moves moves, or boxes so irregular that planning would take
// minutes. A source's tensor that no destination has is not an error here.
absl::StatusOr<MovePlan> Compile(absl::Span<const PlanSource> sources,
                                 const DestinationIndex& destinations, const PlanOptions& options);
absl::StatusOr<MovePlan> Compile(const std::vector<std::shared_ptr<const Layout>>& sources,
                                 const DestinationIndex& destinations, const PlanOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_PLAN_H_
