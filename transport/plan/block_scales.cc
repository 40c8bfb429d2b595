#include "transport/plan/block_scales.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

int64_t Blocks(int64_t n, int64_t block) { return n / block + (n % block == 0 ? 0 : 1); }

Dims BlocksOf(const Dims& shape, int64_t block) {
  Dims blocks = shape;
  for (int64_t& n : blocks) n = Blocks(n, block);
  return blocks;
}

// The range of one tensor that the layout's pieces reach.
struct Reach {
  Dims begin;  // in each dimension, the least offset of the tensor's pieces; empty: no pieces
  Dims end;
};

std::vector<Reach> ReachOfTensors(const Layout& layout) {
  std::vector<Reach> reach(layout.tensors.size());
  for (const Piece& piece : layout.pieces) {
    if (ElementCount(piece.box) == 0) continue;
    Reach& of = reach[piece.tensor];
    if (of.begin.empty()) {
      of.begin.assign(piece.box.offset.size(), std::numeric_limits<int64_t>::max());
      of.end.assign(piece.box.offset.size(), 0);
    }
    for (size_t d = 0; d < of.begin.size(); ++d) {
      of.begin[d] = std::min(of.begin[d], piece.box.offset[d]);
      of.end[d] = std::max(of.end[d], piece.box.offset[d] + piece.box.extent[d]);
    }
  }
  return reach;
}

using Scales = absl::flat_hash_map<std::string_view, uint32_t>;  // by their weights' names

Scales ScalesOf(const Layout& layout) {
  Scales scales;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    std::string_view name = layout.tensors[i].name;
    if (!name.ends_with(kScaleSuffix)) continue;
    name.remove_suffix(kScaleSuffix.size());
    scales.emplace(name, static_cast<uint32_t>(i));
  }
  return scales;
}

// Checks one piece of a weight; `held` is the range of the weight's scales.
absl::Status CheckPiece(const Box& box, const TensorSpec& weight, const TensorSpec& scale,
                        const Reach& held, int64_t block) {
  for (size_t d = 0; d < scale.shape.size(); ++d) {
    const bool whole = !held.begin.empty() && held.begin[d] == 0 && held.end[d] == scale.shape[d];
    if (whole) continue;
    const int64_t begin = box.offset[d];
    const int64_t end = begin + box.extent[d];
    const bool cut_at_end = end % block != 0 && end != weight.shape[d];
    if (begin % block == 0 && !cut_at_end) continue;
    return AboutTensor(
        Error(absl::StatusCode::kFailedPrecondition,
              "tensor {}: the shard [{}, {}) of dimension {} cuts a block of {} whose scales in "
              "{} are sharded along it",
              weight.name, begin, end, d, block, scale.name),
        weight.name);
  }
  return absl::OkStatus();
}

bool IsFloat8(DType dtype) { return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2; }

}  // namespace

std::optional<int64_t> ScaleBlockOf(const TensorSpec& weight, const TensorSpec& scale) {
  if (weight.shape.empty() || weight.shape.size() != scale.shape.size()) return std::nullopt;
  if (scale.shape == BlocksOf(weight.shape, kScaleBlock)) return kScaleBlock;
  std::optional<int64_t> block;
  for (size_t d = 0; d < weight.shape.size(); ++d) {
    const int64_t n = weight.shape[d];
    const int64_t blocks = scale.shape[d];
    if (n < 1 || blocks < 1 || n % blocks != 0) return std::nullopt;
    if (block.has_value() && *block != n / blocks) return std::nullopt;
    block = n / blocks;
  }
  return block;
}

absl::Status CheckFloat8Scales(const Layout& layout) {
  const Scales scales = ScalesOf(layout);
  if (scales.empty()) return absl::OkStatus();
  const std::vector<Reach> reach = ReachOfTensors(layout);
  for (const Piece& piece : layout.pieces) {
    const TensorSpec& weight = layout.tensors[piece.tensor];
    if (!IsFloat8(weight.dtype) || ElementCount(piece.box) == 0) continue;
    const auto found = scales.find(weight.name);
    if (found == scales.end()) continue;
    const TensorSpec& scale = layout.tensors[found->second];
    const std::optional<int64_t> block = ScaleBlockOf(weight, scale);
    if (!block.has_value()) continue;
    REFITD_RETURN_IF_ERROR(CheckPiece(piece.box, weight, scale, reach[found->second], *block));
  }
  return absl::OkStatus();
}

}  // namespace refitd
