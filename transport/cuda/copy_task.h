// One task of a copy kernel, as it lies in device memory: plain data, the same for nvcc and for
// the host's compiler.
#ifndef REFITD_TRANSPORT_CUDA_COPY_TASK_H_
#define REFITD_TRANSPORT_CUDA_COPY_TASK_H_

#include <cstdint>

namespace refitd {

// Dimensions of a task besides its run; boxes with more become several tasks.
inline constexpr int kTaskDims = 3;
inline constexpr uint32_t kNoSum = ~uint32_t{0};

// The most vectors of a task: its runs times the 16-byte vectors that one run may touch, or its
// runs of one element. The task's index arithmetic is exact up to this number.
inline constexpr uint32_t kMaxTaskVectors = 1 << 16;

// A box of `count[0] * count[1] * count[2]` runs of `run` elements each. A run is contiguous at the
// source and at the destination, and, where digested, in the tensor's row-major index. Addresses
// and steps need no alignment. Memory is accessed in units of 16 aligned bytes where that is
// faster: loads may fetch, and ignore, bytes beside a run in its first and last unit.
//
// Two passes (P1): the copy reads at `source`, as the program says, stores at `destination` and
// adds the digest of what it stored, with the index by the destination's metadata, to
// stored_sums[sum]; the source pass reads the same elements at `proof`, where the source's own
// metadata says that they lie, and adds to source_sums[proof_sum]. If the digest of what was stored
// is not wanted (sum is kNoSum) and `proof` is `source`, the copy itself is the source pass.
struct alignas(16) CopyTask {
  uint64_t source = 0;       // address; 0: nothing is copied
  uint64_t destination = 0;  // address; 0: nothing is copied
  uint64_t proof = 0;        // address; 0: no source pass
  uint64_t index = 0;        // of the first element, row-major in the unpadded global shape
  int64_t source_step[kTaskDims] = {0, 0, 0};  // bytes; of `proof` too
  int64_t destination_step[kTaskDims] = {0, 0, 0};
  int64_t index_step[kTaskDims] = {0, 0, 0};  // elements
  uint32_t run = 0;                           // elements
  // Slowest first; a box of fewer dimensions uses the last ones.
  uint16_t count[kTaskDims] = {1, 1, 1};
  uint8_t element_bytes = 1;    // 1, 2 or 4; 8-byte elements are two of 4 bytes
  uint8_t derived = 0;          // not 0: this is a DeriveTask (derive_task.h)
  uint32_t sum = kNoSum;        // of what is stored; kNoSum: not digested
  uint32_t proof_sum = kNoSum;  // of the source pass
};
static_assert(sizeof(CopyTask) == 128);

// Whether a task has single elements, each at a multiple of its size.
constexpr bool LiesApart(const CopyTask& task) {
  if (task.run != 1) return false;
  const uint64_t bytes = task.element_bytes;
  uint64_t all = task.source | task.proof | task.destination;
  for (int d = 0; d < kTaskDims; ++d) {
    all |= static_cast<uint64_t>(task.source_step[d] | task.destination_step[d]);
  }
  return all % bytes == 0;  // sizes are powers of two
}

// Each task is for one kernel: kApart has those that lie apart; of the others, kPlain has those
// without digests, kRead those that store nothing, kRuns the rest. kDerive has the DeriveTasks. The
// code of one kernel would take registers from another: a kernel for two of them loads fewer
// vectors at once, or spills.
enum class CopyKernel : uint8_t { kRuns, kRead, kPlain, kApart, kDerive };
inline constexpr int kCopyKernels = 5;

constexpr CopyKernel KernelOf(const CopyTask& task) {
  if (task.derived != 0) return CopyKernel::kDerive;
  if (LiesApart(task)) return CopyKernel::kApart;
  const bool digested = task.sum != kNoSum || task.proof_sum != kNoSum;
  if (!digested) return CopyKernel::kPlain;
  return task.destination == 0 ? CopyKernel::kRead : CopyKernel::kRuns;
}

// The least bytes of a slice of a task: eight vectors for each thread of a block.
inline constexpr uint32_t kSliceBytes = 64 << 10;

// A kernel's launch argument.
struct CopyLaunch {
  const CopyTask* tasks = nullptr;  // in device memory, aligned to 16 bytes
  uint32_t task_count = 0;
  // kPlain: into how many slices a task is cut (CutSlice in copy_code.h), each for one thread block
  // at a time. Blocks that run at once then work close together in memory, which is faster.
  uint32_t slices = 1;
  uint32_t* next_task = nullptr;  // zero at the launch; blocks take tasks from it
  // The address of sum 0, even if this device lacks it (SumRange); the sums are zeroed before.
  unsigned long long* stored_sums = nullptr;
  unsigned long long* source_sums = nullptr;
  unsigned long long* fault = nullptr;  // kDerive: zero at the launch (FaultOf in derive_code.h)
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_TASK_H_
