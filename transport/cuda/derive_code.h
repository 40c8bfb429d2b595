// The code of the derive kernel: the work of one GPU thread for one quantisation block of a
// DeriveTask. nvcc compiles it for GPUs, and the host's compiler for copy_interpreter_testing.h, as
// copy_code.h.
//
// A block's elements are read twice: for the largest magnitude, and for the values. A thread takes
// as many elements beside one another as fill a vector of 16 bytes of what is stored, so that eight
// threads store a row of a block of E4M3: 128 bytes, a line.
#ifndef REFITD_TRANSPORT_CUDA_DERIVE_CODE_H_
#define REFITD_TRANSPORT_CUDA_DERIVE_CODE_H_

#include <cstdint>

#include "transport/cuda/copy_code.h"
#include "transport/cuda/derive_task.h"

#if defined(__CUDACC__)
#define REFITD_DERIVE_CODE __host__ __device__ __forceinline__
#endif
#include "transport/derive/arithmetic.h"

namespace refitd::derive_code {

using copy_code::Vector;

// The most elements of a unit, which a thread handles at a time.
inline constexpr uint32_t kUnit = copy_code::kVector;

// The values of DType that a task's dtype may have.
inline constexpr uint8_t kFloat32 = 2;
inline constexpr uint8_t kFloat16 = 3;

REFITD_COPY_CODE float NumberOf(uint8_t dtype, uint32_t bits) {
  if (dtype == kFloat32) return derive::FloatOf(bits);
  const auto half = static_cast<uint16_t>(bits);
  return dtype == kFloat16 ? derive::FromFloat16(half) : derive::FromBFloat16(half);
}

// Loads `count` elements of a row, at most kUnit, as float32.
REFITD_COPY_CODE void LoadUnit(const DeriveTask& task, uint64_t at, uint32_t count,
                               float (&numbers)[kUnit]) {
  const uint32_t bytes = task.dtype == kFloat32 ? 4 : 2;
  const uint32_t lanes = copy_code::kVector / bytes;
  if (task.source_column == bytes && at % copy_code::kVector == 0 && count % lanes == 0) {
    REFITD_COPY_UNROLL
    for (uint32_t v = 0; v < kUnit / 4; ++v) {
      if (v * lanes >= count) break;
      const Vector vector = copy_code::Load<false>(at + v * copy_code::kVector);
      REFITD_COPY_UNROLL
      for (uint32_t w = 0; w < 4; ++w) {
        if (bytes == 4) {
          numbers[v * 4 + w] = derive::FloatOf(vector.w[w]);
        } else if (v < kUnit / 8) {
          numbers[(v * 8 + w * 2) % kUnit] = NumberOf(task.dtype, vector.w[w] & 0xffff);
          numbers[(v * 8 + w * 2 + 1) % kUnit] = NumberOf(task.dtype, vector.w[w] >> 16);
        }
      }
    }
    return;
  }
  REFITD_COPY_UNROLL
  for (uint32_t i = 0; i < kUnit; ++i) {
    if (i >= count) break;
    const uint64_t from = at + i * static_cast<uint64_t>(task.source_column);
    numbers[i] = NumberOf(task.dtype, bytes == 4 ? copy_code::Load4(from) : copy_code::Load2(from));
  }
}

// The bits of the largest magnitude of this thread's elements of a block, as float32. Infinities
// and NaN are larger than all numbers.
REFITD_COPY_CODE uint32_t Amax(const DeriveTask& task, uint32_t block, uint32_t thread,
                               uint32_t threads) {
  const uint32_t units = (task.columns + kUnit - 1) / kUnit;  // of a row
  const uint64_t from = task.source + block * static_cast<uint64_t>(task.source_block);
  uint32_t amax = 0;
  REFITD_COPY_NO_UNROLL
  for (uint32_t unit = thread; unit < task.rows * units; unit += threads) {
    const uint32_t row = unit / units;
    const uint32_t column = unit % units * kUnit;
    const uint32_t left = task.columns - column;
    const uint32_t count = left < kUnit ? left : kUnit;
    float numbers[kUnit] = {};
    LoadUnit(task,
             from + row * static_cast<uint64_t>(task.source_row) +
                 column * static_cast<uint64_t>(task.source_column),
             count, numbers);
    REFITD_COPY_UNROLL
    for (uint32_t i = 0; i < kUnit; ++i) {
      const uint32_t magnitude = derive::BitsOf(numbers[i]) & 0x7fffffff;
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  return amax;
}

// The value of CopyLaunch::fault that a block without a result leaves; the greatest stays. 0: none.
REFITD_COPY_CODE unsigned long long FaultOf(const DeriveTask& task, uint32_t block) {
  return (static_cast<unsigned long long>(task.piece) + 1) << 32 | (task.place + block);
}

// Stores `count` derived elements of kBytes each, from the low end of `v` on.
template <int kBytes>
REFITD_COPY_CODE void StoreUnit(const DeriveTask& task, uint64_t to, const Vector& v,
                                uint32_t count) {
  if (task.destination_column == kBytes) {
    if (count == copy_code::kVector / kBytes && to % copy_code::kVector == 0) {
      copy_code::Store(to, v);
    } else {
      copy_code::StoreBytes(to, v, 0, static_cast<int>(count * kBytes));
    }
    return;
  }
  REFITD_COPY_UNROLL
  for (uint32_t i = 0; i < copy_code::kVector / kBytes; ++i) {
    if (i >= count) break;
    const uint64_t at = to + i * static_cast<uint64_t>(task.destination_column);
    const uint32_t word = v.w[i * kBytes / 4] >> (8 * (i * kBytes % 4));
    if constexpr (kBytes == 1) copy_code::Store1(at, word & 0xff);
    if constexpr (kBytes == 2) copy_code::Store2(at, word & 0xffff);
    if constexpr (kBytes == 4) copy_code::Store4(at, word);
  }
}

// The derived element of a number, as it is stored.
template <int kBytes>
REFITD_COPY_CODE uint32_t Element(const DeriveTask& task, float number,
                                  const derive::BlockScale& scale) {
  if constexpr (kBytes == 1) {
    return derive::ToE4M3(scale.divides ? number / scale.factor : number * scale.factor);
  } else if constexpr (kBytes == 2) {
    return task.role == kFloat16 ? derive::ToFloat16(number) : derive::ToBFloat16(number);
  } else {
    return derive::BitsOf(number);
  }
}

// Stores this thread's part of a block's window, whose elements have kBytes, and returns its
// digest.
template <int kBytes>
REFITD_COPY_CODE uint64_t StoreWindow(const DeriveTask& task, uint32_t block,
                                      const derive::BlockScale& scale, const uint32_t* table,
                                      uint32_t thread, uint32_t threads) {
  constexpr uint32_t kLanes = copy_code::kVector / kBytes;
  const bool digested = task.sum != kNoSum || task.proof_sum != kNoSum;
  const uint32_t units = (task.window_columns + kLanes - 1) / kLanes;  // of a row
  const uint64_t from = task.source + block * static_cast<uint64_t>(task.source_block) +
                        task.first_row * static_cast<uint64_t>(task.source_row) +
                        task.first_column * static_cast<uint64_t>(task.source_column);
  const uint64_t to = task.destination + block * static_cast<uint64_t>(task.destination_block);
  const uint64_t index = task.index + block * static_cast<uint64_t>(task.index_block);
  copy_code::VectorDigest<kBytes> digest(table);
  REFITD_COPY_NO_UNROLL
  for (uint32_t unit = thread; unit < task.window_rows * units; unit += threads) {
    const uint32_t row = unit / units;
    const uint32_t column = unit % units * kLanes;
    const uint32_t left = task.window_columns - column;
    const uint32_t count = left < kLanes ? left : kLanes;
    float numbers[kUnit] = {};
    LoadUnit(task,
             from + row * static_cast<uint64_t>(task.source_row) +
                 column * static_cast<uint64_t>(task.source_column),
             count, numbers);
    Vector v = {};
    REFITD_COPY_UNROLL
    for (uint32_t i = 0; i < kLanes; ++i) {
      v.w[i * kBytes / 4] |= Element<kBytes>(task, numbers[i], scale) << (8 * (i * kBytes % 4));
    }
    if (task.destination != 0) {
      StoreUnit<kBytes>(task,
                        to + row * static_cast<uint64_t>(task.destination_row) +
                            column * static_cast<uint64_t>(task.destination_column),
                        v, count);
    }
    if (!digested) continue;
    const uint64_t p = index + row * static_cast<uint64_t>(task.index_row) + column;
    if (count == kLanes && p % kLanes == 0) {
      digest.AddWhole(v, p);
    } else {
      digest.AddPart(v, p, 0, static_cast<int>(count * kBytes));
    }
  }
  return digest.sum();
}

// Stores the block's scale, by one thread, and returns its digest.
REFITD_COPY_CODE uint64_t StoreScale(const DeriveTask& task, uint32_t block,
                                     const derive::BlockScale& scale, const uint32_t* table,
                                     uint32_t thread) {
  if (thread != 0) return 0;
  const uint32_t bits = derive::BitsOf(scale.stored);
  if (task.destination != 0) {
    copy_code::Store4(task.destination + block * static_cast<uint64_t>(task.destination_block),
                      bits);
  }
  if (task.sum == kNoSum && task.proof_sum == kNoSum) return 0;
  copy_code::VectorDigest<4> digest(table);
  digest.AddPart({{bits, 0, 0, 0}}, task.index + block * static_cast<uint64_t>(task.index_block), 0,
                 4);
  return digest.sum();
}

// Stores this thread's part of what is derived from a block, and returns its digest.
REFITD_COPY_CODE uint64_t Store(const DeriveTask& task, uint32_t block,
                                const derive::BlockScale& scale, const uint32_t* table,
                                uint32_t thread, uint32_t threads) {
  const auto kind = static_cast<DerivedKind>(task.kind);
  if (kind != DerivedKind::kCast && task.role == static_cast<uint8_t>(DerivedRole::kScales)) {
    return StoreScale(task, block, scale, table, thread);
  }
  if (kind != DerivedKind::kCast) return StoreWindow<1>(task, block, scale, table, thread, threads);
  return task.element_bytes == 2 ? StoreWindow<2>(task, block, scale, table, thread, threads)
                                 : StoreWindow<4>(task, block, scale, table, thread, threads);
}

}  // namespace refitd::derive_code

#endif  // REFITD_TRANSPORT_CUDA_DERIVE_CODE_H_
