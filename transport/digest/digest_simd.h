// Internal to the digest: the vector kernels, over a set of vector operations `V` that
// digest_avx2.cc and digest_avx512.cc define. Only these two include this file.
//
// A block of 64 elements fills element_bytes * 64 / V::kBytes vectors. The only cheap wide
// multiplication is 32x32->64 on the low halves of 64-bit lanes, so the elements are not unpacked:
// shifts and masks bring each of a lane's elements in turn into the lane's low half, and t is
// stored in the order in which the elements come (Constants). A block's lanes are then multiplied
// by h and added up.
#ifndef REFITD_TRANSPORT_DIGEST_DIGEST_SIMD_H_
#define REFITD_TRANSPORT_DIGEST_DIGEST_SIMD_H_

#include <string.h>

#include "transport/digest/digest_kernels.h"

namespace refitd {
namespace {

// The constants t of a block, as vectors in the order in which the multiplications take them.
template <int kLanes, int kElementBytes>
struct Constants {
  alignas(64) uint64_t t[kBlock];
};

template <int kLanes, int kElementBytes>
constexpr Constants<kLanes, kElementBytes> MakeConstants() {
  Constants<kLanes, kElementBytes> constants = {};
  constexpr int kPerLane = 8 / kElementBytes;
  for (int i = 0; i < kBlock; ++i) {
    const int vector = i / (kPerLane * kLanes);
    const int lane = i / kPerLane % kLanes;
    const int turn = i % kPerLane;
    constants.t[(vector * kPerLane + turn) * kLanes + lane] = DigestConstant(i);
  }
  return constants;
}

template <int kLanes, int kElementBytes>
constexpr Constants<kLanes, kElementBytes> kConstants = MakeConstants<kLanes, kElementBytes>();

constexpr size_t kLineBytes = 64;  // of a cache

enum class Stores : uint8_t { kNone, kCached, kStreaming };

template <typename V, int kElementBytes>
struct Kernel {
  using Vec = typename V::Vec;
  static constexpr int kPerLane = 8 / kElementBytes;
  static constexpr int kBlockBytes = kBlock * kElementBytes;
  static constexpr int kVectors = kBlockBytes / V::kBytes;

  // The sums of bits * t of the elements of vector `k` of a block, by lane.
  [[gnu::always_inline]] static inline Vec Sum(Vec v, int k) {
    const uint64_t* t =
        kConstants<V::kLanes, kElementBytes>.t + static_cast<ptrdiff_t>(k * kPerLane * V::kLanes);
    const auto times = [&](Vec low, int turn) __attribute__((always_inline)) {
      return V::Mul(low, V::LoadAligned(t + turn * V::kLanes));
    };
    if constexpr (kElementBytes == 4) {
      return V::Add(times(v, 0), times(V::High(v), 1));
    } else if constexpr (kElementBytes == 2) {
      const Vec even = V::And(v, V::Set1(0x0000ffff0000ffff));
      const Vec odd = V::template Shift32<16>(v);
      return V::Add(V::Add(times(even, 0), times(odd, 1)),
                    V::Add(times(V::High(even), 2), times(V::High(odd), 3)));
    } else {
      const Vec mask = V::Set1(0x000000ff000000ff);
      const Vec a = V::And(v, mask);
      const Vec b = V::And(V::template Shift32<8>(v), mask);
      const Vec c = V::And(V::template Shift32<16>(v), mask);
      const Vec d = V::template Shift32<24>(v);
      const Vec low = V::Add(V::Add(times(a, 0), times(b, 1)), V::Add(times(c, 2), times(d, 3)));
      const Vec high = V::Add(V::Add(times(V::High(a), 4), times(V::High(b), 5)),
                              V::Add(times(V::High(c), 6), times(V::High(d), 7)));
      return V::Add(low, high);
    }
  }

  // Returns the sums of one whole block by lane, and copies the block if kStores says so.
  template <Stores kStores>
  [[gnu::always_inline]] static inline Vec Block(char* to, const char* from) {
    Vec sum = V::Zero();
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      const Vec v = V::Load(from + k * V::kBytes);
      if constexpr (kStores == Stores::kCached) V::Store(to + k * V::kBytes, v);
      if constexpr (kStores == Stores::kStreaming) V::Stream(to + k * V::kBytes, v);
      sum = V::Add(sum, Sum(v, k));
    }
    return sum;
  }

