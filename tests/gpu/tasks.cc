#include "tests/gpu/store.h"
#include "transport/base/status.h"

namespace refitd::gpu {
namespace {

// Gives `task` the dimensions of the box, outermost first. An inner dimension that is whole and
// dense in both the tensor and the storage is merged into the next outer one.
void MergeDims(const Piece& piece, const Dims& shape, Task* task) {
  const Dims global = RowMajorStrides(shape);
  for (size_t d = 0; d < piece.box.extent.size(); ++d) {
    const int64_t extent = piece.box.extent[d];
    if (extent == 1) continue;
    const int last = task->dims - 1;
    if (last >= 0 && task->stride[last] == extent * piece.strides[d] &&
        task->global_stride[last] == extent * global[d]) {
      task->extent[last] *= extent;
      task->stride[last] = piece.strides[d];
      task->global_stride[last] = global[d];
      continue;
    }
    task->extent[task->dims] = extent;
    task->stride[task->dims] = piece.strides[d];
    task->global_stride[task->dims] = global[d];
    ++task->dims;
  }
}

}  // namespace

absl::StatusOr<Tasks> MakeTasks(const Layout& layout, const std::vector<uint64_t>& addresses) {
  Tasks made;
  made.first_chunk.push_back(0);
  made.chunk_of_task.push_back(0);
  for (const Piece& piece : layout.pieces) {
    const size_t block = static_cast<size_t>(piece.region.value()) - 1;
    if (block >= addresses.size()) return Error(absl::StatusCode::kInternal, "block {}", block);
    if (block + 1 < made.first_chunk.size()) {
      return Error(absl::StatusCode::kInternal, "pieces don't ascend by block");
    }
    while (made.first_chunk.size() <= block) made.first_chunk.push_back(made.chunks.size());
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    Task task;
    task.address = addresses[block] + static_cast<uint64_t>(piece.byte_offset);
    task.tensor_hash = TensorHash(tensor);
    task.elements = ElementCount(piece.box);
    task.element_bytes = static_cast<int32_t>(ElementBytes(tensor.dtype));
    task.first_index = task.elements == 0 ? 0 : FirstIndex(piece.box, tensor.shape);
    MergeDims(piece, tensor.shape, &task);
    for (int64_t first = 0; first < task.elements; first += kChunkElements) {
      made.chunks.push_back(
          {first, std::min(kChunkElements, task.elements - first), made.tasks.size()});
    }
    made.tasks.push_back(task);
    made.chunk_of_task.push_back(made.chunks.size());
  }
  while (made.first_chunk.size() <= addresses.size())
    made.first_chunk.push_back(made.chunks.size());
  return made;
}

}  // namespace refitd::gpu
