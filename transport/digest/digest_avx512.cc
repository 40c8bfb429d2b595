// Compiled for AVX-512 (F, BW, DQ, VL); entered only where the CPU has them.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 intrinsics cause these warnings.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "transport/digest/digest_simd.h"

namespace refitd {
namespace {

struct Avx512 {
  using Vec = __m512i;
  static constexpr int kBytes = 64;
  static constexpr int kLanes = 8;
  static constexpr int kPrefetchBytes = 4096;
  static constexpr bool kMasks = true;

  static Vec Zero() { return _mm512_setzero_si512(); }
  static Vec Set1(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  static Vec Load(const void* p) { return _mm512_loadu_si512(p); }
  static Vec LoadAligned(const void* p) { return _mm512_load_si512(p); }
  static void Store(void* p, Vec v) { _mm512_storeu_si512(p, v); }
  static void Stream(void* p, Vec v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
  static void Fence() { _mm_sfence(); }
  static Vec Add(Vec a, Vec b) { return _mm512_add_epi64(a, b); }
  static Vec And(Vec a, Vec b) { return _mm512_and_si512(a, b); }
  static Vec Mul(Vec a, Vec b) { return _mm512_mul_epu32(a, b); }
  static Vec High(Vec v) { return _mm512_srli_epi64(v, 32); }
  template <int kBits>
  static Vec Shift32(Vec v) {
    return _mm512_srli_epi32(v, kBits);
  }
  static Vec MulLo(Vec v, uint64_t h) { return _mm512_mullo_epi64(v, Set1(h)); }
  static uint64_t SumLanes(Vec v) { return static_cast<uint64_t>(_mm512_reduce_add_epi64(v)); }

  // The mask of a vector's bytes [begin, end). `begin` may be negative, and `end` may be larger
  // than kBytes.
  static __mmask64 Mask(int64_t begin, int64_t end) {
    const uint64_t from = begin <= 0 ? ~uint64_t{0} : ~uint64_t{0} << begin;
    const uint64_t to = end >= kBytes ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
    return from & to;
  }
  // Masked-out bytes are not touched, so the address may lie before the run.
  static Vec LoadPart(const char* from, int64_t at, __mmask64 mask) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(at);
    return _mm512_maskz_loadu_epi8(mask, reinterpret_cast<const void*>(address));
  }
  static void StorePart(char* to, int64_t at, __mmask64 mask, Vec v) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(to) + static_cast<uintptr_t>(at);
    _mm512_mask_storeu_epi8(reinterpret_cast<void*>(address), mask, v);
  }
};

}  // namespace

const DigestKernels kAvx512Kernels = {
    .name = "avx512",
    .digest = Entry<Avx512>::Digest,
    .copy_and_digest = Entry<Avx512>::CopyAndDigest,
    .copy = Entry<Avx512>::Copy,
    .digest_rows = Entry<Avx512>::DigestRowsOf,
    .copy_and_digest_rows = Entry<Avx512>::CopyAndDigestRows,
    .copy_rows = Entry<Avx512>::CopyRows,
};

}  // namespace refitd

#endif  // __x86_64__
