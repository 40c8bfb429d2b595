// The code of the derive kernel: the work of one GPU thread for one quantisation block of a
// DeriveTask. nvcc compiles it for GPUs, and the host's compiler for copy_interpreter_testing.h, as
// copy_code.h.
//
// A block's elements are read twice: for the largest magnitude, and for the values; the second time
// they are in a cache. A thread takes so many elements beside one another that they fill vectors of
// 16 bytes at the source and of what is stored: eight threads store a row of a block of E4M3, 128
// bytes, a line.
#ifndef REFITD_TRANSPORT_CUDA_DERIVE_CODE_H_
#define REFITD_TRANSPORT_CUDA_DERIVE_CODE_H_

#include <cstdint>

#include "transport/cuda/copy_code.h"
#include "transport/cuda/derive_task.h"

#if defined(__CUDACC__)
#define REFITD_DERIVE_CODE __host__ __device__ __forceinline__
#endif
#include "transport/derive/arithmetic.h"

// Loops over whole units are unrolled, so that several loads are under way at once.
#if defined(__CUDACC__)
#define REFITD_DERIVE_UNROLL(count) _Pragma(#count)
#else
#define REFITD_DERIVE_UNROLL(count)
#endif

namespace refitd::derive_code {

using copy_code::kVector;
using copy_code::Vector;

// The values of DType that a task's dtype may have.
inline constexpr uint8_t kFloat32 = 2;
inline constexpr uint8_t kFloat16 = 3;
inline constexpr uint8_t kBFloat16 = 4;

template <uint8_t kDType>
inline constexpr uint32_t kSourceBytes = kDType == kFloat32 ? 4 : 2;

// How many elements a thread takes at a time, if what is stored has kBytes an element.
template <uint8_t kDType, uint32_t kBytes>
inline constexpr uint32_t kUnit = kVector /
                                  (kBytes < kSourceBytes<kDType> ? kBytes : kSourceBytes<kDType>);

// The first `count` bytes of a vector; the others are zero.
REFITD_COPY_CODE Vector FirstBytes(Vector v, uint32_t count) {
  REFITD_COPY_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t bytes = count > 4 * i ? count - 4 * i : 0;
    if (bytes < 4) v.w[i] &= (1U << (8 * bytes)) - 1;
  }
  return v;
}

// `v` with `added` in it from byte `at` on, where it is zero.
REFITD_COPY_CODE Vector WithBytes(const Vector& v, const Vector& added, uint32_t at) {
  const Vector shifted = at == 0 ? added : copy_code::Shifted(Vector{}, added, kVector - at);
  return {
      {v.w[0] | shifted.w[0], v.w[1] | shifted.w[1], v.w[2] | shifted.w[2], v.w[3] | shifted.w[3]}};
}

// The larger of two pairs of 16-bit numbers, each.
REFITD_COPY_CODE uint32_t LargerPair(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
  return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
#endif
}

// E4M3 of two numbers that are not NaN, `low` in the low byte.
REFITD_COPY_CODE uint32_t ToE4M3Pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return derive::ToE4M3(low) | static_cast<uint32_t>(derive::ToE4M3(high)) << 8;
#endif
}

// Elements of a row beside one another, as they lie in memory; zero beyond the row's end.
template <uint8_t kDType, uint32_t kCount>
struct Elements {
  static constexpr uint32_t kBytes = kSourceBytes<kDType>;
  static constexpr uint32_t kVectors = kCount * kBytes / kVector;

  // kWhole: there are kCount, beside one another, at a multiple of 16 bytes.
  template <bool kWhole>
  REFITD_COPY_CODE void Load(const DeriveTask& task, uint64_t at, uint32_t count) {
    if constexpr (kWhole) {
      REFITD_COPY_UNROLL
      for (uint32_t i = 0; i < kVectors; ++i) v[i] = copy_code::Load<false>(at + i * kVector);
    } else {
      REFITD_COPY_UNROLL
      for (uint32_t i = 0; i < kVectors; ++i) v[i] = {};
      REFITD_COPY_UNROLL
      for (uint32_t i = 0; i < kCount; ++i) {
        if (i >= count) break;
        const uint64_t from = at + i * static_cast<uint64_t>(task.source_column);
        const uint32_t bits = kBytes == 4 ? copy_code::Load4(from) : copy_code::Load2(from);
        v[i * kBytes / kVector].w[i * kBytes / 4 % 4] |= bits << (8 * (i * kBytes % 4));
      }
    }
  }

