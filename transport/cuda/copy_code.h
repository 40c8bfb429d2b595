// The code of the copy kernels: the work of one thread of a block for a copy task. nvcc compiles it
// for GPUs, and the host's compiler for copy_interpreter_testing.h, which runs thread after thread,
// so that tests without a GPU run it too.
//
// A run is handled in vectors of 16 bytes. They are aligned to the address that is stored to, or,
// in a pass that stores nothing, to the digest's index; the first and last vector of a run may be
// partial. The vectors of all runs of a task are numbered, and thread i takes numbers i, i +
// threads, ...: so short runs keep a block as busy as long ones. Digests are computed from the
// registers that are stored.
//
// Three loops share the work of runs. Line and QuickPass take whole vectors if source, destination
// and the digest's index are equally aligned: Line those of tasks with one run, or with equally
// aligned runs; QuickPass all others. SlowPass takes any vector: sources with another alignment are
// loaded as two aligned vectors and shifted, partial vectors are stored in parts, and elements of a
// vector may belong to two blocks of the digest. After Line or QuickPass, SlowPass takes only the
// ends of runs.
//
// Line handles most weights. On an H200, memory delivers a vector for each thread of a warp to a
// multiprocessor every 31 cycles. Line spends 53 instructions on a digested vector of 2-byte
// elements (50 for 1-byte elements, 37 for 4-byte elements; 11 more if there are several runs),
// QuickPass 120 to 172 (sm_90). Line does both passes of a task at once: the second load finds in a
// cache the bytes that the first load brought from memory.
//
// Elements that lie apart, such as gate and up that alternate in the last dimension, are runs of
// one element. GatherPass loads them one by one and stores whole vectors. ElementPass stores them
// one by one, so that the stores of a warp are beside one another; a vector for each thread, stored
// in parts, would touch as many lines of memory as there are threads.
//
// If digested elements are stored at addresses that are not multiples of the element size, aligned
// vectors would cut elements. Then vectors begin where the run begins, and stores are as narrow as
// that requires.
#ifndef REFITD_TRANSPORT_CUDA_COPY_CODE_H_
#define REFITD_TRANSPORT_CUDA_COPY_CODE_H_

#include <cstdint>

#include "transport/cuda/copy_task.h"

#if defined(__CUDACC__)
#define REFITD_COPY_CODE __device__ __forceinline__
#define REFITD_COPY_UNROLL _Pragma("unroll")
#define REFITD_COPY_NO_UNROLL _Pragma("unroll 1")
#else
#define REFITD_COPY_CODE inline
#define REFITD_COPY_UNROLL
#define REFITD_COPY_NO_UNROLL
#endif

// Loads of whole aligned vectors read bytes beside a run (copy_task.h), which the sanitizer must
// not report.
#if defined(__SANITIZE_ADDRESS__)
#define REFITD_COPY_LOAD __attribute__((no_sanitize_address, noinline))
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define REFITD_COPY_LOAD __attribute__((no_sanitize("address", "thread"), noinline))
#endif
#endif
#if !defined(REFITD_COPY_LOAD)
#define REFITD_COPY_LOAD inline
#endif

namespace refitd::copy_code {

constexpr uint32_t kVector = 16;       // bytes
constexpr uint32_t kDigestBlock = 64;  // elements

struct Vector {
  uint32_t w[4];
};

// ---- memory ----

#if defined(__CUDACC__)

// Sources are written before the launch, so loading by the non-coherent path is safe.
template <bool kOnce>
REFITD_COPY_CODE Vector Load(uint64_t address) {
  Vector v;
  if constexpr (kOnce) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(address));
  } else {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(address));
  }
  return v;
}

REFITD_COPY_CODE uint32_t Load4(uint64_t address) {
  uint32_t x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(address));
  return x;
}
REFITD_COPY_CODE uint32_t Load2(uint64_t address) {
  uint16_t x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(address));
  return x;
}
REFITD_COPY_CODE uint32_t Load1(uint64_t address) {
  uint16_t x;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=h"(x) : "l"(address));
  return x;
}

REFITD_COPY_CODE void Store(uint64_t address, const Vector& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.w[0]),
               "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}
// A copy without a digest is 1% faster if what it stores may stay in the L2 cache.
template <bool kMayStay>
REFITD_COPY_CODE void StoreWhole(uint64_t address, const Vector& v) {
  if constexpr (kMayStay) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.w[0]),
                 "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
                 : "memory");
  } else {
    Store(address, v);
  }
}
REFITD_COPY_CODE void Store8(uint64_t address, uint32_t low, uint32_t high) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(low), "r"(high)
               : "memory");
}
REFITD_COPY_CODE void Store4(uint64_t address, uint32_t x) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
REFITD_COPY_CODE void Store2(uint64_t address, uint32_t x) {
  asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(address), "h"(static_cast<uint16_t>(x))
               : "memory");
}
REFITD_COPY_CODE void Store1(uint64_t address, uint32_t x) {
  asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(address), "h"(static_cast<uint16_t>(x & 0xff))
               : "memory");
}

REFITD_COPY_CODE uint32_t ShiftRight(uint32_t low, uint32_t high, uint32_t bits) {
  return __funnelshift_r(low, high, bits);
}
REFITD_COPY_CODE uint32_t MultiplyHigh(uint32_t a, uint32_t b) { return __umulhi(a, b); }
REFITD_COPY_CODE uint32_t DotBytes(uint32_t a, uint32_t b, uint32_t sum) {
  return __dp4a(a, b, sum);
}

#else

// Refuses unaligned addresses as the GPU does, since the host's own stores would accept them.
inline void CheckAligned(uint64_t address, uint64_t bytes) {
  if (address % bytes != 0) __builtin_trap();
}

template <bool kOnce>
REFITD_COPY_LOAD Vector Load(uint64_t address) {
  CheckAligned(address, kVector);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): tasks hold addresses of the device
  const volatile uint32_t* const from = reinterpret_cast<const uint32_t*>(address);
  return {{from[0], from[1], from[2], from[3]}};
}

template <typename Word>
inline uint32_t LoadWord(uint64_t address) {
  CheckAligned(address, sizeof(Word));
  // NOLINTNEXTLINE(performance-no-int-to-ptr): as above
  return *reinterpret_cast<const volatile Word*>(address);
}
inline uint32_t Load4(uint64_t address) { return LoadWord<uint32_t>(address); }
inline uint32_t Load2(uint64_t address) { return LoadWord<uint16_t>(address); }
inline uint32_t Load1(uint64_t address) { return LoadWord<uint8_t>(address); }

