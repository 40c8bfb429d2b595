#include "daemon/refitctl/slicing.h"

namespace refitd {

Chunk ChunkOf(int64_t n, int parts, int index) {
  const int64_t size = (n + parts - 1) / parts;
  const int64_t offset = std::min(n, size * index);
  return {offset, std::min(size, n - offset)};
}

Box SliceOf(const Dims& shape, std::optional<int> dim, int rank, int world_size) {
  Box box = WholeBox(shape);
  if (!dim || shape.size() < 2 || static_cast<size_t>(*dim) >= shape.size()) return box;
  const auto d = static_cast<size_t>(*dim);
  const Chunk chunk = ChunkOf(shape[d], world_size, rank);
  box.offset[d] = chunk.offset;
  box.extent[d] = chunk.extent;
  return box;
}

Strips StripsOf(const Dims& shape, const Box& box) {
  size_t dim = 0;
  while (dim < shape.size() && box.extent[dim] == shape[dim]) ++dim;
  if (dim == shape.size()) {
    const int64_t elements = ElementCount(box);
    return {0, elements, elements, 1};
  }
  int64_t inner = 1;  // elements below the sliced dimension
  for (size_t i = dim + 1; i < shape.size(); ++i) inner *= shape[i];
  int64_t outer = 1;
  for (size_t i = 0; i < dim; ++i) outer *= shape[i];
  return {box.offset[dim] * inner, box.extent[dim] * inner, shape[dim] * inner, outer};
}

Holding PlanHolding(const std::vector<TensorSpec>& tensors, std::optional<int> dim, int rank,
                    int world_size) {
  Holding holding;
  holding.held.reserve(tensors.size());
  for (const TensorSpec& tensor : tensors) {
    HeldTensor held;
    held.box = SliceOf(tensor.shape, dim, rank, world_size);
    held.strips = StripsOf(tensor.shape, held.box);
    held.byte_offset = holding.memory_bytes;
    held.bytes = ElementCount(held.box) * ElementBytes(tensor.dtype);
    holding.tensor_bytes += held.bytes;
    const int64_t end = held.byte_offset + held.bytes;
    holding.memory_bytes = AlignUp(end);
    holding.held.push_back(std::move(held));
  }
  return holding;
}

Layout LayoutOf(const std::vector<TensorSpec>& tensors, const Holding& holding, RegionId region) {
  Layout layout;
  layout.tensors = tensors;
  layout.pieces.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const HeldTensor& held = holding.held[i];
    layout.pieces.push_back({static_cast<uint32_t>(i), held.box, region, held.byte_offset,
                             RowMajorStrides(held.box.extent)});
  }
  return layout;
}

}  // namespace refitd
