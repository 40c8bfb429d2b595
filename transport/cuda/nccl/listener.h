// Ends NCCL's listener for the ranks of a unique id if these ranks will never come. Private to
// transport/cuda/.
//
// ncclGetUniqueId starts a thread of NCCL, which listens until all ranks have come, or until a rank
// comes that does not fit; no call ends it (P8). A communicator of a single rank always ends the
// listening in one of these ways.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_LISTENER_H_
#define REFITD_TRANSPORT_CUDA_NCCL_LISTENER_H_

#if defined(REFITD_CUDA)
#include <chrono>

#include "transport/cuda/api.h"
#include "transport/cuda/nccl/api.h"

namespace refitd {

// Makes a communicator with a single rank for `id`, on the current context's device, and waits
// until it is connected, at most `limit`. The caller must abort the communicator in any case. Null:
// NCCL made none, and goes on listening.
NcclComm MakeLastRank(const NcclApi& nccl, const NcclUniqueId& id, std::chrono::milliseconds limit);

// Makes such a communicator and aborts it. This may hang, so it must run on a watched thread
// (thread.h).
void StopListening(const NcclApi& nccl, const CudaApi& api, CUcontext context,
                   const NcclUniqueId& id, std::chrono::milliseconds limit);

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_LISTENER_H_