template <typename Word>
inline void StoreWord(uint64_t address, Word x) {
  CheckAligned(address, sizeof(Word));
  // NOLINTNEXTLINE(performance-no-int-to-ptr): as above
  __builtin_memcpy(reinterpret_cast<void*>(address), &x, sizeof(x));
}
inline void Store(uint64_t address, const Vector& v) { StoreWord(address, v); }
template <bool kMayStay>
inline void StoreWhole(uint64_t address, const Vector& v) {
  Store(address, v);
}
inline void Store8(uint64_t address, uint32_t low, uint32_t high) {
  StoreWord(address, uint64_t{high} << 32 | low);
}
inline void Store4(uint64_t address, uint32_t x) { StoreWord(address, x); }
inline void Store2(uint64_t address, uint32_t x) { StoreWord(address, static_cast<uint16_t>(x)); }
inline void Store1(uint64_t address, uint32_t x) { StoreWord(address, static_cast<uint8_t>(x)); }

inline uint32_t ShiftRight(uint32_t low, uint32_t high, uint32_t bits) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> bits);
}
inline uint32_t MultiplyHigh(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
// Returns `sum` plus the four products of the bytes of `a` and `b`.
inline uint32_t DotBytes(uint32_t a, uint32_t b, uint32_t sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 0xff) * (b >> shift & 0xff);
  return sum;
}

#endif

// Returns bytes [n, n + 16) of `a` followed by `b`; n < 16.
REFITD_COPY_CODE Vector Shifted(const Vector& a, const Vector& b, uint32_t n) {
  uint32_t x[8] = {a.w[0], a.w[1], a.w[2], a.w[3], b.w[0], b.w[1], b.w[2], b.w[3]};
  REFITD_COPY_UNROLL
  for (int i = 0; i < 6; ++i) x[i] = (n & 8) != 0 ? x[i + 2] : x[i];
  REFITD_COPY_UNROLL
  for (int i = 0; i < 5; ++i) x[i] = (n & 4) != 0 ? x[i + 1] : x[i];
  Vector v;
  REFITD_COPY_UNROLL
  for (int i = 0; i < 4; ++i) v.w[i] = ShiftRight(x[i], x[i + 1], 8 * (n & 3));
  return v;
}

// Stores bytes [low, high) of `v`, whose byte 0 belongs at `address`, as widely as addresses allow.
REFITD_COPY_CODE void StoreBytes(uint64_t address, Vector v, int low, int high) {
  v = Shifted(v, Vector{}, static_cast<uint32_t>(low));
  uint64_t at = address + static_cast<uint64_t>(low);
  REFITD_COPY_NO_UNROLL
  for (int left = high - low; left > 0;) {
    if (at % 8 == 0 && left >= 8) {
      Store8(at, v.w[0], v.w[1]);
      v = {{v.w[2], v.w[3], 0, 0}};
      at += 8;
      left -= 8;
      continue;
    }
    uint32_t bytes = 1;
    if (at % 4 == 0 && left >= 4) {
      Store4(at, v.w[0]);
      v = {{v.w[1], v.w[2], v.w[3], 0}};
      at += 4;
      left -= 4;
      continue;
    }
    if (at % 2 == 0 && left >= 2) {
      Store2(at, v.w[0]);
      bytes = 2;
    } else {
      Store1(at, v.w[0]);
    }
    v = {{ShiftRight(v.w[0], v.w[1], 8 * bytes), ShiftRight(v.w[1], v.w[2], 8 * bytes),
          ShiftRight(v.w[2], v.w[3], 8 * bytes), v.w[3] >> (8 * bytes)}};
    at += bytes;
    left -= static_cast<int>(bytes);
  }
}

// ---- digests (transport/digest/digest.h) ----

REFITD_COPY_CODE constexpr uint64_t SplitMix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Returns kDigestT[i].
REFITD_COPY_CODE constexpr uint32_t DigestConstant(uint32_t i) {
  return static_cast<uint32_t>(SplitMix64(~uint64_t{i}) >> 32) | 1;
}

// Passes use a table of these words. First come the constants, then the constants' bytes in the
// order in which DotBytes takes them: of each four constants the lowest bytes, then the second
// bytes, and so on.
constexpr uint32_t kTableWords = 2 * kDigestBlock;
REFITD_COPY_CODE constexpr uint32_t TableWord(uint32_t i) {
  if (i < kDigestBlock) return DigestConstant(i);
  const uint32_t first = (i - kDigestBlock) / 4 * 4;
  const uint32_t shift = 8 * (i % 4);
  uint32_t word = 0;
  for (uint32_t k = 0; k < 4; ++k) word |= (DigestConstant(first + k) >> shift & 0xff) << (8 * k);
  return word;
}

REFITD_COPY_CODE uint64_t BlockFactor(uint64_t block) { return SplitMix64(block) | 1; }

// The constants of one vector's elements of kBytes bytes.
template <int kBytes>
class LaneConstants {
 public:
  static constexpr uint32_t kLanes = kVector / kBytes;

  // Loads the constants of elements [at, at + kLanes) of a block.
  REFITD_COPY_CODE void Fetch(const uint32_t* table, uint32_t at) {
    ones_ = 0;
    REFITD_COPY_UNROLL
    for (uint32_t i = 0; i < kLanes; ++i) ones_ += table[at + i];
    const uint32_t from = kBytes == 1 ? kDigestBlock + at : at;
    REFITD_COPY_UNROLL
    for (uint32_t i = 0; i < kLanes; ++i) t_[i] = table[from + i];
  }

  // Returns the sum of (bits + 1) * t over the vector's elements.
  REFITD_COPY_CODE uint64_t Sum(const Vector& v) const {
    if constexpr (kBytes == 1) {
      // DotBytes makes four products in one instruction; no sum exceeds 16 * 255 * 255.
      uint32_t sums[4] = {};
      REFITD_COPY_UNROLL
      for (uint32_t i = 0; i < kLanes; ++i) sums[i % 4] = DotBytes(v.w[i / 4], t_[i], sums[i % 4]);
      return ones_ + (sums[0] + (sums[1] << 8)) + uint64_t{sums[2] + (sums[3] << 8)} * 0x10000;
    } else {
      uint64_t sum = ones_;
      REFITD_COPY_UNROLL
      for (uint32_t i = 0; i < kLanes; ++i) sum += uint64_t{Lane(v, i)} * t_[i];
      return sum;
    }
  }

