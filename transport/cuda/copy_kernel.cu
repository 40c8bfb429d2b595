// The copy kernels: thread blocks that take tasks until there are none left.
#include "transport/cuda/copy_code.h"
#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/copy_task.h"
#include "transport/cuda/derive_code.h"
#include "transport/cuda/derive_task.h"

namespace refitd {
namespace {

template <CopyKernel kKernel>
constexpr uint32_t kThreads = kCopyThreads[static_cast<size_t>(kKernel)];
constexpr uint32_t kMostWarps = kMostCopyThreads / 32;
constexpr uint32_t kTaskWords = sizeof(CopyTask) / sizeof(uint64_t);

// A block's copy of a task. A block has two of these, for the current task and the next, and uses
// them in turns. Tasks are aligned as CopyTask says, on which the compiler relies.
struct alignas(alignof(CopyTask)) Turn {
  uint64_t task[kTaskWords];
  uint64_t stored[kMostWarps];
  uint64_t source[kMostWarps];
  uint32_t number;
};

__device__ __forceinline__ uint64_t WarpSum(uint64_t x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0U, x, lanes);
  return x;
}

// Adds up the sums of all warps; run by the first warp.
template <uint32_t kWarps>
__device__ __forceinline__ void AddSum(unsigned long long* sums, uint32_t sum,
                                       const uint64_t* warps) {
  const uint64_t digest = WarpSum(threadIdx.x < kWarps ? warps[threadIdx.x] : 0);
  if (threadIdx.x == 0) atomicAdd(sums + sum, digest);
}

__device__ __forceinline__ void FetchTask(const CopyLaunch& launch, uint32_t number, Turn* turn) {
  if (number >= launch.task_count || threadIdx.x >= kTaskWords) return;
  turn->task[threadIdx.x] = reinterpret_cast<const uint64_t*>(launch.tasks + number)[threadIdx.x];
}

// Does one thread's part of a task.
template <CopyKernel kKernel>
__device__ __forceinline__ copy_code::TaskSums Run(const CopyTask& task, const uint32_t* table) {
  if constexpr (kKernel == CopyKernel::kApart) {
    return copy_code::RunApart(task, table, threadIdx.x, kThreads<kKernel>);
  } else if constexpr (kKernel == CopyKernel::kRead) {
    return copy_code::RunRead(task, table, threadIdx.x, kThreads<kKernel>);
  } else {
    return copy_code::RunRuns(task, table, threadIdx.x, kThreads<kKernel>);
  }
}

// All tasks come from the counter, also each block's first task: if first tasks were fixed, those
// of a block that waits for a multiprocessor would wait too. Each task is taken and fetched while
// the block works on the task before.
template <CopyKernel kKernel>
__device__ __forceinline__ void RunTasks(const CopyLaunch& launch) {
  __shared__ uint32_t table[copy_code::kTableWords];
  __shared__ Turn turns[2];
  const uint32_t thread = threadIdx.x;
  if (thread < copy_code::kTableWords) table[thread] = copy_code::TableWord(thread);
  if (thread == 0) {
    turns[0].number = atomicAdd(launch.next_task, 1);
    turns[1].number = atomicAdd(launch.next_task, 1);
  }
  __syncthreads();
  uint32_t number = turns[0].number;
  FetchTask(launch, number, &turns[0]);
  __syncthreads();
  for (uint32_t at = 0; number < launch.task_count; at ^= 1) {
    Turn& turn = turns[at];
    Turn& other = turns[at ^ 1];
    const uint32_t next = other.number;
    uint32_t after = 0;
    if (thread == 0) after = atomicAdd(launch.next_task, 1);
    FetchTask(launch, next, &other);

    const CopyTask& task = *reinterpret_cast<const CopyTask*>(turn.task);
    const copy_code::TaskSums sums = Run<kKernel>(task, table);
    const bool stored = task.sum != kNoSum;
    const bool source = task.proof_sum != kNoSum;
    if (stored) {
      const uint64_t sum = WarpSum(sums.stored);
      if (thread % 32 == 0) turn.stored[thread / 32] = sum;
    }
    if (source) {
      const uint64_t sum = WarpSum(sums.source);
      if (thread % 32 == 0) turn.source[thread / 32] = sum;
    }
    if (thread == 0) turn.number = after;
    __syncthreads();
    // No second barrier is needed here: the next turn writes to the other Turn, and this one is
    // written again only after the next turn's barrier.
    if (thread < 32) {
      if (stored) AddSum<kThreads<kKernel> / 32>(launch.stored_sums, task.sum, turn.stored);
      if (source) AddSum<kThreads<kKernel> / 32>(launch.source_sums, task.proof_sum, turn.source);
    }
    // The next turn's fetch overwrites the memory from which this turn's sums were read.
    __syncwarp();
    number = next;
  }
}

// Does what RunTasks does for tasks without digests, one slice at a time. In a kernel of its own
// there are enough registers for twice the loads in flight; a loop for both would carry the sums.
__device__ __forceinline__ void RunPlainTasks(const CopyLaunch& launch) {
  __shared__ Turn turns[2];
  const uint32_t thread = threadIdx.x;
  const uint32_t count = launch.task_count * launch.slices;
  const auto fetch = [&launch](uint32_t number, Turn* turn) {
    FetchTask(launch, number / launch.slices, turn);
  };
  // Reduces the fetched task to its slice. One thread calls it, after a __syncwarp that makes the
  // warp's fetch visible.
  const auto cut = [&launch](uint32_t number, Turn* turn) {
    copy_code::CutSlice(reinterpret_cast<CopyTask*>(turn->task), number % launch.slices,
                        launch.slices);
  };
  if (thread == 0) {
    turns[0].number = atomicAdd(launch.next_task, 1);
    turns[1].number = atomicAdd(launch.next_task, 1);
  }
  __syncthreads();
  uint32_t number = turns[0].number;
  fetch(number, &turns[0]);
  __syncwarp();
  if (thread == 0) cut(number, &turns[0]);
  __syncthreads();
  for (uint32_t at = 0; number < count; at ^= 1) {
    Turn& turn = turns[at];
    Turn& other = turns[at ^ 1];
    const uint32_t next = other.number;
    uint32_t after = 0;
    if (thread == 0) after = atomicAdd(launch.next_task, 1);
    fetch(next, &other);
    copy_code::RunPlain(*reinterpret_cast<const CopyTask*>(turn.task), thread, kThreads<CopyKernel::kPlain>);
    __syncwarp();
    if (thread == 0) {
      turn.number = after;
      cut(next, &other);
    }
    __syncthreads();
    number = next;
  }
}

// Does one thread's share of a DeriveTask, and returns its digest. Where blocks have one row, each
// warp takes a block of its own; else all warps take each block together. `parts`: the task and
// those behind it. `maxima`: two arrays of a number for each warp.
template <uint8_t kDType, bool kWhole>
__device__ __forceinline__ uint64_t RunDerive(const DeriveTask& task, const DeriveTask* parts,
                                              const CopyLaunch& launch, const uint32_t* table,
                                              uint32_t* maxima) {
  constexpr uint32_t kCount = kThreads<CopyKernel::kDerive>;
  constexpr uint32_t kWarps = kCount / 32;
  const auto kind = static_cast<DerivedKind>(task.kind);
  if (kind == DerivedKind::kCast) {
    return derive_code::Store<kDType, kWhole>(task, 0, {}, table, threadIdx.x, kCount);
  }
  if (HasSmallBlocks(kind)) {
    unsigned long long fault = 0;
    const uint64_t digest =
        derive_code::StoreSmall<kDType, kWhole>(task, table, threadIdx.x, kCount, &fault);
    if (fault != 0) atomicMax(launch.fault, fault);
    return digest;
  }
  const bool by_warps = kind == DerivedKind::kFp8Channel || (task.parts == 1 && task.rows == 1);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t threads = by_warps ? 32 : kCount;
  const uint32_t thread = threadIdx.x % threads;
  uint64_t digest = 0;
  for (uint32_t block = by_warps ? warp : 0; block < task.blocks; block += by_warps ? kWarps : 1) {
    uint32_t amax = 0;
    REFITD_COPY_NO_UNROLL
    for (uint32_t i = 0; i < task.parts; ++i) {
      const DeriveTask& part = i == 0 ? task : parts[i];
      amax = max(amax, derive_code::Amax<kDType, kWhole>(part, block, thread, threads));
    }
    amax = __reduce_max_sync(~0U, amax);
    if (!by_warps) {
      // No second barrier is needed: the next block's numbers go to the other array, and this array
      // is written again only after the next block's barrier.
      uint32_t* const warps = maxima + block % 2 * kWarps;
      if (threadIdx.x % 32 == 0) warps[warp] = amax;
      __syncthreads();
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) amax = max(amax, warps[w]);
    }
    derive::BlockScale scale;
    if (!derive::FindScale(kind, amax, &scale)) {
      if (thread == 0) atomicMax(launch.fault, derive_code::FaultOf(task, block));
      continue;
    }
    REFITD_COPY_NO_UNROLL
    for (uint32_t i = 0; i < task.parts; ++i) {
      const DeriveTask& part = i == 0 ? task : parts[i];
      digest += derive_code::Store<kDType, kWhole>(part, block, scale, table, thread, threads);
    }
  }
  return digest;
}

