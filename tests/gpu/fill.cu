// Kernels of gpu_rank: fill sources, check and poison destinations, all at memory speed. Loaded
// through the driver API from the fat binary that is built into gpu_rank.
#include "tests/gpu/values.h"

using refitd::gpu::Chunk;
using refitd::gpu::kChunkElements;
using refitd::gpu::Locate;
using refitd::gpu::Place;
using refitd::gpu::Task;
using refitd::gpu::Value;
using refitd::gpu::Wrong;

extern "C" __global__ void Fill(const Task* tasks, const Chunk* chunks, uint64_t chunk_count,
                                uint64_t salt) {
  for (uint64_t c = blockIdx.x; c < chunk_count; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const Task& task = tasks[chunk.task];
    for (int64_t i = threadIdx.x; i < chunk.count; i += blockDim.x) {
      const Place at = Locate(task, chunk.first + i);
      StoreElement(task, at.storage, Value(task.tensor_hash, salt, at.index, task.element_bytes));
    }
  }
}

// Loads the elements of the pieces whose row-major index is in [start, start + count); they lie one
// after the other from `from` on.
extern "C" __global__ void Load(const Task* tasks, const Chunk* chunks, uint64_t chunk_count,
                                uint64_t from, int64_t start, int64_t count) {
  for (uint64_t c = blockIdx.x; c < chunk_count; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const Task& task = tasks[chunk.task];
    for (int64_t i = threadIdx.x; i < chunk.count; i += blockDim.x) {
      LoadFrom(task, Locate(task, chunk.first + i), from, start, count);
    }
  }
}

// Writes `byte` over every element. Fill or a transfer must then replace all of it; afterwards only
// the bytes beside the pieces may have this value.
extern "C" __global__ void Poison(const Task* tasks, const Chunk* chunks, uint64_t chunk_count,
                                  uint64_t byte) {
  for (uint64_t c = blockIdx.x; c < chunk_count; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const Task& task = tasks[chunk.task];
    for (int64_t i = threadIdx.x; i < chunk.count; i += blockDim.x) {
      StoreElement(task, Locate(task, chunk.first + i).storage, byte * 0x0101010101010101);
    }
  }
}

extern "C" __global__ void Check(const Task* tasks, const Chunk* chunks, uint64_t chunk_count,
                                 uint64_t salt, Wrong* wrong) {
  for (uint64_t c = blockIdx.x; c < chunk_count; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const Task& task = tasks[chunk.task];
    for (int64_t i = threadIdx.x; i < chunk.count; i += blockDim.x) {
      const Place at = Locate(task, chunk.first + i);
      if (LoadElement(task, at.storage) ==
          Value(task.tensor_hash, salt, at.index, task.element_bytes)) {
        continue;
      }
      atomicAdd(&wrong->count, 1ULL);
      atomicMin(&wrong->first, static_cast<unsigned long long>(chunk.task) << 40 |
                                   static_cast<unsigned long long>(chunk.first + i));
    }
  }
}

// Counts the bytes of [data, data + bytes) that are not `byte`; `data` and `bytes` are multiples of
// 8.
extern "C" __global__ void CountOther(const uint64_t* data, uint64_t bytes, uint64_t byte,
                                      Wrong* wrong) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes / 8; i += step) {
    uint64_t differ = data[i] ^ byte * 0x0101010101010101;
    if (differ == 0) continue;
    unsigned long long count = 0;
    for (int b = 0; b < 8; ++b, differ >>= 8) count += (differ & 0xff) != 0 ? 1 : 0;
    atomicAdd(&wrong->count, count);
    atomicMin(&wrong->first, static_cast<unsigned long long>(i * 8));
  }
}

// Keeps its stream busy for this time.
extern "C" __global__ void Spin(uint64_t nanoseconds) {
  uint64_t start = 0;
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
