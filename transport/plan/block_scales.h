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

// What a scale tensor's name has beyond its weight's.
inline constexpr std::string_view kScaleSuffix = "_scale_inv";

// Elements of a block's side, as checkpoints and engines have it.
inline constexpr int64_t kScaleBlock = 128;

// FAILED_PRECONDITION if an engine with this layout could not apply the block scales of its FP8
// weights, naming the tensor, the boundary and the block. The exact rule: for every tensor W of the
// layout whose `<W>_scale_inv` S is in the layout too,
//  - S has the shape ceil(W's / scale_block);
//  - in each dimension d, where a piece of W begins at b > 0 or ends at e short of the shape, b and
//    e are multiples of scale_block, unless the pieces of S reach from the first to the last block
//    of d (S is then not sharded along d, and every block is there whatever the cut).
// Sources need no such check: their bytes move element by element.
absl::Status CheckBlockScales(const Layout& layout, int64_t scale_block = kScaleBlock);

// The side of the blocks that `scale` has one number for each of: kScaleBlock where that explains
// every dimension, else the one size that divides every dimension of `weight` into so many blocks.
// nullopt: neither, or other numbers of dimensions; `scale` then is not one of square blocks.
std::optional<int64_t> ScaleBlockOf(const TensorSpec& weight, const TensorSpec& scale);

// The same for a layout whose blocks are not told: of float8 tensors W, with the blocks that
// ScaleBlockOf finds. Scales in which it finds none are not checked.
absl::Status CheckFloat8Scales(const Layout& layout);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_BLOCK_SCALES_H_
