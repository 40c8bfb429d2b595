#include "daemon/node/incarnation.h"

#include <sys/random.h>

#include <algorithm>

#include "transport/base/status.h"

namespace refitd {

uint64_t NewIncarnation(uint64_t above) {
  uint64_t bits = 0;
  REFITD_CHECK(getrandom(&bits, sizeof(bits), 0) == sizeof(bits));
  const uint64_t term = above == 0 ? 0 : std::min(TermOf(above) + 1, kMaxTerm);
  // 0 means "the current incarnation" in messages, so the lowest bit is set.
  return (term << (64 - kTermBits)) | (bits >> kTermBits) | 1;
}

}  // namespace refitd
