// The digest of a tensor's bytes (verification, P1), and copies that compute it on the way.
//
// digest = sum over elements p of (bits_p + 1) * t[p mod 64] * h(p div 64), modulo 2^64, where
//   p     row-major index of the element in the unpadded global shape,
//   bits  the element as stored, zero-extended; 8-byte elements count as two 32-bit words at 2p and
//         2p+1 (low word first),
//   t     64 fixed odd 32-bit constants: t[i] = (splitmix64(~i) >> 32) | 1 (kDigestT),
//   h     splitmix64 of the block index, forced odd.
// splitmix64(x) is the finaliser of that generator applied to x + 0x9e3779b97f4a7c15. Any single
// wrong element changes the digest. The digest does not depend on order, and the digests of a
// disjoint cover add up, whatever the sharding. It costs about one multiply-add per element, and is
// the same on CPU and GPU.
//
// Runs are contiguous in memory and in p. Little-endian machines only. Pure functions, thread-safe;
// the instruction set is chosen once at run time.
#ifndef REFITD_TRANSPORT_DIGEST_DIGEST_H_
#define REFITD_TRANSPORT_DIGEST_DIGEST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace refitd {

extern const std::array<uint32_t, 64> kDigestT;

// The factor h of the definition above.
uint64_t DigestBlockFactor(uint64_t block);

// Equal runs at regular distances, e.g. the rows of a box.
struct DigestRows {
  int64_t rows = 1;
  int64_t count = 0;         // elements of one run
  int64_t first = 0;         // p of the first run's first element
  int64_t first_stride = 0;  // elements in p from one run to the next
  int64_t to_stride = 0;     // bytes
  int64_t from_stride = 0;   // bytes
  // How many bytes ahead of a load to prefetch; 0: a distance that suits memory which is read once,
  // in order. This is a hint: the prefetched addresses need not exist.
  int64_t prefetch = 0;
};

// The way in which copied bytes reach memory. Streaming stores keep the destination out of the
// caches; only DigestStoreFence orders them before later stores.
enum class StoreMode : uint8_t { kCached, kStreaming };

// From this size on streaming stores are faster, because a cached destination would only push the
// source out of the cache.
inline constexpr int64_t kStreamingBytes = 64 << 10;

// The kernels of one instruction set. `element_bytes` is 1, 2, 4 or 8; `first` is p of the first
// element; pointers need no alignment.
struct DigestKernels {
  std::string_view name;  // "scalar", "avx2", "avx512"
  // Digest of `count` elements at `data`.
  uint64_t (*digest)(const void* data, int element_bytes, int64_t first, int64_t count);
  // Copies `count` elements and returns the digest of what was stored (of the registers that were
  // stored). Ranges must not overlap. Large runs use streaming stores and end with a store fence,
  // so that the bytes are visible to any thread that is told after this returned.
  uint64_t (*copy_and_digest)(void* to, const void* from, int element_bytes, int64_t first,
                              int64_t count);
  // Copies bytes; streaming stores and the fence are as above.
  void (*copy)(void* to, const void* from, size_t bytes);

  // The same over rows, but without a fence: callers end a sequence of these with DigestStoreFence.
  // Strides that a function does not use are ignored.
  uint64_t (*digest_rows)(const void* data, int element_bytes, const DigestRows& rows);
  uint64_t (*copy_and_digest_rows)(void* to, const void* from, int element_bytes,
                                   const DigestRows& rows, StoreMode mode);
  void (*copy_rows)(void* to, const void* from, int element_bytes, const DigestRows& rows,
                    StoreMode mode);
};

// Orders streaming stores of this thread before its later stores.
void DigestStoreFence();

// The fastest kernels that this CPU can run. The first call chooses them.
const DigestKernels& BestDigestKernels();
// All kernels that this CPU can run, scalar first; tests compare each with the definition.
std::vector<const DigestKernels*> AllDigestKernels();

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DIGEST_DIGEST_H_