  REFITD_COPY_CODE float Number(uint32_t i) const {
    const uint32_t word = v[i * kBytes / kVector].w[i * kBytes / 4 % 4];
    if constexpr (kDType == kFloat32) return derive::FloatOf(word);
    const auto half = static_cast<uint16_t>(word >> (8 * (i * kBytes % 4)));
    return kDType == kFloat16 ? derive::FromFloat16(half) : derive::FromBFloat16(half);
  }

  // The larger of `largest` and the magnitudes here, as bits: of 16 bits each in both halves.
  REFITD_COPY_CODE uint32_t Largest(uint32_t largest) const {
    REFITD_COPY_UNROLL
    for (const Vector& vector : v) {
      REFITD_COPY_UNROLL
      for (const uint32_t word : vector.w) {
        if constexpr (kDType == kFloat32) {
          const uint32_t magnitude = word & 0x7fffffff;
          largest = magnitude > largest ? magnitude : largest;
        } else {
          largest = LargerPair(largest, word & 0x7fff7fff);
        }
      }
    }
    return largest;
  }

  Vector v[kVectors];
};

// The bits, as float32, of what Elements::Largest found. Infinities and NaN are larger than all
// numbers.
template <uint8_t kDType>
REFITD_COPY_CODE uint32_t AmaxOf(uint32_t largest) {
  if constexpr (kDType == kFloat32) return largest;
  const uint32_t low = largest & 0xffff;
  const uint32_t high = largest >> 16;
  const auto half = static_cast<uint16_t>(low > high ? low : high);
  return derive::BitsOf(kDType == kFloat16 ? derive::FromFloat16(half)
                                           : derive::FromBFloat16(half));
}

// A thread's places among the units of a box of rows: `thread`, `thread` + `threads`, ...
class Places {
 public:
  REFITD_COPY_CODE Places(uint32_t units, uint32_t thread, uint32_t threads)
      : units_(units),
        row_(thread / units),
        unit_(thread % units),
        rows_step_(threads / units),
        units_step_(threads % units) {}
  REFITD_COPY_CODE uint32_t row() const { return row_; }
  REFITD_COPY_CODE uint32_t unit() const { return unit_; }
  REFITD_COPY_CODE void Next() {
    row_ += rows_step_;
    unit_ += units_step_;
    if (unit_ < units_) return;
    unit_ -= units_;
    ++row_;
  }

 private:
  uint32_t units_;  // of a row
  uint32_t row_;
  uint32_t unit_;
  uint32_t rows_step_;
  uint32_t units_step_;
};

// The address, at the source, of an element of a block.
REFITD_COPY_CODE uint64_t SourceAt(const DeriveTask& task, uint32_t block, uint32_t row,
                                   uint32_t column) {
  return task.source + block * static_cast<uint64_t>(task.source_block) +
         row * static_cast<uint64_t>(task.source_row) +
         column * static_cast<uint64_t>(task.source_column);
}

REFITD_COPY_CODE bool HasRole(const DeriveTask& task, DerivedRole role) {
  return task.kind != static_cast<uint8_t>(DerivedKind::kCast) &&
         task.role == static_cast<uint8_t>(role);
}

