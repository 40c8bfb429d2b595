// Broadcasts through slots. This work spans devices, and one thread issues it (P7: communicators
// need the same order on every device). Private to transport/cuda/.
//
// A chain: the source's device copies a chunk into the first slot, that device hands it to the
// next, and so on, by copy engines alone; each copy waits for the copy before it by an event, so
// that soon all links are busy. Every device has one stream for the chunks that it hands on, shared
// by all broadcasts, so that chunks of the next broadcast follow at once. A slot on the source's
// own device is filled beside the chain. Unpacking waits on the device until its slot is filled
// (Arrivals), so that no thread wakes up between the two.
//
// The threads of device_queue.h, which do this work, keep P4, P6 and P8.
#ifndef REFITD_TRANSPORT_CUDA_RELAY_H_
#define REFITD_TRANSPORT_CUDA_RELAY_H_

#if defined(REFITD_CUDA)
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/cuda/api.h"
#include "transport/cuda/device_queue.h"
#include "transport/cuda/memory.h"
#include "transport/cuda/relay_issue.h"

namespace refitd {

class NcclBroadcasts;

// What a broadcast tells; both are called once, on a thread of the queue, `issued` first.
struct RelayCalls {
  // Work that waits for the arrivals finds the slots filled; null: they are filled already. After
  // an error nothing may read them.
  std::function<void(absl::StatusOr<std::shared_ptr<const Arrivals>>)> issued;
  // No memory is touched any more. OK: every slot is filled. Errors: UNAVAILABLE: a device can't
  // reach the next; those of device_queue.h.
  std::function<void(absl::Status)> ended;
};

// Runs broadcasts through slots. Thread-safe.
class RelayQueue {
 public:
  struct Options {
    std::chrono::milliseconds limit{0};
    std::function<void(absl::Status)> lost;  // called as CudaTransportOptions::lost is
    std::shared_ptr<NcclBroadcasts> nccl;    // null: no broadcast is by NCCL
  };
  RelayQueue(std::shared_ptr<CudaMemory> memory, std::shared_ptr<CudaContexts> contexts,
             Options options);
  ~RelayQueue();
  RelayQueue(const RelayQueue&) = delete;
  RelayQueue& operator=(const RelayQueue&) = delete;

  void Submit(Relay relay, RelayCalls calls);
  // Stops all relays as DeviceQueue::Stop stops a queue.
  void Stop(std::chrono::steady_clock::time_point deadline);

 private:
  class Job;

  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<CudaContexts> contexts_;
  const Options options_;
  const std::shared_ptr<LostContext> lost_;
  const std::shared_ptr<RelayStreams> streams_;
  const std::shared_ptr<std::atomic<int>> under_way_ = std::make_shared<std::atomic<int>>(0);
  Mutex mutex_;
  std::shared_ptr<DeviceQueue> queue_ ABSL_GUARDED_BY(mutex_);  // made by the first broadcast
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_RELAY_H_