 private:
  static REFITD_COPY_CODE uint32_t Lane(const Vector& v, uint32_t i) {
    if constexpr (kBytes == 4) return v.w[i];
    return i % 2 == 0 ? v.w[i / 2] & 0xffff : v.w[i / 2] >> 16;
  }

  uint32_t t_[kLanes] = {};  // for single bytes, from the table's second half
  uint64_t ones_ = 0;        // sum of the constants: (bits + 1) * t = bits * t + t
};

// Adds up the digests of vectors of elements of kBytes bytes. Each vector comes with the index of
// the element in its byte 0, which may be before the run, and even before 0.
template <int kBytes>
class VectorDigest {
 public:
  static constexpr uint32_t kLanes = kVector / kBytes;

  // `table` has kTableWords words.
  REFITD_COPY_CODE explicit VectorDigest(const uint32_t* table) : table_(table) {}

  // Adds a whole vector; p is a multiple of kLanes.
  REFITD_COPY_CODE void AddWhole(const Vector& v, uint64_t p) {
    const uint32_t at = static_cast<uint32_t>(p) % kDigestBlock;
    // In long runs a thread uses the same constants again and again.
    if (at != at_) constants_.Fetch(table_, at_ = at);
    sum_ += constants_.Sum(v) * BlockFactor(p / kDigestBlock);
  }

  // Adds the elements in bytes [low, high) of `v`.
  REFITD_COPY_CODE void AddPart(const Vector& v, uint64_t p, int low, int high) {
    Vector rest = Shifted(v, Vector{}, static_cast<uint32_t>(low));
    p += static_cast<uint64_t>(low / kBytes);
    uint64_t sum = 0;
    REFITD_COPY_NO_UNROLL
    for (int left = (high - low) / kBytes; left > 0; --left) {
      const uint32_t at = static_cast<uint32_t>(p) % kDigestBlock;
      sum += (uint64_t{rest.w[0] & kMask} + 1) * table_[at];
      if (left == 1 || at == kDigestBlock - 1) {
        sum_ += sum * BlockFactor(p / kDigestBlock);
        sum = 0;
      }
      ++p;
      if constexpr (kBytes == 4) {
        rest = {{rest.w[1], rest.w[2], rest.w[3], 0}};
      } else {
        constexpr uint32_t kBits = 8 * kBytes;
        rest = {{ShiftRight(rest.w[0], rest.w[1], kBits), ShiftRight(rest.w[1], rest.w[2], kBits),
                 ShiftRight(rest.w[2], rest.w[3], kBits), rest.w[3] >> kBits}};
      }
    }
  }

  // Adds a sum that was computed elsewhere.
  REFITD_COPY_CODE void AddSum(uint64_t sum) { sum_ += sum; }
  REFITD_COPY_CODE uint64_t sum() const { return sum_; }

 private:
  static constexpr uint32_t kMask = kBytes == 4 ? ~0U : (1U << (8 * (kBytes % 4))) - 1;

  const uint32_t* const table_;
  LaneConstants<kBytes> constants_;
  uint32_t at_ = ~0U;
  uint64_t sum_ = 0;
};

template <>
class LaneConstants<0> {};

template <>
class VectorDigest<0> {
 public:
  static constexpr uint32_t kLanes = kVector;

  REFITD_COPY_CODE explicit VectorDigest(const uint32_t* /*table*/) {}
  REFITD_COPY_CODE void AddWhole(const Vector& /*v*/, uint64_t /*p*/) {}
  REFITD_COPY_CODE void AddPart(const Vector& /*v*/, uint64_t /*p*/, int /*low*/, int /*high*/) {}
  REFITD_COPY_CODE void AddSum(uint64_t /*sum*/) {}
  REFITD_COPY_CODE uint64_t sum() const { return 0; }
};

// ---- one pass over a task ----

// Divides by multiplying with an inverse. The result is exact for n and d of at most 2^16.
struct Divisor {
  uint32_t d;
  uint32_t inverse;
  REFITD_COPY_CODE explicit Divisor(uint32_t divisor) : d(divisor), inverse(~0U / divisor + 1) {}
  REFITD_COPY_CODE uint32_t Divide(uint32_t n) const {
    return d == 1 ? n : MultiplyHigh(n, inverse);
  }
};

// The place of one vector.
struct Place {
  uint64_t from;  // of its byte 0
  uint64_t to;
  uint64_t p;  // of the element in its byte 0
  int low;     // bytes [low, high) belong to the run; none if high <= low
  int high;
};

// The bytes that a pass reads, and how it cuts them into vectors.
struct PassShape {
  uint64_t from;     // task.source or task.proof
  uint32_t run;      // bytes
  uint32_t vectors;  // of a run, at most
  uint32_t runs;
  uint64_t grid;  // 15: vectors are aligned; 0: they begin with the run
  bool quick;     // QuickPass can take whole vectors
  bool ends;      // there may be partial vectors
  int dims;       // number of dimensions to distinguish: 0, 1 or kTaskDims
};

// Whether `base`, and the steps in each dimension, are multiples of `of`.
REFITD_COPY_CODE bool Multiple(const CopyTask& task, uint64_t base, const uint64_t* step,
                               uint64_t of) {
  bool yes = base % of == 0;
  REFITD_COPY_UNROLL
  for (int d = 0; d < kTaskDims; ++d) yes = yes && (task.count[d] == 1 || step[d] % of == 0);
  return yes;
}

// The bytes of an element, within which runs must not be cut. As everywhere in this file, kDigest
// is the size in bytes of the elements to digest; 0: no digest.
template <int kDigest>
inline constexpr uint64_t kElementBytes = kDigest;
template <>
inline constexpr uint64_t kElementBytes<0> = 1;

