#include "transport/cuda/nccl/listener.h"

#if defined(REFITD_CUDA)
#include "transport/cuda/nccl/thread.h"

namespace refitd {

using Clock = std::chrono::steady_clock;

NcclComm MakeLastRank(const NcclApi& nccl, const NcclUniqueId& id,
                      std::chrono::milliseconds limit) {
  const Clock::time_point since = Clock::now();
  NcclConfig config;
  config.blocking = 0;
  NcclComm comm = nullptr;
  (void)nccl.ncclCommInitRankConfig(&comm, 1, id, 0, &config);
  NcclResult result = NcclResult::kInProgress;
  while (comm != nullptr && Clock::now() < since + limit &&
         nccl.ncclCommGetAsyncError(comm, &result) == NcclResult::kSuccess &&
         result == NcclResult::kInProgress) {
    PauseOfPoll(since);
  }
  return comm;
}

void StopListening(const NcclApi& nccl, const CudaApi& api, CUcontext context,
                   const NcclUniqueId& id, std::chrono::milliseconds limit) {
  const ScopedContext current(api, context);
  if (!current.status().ok()) return;
  const NcclComm comm = MakeLastRank(nccl, id, limit);
  if (comm != nullptr) (void)nccl.ncclCommAbort(comm);
}

}  // namespace refitd

#endif  // REFITD_CUDA