// Whether all units that Amax and Store take of a task are whole vectors, at the source and where
// they are stored. StoreSmall needs this at the source alone.
REFITD_COPY_CODE bool IsWhole(const DeriveTask& task) {
  const uint32_t bytes = task.dtype == kFloat32 ? 4 : 2;
  const uint32_t stored = task.element_bytes;
  if (HasSmallBlocks(static_cast<DerivedKind>(task.kind))) {
    return task.source_column == bytes && task.first_column % kVector == 0 &&
           (task.source | static_cast<uint64_t>(task.source_row)) % kVector == 0;
  }
  // Scales are stored one by one.
  const bool scales = HasRole(task, DerivedRole::kScales);
  const uint32_t unit = scales ? kVector : kVector / (stored < bytes ? stored : bytes);
  uint64_t all = task.source | static_cast<uint64_t>(task.source_row) |
                 static_cast<uint64_t>(task.source_block) |
                 static_cast<uint64_t>(task.first_column * bytes);
  uint32_t columns = task.columns;
  if (!scales) {
    all |= task.destination | static_cast<uint64_t>(task.destination_row) |
           static_cast<uint64_t>(task.destination_block) |
           (task.index | static_cast<uint64_t>(task.index_row) |
            static_cast<uint64_t>(task.index_block)) *
               stored;
    columns |= task.window_columns;
    if (task.destination != 0 && task.destination_column != stored) return false;
  }
  return task.source_column == bytes && all % kVector == 0 && columns % unit == 0;
}

// The bits of the largest magnitude of this thread's elements of a block, as float32.
template <uint8_t kDType, bool kWhole>
REFITD_COPY_CODE uint32_t Amax(const DeriveTask& task, uint32_t block, uint32_t thread,
                               uint32_t threads) {
  constexpr uint32_t kLanes = kUnit<kDType, 1>;
  uint32_t largest = 0;
  Places places((task.columns + kLanes - 1) / kLanes, thread, threads);
  REFITD_DERIVE_UNROLL(unroll(kWhole ? 4 : 1))
  for (; places.row() < task.rows; places.Next()) {
    const uint32_t column = places.unit() * kLanes;
    Elements<kDType, kLanes> elements;
    elements.template Load<kWhole>(task, SourceAt(task, block, places.row(), column),
                                   task.columns - column);
    largest = elements.Largest(largest);
  }
  return AmaxOf<kDType>(largest);
}

// The value of CopyLaunch::fault that a block without a result leaves; the greatest stays. 0: none.
REFITD_COPY_CODE unsigned long long FaultOf(const DeriveTask& task, uint32_t block) {
  return (static_cast<unsigned long long>(task.piece) + 1) << 32 | (task.place + block);
}

// Stores `count` derived elements of kBytes each, from the low end of `v` on.
template <uint32_t kBytes>
REFITD_COPY_CODE void StorePart(const DeriveTask& task, uint64_t to, const Vector& v,
                                uint32_t count) {
  if (task.destination_column == kBytes) {
    copy_code::StoreBytes(to, v, 0, static_cast<int>(count * kBytes));
    return;
  }
  REFITD_COPY_UNROLL
  for (uint32_t i = 0; i < kVector / kBytes; ++i) {
    if (i >= count) break;
    const uint64_t at = to + i * static_cast<uint64_t>(task.destination_column);
    const uint32_t word = v.w[i * kBytes / 4] >> (8 * (i * kBytes % 4));
    if constexpr (kBytes == 1) copy_code::Store1(at, word & 0xff);
    if constexpr (kBytes == 2) copy_code::Store2(at, word & 0xffff);
    if constexpr (kBytes == 4) copy_code::Store4(at, word);
  }
}

// The derived elements of a unit from `first` on that fill a vector.
template <uint8_t kDType, uint32_t kBytes, bool kDivides, uint32_t kCount>
REFITD_COPY_CODE Vector Derived(const DeriveTask& task, const Elements<kDType, kCount>& elements,
                                uint32_t first, float factor) {
  [[maybe_unused]] const float reciprocal = 1.0F / factor;
  Vector v = {};
  if constexpr (kBytes == 1) {
    REFITD_COPY_UNROLL
    for (uint32_t i = 0; i < kVector; i += 2) {
      const float low = elements.Number(first + i);
      const float high = elements.Number(first + i + 1);
      const uint32_t pair = kDivides ? ToE4M3Pair(derive::Quotient(low, factor, reciprocal),
                                                  derive::Quotient(high, factor, reciprocal))
                                     : ToE4M3Pair(low * factor, high * factor);
      v.w[i / 4] |= pair << (8 * (i % 4));
    }
  } else {
    REFITD_COPY_UNROLL
    for (uint32_t i = 0; i < kVector / kBytes; ++i) {
      const float number = elements.Number(first + i);
      const uint32_t bits = kBytes == 4             ? derive::BitsOf(number)
                            : task.role == kFloat16 ? derive::ToFloat16(number)
                                                    : derive::ToBFloat16(number);
      v.w[i * kBytes / 4] |= bits << (8 * (i * kBytes % 4));
    }
  }
  return v;
}