template <int kDigest, bool kStore>
REFITD_COPY_CODE PassShape MakeShape(const CopyTask& task, uint64_t from) {
  constexpr uint64_t kElement = kElementBytes<kDigest>;
  // The address or index to which vectors are aligned, and the others whose alignment must be
  // equal.
  const uint64_t base = kStore ? task.destination : task.index * kElement;
  uint64_t step[kTaskDims];
  uint64_t source[kTaskDims];
  uint64_t index[kTaskDims];
  REFITD_COPY_UNROLL
  for (int d = 0; d < kTaskDims; ++d) {
    const uint64_t index_step = static_cast<uint64_t>(task.index_step[d]) * kElement;
    step[d] = kStore ? static_cast<uint64_t>(task.destination_step[d]) : index_step;
    source[d] = static_cast<uint64_t>(task.source_step[d]) - step[d];
    index[d] = index_step - step[d];
  }
  PassShape shape;
  shape.from = from;
  shape.run = task.run * task.element_bytes;
  const bool whole = Multiple(task, base, step, kElement);
  const bool alike = Multiple(task, 0, step, kVector);  // all runs have the same alignment
  shape.grid = whole ? kVector - 1 : 0;
  const auto before = static_cast<uint32_t>(base % kVector);
  uint32_t most = 0;  // bytes of a first vector that lie before the run
  if (whole) most = alike ? before : kVector - static_cast<uint32_t>(kElement);
  shape.vectors = (most + shape.run + kVector - 1) / kVector;
  shape.runs = uint32_t{task.count[0]} * task.count[1] * task.count[2];
  shape.quick = whole && Multiple(task, from - base, source, kVector) &&
                (kDigest == 0 || Multiple(task, task.index * kElement - base, index, kVector));
  shape.ends = !shape.quick || !alike || before != 0 || shape.run % kVector != 0;
  shape.dims = task.count[0] > 1 || task.count[1] > 1 ? kTaskDims : task.count[2] > 1 ? 1 : 0;
  return shape;
}

template <int kDigest, bool kStore>
class Locator {
 public:
  REFITD_COPY_CODE Locator(const CopyTask& task, const PassShape& shape)
      : task_(task), shape_(shape), count1_(task.count[1]), count2_(task.count[2]) {}

  REFITD_COPY_CODE Place At(uint32_t run, uint32_t vector) const {
    Place place = {shape_.from, task_.destination, task_.index, 0, 0};
    const uint32_t rest = count2_.Divide(run);
    const uint32_t slowest = count1_.Divide(rest);
    Step(2, run - rest * count2_.d, &place);
    Step(1, rest - slowest * count1_.d, &place);
    Step(0, slowest, &place);
    const uint64_t base = kStore ? place.to : place.p * kElementBytes<kDigest>;
    const auto before = static_cast<int>(base & shape_.grid);
    const int at = static_cast<int>(vector * kVector) - before;
    const int left = static_cast<int>(shape_.run) - at;
    place.low = at < 0 ? -at : 0;
    place.high = left < static_cast<int>(kVector) ? left : static_cast<int>(kVector);
    place.from += static_cast<uint64_t>(int64_t{at});
    place.to += static_cast<uint64_t>(int64_t{at});
    if constexpr (kDigest != 0) place.p += static_cast<uint64_t>(int64_t{at / kDigest});
    return place;
  }

 private:
  REFITD_COPY_CODE void Step(int d, uint32_t times, Place* place) const {
    place->from += times * static_cast<uint64_t>(task_.source_step[d]);
    if constexpr (kStore) place->to += times * static_cast<uint64_t>(task_.destination_step[d]);
    if constexpr (kDigest != 0) place->p += times * static_cast<uint64_t>(task_.index_step[d]);
  }

  const CopyTask& task_;
  const PassShape& shape_;
  const Divisor count1_;
  const Divisor count2_;
};

// The tasks that a Line takes: one run, or runs at a regular distance.
enum class LineKind : uint8_t { kNone, kRun, kRuns };

// Says which of these kinds the task is; kNone: a Line does not take it. All vectors of one thread
// must have the same position in blocks of the digest, and with several runs all vectors must be
// whole.
template <int kDigest>
REFITD_COPY_CODE LineKind LineOf(const CopyTask& task, const PassShape& shape, uint32_t threads) {
  constexpr uint32_t kLanes = kVector / kElementBytes<kDigest>;
  if (!shape.quick || (kDigest != 0 && threads * kLanes % kDigestBlock != 0)) {
    return LineKind::kNone;
  }
  if (shape.dims == 0) return LineKind::kRun;
  const bool alike =
      kDigest == 0 || (task.run % kDigestBlock == 0 && task.index_step[2] % kDigestBlock == 0);
  return shape.dims == 1 && !shape.ends && alike ? LineKind::kRuns : LineKind::kNone;
}

// The position of a vector, or its distance from another vector.
struct LinePlace {
  uint64_t from = 0;
  uint64_t to = 0;
  uint64_t block = 0;  // of the digest

  REFITD_COPY_CODE void Add(const LinePlace& distance) {
    from += distance.from;
    to += distance.to;
    block += distance.block;
  }
};

// Handles one thread's whole vectors of a task, with little computation for each vector besides its
// digest. With kProof it does both passes at once: it stores one vector and loads another at
// `proof`; their digests share the factors of their blocks. kRuns is true if LineOf(task) is
// LineKind::kRuns.
template <bool kRuns, int kDigest, bool kStore, bool kProof>
class Line {
 public:
  REFITD_COPY_CODE Line(const CopyTask& task, const PassShape& shape, const uint32_t* table,
                        uint32_t thread, uint32_t threads)
      : proof_(task.proof - shape.from) {
    const uint64_t base = kStore ? task.destination : task.index * kElementBytes<kDigest>;
    const auto before = static_cast<uint32_t>(base % kVector);
    const uint32_t first = (before != 0 ? 1 : 0) + thread;
    run_ = (before + shape.run) / kVector;
    // With one run, step_runs is 0 and rest_ is `threads`.
    const uint32_t step_runs = kRuns ? threads / run_ : 0;
    rest_ = threads - step_runs * run_;
    step_ = Distance(task, step_runs, rest_);
    wrap_ = Distance(task, 1, -int64_t{run_});
    const uint32_t end = kRuns ? run_ * shape.runs : run_;
    if (first >= end) return;
    left_ = (end - first - 1) / threads + 1;
    const uint32_t runs = kRuns ? first / run_ : 0;
    at_ = first - runs * run_;
    next_ = {shape.from - before, task.destination - before, 0};
    next_.Add(Distance(task, runs, at_));
    if constexpr (kDigest != 0) {
      const uint64_t p = task.index - before / kDigest + Elements(task, runs, at_);
      next_.block = p / kDigestBlock;
      constants_.Fetch(table, static_cast<uint32_t>(p) % kDigestBlock);
    }
  }