// Does what RunTasks does for DeriveTasks.
__device__ __forceinline__ void RunDeriveTasks(const CopyLaunch& launch) {
  __shared__ uint32_t table[copy_code::kTableWords];
  __shared__ Turn turn;
  __shared__ uint32_t maxima[2 * kMostWarps];
  const uint32_t thread = threadIdx.x;
  if (thread < copy_code::kTableWords) table[thread] = copy_code::TableWord(thread);
  while (true) {
    __syncthreads();  // nobody reads the task before
    if (thread == 0) turn.number = atomicAdd(launch.next_task, 1);
    __syncthreads();
    if (turn.number >= launch.task_count) return;
    FetchTask(launch, turn.number, &turn);
    __syncthreads();
    const DeriveTask& task = *reinterpret_cast<const DeriveTask*>(turn.task);
    if (task.parts == 0) continue;
    const auto* const parts = reinterpret_cast<const DeriveTask*>(launch.tasks) + turn.number;
    bool whole = derive_code::IsWhole(task);
    for (uint32_t i = 1; i < task.parts; ++i) whole = whole && derive_code::IsWhole(parts[i]);
    const uint64_t digest =
        derive_code::Choose(task.dtype, whole, [&]<uint8_t kDType, bool kWhole> {
          return RunDerive<kDType, kWhole>(task, parts, launch, table, maxima);
        });
    if (task.sum == kNoSum && task.proof_sum == kNoSum) continue;
    const uint64_t sum = WarpSum(digest);
    if (thread % 32 != 0) continue;
    if (task.sum != kNoSum) atomicAdd(launch.stored_sums + task.sum, sum);
    if (task.proof_sum != kNoSum) atomicAdd(launch.source_sums + task.proof_sum, sum);
  }
}

}  // namespace

#define REFITD_KERNEL(kernel, blocks) \
  extern "C" __global__ void __launch_bounds__(kThreads<CopyKernel::kernel>, blocks)

REFITD_KERNEL(kRuns, 1) refitd_copy(CopyLaunch launch) { RunTasks<CopyKernel::kRuns>(launch); }

REFITD_KERNEL(kRead, 2) refitd_copy_read(CopyLaunch launch) { RunTasks<CopyKernel::kRead>(launch); }

REFITD_KERNEL(kPlain, 1) refitd_copy_plain(CopyLaunch launch) { RunPlainTasks(launch); }

REFITD_KERNEL(kApart, 2) refitd_copy_apart(CopyLaunch launch) {
  RunTasks<CopyKernel::kApart>(launch);
}

REFITD_KERNEL(kDerive, 3) refitd_derive(CopyLaunch launch) { RunDeriveTasks(launch); }

}  // namespace refitd