// Stores this thread's part of a block's window, whose elements have kBytes, and returns its
// digest.
template <uint8_t kDType, bool kWhole, uint32_t kBytes, bool kDivides>
REFITD_COPY_CODE uint64_t StoreWindow(const DeriveTask& task, uint32_t block, float factor,
                                      const uint32_t* table, uint32_t thread, uint32_t threads) {
  constexpr uint32_t kCount = kUnit<kDType, kBytes>;
  constexpr uint32_t kLanes = kVector / kBytes;
  const bool digested = task.sum != kNoSum || task.proof_sum != kNoSum;
  const uint64_t to = task.destination + block * static_cast<uint64_t>(task.destination_block);
  const uint64_t index = task.index + block * static_cast<uint64_t>(task.index_block);
  copy_code::VectorDigest<kBytes> digest(table);
  Places places((task.window_columns + kCount - 1) / kCount, thread, threads);
  REFITD_DERIVE_UNROLL(unroll(kWhole ? 2 : 1))
  for (; places.row() < task.window_rows; places.Next()) {
    const uint32_t row = places.row();
    const uint32_t column = places.unit() * kCount;
    const uint32_t left = task.window_columns - column;
    Elements<kDType, kCount> elements;
    elements.template Load<kWhole>(
        task, SourceAt(task, block, task.first_row + row, task.first_column + column), left);
    REFITD_COPY_UNROLL
    for (uint32_t first = 0; first < kCount; first += kLanes) {
      if (!kWhole && first >= left) break;
      const uint32_t count = left - first < kLanes ? left - first : kLanes;
      const Vector v = Derived<kDType, kBytes, kDivides>(task, elements, first, factor);
      const uint64_t at = to + row * static_cast<uint64_t>(task.destination_row) +
                          (column + first) * static_cast<uint64_t>(task.destination_column);
      const uint64_t p = index + row * static_cast<uint64_t>(task.index_row) + column + first;
      if constexpr (kWhole) {
        if (task.destination != 0) copy_code::Store(at, v);
        if (digested) digest.AddWhole(v, p);
      } else {
        if (task.destination != 0) StorePart<kBytes>(task, at, v, count);
        if (digested) digest.AddPart(v, p, 0, static_cast<int>(count * kBytes));
      }
    }
  }
  return digest.sum();
}

