// Copies of strided boxes for which the host transport chooses stores and prefetching.
#ifndef REFITD_TRANSPORT_HOST_BOX_COPY_H_
#define REFITD_TRANSPORT_HOST_BOX_COPY_H_

#include <cstdint>

#include "transport/digest/digest.h"
#include "transport/plan/layout.h"

namespace refitd {

struct BoxCopyOptions {
  bool with_digest = false;
  StoreMode mode = StoreMode::kCached;
  int64_t prefetch = 0;  // DigestRows::prefetch
};

// Copies `box` (global coordinates), whose first element is at `from` and goes to `to`. Returns the
// digest of what was stored if `with_digest`, else 0. Callers end a sequence of these with
// DigestStoreFence.
uint64_t CopyBoxUnfenced(char* to, const Dims& to_strides, const char* from,
                         const Dims& from_strides, const Box& box, const Dims& shape,
                         int element_bytes, const BoxCopyOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_BOX_COPY_H_
