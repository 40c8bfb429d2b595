// NCCL communicators over GPUs of this daemon: one process drives all ranks, one rank per device.
//
//   Create -> usable -> Close -> closed
//               +--> a call failed or was late, Abort: poisoned, and given back behind the scenes
//
// A communicator runs broadcasts, and all-gathers over windows (symmetric memory). A window is a
// set of equal regions, one per device; an all-gather uses the same offset in all of them, and NCCL
// moves it with its symmetric kernels or, with `copy_engines`, without any kernel. NCCL has no
// symmetric broadcast; callers make one of a scatter and an all-gather among the receivers.
//
// P4: every call has a deadline and keeps it, even if NCCL hangs; the error names the call and the
// device that is waited for. A call that fails or is late poisons its communicator, which then
// takes no more calls; its successor has a new number. A call whose deadline passed before it began
// changes nothing. If a communicator can't be freed because a device does not end NCCL's work, that
// is reported as a loss of the GPUs.
// P7: all calls of all communicators are issued by one thread in the order in which they came.
// P6, P8: a window holds its regions until NCCL has let go of them; nothing outlives the
// communicator, poisoned or not.
//
// Only Create waits for devices, for its first collective: Broadcast and AllGather return when
// their work is on the given streams. The caller that waits for the streams must also notice a
// collective that does not end, and call Abort.
//
// Thread-safe. Calls block at most until their deadline, so they must not be made under the node's
// mutex or on a gRPC thread. To make or free windows and communicators NCCL maps and unmaps memory,
// which may wait for all work of the devices.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_COMMUNICATOR_H_
#define REFITD_TRANSPORT_CUDA_NCCL_COMMUNICATOR_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/cuda/api.h"
#include "transport/cuda/memory.h"
#include "transport/cuda/nccl/api.h"
#include "transport/cuda/nccl/nccl.h"
#include "transport/cuda/nccl/thread.h"

namespace refitd {

// The alignment of shares of an all-gather. If addresses are not multiples of 4, NCCL 2.28.9's
// symmetric kernel for small messages gathers wrong bytes (tests/gpu/nccl_trial.cc found it); 16 is
// also the alignment at which its other kernel is fast.
inline constexpr int64_t kAllGatherAlignment = 16;

// The most channels of a communicator. Each has buffers on every device, and occupies a
// multiprocessor while a collective runs. On two H200 a broadcast of 256 MiB by 8, 12, 16 and 24
// channels (24 is NCCL's own choice) runs at 272, 339, 354 and 356 GB/s, and the communicator takes
// 100, 244, 148 to 260 and 484 MiB of each device.
inline constexpr int kMostCtas = 16;

inline constexpr size_t kMaxCommunicatorDevices = 64;  // more than a host has
inline constexpr size_t kMaxCommunicatorWindows = 64;  // pools of groups; each takes addresses

struct CommunicatorOptions {
  std::vector<int> devices;  // ordinals, by rank; at least two, all different
  // All-gathers over windows by copy engines (CTA policy zero) instead of by kernels.
  bool copy_engines = false;
};

class Communicator {
 public:
  using Clock = std::chrono::steady_clock;
  using WindowId = uint64_t;

  // Frees the communicator as Abort does, if neither Close nor Abort was called.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::vector<int>& devices() const;
  // OK if usable; else why not, naming the call that failed.
  absl::Status status() const;

  // Makes a window over whole regions, one for each rank, all of the same size. They must come from
  // CudaMemory::MakePool or ImportDescriptor and be in no other window of this communicator; else
  // INVALID_ARGUMENT. UNIMPLEMENTED: this NCCL, or these devices, have no symmetric memory; the
  // communicator stays usable. RESOURCE_EXHAUSTED: kMaxCommunicatorWindows.
  absl::StatusOr<WindowId> RegisterWindow(
      const std::vector<std::shared_ptr<const DeviceRegion>>& regions, Clock::time_point deadline);
  // Frees a window that no unfinished work uses. INVALID_ARGUMENT: no such window.
  absl::Status DeregisterWindow(WindowId window, Clock::time_point deadline);
  // Does what DeregisterWindow does, after all earlier calls and without waiting for the result. If
  // freeing the window fails, the communicator is poisoned.
  void DeregisterLater(WindowId window, Clock::time_point deadline);