  REFITD_COPY_CODE void Run() {
    REFITD_COPY_NO_UNROLL
    for (; left_ >= kMany; left_ -= kMany) Step<true>();
    if (left_ > 0) Step<false>();
  }

  REFITD_COPY_CODE uint64_t sum() const { return sum_; }
  REFITD_COPY_CODE uint64_t proof_sum() const { return proof_sum_; }

 private:
  // The number of vectors loaded at once, to hide the latency of memory. If vectors are also stored
  // and digested, more loads make it slower.
  static constexpr uint32_t kMany = kStore && kDigest != 0 ? 4 : 8;
  // Whether loads bypass the L1 cache; a copy without a digest is 2% faster through it.
  static constexpr bool kOnce = !kStore || kProof;

  template <bool kAll>
  REFITD_COPY_CODE void Step() {
    Vector v[kMany];
    Vector proof[kMany];
    LinePlace at[kMany];
    REFITD_COPY_UNROLL
    for (uint32_t u = 0; u < kMany; ++u) {
      if (!kAll && u >= left_) break;
      at[u] = next_;
      v[u] = Load<kOnce>(next_.from);
      if constexpr (kProof) proof[u] = Load<kOnce>(next_.from + proof_);
      Advance();
    }
    REFITD_COPY_UNROLL
    for (uint32_t u = 0; u < kMany; ++u) {
      if (!kAll && u >= left_) break;
      if constexpr (kStore) StoreWhole<kDigest == 0>(at[u].to, v[u]);
      if constexpr (kDigest != 0) {
        const uint64_t factor = BlockFactor(at[u].block);
        sum_ += constants_.Sum(v[u]) * factor;
        if constexpr (kProof) proof_sum_ += constants_.Sum(proof[u]) * factor;
      }
    }
  }

  REFITD_COPY_CODE void Advance() {
    next_.Add(step_);
    if constexpr (kRuns) {
      at_ += rest_;
      if (at_ < run_) return;
      at_ -= run_;
      next_.Add(wrap_);
    }
  }

  static REFITD_COPY_CODE uint64_t Elements(const CopyTask& task, int64_t runs, int64_t vectors) {
    constexpr int64_t kLanes = kVector / kElementBytes<kDigest>;
    return static_cast<uint64_t>(runs * task.index_step[2] + vectors * kLanes);
  }

  // The distance of that many runs and vectors. This thread only moves by multiples of the digest's
  // blocks.
  static REFITD_COPY_CODE LinePlace Distance(const CopyTask& task, int64_t runs, int64_t vectors) {
    const int64_t bytes = vectors * kVector;
    LinePlace distance;
    distance.from = static_cast<uint64_t>(runs * task.source_step[2] + bytes);
    if constexpr (kStore) {
      distance.to = static_cast<uint64_t>(runs * task.destination_step[2] + bytes);
    }
    if constexpr (kDigest != 0) {
      const auto elements = static_cast<int64_t>(Elements(task, runs, vectors));
      distance.block = static_cast<uint64_t>(elements / int64_t{kDigestBlock});
    }
    return distance;
  }

  const uint64_t proof_;  // how far from the source
  uint32_t run_ = 0;      // vectors of a run
  uint32_t left_ = 0;     // vectors of this thread
  LinePlace next_;        // the next vector, and its number in its run
  uint32_t at_ = 0;
  LinePlace step_;  // to the one after it, rest_ further in its run
  uint32_t rest_ = 0;
  LinePlace wrap_;  // from the end of a run to the beginning of the next run
  LaneConstants<kDigest> constants_;
  uint64_t sum_ = 0;
  uint64_t proof_sum_ = 0;
};

template <int kDigest, bool kStore>
REFITD_COPY_CODE void QuickPass(const CopyTask& task, const PassShape& shape, uint32_t thread,
                                uint32_t threads, VectorDigest<kDigest>* digest) {
  // The number of loads that one thread has in flight.
  constexpr int kUnroll = kDigest == 0 ? 8 : 4;
  const Locator<kDigest, kStore> locator(task, shape);
  const Divisor vectors(shape.vectors);
  const uint32_t items = shape.vectors * shape.runs;
  REFITD_COPY_NO_UNROLL
  for (uint32_t first = thread; first < items; first += kUnroll * threads) {
    bool whole[kUnroll];
    uint64_t to[kUnroll];
    uint64_t p[kUnroll];
    Vector v[kUnroll];
    REFITD_COPY_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t item = first + static_cast<uint32_t>(u) * threads;
      const uint32_t run = vectors.Divide(item);
      const Place place = locator.At(run, item - run * vectors.d);
      whole[u] = item < items && place.low == 0 && place.high == static_cast<int>(kVector);
      to[u] = place.to;
      p[u] = place.p;
      if (whole[u]) v[u] = Load<true>(place.from);
    }
    REFITD_COPY_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      if (!whole[u]) continue;
      if constexpr (kStore) Store(to[u], v[u]);
      digest->AddWhole(v[u], p[u]);
    }
  }
}

// The partial vectors of a run are among this number of vectors: its first, and the last two of all
// the vectors that it may have.
constexpr uint32_t kEnds = 3;

template <int kDigest, bool kStore>
REFITD_COPY_CODE void SlowPass(const CopyTask& task, const PassShape& shape, uint32_t thread,
                               uint32_t threads, VectorDigest<kDigest>* digest) {
  const Locator<kDigest, kStore> locator(task, shape);
  const bool ends = shape.quick && shape.vectors > kEnds;
  const Divisor each(ends ? kEnds : shape.vectors);
  const uint32_t items = each.d * shape.runs;
  REFITD_COPY_NO_UNROLL
  for (uint32_t item = thread; item < items; item += threads) {
    const uint32_t run = each.Divide(item);
    uint32_t vector = item - run * each.d;
    if (ends && vector > 0) vector = shape.vectors - vector;
    const Place place = locator.At(run, vector);
    const bool whole = place.low == 0 && place.high == static_cast<int>(kVector);
    if (place.low >= place.high || (shape.quick && whole)) continue;
    // An aligned vector that has no byte of the run may lie in memory that is not accessible.
    const auto shift = static_cast<uint32_t>(place.from % kVector);
    const int split = static_cast<int>(kVector - shift);
    Vector v = {};
    Vector next = {};
    if (place.low < split) v = Load<false>(place.from - shift);
    if (place.high > split) next = Load<false>(place.from - shift + kVector);
    v = Shifted(v, next, shift);
    if constexpr (kStore) {
      if (whole && place.to % kVector == 0) {
        Store(place.to, v);
      } else {
        StoreBytes(place.to, v, place.low, place.high);
      }
    }
    if (kDigest != 0 && whole && place.p % VectorDigest<kDigest>::kLanes == 0) {
      digest->AddWhole(v, place.p);
    } else {
      digest->AddPart(v, place.p, place.low, place.high);
    }
  }
}

