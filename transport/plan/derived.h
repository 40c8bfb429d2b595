// Derived tensors: tensors of engines that a refit computes, on the way, from tensors that trainers
// hold: casts, and the values and scales of quantised weights.
//
// An engine's layout declares such a tensor by TensorSpec::derived. The planner then gives each
// trainer's layout the boxes of it that the trainer can compute (DerivedLayouts), and plans routes
// for these boxes as for any others, in elements and bytes of the derived tensor; transports
// compute a box where they would copy it (transport/derive/derive.h). An engine that holds derived
// tensors gives them as they are (catch-ups).
//
// Pure; thread-safe because nothing is shared.
#ifndef REFITD_TRANSPORT_PLAN_DERIVED_H_
#define REFITD_TRANSPORT_PLAN_DERIVED_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/plan/derived_kind.h"
#include "transport/plan/layout.h"

namespace refitd {

struct Derivation {
  TensorSpec from;  // the trainers' tensor; not derived itself
  DerivedKind kind = DerivedKind::kCast;
  DerivedRole role = DerivedRole::kValues;
  bool operator==(const Derivation&) const = default;
};

// The name of the tensor that trainers hold for an engine's tensor.
inline const std::string& NameAtSource(const TensorSpec& tensor) {
  return tensor.derived == nullptr ? tensor.name : tensor.derived->from.name;
}
// Returns "cast", "fp8_block", ..., the names that clients use.
std::string_view NameOf(DerivedKind kind);
// Returns "values of fp8_block of float32 [256, 256] model.w", for messages.
std::string Describe(const Derivation& derivation);

// The error for a block without a result. `where` is the place in derivation.from: "element [3,
// 4]". FAILED_PRECONDITION, with the tensor.
absl::Status NoResult(const Derivation& derivation, std::string_view where);

// The extents, in elements of `from`, of the blocks that are computed together: each value depends
// on its block alone, and each block has one scale. Blocks begin at multiples of these extents;
// those at the end of a dimension are cut short.
Dims BlockOf(const Derivation& derivation);

// Checks a tensor that is derived: kind and role are known and fit `from`, its dtype and shape are
// those that they give. The values have `from`'s shape; scales have a number for each block, in as
// many dimensions. INVALID_ARGUMENT, naming the tensor.
absl::Status ValidateDerived(const TensorSpec& tensor);

// Checks that a layout with the values of a quantised tensor has its scales, and the reverse.
// INVALID_ARGUMENT, naming the tensor.
absl::Status CheckScalesOfDerived(const std::vector<TensorSpec>& tensors);

// The largest box of the derived tensor, in its elements, that can be computed from the box `held`
// of `from`. nullopt: `held` contains no whole block.
std::optional<Box> ComputableBox(const Derivation& derivation, const Box& held);

// Adds derived tensors to trainers' layouts. Not thread-safe.
class DerivedLayouts {
 public:
  // Takes the derived tensors of these layouts, or of this list. Null layouts are passed over. What
  // is given must outlive this object.
  explicit DerivedLayouts(absl::Span<const Layout* const> layouts);
  explicit DerivedLayouts(const std::vector<TensorSpec>& tensors);

  // Returns the layout with the derived tensors appended, and, for each piece that contains a whole
  // block, one computed piece (Piece::computed_from) for each tensor derived from it. Returns
  // `layout` itself if there is nothing to add, which is so of layouts that have the derived
  // tensors themselves. Layouts with one list of tensors have one list afterwards.
  // FAILED_PRECONDITION, naming the tensor: what it is derived from has another dtype or shape in
  // the layout. RESOURCE_EXHAUSTED: more than kMaxPiecesPerLayout pieces would have to be looked
  // at.
  absl::StatusOr<std::shared_ptr<const Layout>> Extend(std::shared_ptr<const Layout> layout);

 private:
  // A list of tensors with those that are derived from them.
  struct Extended {
    std::shared_ptr<const TensorList::List> tensors;  // null: nothing is derived from the list
    absl::flat_hash_map<uint32_t, std::vector<uint32_t>>
        computed;  // by tensor: those derived of it
  };

  void Add(const TensorSpec& tensor);
  absl::StatusOr<Extended> ExtendedOf(const TensorList::List& tensors) const;

  absl::flat_hash_set<std::string_view> names_;
  absl::flat_hash_map<std::string_view, std::vector<const TensorSpec*>> by_source_;
  absl::flat_hash_map<const TensorSpec*, Extended> lists_;  // by a list's first tensor
  absl::flat_hash_map<const Layout*, std::shared_ptr<const Layout>> layouts_;
};

// The piece of a trainers' tensor from which a box of a derived tensor is computed.
struct HeldPiece {
  std::shared_ptr<const Derivation> derivation;  // names the tensor, its dtype and shape
  Box box;
  Dims strides;                // elements
  const char* data = nullptr;  // first element of the box
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_DERIVED_H_
