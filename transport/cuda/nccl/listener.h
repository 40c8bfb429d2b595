// How NCCL's listener for the ranks of a unique id ends that are not coming. Private to
// transport/cuda/.
//
// ncclGetUniqueId starts a thread of NCCL, which listens until all ranks have come, or one that
// can't be of them; no call takes an id back (P8). A communicator of a single rank is always one of
// the two.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_LISTENER_H_
#define REFITD_TRANSPORT_CUDA_NCCL_LISTENER_H_

#if defined(REFITD_CUDA)
#include <chrono>

#include "transport/cuda/api.h"
#include "transport/cuda/nccl/api.h"

namespace refitd {

// Makes that communicator on the current context's device, and waits until it is up, `limit` at
// most. Up or not, it is the caller's to abort. Null: NCCL makes none, and goes on listening.
NcclComm MakeLastRank(const NcclApi& nccl, const NcclUniqueId& id, std::chrono::milliseconds limit);

// And aborts it, which may hang: for a thread that is watched (thread.h).
void StopListening(const NcclApi& nccl, const CudaApi& api, CUcontext context,
                   const NcclUniqueId& id, std::chrono::milliseconds limit);

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_LISTENER_H_
