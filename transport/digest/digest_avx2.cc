// Compiled for AVX2; entered only where the CPU has it.
#if defined(__x86_64__)

#include <immintrin.h>

#include "transport/digest/digest_simd.h"

namespace refitd {
namespace {

struct Avx2 {
  using Vec = __m256i;
  static constexpr int kBytes = 32;
  static constexpr int kLanes = 4;
  static constexpr int kPrefetchBytes = 4096;
  static constexpr bool kMasks = false;

  static Vec Zero() { return _mm256_setzero_si256(); }
  static Vec Set1(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  static Vec Load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Vec LoadAligned(const void* p) {
    return _mm256_load_si256(static_cast<const __m256i*>(p));
  }
  static void Store(void* p, Vec v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static void Stream(void* p, Vec v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
  static void Fence() { _mm_sfence(); }
  static Vec Add(Vec a, Vec b) { return _mm256_add_epi64(a, b); }
  static Vec And(Vec a, Vec b) { return _mm256_and_si256(a, b); }
  static Vec Mul(Vec a, Vec b) { return _mm256_mul_epu32(a, b); }
  static Vec High(Vec v) { return _mm256_srli_epi64(v, 32); }
  template <int kBits>
  static Vec Shift32(Vec v) {
    return _mm256_srli_epi32(v, kBits);
  }
  // v * h modulo 2^64 from 32-bit products: low*low + ((high*low + low*high) << 32).
  static Vec MulLo(Vec v, uint64_t h) {
    const Vec low = Set1(h);
    const Vec cross = Add(Mul(High(v), low), Mul(v, Set1(h >> 32)));
    return Add(Mul(v, low), _mm256_slli_epi64(cross, 32));
  }
  static uint64_t SumLanes(Vec v) {
    const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(halves)) +
           static_cast<uint64_t>(_mm_extract_epi64(halves, 1));
  }
};

}  // namespace

const DigestKernels kAvx2Kernels = {
    .name = "avx2",
    .digest = Entry<Avx2>::Digest,
    .copy_and_digest = Entry<Avx2>::CopyAndDigest,
    .copy = Entry<Avx2>::Copy,
    .digest_rows = Entry<Avx2>::DigestRowsOf,
    .copy_and_digest_rows = Entry<Avx2>::CopyAndDigestRows,
    .copy_rows = Entry<Avx2>::CopyRows,
};

}  // namespace refitd

#endif  // __x86_64__