template <int kDigest, bool kStore>
REFITD_COPY_CODE uint64_t Pass(const CopyTask& task, uint64_t from, const uint32_t* table,
                               uint32_t thread, uint32_t threads) {
  const PassShape shape = MakeShape<kDigest, kStore>(task, from);
  VectorDigest<kDigest> digest(table);
  switch (LineOf<kDigest>(task, shape, threads)) {
    case LineKind::kRun: {
      Line<false, kDigest, kStore, false> line(task, shape, table, thread, threads);
      line.Run();
      digest.AddSum(line.sum());
      break;
    }
    case LineKind::kRuns: {
      Line<true, kDigest, kStore, false> line(task, shape, table, thread, threads);
      line.Run();
      digest.AddSum(line.sum());
      break;
    }
    default:
      if (shape.quick) QuickPass<kDigest, kStore>(task, shape, thread, threads, &digest);
  }
  if (shape.ends) SlowPass<kDigest, kStore>(task, shape, thread, threads, &digest);
  return digest.sum();
}

// ---- elements that lie apart (LiesApart) ----

template <int kBytes>
REFITD_COPY_CODE uint32_t LoadElement(uint64_t address) {
  if constexpr (kBytes == 1) return Load1(address);
  if constexpr (kBytes == 2) return Load2(address);
  return Load4(address);
}

template <int kBytes>
REFITD_COPY_CODE void StoreElement(uint64_t address, uint32_t x) {
  if constexpr (kBytes == 1) {
    Store1(address, x);
  } else if constexpr (kBytes == 2) {
    Store2(address, x);
  } else {
    Store4(address, x);
  }
}

// The distance of `slowest`, `middle` and `last` steps in the three dimensions.
REFITD_COPY_CODE uint64_t Distance(const int64_t* step, uint32_t slowest, uint32_t middle,
                                   uint32_t last) {
  return slowest * static_cast<uint64_t>(step[0]) + middle * static_cast<uint64_t>(step[1]) +
         last * static_cast<uint64_t>(step[2]);
}

// Whether `base` and the steps of the two slower dimensions are multiples of `of`.
REFITD_COPY_CODE bool RowsMultiple(const CopyTask& task, uint64_t base, const int64_t* step,
                                   uint64_t of) {
  return base % of == 0 && (task.count[0] == 1 || static_cast<uint64_t>(step[0]) % of == 0) &&
         (task.count[1] == 1 || static_cast<uint64_t>(step[1]) % of == 0);
}

// Whether the fastest dimension consists of whole vectors, both where they are stored and in blocks
// of the digest.
template <int kBytes, bool kDigested, bool kStore>
REFITD_COPY_CODE bool Gathers(const CopyTask& task) {
  constexpr uint32_t kLanes = kVector / kBytes;
  if (task.count[2] % kLanes != 0) return false;
  if (kStore && (task.destination_step[2] != kBytes ||
                 !RowsMultiple(task, task.destination, task.destination_step, kVector))) {
    return false;
  }
  return !kDigested ||
         (task.index_step[2] == 1 && RowsMultiple(task, task.index, task.index_step, kLanes));
}

// Handles whole vectors whose elements lie apart, or together, at `from`.
template <int kBytes, bool kDigested, bool kStore>
REFITD_COPY_CODE uint64_t GatherPass(const CopyTask& task, uint64_t from, const uint32_t* table,
                                     uint32_t thread, uint32_t threads) {
  constexpr uint32_t kLanes = kVector / kBytes;
  constexpr uint32_t kInWord = 4 / kBytes;
  constexpr uint32_t kMany = kBytes == 1 ? 1 : 2;  // vectors at once: 16 loads in flight at most
  const Divisor count1(task.count[1]);
  const Divisor vectors(task.count[2] / kLanes);
  const uint32_t items = task.count[0] * count1.d * vectors.d;
  const bool together =
      task.source_step[2] == kBytes && RowsMultiple(task, from, task.source_step, kVector);
  VectorDigest<kDigested ? kBytes : 0> digest(table);
  REFITD_COPY_NO_UNROLL
  for (uint32_t first = thread; first < items; first += kMany * threads) {
    Vector v[kMany];
    uint64_t to[kMany];
    uint64_t p[kMany];
    REFITD_COPY_UNROLL
    for (uint32_t u = 0; u < kMany; ++u) {
      const uint32_t item = first + u * threads;
      if (item >= items) break;
      const uint32_t row = vectors.Divide(item);
      const uint32_t slowest = count1.Divide(row);
      const uint32_t middle = row - slowest * count1.d;
      const uint32_t last = (item - row * vectors.d) * kLanes;
      const uint64_t at = from + Distance(task.source_step, slowest, middle, last);
      to[u] = task.destination + Distance(task.destination_step, slowest, middle, last);
      p[u] = task.index + Distance(task.index_step, slowest, middle, last);
      if (together) {
        v[u] = Load<true>(at);
        continue;
      }
      const auto step = static_cast<uint64_t>(task.source_step[2]);
      uint32_t x[kLanes];
      REFITD_COPY_UNROLL
      for (uint32_t i = 0; i < kLanes; ++i) x[i] = LoadElement<kBytes>(at + i * step);
      REFITD_COPY_UNROLL
      for (uint32_t w = 0; w < 4; ++w) {
        v[u].w[w] = 0;
        REFITD_COPY_UNROLL
        for (uint32_t i = 0; i < kInWord; ++i) v[u].w[w] |= x[w * kInWord + i] << (8 * kBytes * i);
      }
    }
    REFITD_COPY_UNROLL
    for (uint32_t u = 0; u < kMany; ++u) {
      if (first + u * threads >= items) break;
      if constexpr (kStore) Store(to[u], v[u]);
      digest.AddWhole(v[u], p[u]);
    }
  }
  return digest.sum();
}

