// Broadcasts through slots by NCCL, among the GPUs of this daemon. Private to transport/cuda/.
//
//   kNccl       ncclBroadcasts from the source's bytes into the slot of every receiver, pieces
//               that do not lie there as in a slot packed first: one piece while the one before is
//               broadcast
//   kSymmetric  copy engines give each receiver its share, then the receivers all-gather the shares
//               over windows of their pools; in rounds, so that the shares of one are on their way
//               while the ones before are gathered
//
// Communicators are made when first needed, one for each set of devices and kind, and stay: the
// next group on the same devices has them at once. Where there are too many, the one goes that has
// been idle longest. Windows are made of whole pools and given back by LetGo.
//
// P4: what NCCL does not issue within `limit` fails, and what the devices do not end is found late
// by the queue that waits for them (device_queue.h). P7: one thread issues. P8: LetGo, Close.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_BROADCAST_H_
#define REFITD_TRANSPORT_CUDA_NCCL_BROADCAST_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/cuda/nccl/communicator.h"
#include "transport/cuda/nccl/thread.h"
#include "transport/cuda/relay_issue.h"

namespace refitd {

// Sets of devices that broadcasts of one daemon have had, each a communicator of some hundred MiB.
inline constexpr size_t kMaxBroadcastCommunicators = 16;

// Thread-safe.
class NcclBroadcasts {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::chrono::milliseconds limit{0};
    bool copy_engines = true;                // kSymmetric: no kernel gathers
    std::function<void(absl::Status)> lost;  // as CudaTransportOptions::lost
    // kNccl: of a piece that is packed. A source's device has two of them as scratch. A link moves
    // 64 MiB in 190 us, and a collective takes 100 to issue.
    int64_t piece_bytes = 64 << 20;
  };
  NcclBroadcasts(std::shared_ptr<const NcclApi> api, const std::shared_ptr<CudaMemory>& memory,
                 Options options);
  ~NcclBroadcasts();
  NcclBroadcasts(const NcclBroadcasts&) = delete;
  NcclBroadcasts& operator=(const NcclBroadcasts&) = delete;

  // UNIMPLEMENTED: this NCCL does not have what the method needs.
  absl::Status Can(BroadcastMethod method) const;
  // On the issuing thread. Not OK: some of it may be issued. *by: whose collectives it is made of;
  // null: there are none. Once the devices have ended it, the slots are filled if that is still
  // usable: what a later call poisons ends with bytes that mean nothing (communicator.h).
  absl::Status Issue(const Relay& relay, RelayIssue* issue,
                     std::shared_ptr<const Communicator>* by);
  // The pool is about to be given back, and no broadcast uses it: neither do windows from now on.
  // Waits for nothing: NCCL lets go of them behind its other calls, and they hold their pools until
  // then (P6).
  void LetGo(const CudaRegion& pool);
  // Nothing runs any more.
  void Close(Clock::time_point deadline);
  std::vector<CommunicatorStatus> Describe() const { return communicators_.Describe(); }

 private:
  using Pools = std::vector<std::shared_ptr<const CudaRegion>>;
  struct Held {
    std::shared_ptr<Communicator> communicator;  // with the broadcasts that run
    // By the pools that it is made of, which it holds.
    std::map<std::vector<const CudaRegion*>, Communicator::WindowId> windows;
    std::set<const CudaRegion*> pools;  // that its broadcasts filled slots of; none: it is idle
    uint64_t last_use = 0;
  };
  // On a source's device. Its halves are packed in turns, on a stream that has waited for what read
  // the next one before.
  struct Scratch {
    std::unique_ptr<CudaBuffer> memory;
    bool second = false;  // is the next half
    bool waited = true;   // the stream has; else the last broadcast failed before
  };
  using AllScratch = std::map<int, Scratch>;  // by device

  // Of one call: a broadcast makes up to three before the queue that issues it counts it as late.
  Clock::time_point Deadline() const { return Clock::now() + options_.limit / 4; }

  // The issuing thread's.
  absl::Status Broadcast(const Relay& relay, RelayIssue* issue,
                         std::shared_ptr<const Communicator>* by);
  // `call`: of all streams, and the slots; null where the source's device has none.
  absl::Status BroadcastPieces(const Relay& relay, Communicator* communicator,
                               Communicator::BroadcastCall call, RelayIssue* issue);
  absl::Status Symmetric(const Relay& relay, RelayIssue* issue,
                         std::shared_ptr<const Communicator>* by);
  // A communicator for slots of these pools, which is not idle until all of them are given back. It
  // stays until the next call of this.
  absl::StatusOr<Held*> Get(const std::vector<int>& devices, bool copy_engines, const Pools& pools);
  absl::StatusOr<Communicator::WindowId> WindowOf(Held* held, const Pools& pools);
  // Where the piece's bytes lie as they do in a slot, from the first one on, for what comes next on
  // the source's stream; packed there if need be.
  absl::StatusOr<const char*> Packed(const Relay& relay, const RelayChunk& piece,
                                     RelayIssue* issue);
  // With halves of so many bytes; there as long as a communicator is not idle.
  absl::StatusOr<Scratch*> ScratchOf(int device, int64_t bytes);

  void Use(Held* held, const Pools& pools) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for nothing.
  void Free(AllScratch scratch);

  const Options options_;
  const std::shared_ptr<CudaMemory> memory_;
  Communicators communicators_;
  Mutex mutex_;  // not held over calls of NCCL or the driver, which may hang
  // Made and dropped by the issuing thread alone.
  std::map<std::pair<std::vector<int>, bool>, Held> held_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  AllScratch scratch_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<NcclThread> frees_ ABSL_GUARDED_BY(mutex_);  // scratch; null: none was yet
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_BROADCAST_H_