  // Does the same for elements [begin, end) of a block; `from` and `to` are where element `begin`
  // lies.
  template <Stores kStores>
  static Vec Part(char* to, const char* from, int begin, int end) {
    Vec sum = V::Zero();
    if constexpr (V::kMasks) {
      const int64_t first = int64_t{begin} * kElementBytes;
      const int64_t last = int64_t{end} * kElementBytes;
      for (int k = static_cast<int>(first / V::kBytes); k * V::kBytes < last; ++k) {
        // Byte `at` of the run is the first byte of this vector; a negative `at` lies before the
        // run.
        const int64_t at = int64_t{k} * V::kBytes - first;
        const auto mask = V::Mask(-at, last - int64_t{k} * V::kBytes);
        const Vec v = V::LoadPart(from, at, mask);
        if constexpr (kStores != Stores::kNone) V::StorePart(to, at, mask, v);
        sum = V::Add(sum, Sum(v, k));
      }
    } else {
      alignas(64) char block[kBlockBytes] = {};
      const size_t bytes = static_cast<size_t>(end - begin) * kElementBytes;
      char* const at = block + static_cast<ptrdiff_t>(begin) * kElementBytes;
      memcpy(at, from, bytes);
      if constexpr (kStores != Stores::kNone) memcpy(to, at, bytes);
      for (int k = 0; k < kVectors; ++k) {
        sum = V::Add(sum, Sum(V::Load(block + k * V::kBytes), k));
      }
    }
    return sum;
  }

  struct State {
    Vec lanes;         // sums of bits * t * h
    uint64_t ones;     // sum of t * h
    int64_t prefetch;  // bytes ahead
  };

  template <Stores kStores>
  static void AddPart(char* to, const char* from, int64_t p, int64_t count, State* state) {
    const int begin = static_cast<int>(p % kBlock);
    const int end = begin + static_cast<int>(count);
    const uint64_t h = BlockFactor(static_cast<uint64_t>(p) / kBlock);
    state->lanes = V::Add(state->lanes, V::MulLo(Part<kStores>(to, from, begin, end), h));
    state->ones += (kPrefix.before[end] - kPrefix.before[begin]) * h;
  }

  template <Stores kStores>
  [[gnu::always_inline]] static inline void AddBlocks(char* to, const char* from, uint64_t block,
                                                      int64_t blocks, State* state) {
    const int64_t ahead = state->prefetch;
    Vec lanes = state->lanes;
    uint64_t factors = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      const uint64_t h = BlockFactor(block + static_cast<uint64_t>(i));
      for (int at = 0; at < kBlockBytes; at += kLineBytes) __builtin_prefetch(from + ahead + at);
      lanes = V::Add(lanes, V::MulLo(Block<kStores>(to, from), h));
      factors += h;
      from += kBlockBytes;
      if constexpr (kStores != Stores::kNone) to += kBlockBytes;
    }
    state->lanes = lanes;
    state->ones += factors * kPrefix.before[kBlock];
  }

  template <Stores kStores>
  [[gnu::always_inline]] static inline void AddRun(char* to, const char* from, int64_t p,
                                                   int64_t count, State* state) {
    const int64_t into = p % kBlock;
    if (into != 0 || count < kBlock) {
      const int64_t part = count < kBlock - into ? count : kBlock - into;
      AddPart<kStores>(to, from, p, part, state);
      from += part * kElementBytes;
      if constexpr (kStores != Stores::kNone) to += part * kElementBytes;
      p += part;
      count -= part;
    }
    const int64_t blocks = count / kBlock;
    if constexpr (kStores == Stores::kStreaming) {
      if (reinterpret_cast<uintptr_t>(to) % kLineBytes == 0) {
        AddBlocks<Stores::kStreaming>(to, from, static_cast<uint64_t>(p) / kBlock, blocks, state);
      } else {  // streaming stores must be aligned, and are slow unless they fill whole lines
        AddBlocks<Stores::kCached>(to, from, static_cast<uint64_t>(p) / kBlock, blocks, state);
      }
    } else {
      AddBlocks<kStores>(to, from, static_cast<uint64_t>(p) / kBlock, blocks, state);
    }
    const int64_t left = count % kBlock;
    if (left == 0) return;
    from += blocks * kBlockBytes;
    if constexpr (kStores != Stores::kNone) to += blocks * kBlockBytes;
    AddPart<kStores>(to, from, p + blocks * kBlock, left, state);
  }

