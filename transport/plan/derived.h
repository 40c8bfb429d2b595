// Derived tensors: tensors of engines that are computed, on the way, from tensors that trainers
// hold or push: casts, and the values and scales of quantised weights.
//
// An engine's layout declares such a tensor by TensorSpec::derived. A push computes it on the
// engine's node, of the blocks that it brings. For a refit the planner gives each
// trainer's layout the boxes of it that the trainer can compute (derived_layouts.h), and plans
// routes for these boxes as for any others, in elements and bytes of the derived tensor; transports
// compute a box where they would copy it (transport/derive/derive.h). An engine that holds derived
// tensors gives them as they are (catch-ups).
//
// Pure; thread-safe because nothing is shared.
#ifndef REFITD_TRANSPORT_PLAN_DERIVED_H_
#define REFITD_TRANSPORT_PLAN_DERIVED_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
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
// Returns "float8_e4m3fn [256, 256] (values of ...)"; "bfloat16 [256, 256]" if it is not derived.
std::string Describe(const TensorSpec& tensor);

// The error for a block without a result. `where` names elements of derivation.from: "element [3,
// 4]". FAILED_PRECONDITION, with the tensor.
absl::Status NoResult(const Derivation& derivation, std::string_view where);

// The extents, in elements of `from`, of the blocks that are computed together: each value depends
// on its block alone, and each block has one scale. Blocks begin at multiples of these extents;
// those at the end of a dimension are cut short.
Dims BlockOf(const Derivation& derivation);

// Whether a block may be computed of several shards.
bool MayBeCut(DerivedKind kind);

// Checks a tensor that is derived: kind and role are known and fit `from`, its dtype and shape are
// those that they give. The values have `from`'s shape; scales have a number for each block, in as
// many dimensions. INVALID_ARGUMENT, naming the tensor.
absl::Status ValidateDerived(const TensorSpec& tensor);

// The most tensors of a layout that are derived from one tensor (P10): each push of that tensor
// looks at all of them.
inline constexpr int64_t kMaxDerivedFrom = 16;

// Checks that a layout with the values of a quantised tensor has its scales, and the reverse.
// INVALID_ARGUMENT, naming the tensor; RESOURCE_EXHAUSTED: more than kMaxDerivedFrom tensors are
// derived from one.
absl::Status CheckDerivedTogether(const std::vector<TensorSpec>& tensors);

// The largest box of the derived tensor, in its elements, that can be computed from the box `held`
// of `from`. nullopt: `held` contains no whole block.
std::optional<Box> ComputableBox(const Derivation& derivation, const Box& held);
// The whole blocks, as a box of `from`, that a box of `from` meets.
Box BlocksAround(const Derivation& derivation, const Box& box);
// The whole blocks, as a box of `from`, from which `box` of the derived tensor is computed.
Box ComputedFrom(const Derivation& derivation, const Box& box);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_DERIVED_H_