  struct BroadcastCall {
    int root = 0;                // rank
    const char* send = nullptr;  // on the root's device
    // The addresses by rank, each on the rank's own device; the root's may be `send`.
    std::vector<char*> receive;
    int64_t bytes = 0;
    std::vector<CUstream> streams;  // by rank, of its device's primary context
  };
  // Issues a broadcast; the caller must wait for its end on the streams. INVALID_ARGUMENT: the
  // number of pointers or streams is not that of the ranks, a pointer is null, there is no such
  // root, or bytes is less than 0 (0: nothing is issued).
  absl::Status Broadcast(const BroadcastCall& call, Clock::time_point deadline);

  struct AllGatherCall {
    WindowId window = 0;
    // Rank r has its share at byte_offset + r * bytes of its region, and receives the share of
    // every other rank s at byte_offset + s * bytes. Both are multiples of kAllGatherAlignment.
    int64_t byte_offset = 0;
    int64_t bytes = 0;  // of each share
    std::vector<CUstream> streams;
  };
  // Issues an all-gather; its end and its errors are those of Broadcast. INVALID_ARGUMENT also: the
  // shares lie outside of the window, or are unaligned.
  absl::Status AllGather(const AllGatherCall& call, Clock::time_point deadline);

  // Frees the communicator, which must have no unfinished work. If that can't be done by the
  // deadline, it is reported as a loss of the GPUs.
  absl::Status Close(Clock::time_point deadline);
  // Does what Close does, after all earlier calls and without waiting for the result. The
  // communicator must not be used after this.
  void CloseLater(Clock::time_point deadline);
  // Poisons the communicator for this reason, and begins to free it even while its devices run its
  // work: they end NCCL's work with wrong bytes. Does not wait.
  void Abort(const absl::Status& why);

 private:
  friend class Communicators;
  class State;
  explicit Communicator(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State> state_;
};

struct CommunicatorsOptions {
  // A call of NCCL that is this much later than its deadline hangs.
  std::chrono::milliseconds limit{60'000};
  // The time limit for freeing poisoned communicators, for calls that NCCL lets us poll.
  std::chrono::milliseconds clean_up{1'000};
  // Called when the GPUs are lost; the process must then end. Called on a thread of the
  // Communicators, perhaps after its destructor.
  std::function<void(absl::Status)> lost{};
};

// All communicators of the daemon, and their thread, which starts with the first. Thread-safe.
class Communicators {
 public:
  using Clock = Communicator::Clock;

  // `memory` must come from CudaMemory::Create.
  Communicators(std::shared_ptr<const NcclApi> api, const std::shared_ptr<CudaMemory>& memory,
                CommunicatorsOptions options);
  // All its communicators must be destroyed or no longer used. Waits at most `limit`.
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // Makes a communicator, and runs a first small collective on it. INVALID_ARGUMENT: devices are
  // not what CommunicatorOptions says. Other errors are NCCL's or the driver's; nothing is left
  // behind.
  absl::StatusOr<std::unique_ptr<Communicator>> Create(const CommunicatorOptions& options,
                                                       Clock::time_point deadline);
  // The communicators that were not destroyed, oldest first.
  std::vector<CommunicatorStatus> Describe() const;
  const NcclApi& api() const { return *api_; }

 private:
  std::shared_ptr<NcclThread> Thread();
  absl::Status CheckDevices(const std::vector<int>& devices) const;

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<CudaContexts> contexts_;
  const CommunicatorsOptions options_;
  const std::shared_ptr<LostContext> lost_;

  mutable Mutex mutex_;
  std::shared_ptr<NcclThread> thread_ ABSL_GUARDED_BY(mutex_);
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::weak_ptr<Communicator::State>> all_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_COMMUNICATOR_H_
