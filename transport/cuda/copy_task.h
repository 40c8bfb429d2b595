// One task of the copy kernel, as it lies in device memory: plain data, the same for nvcc and for
// the host's compiler.
#ifndef REFITD_TRANSPORT_CUDA_COPY_TASK_H_
#define REFITD_TRANSPORT_CUDA_COPY_TASK_H_

#include <cstdint>

namespace refitd {

// Dimensions of a task besides its run; boxes with more become several tasks.
inline constexpr int kTaskDims = 3;
inline constexpr uint32_t kNoSum = ~uint32_t{0};

// A box of `count[0] * count[1] * count[2]` runs of `run` elements each. A run is contiguous at the
// source, at the destination, and in the tensor's row-major index.
//
// Two passes (P1): the copy reads at `source`, as the program says, stores at `destination` and
// adds the digest of what it stored, with the index by the destination's metadata, to
// stored_sums[sum]; the source pass reads the same elements at `proof`, where the source's own
// metadata says that they lie, and adds to source_sums[proof_sum].
struct CopyTask {
  uint64_t source = 0;       // address; 0: nothing is copied
  uint64_t destination = 0;  // address; 0: nothing is copied
  uint64_t proof = 0;        // address; 0: no source pass
  uint64_t index = 0;        // of the first element, row-major in the unpadded global shape
  uint32_t run = 0;          // elements
  uint32_t count[kTaskDims] = {1, 1, 1};       // slowest first
  int64_t source_step[kTaskDims] = {0, 0, 0};  // bytes; of `proof` too
  int64_t destination_step[kTaskDims] = {0, 0, 0};
  int64_t index_step[kTaskDims] = {0, 0, 0};  // elements
  uint32_t sum = kNoSum;                      // of what is stored; kNoSum: not digested
  uint32_t proof_sum = kNoSum;                // of the source pass
  uint8_t element_bytes = 1;                  // 1, 2, 4 or 8
};

// For a copy engine: `bytes` from one address to another.
struct LinearCopy {
  uint64_t source = 0;
  uint64_t destination = 0;
  int64_t bytes = 0;
};

// What the kernel is launched with.
struct CopyLaunch {
  const CopyTask* tasks = nullptr;  // in device memory
  uint32_t task_count = 0;
  uint32_t* next_task = nullptr;              // zero at the launch; blocks take tasks from it
  unsigned long long* stored_sums = nullptr;  // zeroed before; null where no task has one
  unsigned long long* source_sums = nullptr;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_TASK_H_
