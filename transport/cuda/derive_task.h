// One task of the derive kernel, as it lies in device memory among the copy tasks (copy_task.h):
// plain data, the same for nvcc and for the host's compiler.
#ifndef REFITD_TRANSPORT_CUDA_DERIVE_TASK_H_
#define REFITD_TRANSPORT_CUDA_DERIVE_TASK_H_

#include <cstddef>
#include <cstdint>

#include "transport/cuda/copy_task.h"
#include "transport/plan/derived_kind.h"

#if defined(__CUDACC__)
#define REFITD_TASK_CODE __host__ __device__
#else
#define REFITD_TASK_CODE
#endif

namespace refitd {

// The most rows and blocks of a task.
inline constexpr int64_t kMaxDeriveRows = 1 << 15;
inline constexpr int64_t kMaxDeriveBlocks = 1024;
// The most parts of a block. Shards of one row give 128.
inline constexpr int64_t kMaxDeriveParts = 255;

// Small blocks are so many elements of a row.
inline constexpr uint32_t kSmallBlock = 32;
// Whether a kind has them.
REFITD_TASK_CODE constexpr bool HasSmallBlocks(DerivedKind kind) {
  return kind == DerivedKind::kMxFp8;
}

// Derives `blocks` quantisation blocks at equal distances. Each is `rows` x `columns` elements of
// the trainers' tensor. Values: of each block the same window is stored. Scales: one element is
// stored for each block. A cast has one block, and its window is the whole block. Addresses and
// steps are multiples of the sizes of the elements there.
//
// A task has many small blocks, which lie beside one another in rows: `blocks` is 1, and all of
// them together are `rows` x `columns` elements. Of values the window is stored, of scales
// `window_columns` elements for each row. In such a task `source_block` is no distance but the
// number of blocks in a row of the trainers' tensor, by which `place` grows from row to row.
//
// Blocks that lie in several parts have a task for each part, one behind the other, of which the
// first does the work of all. Each has its part of the blocks in the place of the blocks, and of
// the window, which may have no rows. Scales are those of the first. Small blocks have one part.
//
// As in a copy, the digest of what is stored is added to stored_sums[sum] and
// source_sums[proof_sum] where these are not kNoSum. A block without a result raises
// CopyLaunch::fault; what is stored of it is not defined.
struct alignas(16) DeriveTask {
  uint64_t source = 0;       // address of the first block's first element
  uint64_t destination = 0;  // address of the first element that is stored; 0: nothing is
  uint64_t index = 0;        // of that element, row-major in the derived tensor
  int64_t source_row = 0;    // bytes from a row to the next
  int64_t source_column = 0;
  int64_t source_block = 0;
  int64_t destination_row = 0;
  int64_t destination_column = 0;
  int64_t destination_block = 0;
  int64_t index_row = 0;  // elements
  int64_t index_block = 0;
  uint32_t columns = 0;
  uint32_t first_column = 0;  // of the window in the block
  uint32_t window_columns = 0;
  // Row-major number of the first block among the blocks of the trainers' tensor, for messages.
  uint32_t place = 0;
  uint16_t rows = 0;
  uint16_t first_row = 0;
  uint16_t window_rows = 0;
  uint16_t blocks = 1;
  uint8_t dtype : 4 = 0;  // of the trainers' tensor: 2, 3 or 4, as refitd.v1.DType has them
  uint8_t role : 4 = 0;   // DerivedRole; of a cast: the dtype that it makes
  // The number of consecutive tasks, from this one on, that describe the parts of the same blocks.
  // 0: this task describes such a part, and a task before it does the work.
  uint8_t parts = 1;
  // From here on the fields lie where CopyTask has them.
  uint8_t element_bytes = 1;  // of the derived tensor
  uint8_t kind = 0;           // DerivedKind; CopyTask::derived
  uint32_t sum = kNoSum;
  uint32_t proof_sum = kNoSum;
  uint32_t piece = 0;  // index of the source piece in the transfer, for messages
};
static_assert(sizeof(DeriveTask) == sizeof(CopyTask));
static_assert(offsetof(DeriveTask, element_bytes) == offsetof(CopyTask, element_bytes));
static_assert(offsetof(DeriveTask, kind) == offsetof(CopyTask, derived));
static_assert(offsetof(DeriveTask, sum) == offsetof(CopyTask, sum));
static_assert(offsetof(DeriveTask, proof_sum) == offsetof(CopyTask, proof_sum));

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_DERIVE_TASK_H_
