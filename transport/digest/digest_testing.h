// The digest's definition (digest.h), element by element.
#ifndef REFITD_TRANSPORT_DIGEST_DIGEST_TESTING_H_
#define REFITD_TRANSPORT_DIGEST_DIGEST_TESTING_H_

#include <algorithm>
#include <cstdint>

#include "transport/digest/digest.h"

namespace refitd {

inline uint64_t ReferenceDigest(const void* data, int element_bytes, int64_t first, int64_t count) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  const int word_bytes = std::min(element_bytes, 4);
  const int words = element_bytes / word_bytes;  // of one element
  uint64_t digest = 0;
  for (int64_t i = 0; i < count * words; ++i) {
    const uint64_t p = static_cast<uint64_t>(first * words + i);
    uint64_t bits = 0;
    for (int b = 0; b < word_bytes; ++b) bits |= uint64_t{*bytes++} << (8 * b);
    digest += (bits + 1) * kDigestT[p % 64] * DigestBlockFactor(p / 64);
  }
  return digest;
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DIGEST_DIGEST_TESTING_H_