// The position of an element, or its distance from another element.
struct ElementPlace {
  uint64_t from = 0;
  uint64_t to = 0;
  uint64_t p = 0;

  // The distance of `rows` steps in the middle dimension and `last` steps in the fastest.
  static REFITD_COPY_CODE ElementPlace Distance(const CopyTask& task, int64_t rows, int64_t last) {
    return {
        static_cast<uint64_t>(rows * task.source_step[1] + last * task.source_step[2]),
        static_cast<uint64_t>(rows * task.destination_step[1] + last * task.destination_step[2]),
        static_cast<uint64_t>(rows * task.index_step[1] + last * task.index_step[2])};
  }
  REFITD_COPY_CODE void Add(const ElementPlace& distance) {
    from += distance.from;
    to += distance.to;
    p += distance.p;
  }
};

// Handles elements one by one. Threads that run together take elements beside one another. If the
// dimension is long, each thread takes two elements of the same block of the digest, because the
// block's factor costs more than the elements.
template <int kBytes, bool kDigested, bool kStore>
class ElementPass {
 public:
  REFITD_COPY_CODE ElementPass(const CopyTask& task, const uint32_t* table, uint32_t thread,
                               uint32_t threads)
      : table_(table),
        columns_(task.count[2]),
        items_(uint32_t{task.count[1]} * task.count[2]),
        width_(threads % kTogether == 0 ? kTogether : threads),
        stride_(2 * threads),
        first_(thread / width_ * 2 * width_ + thread % width_) {
    const uint32_t rows = stride_ / columns_;
    rest_ = stride_ - rows * columns_;
    step_ = ElementPlace::Distance(task, rows, rest_);
    wrap_ = ElementPlace::Distance(task, 1, -int64_t{columns_});
  }

  // Handles the two faster dimensions; their first element lies at `begin`.
  REFITD_COPY_CODE void Run(const CopyTask& task, const ElementPlace& begin) {
    ElementPlace next[2];
    uint32_t column[2];
    REFITD_COPY_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t item = first_ + half * width_;
      const uint32_t row = item / columns_;
      column[half] = item - row * columns_;
      next[half] = begin;
      next[half].Add(ElementPlace::Distance(task, row, column[half]));
    }
    REFITD_COPY_NO_UNROLL
    for (uint32_t item = first_; item < items_; item += kPairs * stride_) {
      uint32_t x[2 * kPairs];
      ElementPlace at[2 * kPairs];
      REFITD_COPY_UNROLL
      for (uint32_t u = 0; u < 2 * kPairs; ++u) {
        ElementPlace& place = next[u % 2];
        at[u] = place;
        if (Has(item, u)) x[u] = LoadElement<kBytes>(place.from);
        place.Add(step_);
        column[u % 2] += rest_;
        if (column[u % 2] < columns_) continue;
        column[u % 2] -= columns_;
        place.Add(wrap_);
      }
      REFITD_COPY_UNROLL
      for (uint32_t u = 0; u < 2 * kPairs; ++u) {
        if (!Has(item, u)) continue;
        if constexpr (kStore) StoreElement<kBytes>(at[u].to, x[u]);
        if constexpr (kDigested) AddElement(x[u], at[u].p);
      }
    }
  }

  REFITD_COPY_CODE uint64_t sum() const { return sum_ + in_block_ * BlockFactor(block_); }

 private:
  static constexpr uint32_t kTogether = 32;
  static constexpr uint32_t kPairs = 4;  // at once: their loads are in flight together

  REFITD_COPY_CODE bool Has(uint32_t item, uint32_t u) const {
    return item + u / 2 * stride_ + u % 2 * width_ < items_;
  }

  REFITD_COPY_CODE void AddElement(uint32_t x, uint64_t p) {
    if (p / kDigestBlock != block_) {
      sum_ += in_block_ * BlockFactor(block_);
      in_block_ = 0;
      block_ = p / kDigestBlock;
    }
    const uint32_t t = table_[static_cast<uint32_t>(p) % kDigestBlock];
    in_block_ += uint64_t{x} * t + t;
  }

  const uint32_t* const table_;
  const uint32_t columns_;
  const uint32_t items_;
  const uint32_t width_;
  const uint32_t stride_;  // elements from one pair of this thread to the next
  const uint32_t first_;
  uint32_t rest_ = 0;  // columns of a stride
  ElementPlace step_;  // of a stride
  ElementPlace wrap_;  // from the end of a row to the beginning of the next row
  uint64_t block_ = 0;
  uint64_t in_block_ = 0;  // the block's sum, not multiplied by its factor yet
  uint64_t sum_ = 0;
};

template <int kBytes, bool kDigested, bool kStore>
REFITD_COPY_CODE uint64_t ApartPass(const CopyTask& task, uint64_t from, const uint32_t* table,
                                    uint32_t thread, uint32_t threads) {
  if (Gathers<kBytes, kDigested, kStore>(task)) {
    return GatherPass<kBytes, kDigested, kStore>(task, from, table, thread, threads);
  }
  ElementPass<kBytes, kDigested, kStore> pass(task, table, thread, threads);
  ElementPlace begin = {from, task.destination, task.index};
  REFITD_COPY_NO_UNROLL
  for (uint32_t i = 0; i < task.count[0]; ++i) {
    pass.Run(task, begin);
    begin.Add({static_cast<uint64_t>(task.source_step[0]),
               static_cast<uint64_t>(task.destination_step[0]),
               static_cast<uint64_t>(task.index_step[0])});
  }
  return pass.sum();
}

// ---- passes by the size of an element ----

// Copies the task's elements (with kStore) and returns their digest. `from`: the address to read
// at, `source` or `proof`; `table`: the factors of a digest block.
template <bool kStore>
REFITD_COPY_CODE uint64_t DigestPass(const CopyTask& task, uint64_t from, const uint32_t* table,
                                     uint32_t thread, uint32_t threads) {
  switch (task.element_bytes) {
    case 1:
      return Pass<1, kStore>(task, from, table, thread, threads);
    case 2:
      return Pass<2, kStore>(task, from, table, thread, threads);
    default:  // 4, also for elements of 8 bytes, which are two of 4 (CopyTask::element_bytes)
      return Pass<4, kStore>(task, from, table, thread, threads);
  }
}

// ---- a task ----

