#include "transport/digest/digest.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "transport/digest/digest_kernels.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace refitd {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr std::array<uint32_t, kBlock> MakeDigestT() {
  std::array<uint32_t, kBlock> t = {};
  for (uint64_t i = 0; i < kBlock; ++i) t[i] = DigestConstant(i);
  return t;
}

// The digest of `count` elements at `data`; `first` is the first element's row-major index in its
// tensor.
template <typename Word>
uint64_t DigestRun(const char* data, int64_t first, int64_t count) {
  uint64_t digest = 0;
  while (count > 0) {
    const int64_t begin = first % kBlock;
    const int64_t end = std::min<int64_t>(kBlock, begin + count);
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      Word word;
      std::memcpy(&word, data, sizeof(Word));
      data += sizeof(Word);
      sum += (uint64_t{word} + 1) * kDigestT[static_cast<size_t>(i)];
    }
    digest += sum * BlockFactor(static_cast<uint64_t>(first) / kBlock);
    first += end - begin;
    count -= end - begin;
  }
  return digest;
}

uint64_t ScalarDigest(const void* data, int element_bytes, int64_t first, int64_t count) {
  const char* const bytes = static_cast<const char*>(data);
  switch (element_bytes) {
    case 1:
      return DigestRun<uint8_t>(bytes, first, count);
    case 2:
      return DigestRun<uint16_t>(bytes, first, count);
    case 4:
      return DigestRun<uint32_t>(bytes, first, count);
    default:
      return DigestRun<uint32_t>(bytes, 2 * first, 2 * count);
  }
}

// Copies the run through a small buffer, so that the digest is of the stored bytes even if the
// source changes meanwhile.
uint64_t ScalarCopyAndDigest(void* to, const void* from, int element_bytes, int64_t first,
                             int64_t count) {
  constexpr int64_t kBufferBytes = 4096;
  alignas(64) char buffer[kBufferBytes];
  const int64_t step = kBufferBytes / element_bytes;
  uint64_t digest = 0;
  for (int64_t done = 0; done < count; done += step) {
    const int64_t now = std::min(step, count - done);
    const size_t bytes = static_cast<size_t>(now * element_bytes);
    std::memcpy(buffer, static_cast<const char*>(from) + done * element_bytes, bytes);
    std::memcpy(static_cast<char*>(to) + done * element_bytes, buffer, bytes);
    digest += ScalarDigest(buffer, element_bytes, first + done, now);
  }
  return digest;
}

void ScalarCopy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

uint64_t ScalarDigestRows(const void* data, int element_bytes, const DigestRows& rows) {
  const char* from = static_cast<const char*>(data);
  uint64_t digest = 0;
  for (int64_t row = 0; row < rows.rows; ++row) {
    digest += ScalarDigest(from + row * rows.from_stride, element_bytes,
                           rows.first + row * rows.first_stride, rows.count);
  }
  return digest;
}

uint64_t ScalarCopyAndDigestRows(void* to, const void* from, int element_bytes,
                                 const DigestRows& rows, StoreMode /*mode*/) {
  uint64_t digest = 0;
  for (int64_t row = 0; row < rows.rows; ++row) {
    digest += ScalarCopyAndDigest(static_cast<char*>(to) + row * rows.to_stride,
                                  static_cast<const char*>(from) + row * rows.from_stride,
                                  element_bytes, rows.first + row * rows.first_stride, rows.count);
  }
  return digest;
}

void ScalarCopyRows(void* to, const void* from, int element_bytes, const DigestRows& rows,
                    StoreMode /*mode*/) {
  const size_t bytes = static_cast<size_t>(rows.count * element_bytes);
  for (int64_t row = 0; row < rows.rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * rows.to_stride,
                static_cast<const char*>(from) + row * rows.from_stride, bytes);
  }
}

}  // namespace

constinit const std::array<uint32_t, 64> kDigestT = MakeDigestT();

constinit const DigestKernels kScalarKernels = {
    .name = "scalar",
    .digest = ScalarDigest,
    .copy_and_digest = ScalarCopyAndDigest,
    .copy = ScalarCopy,
    .digest_rows = ScalarDigestRows,
    .copy_and_digest_rows = ScalarCopyAndDigestRows,
    .copy_rows = ScalarCopyRows,
};

uint64_t DigestBlockFactor(uint64_t block) { return BlockFactor(block); }

void DigestStoreFence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

std::vector<const DigestKernels*> AllDigestKernels() {
  std::vector<const DigestKernels*> kernels = {&kScalarKernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) kernels.push_back(&kAvx2Kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kAvx512Kernels);
  }
#endif
  return kernels;
}

const DigestKernels& BestDigestKernels() {
  static const DigestKernels* const best = AllDigestKernels().back();
  return *best;
}

}  // namespace refitd