// Stores the block's scale, by one thread, and returns its digest.
REFITD_COPY_CODE uint64_t StoreScale(const DeriveTask& task, uint32_t block,
                                     const derive::BlockScale& scale, const uint32_t* table,
                                     uint32_t thread) {
  if (thread != 0) return 0;
  const uint32_t bits = derive::StoredBits(static_cast<DerivedKind>(task.kind), scale);
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
template <uint8_t kDType, bool kWhole>
REFITD_COPY_CODE uint64_t Store(const DeriveTask& task, uint32_t block,
                                const derive::BlockScale& scale, const uint32_t* table,
                                uint32_t thread, uint32_t threads) {
  if (task.kind == static_cast<uint8_t>(DerivedKind::kCast)) {
    return task.element_bytes == 2
               ? StoreWindow<kDType, kWhole, 2, false>(task, block, 1, table, thread, threads)
               : StoreWindow<kDType, kWhole, 4, false>(task, block, 1, table, thread, threads);
  }
  if (HasRole(task, DerivedRole::kScales)) {
    return StoreScale(task, block, scale, table, thread);
  }
  return scale.divides ? StoreWindow<kDType, kWhole, 1, true>(task, block, scale.factor, table,
                                                              thread, threads)
                       : StoreWindow<kDType, kWhole, 1, false>(task, block, scale.factor, table,
                                                               thread, threads);
}

// Finds the scale of a small block, whose first element is at `at`.
template <uint8_t kDType, bool kWhole>
REFITD_COPY_CODE bool FindSmall(const DeriveTask& task, uint64_t at, derive::BlockScale* scale) {
  Elements<kDType, kSmallBlock> elements;
  elements.template Load<kWhole>(task, at, kSmallBlock);
  return derive::FindScale(static_cast<DerivedKind>(task.kind), AmaxOf<kDType>(elements.Largest(0)),
                           scale);
}

// Stores this thread's part of what is derived from small blocks. Returns its digest, and raises
// `fault` to FaultOf of a block without a result.
template <uint8_t kDType, bool kWhole>
REFITD_COPY_CODE uint64_t StoreSmall(const DeriveTask& task, const uint32_t* table, uint32_t thread,
                                     uint32_t threads, unsigned long long* fault) {
  const bool scales = HasRole(task, DerivedRole::kScales);
  const bool digested = task.sum != kNoSum || task.proof_sum != kNoSum;
  copy_code::VectorDigest<1> digest(table);
  // A unit is a vector of bytes: of values, or of scales.
  Places places((task.window_columns + kVector - 1) / kVector, thread, threads);
  REFITD_COPY_NO_UNROLL
  for (; places.row() < task.window_rows; places.Next()) {
    const uint32_t row = places.row();
    const uint32_t column = places.unit() * kVector;
    const uint32_t left = task.window_columns - column;
    const uint32_t count = left < kVector ? left : kVector;
    Vector v = {};
    REFITD_COPY_NO_UNROLL
    for (uint32_t done = 0; done < count;) {
      // The block of the next element, and how many elements of the unit it has.
      const uint32_t element =
          scales ? (column + done) * kSmallBlock : task.first_column + column + done;
      const uint32_t block = element / kSmallBlock;
      const uint32_t rest = scales ? 1 : (block + 1) * kSmallBlock - element;
      const uint32_t part = rest < count - done ? rest : count - done;
      const uint64_t at = SourceAt(task, 0, task.first_row + row, block * kSmallBlock);
      derive::BlockScale scale;
      if (!FindSmall<kDType, kWhole>(task, at, &scale)) {
        const auto number = static_cast<uint32_t>((task.first_row + row) *
                                                  static_cast<uint64_t>(task.source_block)) +
                            block;
        const unsigned long long of = FaultOf(task, number);
        if (of > *fault) *fault = of;
      }
      Vector made = {};
      if (scales) {
        made.w[0] = derive::StoredBits(static_cast<DerivedKind>(task.kind), scale);
      } else {
        Elements<kDType, kVector> elements;
        elements.template Load<kWhole>(task, SourceAt(task, 0, task.first_row + row, element),
                                       part);
        made = FirstBytes(Derived<kDType, 1, false>(task, elements, 0, scale.factor), part);
      }
      v = WithBytes(v, made, done);
      done += part;
    }
    const uint64_t at = task.destination + row * static_cast<uint64_t>(task.destination_row) +
                        column * static_cast<uint64_t>(task.destination_column);
    const uint64_t p = task.index + row * static_cast<uint64_t>(task.index_row) + column;
    if (task.destination != 0) {
      if (count == kVector && at % kVector == 0 && task.destination_column == 1) {
        copy_code::Store(at, v);
      } else {
        StorePart<1>(task, at, v, count);
      }
    }
    if (!digested) continue;
    if (count == kVector && p % kVector == 0) {
      digest.AddWhole(v, p);
    } else {
      digest.AddPart(v, p, 0, static_cast<int>(count));
    }
  }
  return digest.sum();
}

// Calls run.template operator()<kDType, kWhole>() with these.
template <typename Run>
REFITD_COPY_CODE auto Choose(uint8_t dtype, bool whole, const Run& run) {
  switch (dtype) {
    case kFloat32:
      return whole ? run.template operator()<kFloat32, true>()
                   : run.template operator()<kFloat32, false>();
    case kFloat16:
      return whole ? run.template operator()<kFloat16, true>()
                   : run.template operator()<kFloat16, false>();
    default:
      return whole ? run.template operator()<kBFloat16, true>()
                   : run.template operator()<kBFloat16, false>();
  }
}

}  // namespace refitd::derive_code

#endif  // REFITD_TRANSPORT_CUDA_DERIVE_CODE_H_
