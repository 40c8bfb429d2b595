// Derived tensors: tensors of engines that a refit computes, on the way, from tensors that trainers
// hold: casts, and the values and scales of quantised weights.
//
// An engine's layout declares such a tensor by TensorSpec::derived. The planner then gives each
// trainer's layout the boxes of it that the trainer can compute (WithDerived), and plans routes for
// these boxes as for any others, in elements and bytes of the derived tensor; transports compute a
// box where they would copy it (transport/derive/derive.h). Engines among themselves (catch-ups)
// move derived tensors as they are.
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

// The error of a transfer that met a block without a result. `where` names what is held of
// derivation.from: "element [3, 4]". FAILED_PRECONDITION, with the tensor.
absl::Status NoResult(const Derivation& derivation, std::string_view where);

// The extents, in elements of `from`, of the blocks that are computed together: each value depends
// on its block alone, and each block has one scale. Blocks begin at multiples of these extents;
// those at the end of a dimension are cut short.
Dims BlockOf(const Derivation& derivation);

// Checks a tensor that is derived: kind and role are known and fit `from`, its dtype and shape are
// those that they give. The values have `from`'s shape; scales have a number for each block, in as
// many dimensions. INVALID_ARGUMENT, naming the tensor.
absl::Status ValidateDerived(const TensorSpec& tensor);

// Checks that of each tensor that is quantised in blocks a layout has the values and the scales.
// INVALID_ARGUMENT, naming the tensor.
absl::Status CheckScalesOfDerived(const std::vector<TensorSpec>& tensors);

// The box of the derived tensor that a box of `from` is enough to compute: it has whole blocks
// only. nullopt: none.
std::optional<Box> ComputableBox(const Derivation& derivation, const Box& held);

// The derived tensors of several layouts, by the name of what they are derived from; each tensor is
// there once.
class DerivedTensors {
 public:
  // Null layouts are passed over. The layouts must outlive this object.
  explicit DerivedTensors(absl::Span<const Layout* const> layouts);
  explicit DerivedTensors(const std::vector<TensorSpec>& tensors);
  bool empty() const { return by_source_.empty(); }
  // Null: nothing is derived from that tensor.
  const std::vector<const TensorSpec*>* From(std::string_view tensor) const;

 private:
  void Add(const TensorSpec& tensor);

  absl::flat_hash_map<std::string_view, std::vector<const TensorSpec*>> by_source_;
};

// Returns the layout with what it can compute of `derived`: tensors at the end, and for each piece
// of what they are derived from a piece with Piece::computed_from, if it has a whole block. Returns
// `layout` itself if there is nothing to add, which is so of layouts that have the derived tensors
// themselves. FAILED_PRECONDITION, naming the tensor: what it is derived from has another dtype or
// shape in the layout. RESOURCE_EXHAUSTED: more pieces than a layout may have.
absl::StatusOr<std::shared_ptr<const Layout>> WithDerived(std::shared_ptr<const Layout> layout,
                                                          const DerivedTensors& derived);

// The piece of a trainers' tensor from which a box of a derived tensor is computed.
struct HeldPiece {
  std::shared_ptr<const Derivation> derivation;  // names the tensor, its dtype and shape
  Box box;
  Dims strides;                // elements
  const char* data = nullptr;  // first element of the box
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_DERIVED_H_
