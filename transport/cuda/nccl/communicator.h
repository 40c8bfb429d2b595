// NCCL communicators over GPUs of this daemon: one process drives all of them, a rank a device.
//
//   Create -> usable -> Close -> closed
//               +--> a call failed or was late, Abort: poisoned, and given back behind the scenes
//
// What a communicator is for: broadcasts, and all-gathers over windows (symmetric memory): the same
// offset of equal regions, one a device, which NCCL moves with its symmetric kernels or, with
// `copy_engines`, without any kernel. A broadcast has no symmetric form in NCCL; a symmetric one is
// a scatter and an all-gather among the receivers.
//
// P4: every call has a deadline and keeps it, also where NCCL hangs; the error names the call and
// the device that is waited for. A call that fails or is late poisons its communicator: nothing
// else may be asked of it, and its successor has a new epoch. A call whose time was up before it
// began leaves all as it was. A communicator that can't be given back, because a device does not
// end what NCCL put there, is told as a loss of the GPUs.
// P7: all calls of all communicators are issued by one thread in the order in which they came.
// P6, P8: a window holds its regions until NCCL has let go of them; nothing outlives the
// communicator, poisoned or not.
//
// Nothing here waits for devices but Create, for its first collective: Broadcast and AllGather
// return when their work is on the given streams. Who waits for the streams also notices a
// collective that does not end, and calls Abort.
//
// Thread-safe. Calls block their caller until their deadline at the latest: never under the node's
// mutex, never on a gRPC thread. Where windows are made or given back, or communicators made or
// closed, NCCL allocates and maps memory, which may wait for whatever the devices are at.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_COMMUNICATOR_H_
#define REFITD_TRANSPORT_CUDA_NCCL_COMMUNICATOR_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
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

// Of shares of an all-gather. Of addresses that are no multiples of 4, NCCL 2.28.9's symmetric
// kernel for small messages gathers wrong bytes (tests/gpu/nccl_trial.cc found it); 16 is also what
// its other one is fast with.
inline constexpr int64_t kAllGatherAlignment = 16;

// Channels of a communicator, each with buffers on every device and a multiprocessor of it while a
// collective runs. On two H200 a broadcast of 256 MiB by 8, 12, 16 and 24 (what NCCL takes by
// itself) goes at 272, 339, 354 and 356 GB/s, and the communicator takes 100, 244, 148 to 260 and
// 484 MiB of each.
inline constexpr int kMostCtas = 16;

inline constexpr size_t kMaxCommunicatorDevices = 64;  // more than a host has
inline constexpr size_t kMaxCommunicatorWindows = 64;  // pools of groups; each takes addresses

struct CommunicatorOptions {
  std::vector<int> devices;  // ordinals, by rank; two at least, each once
  // All-gathers over windows by copy engines (CTA policy zero) instead of by kernels.
  bool copy_engines = false;
};

class Communicator {
 public:
  using Clock = std::chrono::steady_clock;
  using WindowId = uint64_t;

  // Given back, if Close or Abort was not called, as by Abort.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Of all communicators of a Communicators; grows with every Create.
  uint64_t epoch() const;
  const std::vector<int>& devices() const;
  // Why it is no longer usable, naming the call that failed; OK: it is.
  absl::Status status() const;
  CommunicatorStatus Describe() const;

  // A window over whole regions, one a rank, all of the same size, which are of
  // CudaMemory::MakePool or ImportVmm and in no other window of this communicator.
  // INVALID_ARGUMENT: they are not that. UNIMPLEMENTED: this NCCL, or these devices, have no
  // symmetric memory; the communicator stays usable. RESOURCE_EXHAUSTED: kMaxCommunicatorWindows.
  absl::StatusOr<WindowId> RegisterWindow(
      const std::vector<std::shared_ptr<const CudaRegion>>& regions, Clock::time_point deadline);
  // No work that uses it may be left. INVALID_ARGUMENT: no such window.
  absl::Status DeregisterWindow(WindowId window, Clock::time_point deadline);
  // As DeregisterWindow, behind what was asked for before, without waiting. A communicator that
  // does not let go of it is poisoned.
  void DeregisterLater(WindowId window, Clock::time_point deadline);

  struct BroadcastCall {
    int root = 0;                // rank
    const char* send = nullptr;  // on the root's device
    std::vector<char*> receive;  // by rank, where each device reaches its own; the root's may be
                                 // `send`
    int64_t bytes = 0;
    std::vector<CUstream> streams;  // by rank, of its device's primary context
  };
  // Returns when it is issued: to be awaited on the streams. INVALID_ARGUMENT: not that many
  // pointers or streams, null, no such root, or bytes less than 0 (0: nothing is issued).
  absl::Status Broadcast(const BroadcastCall& call, Clock::time_point deadline);

  struct AllGatherCall {
    WindowId window = 0;
    // Rank r has its share at byte_offset + r * bytes of its region, and gets all others' there.
    // Multiples of kAllGatherAlignment.
    int64_t byte_offset = 0;
    int64_t bytes = 0;  // of each share
    std::vector<CUstream> streams;
  };
  // As Broadcast. INVALID_ARGUMENT: also outside of the window, or unaligned.
  absl::Status AllGather(const AllGatherCall& call, Clock::time_point deadline);

  // Gives everything back. No work of it may be left. What it could not give back by the deadline
  // is told as a loss.
  absl::Status Close(Clock::time_point deadline);
  // As Close, behind what was asked for before, without waiting; no use may follow.
  void CloseLater(Clock::time_point deadline);
  // Poisons it for this reason, and begins to give everything back, whatever its devices are at:
  // they end what NCCL put there, with bytes that mean nothing. Does not wait.
  void Abort(const absl::Status& why);

 private:
  friend class Communicators;
  class State;
  explicit Communicator(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State> state_;
};

struct CommunicatorsOptions {
  // A call of NCCL that is so much later than its deadline has hung.
  std::chrono::milliseconds limit{60'000};
  // For giving back what is poisoned, as far as NCCL polls.
  std::chrono::milliseconds clean_up{1'000};
  // The GPUs are lost: the process has to end. On a thread of this; perhaps after its destructor.
  std::function<void(absl::Status)> lost{};
};

// All communicators of the daemon, and their thread, which starts with the first. Thread-safe.
class Communicators {
 public:
  using Clock = Communicator::Clock;

  // `memory` is of CudaMemory::Create.
  Communicators(std::shared_ptr<const NcclApi> api, const std::shared_ptr<CudaMemory>& memory,
                CommunicatorsOptions options);
  // Communicators of it are gone, or no longer used. Waits at most `limit`.
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // Makes one, and runs a first small collective on it. INVALID_ARGUMENT: devices are not what
  // CommunicatorOptions says. Other errors are NCCL's or the driver's; nothing is left behind.
  absl::StatusOr<std::unique_ptr<Communicator>> Create(const CommunicatorOptions& options,
                                                       Clock::time_point deadline);
  // Those that were not destroyed, oldest first.
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
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::weak_ptr<Communicator::State>> all_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_COMMUNICATOR_H_
