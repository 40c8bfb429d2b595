#include "tests/workloads/sharding/arena.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

Part Slice(TensorSpec tensor, size_t dim, int64_t begin, int64_t count) {
  Box box = WholeBox(tensor.shape);
  box.offset[dim] = begin;
  box.extent[dim] = count;
  return {std::move(tensor), std::move(box)};
}

Part EqualShard(TensorSpec tensor, size_t dim, int64_t shards, int64_t index) {
  const int64_t count = tensor.shape[dim] / shards;
  REFITD_CHECK(count * shards == tensor.shape[dim]);
  return Slice(std::move(tensor), dim, index * count, count);
}

}  // namespace

absl::Status CheckDivides(const ModelConfig& config, std::string_view what, int64_t n,
                          std::string_view by_what, int64_t by) {
  if (n % by == 0) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{}: {} {} is not divisible by {} {}",
               config.name, what, n, by_what, by);
}

absl::Status CheckTensorParallel(const ModelConfig& c, int64_t tp) {
  REFITD_RETURN_IF_ERROR(ValidateModel(c));
  REFITD_RETURN_IF_ERROR(CheckDivides(c, "heads", c.heads, "tp", tp));
  if (!c.latent() && c.kv_heads >= tp) {
    REFITD_RETURN_IF_ERROR(CheckDivides(c, "kv_heads", c.kv_heads, "tp", tp));
  } else if (!c.latent()) {
    REFITD_RETURN_IF_ERROR(CheckDivides(c, "tp", tp, "kv_heads", c.kv_heads));
  }
  if (c.dense(0)) REFITD_RETURN_IF_ERROR(CheckDivides(c, "ffn", c.ffn, "tp", tp));
  return CheckDivides(c, "shared_experts * moe_ffn", c.shared_experts * c.moe_ffn, "tp", tp);
}

VocabularyShard ShardVocabulary(TensorSpec tensor, int64_t multiple, int64_t tp, int64_t rank) {
  const int64_t vocabulary = tensor.shape[0];
  const int64_t padded = (vocabulary + multiple - 1) / multiple * multiple;
  const int64_t rows = padded / tp;
  REFITD_CHECK(rows * tp == padded);
  const int64_t begin = std::min(rank * rows, vocabulary);
  const int64_t end = std::min(begin + rows, vocabulary);
  return {Rows(std::move(tensor), begin, end - begin), rows};
}

int64_t ArenaBytes(const Layout& layout) {
  int64_t end = 0;
  for (const Piece& piece : layout.pieces) {
    const auto span = SpanBytes(piece, layout.tensors[piece.tensor].dtype);
    REFITD_CHECK(span.ok());
    end = std::max(end, piece.byte_offset + *span);
  }
  return AlignUp(end);
}

absl::StatusOr<ArenaBuilder> ArenaBuilder::Make(const LayoutOptions& options) {
  constexpr int64_t kMaxAlignment = int64_t{1} << 30;
  if (options.alignment_bytes < 8 || options.alignment_bytes > kMaxAlignment ||
      options.alignment_bytes % 8 != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "alignment_bytes is {}, multiples of 8 up to {} are possible",
                 options.alignment_bytes, kMaxAlignment);
  }
  if (options.vocabulary_multiple < 0 || options.vocabulary_multiple > kMaxAlignment) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "vocabulary_multiple is {}, 0 to {} are possible", options.vocabulary_multiple,
                 kMaxAlignment);
  }
  return ArenaBuilder(options);
}

uint32_t ArenaBuilder::IndexOf(const TensorSpec& tensor) {
  const auto [at, is_new] =
      indices_.try_emplace(tensor.name, static_cast<uint32_t>(layout_.tensors.size()));
  if (is_new) layout_.tensors.push_back(tensor);
  return at->second;
}

void ArenaBuilder::AddParameter(std::span<const Part> parts, int64_t min_rows) {
  if (parts.empty()) return;
  const Part& first = parts.front();
  const int64_t element_bytes = ElementBytes(first.tensor.dtype);
  int64_t row_bytes = element_bytes;
  for (size_t d = 1; d < first.box.extent.size(); ++d) row_bytes *= first.box.extent[d];
  const int64_t begin =
      (end_ + options_.alignment_bytes - 1) / options_.alignment_bytes * options_.alignment_bytes;
  int64_t rows = 0;
  for (const Part& part : parts) {
    REFITD_CHECK(!part.box.extent.empty() && part.tensor.dtype == first.tensor.dtype &&
                 std::equal(part.box.extent.begin() + 1, part.box.extent.end(),
                            first.box.extent.begin() + 1, first.box.extent.end()));
    if (ElementCount(part.box) == 0) continue;
    layout_.pieces.push_back({IndexOf(part.tensor), part.box, options_.region,
                              begin + rows * row_bytes, RowMajorStrides(part.box.extent)});
    rows += part.box.extent[0];
  }
  const int64_t bytes = std::max(rows, min_rows) * row_bytes;
  if (bytes > 0) end_ = begin + bytes;
}

void ArenaBuilder::AddScales(const ModelConfig& config, std::span<const Part> parts) {
  std::vector<Part> scales;
  for (const Part& part : parts) {
    std::optional<TensorSpec> scale = ScaleOf(config, part.tensor);
    if (!scale.has_value()) continue;
    scales.push_back({*std::move(scale), ScaleBox(part.box, config.scale_block)});
  }
  AddParameter(scales);
}

void ArenaBuilder::AddQuantizable(const ModelConfig& config, std::span<const Part> parts) {
  AddParameter(parts);
  AddScales(config, parts);
}

Layout ArenaBuilder::Finish() && {
  layout_.binding_generation = options_.binding_generation;
  return std::move(layout_);
}

Part Whole(TensorSpec tensor) {
  Box box = WholeBox(tensor.shape);
  return {std::move(tensor), std::move(box)};
}

Part Rows(TensorSpec tensor, int64_t begin, int64_t count) {
  return Slice(std::move(tensor), 0, begin, count);
}

Part Columns(TensorSpec tensor, int64_t begin, int64_t count) {
  return Slice(std::move(tensor), 1, begin, count);
}

Part RowShard(TensorSpec tensor, int64_t shards, int64_t index) {
  return EqualShard(std::move(tensor), 0, shards, index);
}

Part ColumnShard(TensorSpec tensor, int64_t shards, int64_t index) {
  return EqualShard(std::move(tensor), 1, shards, index);
}

}  // namespace refitd::sharding
