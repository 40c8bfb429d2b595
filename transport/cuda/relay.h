// Broadcasts through slots: work that spans devices, issued by one thread (P7: communicators need
// the same order on every device). Private to transport/cuda/.
//
// A chain: the source's device copies a chunk into the first slot, that device hands it to the
// next, and so on, by copy engines alone; each hop waits for the one before by an event, so that
// all links are busy from the third chunk on. Every device has one stream for what it hands on,
// shared by all broadcasts: chunks of the next one follow at once. A slot on the source's own
// device is filled beside the chain.
//
// P4, P6, P8: as device_queue.h, whose threads these are.
#ifndef REFITD_TRANSPORT_CUDA_RELAY_H_
#define REFITD_TRANSPORT_CUDA_RELAY_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/mutex.h"
#include "transport/cuda/api.h"
#include "transport/cuda/device_queue.h"
#include "transport/cuda/memory.h"
#include "transport/cuda/relay_issue.h"

namespace refitd {

class NcclBroadcasts;

// Thread-safe.
class RelayQueue {
 public:
  struct Options {
    std::chrono::milliseconds limit{0};
    std::function<void(absl::Status)> lost;  // as CudaTransportOptions::lost
    std::shared_ptr<NcclBroadcasts> nccl;    // null: no relay is by NCCL
  };
  RelayQueue(std::shared_ptr<CudaMemory> memory, std::shared_ptr<CudaContexts> contexts,
             Options options);
  ~RelayQueue();
  RelayQueue(const RelayQueue&) = delete;
  RelayQueue& operator=(const RelayQueue&) = delete;

  // `done` is called once, on a thread of the queue, when every slot is filled or nothing is
  // touched any more. Errors: UNAVAILABLE a device can't reach the next; those of device_queue.h.
  void Submit(Relay relay, std::function<void(absl::Status)> done);
  // As DeviceQueue::Stop.
  void Stop(std::chrono::steady_clock::time_point deadline);

 private:
  class Job;

  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<CudaContexts> contexts_;
  const Options options_;
  const std::shared_ptr<LostContext> lost_;
  const std::shared_ptr<RelayStreams> streams_;
  Mutex mutex_;
  std::shared_ptr<DeviceQueue> queue_ ABSL_GUARDED_BY(mutex_);  // made by the first broadcast
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_RELAY_H_
