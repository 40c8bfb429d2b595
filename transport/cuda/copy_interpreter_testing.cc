#include "transport/cuda/copy_interpreter_testing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "transport/cuda/copy_code.h"
#include "transport/cuda/derive_code.h"

namespace refitd {
namespace {

constexpr std::array<uint32_t, copy_code::kTableWords> MakeTable() {
  std::array<uint32_t, copy_code::kTableWords> table = {};
  for (uint32_t i = 0; i < table.size(); ++i) table[i] = copy_code::TableWord(i);
  return table;
}

constexpr std::array<uint32_t, copy_code::kTableWords> kTable = MakeTable();

void Add(unsigned long long* sums, uint32_t sum, uint64_t digest) {
  if (sum != kNoSum) __atomic_fetch_add(sums + sum, digest, __ATOMIC_RELAXED);
}

copy_code::TaskSums Run(CopyKernel kernel, const CopyTask& task, uint32_t thread,
                        uint32_t threads) {
  switch (kernel) {
    case CopyKernel::kApart:
      return copy_code::RunApart(task, kTable.data(), thread, threads);
    case CopyKernel::kRead:
      return copy_code::RunRead(task, kTable.data(), thread, threads);
    case CopyKernel::kPlain:
      copy_code::RunPlain(task, thread, threads);
      return {};
    default:
      return copy_code::RunRuns(task, kTable.data(), thread, threads);
  }
}

}  // namespace

void RunDerive(const CopyLaunch& launch, uint32_t number, uint32_t threads) {
  std::vector<DeriveTask> parts = {std::bit_cast<DeriveTask>(launch.tasks[number])};
  const DeriveTask task = parts.front();
  if (task.parts == 0) return;
  bool whole = derive_code::IsWhole(task);
  while (parts.size() < task.parts) {
    parts.push_back(std::bit_cast<DeriveTask>(launch.tasks[number + parts.size()]));
    whole = whole && derive_code::IsWhole(parts.back());
  }
  const auto add = [&](uint64_t digest) {
    Add(launch.stored_sums, task.sum, digest);
    Add(launch.source_sums, task.proof_sum, digest);
  };
  derive_code::Choose(task.dtype, whole, [&]<uint8_t kDType, bool kWhole> {
    const auto kind = static_cast<DerivedKind>(task.kind);
    for (uint32_t thread = 0; thread < threads && HasSmallBlocks(kind); ++thread) {
      add(derive_code::StoreSmall<kDType, kWhole>(task, kTable.data(), thread, threads,
                                                  launch.fault));
    }
    for (uint32_t block = 0; block < task.blocks && !HasSmallBlocks(kind); ++block) {
      uint32_t amax = 0;
      for (uint32_t thread = 0; thread < threads && kind != DerivedKind::kCast; ++thread) {
        for (const DeriveTask& part : parts) {
          amax = std::max(amax, derive_code::Amax<kDType, kWhole>(part, block, thread, threads));
        }
      }
      derive::BlockScale scale;
      if (!derive::FindScale(kind, amax, &scale)) {
        *launch.fault = std::max(*launch.fault, derive_code::FaultOf(task, block));
        continue;
      }
      for (uint32_t thread = 0; thread < threads; ++thread) {
        for (const DeriveTask& part : parts) {
          add(derive_code::Store<kDType, kWhole>(part, block, scale, kTable.data(), thread,
                                                 threads));
        }
      }
    }
  });
}

void RunTasks(const CopyLaunch& launch, uint32_t threads) {
  while (true) {
    const uint32_t next = __atomic_fetch_add(launch.next_task, 1, __ATOMIC_RELAXED);
    if (next >= launch.task_count * launch.slices) return;
    CopyTask task = launch.tasks[next / launch.slices];
    const CopyKernel kernel = KernelOf(task);
    if (kernel == CopyKernel::kDerive) {
      RunDerive(launch, next / launch.slices, threads);
      continue;
    }
    if (kernel == CopyKernel::kPlain) {
      copy_code::CutSlice(&task, next % launch.slices, launch.slices);
    }
    for (uint32_t thread = 0; thread < threads; ++thread) {
      const copy_code::TaskSums sums = Run(kernel, task, thread, threads);
      Add(launch.stored_sums, task.sum, sums.stored);
      Add(launch.source_sums, task.proof_sum, sums.source);
    }
  }
}

}  // namespace refitd
