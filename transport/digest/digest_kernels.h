// Internal to the digest: constants that every kernel uses, and the kernels of each instruction
// set. Each set has its own file, because each file is compiled for its own instruction set.
//
// Everything inline here is in an unnamed namespace on purpose: an inline function with a linker-
// visible name could be kept in the copy that was compiled for AVX-512, and then run elsewhere.
#ifndef REFITD_TRANSPORT_DIGEST_DIGEST_KERNELS_H_
#define REFITD_TRANSPORT_DIGEST_DIGEST_KERNELS_H_

#include <stdint.h>

#include "transport/digest/digest.h"

namespace refitd {

extern const DigestKernels kScalarKernels;
#if defined(__x86_64__)
extern const DigestKernels kAvx2Kernels;
extern const DigestKernels kAvx512Kernels;
#endif

namespace {

// Each instruction set has its own copy, on purpose: the linker could keep the copy of shared
// inline code that was compiled for the widest set. NOLINTBEGIN(misc-definitions-in-headers)
constexpr int kBlock = 64;  // elements

constexpr uint64_t SplitMix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr uint64_t BlockFactor(uint64_t block) { return SplitMix64(block) | 1; }

constexpr uint32_t DigestConstant(uint64_t i) {
  return static_cast<uint32_t>(SplitMix64(~i) >> 32) | 1;
}

// before[i] is the sum of t[0..i). It gives the "+ 1" of every element, since (bits + 1) * t = bits
// * t + t.
struct PrefixSums {
  uint64_t before[kBlock + 1];
};

constexpr PrefixSums MakePrefixSums() {
  PrefixSums sums = {};
  for (int i = 0; i < kBlock; ++i) sums.before[i + 1] = sums.before[i] + DigestConstant(i);
  return sums;
}

constexpr PrefixSums kPrefix = MakePrefixSums();
// NOLINTEND(misc-definitions-in-headers)

// Describes rows of 8-byte elements as rows of twice as many 4-byte elements.
inline DigestRows AsWords(DigestRows rows) {
  rows.count *= 2;
  rows.first *= 2;
  rows.first_stride *= 2;
  return rows;
}

}  // namespace
}  // namespace refitd

#endif  // REFITD_TRANSPORT_DIGEST_DIGEST_KERNELS_H_