  template <Stores kStores>
  static uint64_t Rows(char* to, const char* from, const DigestRows& rows) {
    if (rows.count <= 0) return 0;
    State state = {V::Zero(), 0, rows.prefetch != 0 ? rows.prefetch : V::kPrefetchBytes};
    int64_t p = rows.first;
    for (int64_t row = 0; row < rows.rows; ++row) {
      AddRun<kStores>(to, from, p, rows.count, &state);
      from += rows.from_stride;
      if constexpr (kStores != Stores::kNone) to += rows.to_stride;
      p += rows.first_stride;
    }
    return V::SumLanes(state.lanes) + state.ones;
  }
};

template <typename V, Stores kStores>
uint64_t RowsOf(char* to, const char* from, int element_bytes, const DigestRows& rows) {
  switch (element_bytes) {
    case 1:
      return Kernel<V, 1>::template Rows<kStores>(to, from, rows);
    case 2:
      return Kernel<V, 2>::template Rows<kStores>(to, from, rows);
    case 4:
      return Kernel<V, 4>::template Rows<kStores>(to, from, rows);
    default:
      return Kernel<V, 4>::template Rows<kStores>(to, from, AsWords(rows));
  }
}

template <typename V>
void CopyRun(char* to, const char* from, size_t bytes, StoreMode mode) {
  constexpr size_t kStep = 4 * V::kBytes;
  if (mode == StoreMode::kCached || bytes < 2 * kLineBytes) {
    memcpy(to, from, bytes);
    return;
  }
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
  memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kStep; bytes -= kStep, to += kStep, from += kStep) {
    for (size_t i = 0; i < kStep; i += kLineBytes) __builtin_prefetch(from + V::kPrefetchBytes + i);
    const auto a = V::Load(from);
    const auto b = V::Load(from + V::kBytes);
    const auto c = V::Load(from + 2 * V::kBytes);
    const auto d = V::Load(from + 3 * V::kBytes);
    V::Stream(to, a);
    V::Stream(to + V::kBytes, b);
    V::Stream(to + 2 * V::kBytes, c);
    V::Stream(to + 3 * V::kBytes, d);
  }
  for (; bytes >= kLineBytes; bytes -= kLineBytes, to += kLineBytes, from += kLineBytes) {
    for (size_t i = 0; i < kLineBytes; i += V::kBytes) V::Stream(to + i, V::Load(from + i));
  }
  memcpy(to, from, bytes);
}

template <typename V>
struct Entry {
  static uint64_t DigestRowsOf(const void* data, int element_bytes, const DigestRows& rows) {
    return RowsOf<V, Stores::kNone>(nullptr, static_cast<const char*>(data), element_bytes, rows);
  }

  static uint64_t CopyAndDigestRows(void* to, const void* from, int element_bytes,
                                    const DigestRows& rows, StoreMode mode) {
    char* const t = static_cast<char*>(to);
    const char* const f = static_cast<const char*>(from);
    return mode == StoreMode::kStreaming ? RowsOf<V, Stores::kStreaming>(t, f, element_bytes, rows)
                                         : RowsOf<V, Stores::kCached>(t, f, element_bytes, rows);
  }

  static void CopyRows(void* to, const void* from, int element_bytes, const DigestRows& rows,
                       StoreMode mode) {
    const size_t bytes = static_cast<size_t>(rows.count) * static_cast<size_t>(element_bytes);
    char* t = static_cast<char*>(to);
    const char* f = static_cast<const char*>(from);
    for (int64_t row = 0; row < rows.rows; ++row) {
      CopyRun<V>(t, f, bytes, mode);
      t += rows.to_stride;
      f += rows.from_stride;
    }
  }

  static uint64_t Digest(const void* data, int element_bytes, int64_t first, int64_t count) {
    return DigestRowsOf(data, element_bytes, {.count = count, .first = first});
  }

  static uint64_t CopyAndDigest(void* to, const void* from, int element_bytes, int64_t first,
                                int64_t count) {
    const StoreMode mode =
        count * element_bytes >= kStreamingBytes ? StoreMode::kStreaming : StoreMode::kCached;
    const uint64_t digest =
        CopyAndDigestRows(to, from, element_bytes, {.count = count, .first = first}, mode);
    if (mode == StoreMode::kStreaming) V::Fence();
    return digest;
  }

  static void Copy(void* to, const void* from, size_t bytes) {
    const bool stream = bytes >= static_cast<size_t>(kStreamingBytes);
    CopyRun<V>(static_cast<char*>(to), static_cast<const char*>(from), bytes,
               stream ? StoreMode::kStreaming : StoreMode::kCached);
    if (stream) V::Fence();
  }
};

}  // namespace
}  // namespace refitd

#endif  // REFITD_TRANSPORT_DIGEST_DIGEST_SIMD_H_
