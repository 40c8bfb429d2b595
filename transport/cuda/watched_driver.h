// The driver, together with the watch over its calls (P4). Private to transport/cuda/.
#ifndef REFITD_TRANSPORT_CUDA_WATCHED_DRIVER_H_
#define REFITD_TRANSPORT_CUDA_WATCHED_DRIVER_H_

#if defined(REFITD_CUDA)
#include <memory>

#include "transport/cuda/api.h"
#include "transport/cuda/call_watch.h"

namespace refitd {

struct WatchedDriver {
  const CudaApi& api() const { return contexts->api(); }
  std::shared_ptr<CudaContexts> contexts;
  std::shared_ptr<CallWatch> calls;  // null: calls are not watched
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_WATCHED_DRIVER_H_
