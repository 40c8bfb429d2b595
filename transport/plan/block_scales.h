// Block scales of FP8 weights: a weight W of a layout and the tensor named W + kScaleSuffix, which
// has one scale for each block of W.
//
// Pure; thread-safe because nothing is shared.
#ifndef REFITD_TRANSPORT_PLAN_BLOCK_SCALES_H_
#define REFITD_TRANSPORT_PLAN_BLOCK_SCALES_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "transport/plan/layout.h"

namespace refitd {

// The end of a scale tensor's name, after the weight's name.
inline constexpr std::string_view kScaleSuffix = "_scale_inv";

// The side of a block in elements, as checkpoints and engines have it.
inline constexpr int64_t kScaleBlock = 128;

// The side of the square blocks for which `scale` has one number each: kScaleBlock if that explains
// every dimension, else the one size that divides every dimension of `weight` into as many blocks
// as `scale` has numbers. nullopt: no size fits, or the numbers of dimensions differ; then `scale`
// does not scale square blocks.
std::optional<int64_t> ScaleBlockOf(const TensorSpec& weight, const TensorSpec& scale);

// FAILED_PRECONDITION if an engine with this layout could not apply the block scales of its FP8
// weights, naming the tensor, the boundary and the block. The exact rule: for every float8 tensor W
// of the layout whose `<W>_scale_inv` S is in the layout too and scales square blocks
// (ScaleBlockOf): in each dimension d, where a piece of W begins at b > 0 or ends at e short of the
// shape, b and e are multiples of the block, unless the pieces of S reach from the first to the
// last block of d (S is then not sharded along d, and has the scale of every block wherever W is
// cut). Sources need no such check: their bytes move element by element.
absl::Status CheckFloat8Scales(const Layout& layout);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_BLOCK_SCALES_H_
