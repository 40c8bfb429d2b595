#include "daemon/node/incarnation.h"

#include <sys/random.h>

#include "transport/base/status.h"

namespace refitd {

uint64_t NewIncarnation() {
  uint64_t bits = 0;
  REFITD_CHECK(getrandom(&bits, sizeof(bits), 0) == sizeof(bits));
  // 0 means "the current incarnation" in messages, so the lowest bit is set.
  return bits | 1;
}

}  // namespace refitd