struct TaskSums {
  uint64_t stored = 0;
  uint64_t source = 0;
};

template <bool kRuns, int kDigest>
REFITD_COPY_CODE void LineOfBoth(const CopyTask& task, const PassShape& shape,
                                 const uint32_t* table, uint32_t thread, uint32_t threads,
                                 TaskSums* sums) {
  Line<kRuns, kDigest, true, true> line(task, shape, table, thread, threads);
  line.Run();
  sums->stored = line.sum();
  sums->source = line.proof_sum();
}

// Does both passes at once if they take the same whole vectors. If they don't, nothing is done and
// the result is false.
template <int kDigest>
REFITD_COPY_CODE bool BothPasses(const CopyTask& task, const uint32_t* table, uint32_t thread,
                                 uint32_t threads, TaskSums* sums) {
  const PassShape shape = MakeShape<kDigest, true>(task, task.source);
  if (shape.ends || task.proof % kVector != 0) return false;
  switch (LineOf<kDigest>(task, shape, threads)) {
    case LineKind::kRun:
      LineOfBoth<false, kDigest>(task, shape, table, thread, threads, sums);
      return true;
    case LineKind::kRuns:
      LineOfBoth<true, kDigest>(task, shape, table, thread, threads, sums);
      return true;
    default:
      return false;
  }
}

REFITD_COPY_CODE bool BothPasses(const CopyTask& task, const uint32_t* table, uint32_t thread,
                                 uint32_t threads, TaskSums* sums) {
  switch (task.element_bytes) {
    case 1:
      return BothPasses<1>(task, table, thread, threads, sums);
    case 2:
      return BothPasses<2>(task, table, thread, threads, sums);
    default:
      return BothPasses<4>(task, table, thread, threads, sums);
  }
}

// The passes of a task.
struct Passes {
  bool copied;
  bool proven;
  bool is_proof;  // the copy is the source pass

  REFITD_COPY_CODE explicit Passes(const CopyTask& task)
      : copied(task.destination != 0),
        proven(task.proof_sum != kNoSum),
        is_proof(copied && proven && task.sum == kNoSum && task.proof == task.source) {}
};

template <int kBytes>
REFITD_COPY_CODE TaskSums RunApartOf(const CopyTask& task, const uint32_t* table, uint32_t thread,
                                     uint32_t threads) {
  const Passes passes(task);
  TaskSums sums;
  if (passes.proven && !passes.is_proof) {
    sums.source = ApartPass<kBytes, true, false>(task, task.proof, table, thread, threads);
  }
  if (!passes.copied) return sums;
  if (task.sum == kNoSum && !passes.is_proof) {
    ApartPass<kBytes, false, true>(task, task.source, table, thread, threads);
    return sums;
  }
  const uint64_t digest = ApartPass<kBytes, true, true>(task, task.source, table, thread, threads);
  (passes.is_proof ? sums.source : sums.stored) = digest;
  return sums;
}

// The four functions for the four kernels (CopyKernel): each does one thread's part of a task. The
// task's digests are the sums over all threads; those that the task does not ask for mean nothing.
REFITD_COPY_CODE TaskSums RunApart(const CopyTask& task, const uint32_t* table, uint32_t thread,
                                   uint32_t threads) {
  switch (task.element_bytes) {
    case 1:
      return RunApartOf<1>(task, table, thread, threads);
    case 2:
      return RunApartOf<2>(task, table, thread, threads);
    default:
      return RunApartOf<4>(task, table, thread, threads);
  }
}

// Reduces a task without digests to one of its slices, which together are the task. A slice may be
// empty: then it copies nothing.
REFITD_COPY_CODE void CutSlice(CopyTask* task, uint32_t slice, uint32_t slices) {
  if (slices <= 1) return;
  // The run is cut if there is only one, else the slowest dimension.
  int d = 0;
  while (d < kTaskDims && task->count[d] == 1) ++d;
  const bool cuts_run = d == kTaskDims;
  const uint32_t steps = cuts_run ? task->run : task->count[d];
  uint32_t step_bytes = task->element_bytes;
  if (!cuts_run) {
    step_bytes *= task->run;
    for (int inner = d + 1; inner < kTaskDims; ++inner) step_bytes *= task->count[inner];
  }
  const uint32_t least = (kSliceBytes + step_bytes - 1) / step_bytes;
  const uint32_t wanted = (steps + slices - 1) / slices;
  const uint32_t each = (wanted + least - 1) / least * least;
  if (uint64_t{slice} * each >= steps) {
    task->source = task->destination = 0;
    return;
  }
  const uint32_t first = slice * each;
  const uint32_t count = steps - first < each ? steps - first : each;
  const int64_t source_step = cuts_run ? task->element_bytes : task->source_step[d];
  const int64_t destination_step = cuts_run ? task->element_bytes : task->destination_step[d];
  task->source += first * static_cast<uint64_t>(source_step);
  task->destination += first * static_cast<uint64_t>(destination_step);
  if (cuts_run) {
    task->run = count;
  } else {
    task->count[d] = static_cast<uint16_t>(count);
  }
}

REFITD_COPY_CODE TaskSums RunRead(const CopyTask& task, const uint32_t* table, uint32_t thread,
                                  uint32_t threads) {
  TaskSums sums;
  if (task.proof_sum != kNoSum) {
    sums.source = DigestPass<false>(task, task.proof, table, thread, threads);
  }
  return sums;
}

REFITD_COPY_CODE void RunPlain(const CopyTask& task, uint32_t thread, uint32_t threads) {
  if (task.destination != 0) Pass<0, true>(task, task.source, nullptr, thread, threads);
}

REFITD_COPY_CODE TaskSums RunRuns(const CopyTask& task, const uint32_t* table, uint32_t thread,
                                  uint32_t threads) {
  TaskSums sums;
  const Passes passes(task);
  if (passes.proven && task.sum != kNoSum && BothPasses(task, table, thread, threads, &sums)) {
    return sums;
  }
  if (passes.proven && !passes.is_proof) {
    sums.source = DigestPass<false>(task, task.proof, table, thread, threads);
  }
  const uint64_t digest = DigestPass<true>(task, task.source, table, thread, threads);
  (passes.is_proof ? sums.source : sums.stored) = digest;
  return sums;
}

}  // namespace refitd::copy_code

#endif  // REFITD_TRANSPORT_CUDA_COPY_CODE_H_
