// Broadcasts through slots by NCCL, among the GPUs of this daemon. Private to transport/cuda/.
//
//   kNccl       ncclBroadcasts from the source's bytes into the slot of every receiver. Pieces that
//               do not lie as in a slot are packed first, each while the piece before is broadcast
//   kSymmetric  copy engines give each receiver its share, then the receivers all-gather the shares
//               over windows of their pools. This is done in rounds, so that the shares of a round
//               are copied while those of the round before are gathered
//
// Communicators are made when first needed, one for each set of devices and kind, and stay, so that
// the next group on the same devices has them at once. If there are too many, the communicator that
// has been idle longest is closed. Windows are made of whole pools and given back by LetGo.
//
// P4: a broadcast that NCCL does not issue within `limit` fails; a broadcast that the devices do
// not end is noticed by the queue that waits for them (device_queue.h). P7: one thread issues. P8:
// LetGo and Close give memory back.
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

// The most communicators kept, one for each set of devices; each takes some hundred MiB.
inline constexpr size_t kMaxBroadcastCommunicators = 16;

// Issues broadcasts by NCCL. Thread-safe.
class NcclBroadcasts {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::chrono::milliseconds limit{0};
    bool copy_engines = true;                // kSymmetric: copy engines gather, no kernel does
    std::function<void(absl::Status)> lost;  // called as CudaTransportOptions::lost is
    // kNccl: size of a piece that is packed. A source's device has scratch memory for two pieces. A
    // link moves 64 MiB in 190 us, and a collective takes 100 us to issue.
    int64_t piece_bytes = 64 << 20;
  };
  NcclBroadcasts(std::shared_ptr<const NcclApi> api, const std::shared_ptr<CudaMemory>& memory,
                 Options options);
  ~NcclBroadcasts();
  NcclBroadcasts(const NcclBroadcasts&) = delete;
  NcclBroadcasts& operator=(const NcclBroadcasts&) = delete;

  // OK if this NCCL can broadcast by `method`; else UNIMPLEMENTED.
  absl::Status Can(BroadcastMethod method) const;
  // Issues a broadcast; called on the issuing thread. After an error some of it may be issued. *by
  // is the communicator whose collectives it uses; null: it uses none. When the devices have ended
  // the broadcast, the slots are filled only if *by is still usable, because poisoning a
  // communicator ends its collectives with wrong bytes (communicator.h).
  absl::Status Issue(const Relay& relay, RelayIssue* issue,
                     std::shared_ptr<const Communicator>* by);
  // Closes the windows of a pool that is about to be given back and that no broadcast uses. Waits
  // for nothing: NCCL closes the windows after its other calls, and they hold their pools until
  // then (P6).
  void LetGo(const DeviceRegion& pool);
  // Closes all communicators. To be called when nothing runs any more.
  void Close(Clock::time_point deadline);
  std::vector<CommunicatorStatus> Describe() const { return communicators_.Describe(); }

 private:
  using Pools = std::vector<std::shared_ptr<const DeviceRegion>>;
  struct Cached {
    std::shared_ptr<Communicator> communicator;  // shared with the broadcasts that run
    // Each window by the pools that it is made of, which it holds.
    std::map<std::vector<const DeviceRegion*>, Communicator::WindowId> windows;
    // Pools in which its broadcasts filled slots; empty: it is idle.
    std::set<const DeviceRegion*> pools;
    uint64_t last_use = 0;
  };
  // Scratch memory on a source's device. Pieces are packed into its two halves in turns, on a
  // stream that first waits until the half's last reader is done.
  struct Scratch {
    std::unique_ptr<CudaBuffer> memory;
    bool second = false;  // true: the second half is next
    bool waited = true;   // the stream has waited; false: the last broadcast failed before it did
  };
  using AllScratch = std::map<int, Scratch>;  // by device

  // The deadline of one call. A broadcast makes up to three calls, which must end before the queue
  // that issues it counts it as late.
  Clock::time_point Deadline() const { return Clock::now() + options_.limit / 4; }

  // These functions are called on the issuing thread.
  absl::Status Broadcast(const Relay& relay, RelayIssue* issue,
                         std::shared_ptr<const Communicator>* by);
  // `call` has all streams and slots; a slot is null if the source's device has none.
  absl::Status BroadcastPieces(const Relay& relay, Communicator* communicator,
                               Communicator::BroadcastCall call, RelayIssue* issue);
  absl::Status Symmetric(const Relay& relay, RelayIssue* issue,
                         std::shared_ptr<const Communicator>* by);
  // Returns a communicator for slots of these pools; it does not count as idle until all these
  // pools are given back. The result stays valid until the next call of Get.
  absl::StatusOr<Cached*> Get(const std::vector<int>& devices, bool copy_engines,
                              const Pools& pools);
  absl::StatusOr<Communicator::WindowId> WindowOf(Cached* held, const Pools& pools);
  // Returns an address at which the piece's bytes lie as in a slot, for the next work on the
  // source's stream; packs the bytes into scratch memory if necessary.
  absl::StatusOr<const char*> Packed(const Relay& relay, const RelayChunk& piece,
                                     RelayIssue* issue);
  // Returns the device's scratch memory with halves of `bytes`. The memory stays as long as a
  // communicator is not idle.
  absl::StatusOr<Scratch*> ScratchOf(int device, int64_t bytes);

  void Use(Cached* held, const Pools& pools) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frees scratch memory behind the scenes, and waits for nothing.
  void Free(AllScratch scratch);

  const Options options_;
  const std::shared_ptr<CudaMemory> memory_;
  Communicators communicators_;
  Mutex mutex_;  // not held during calls of NCCL or the driver, which may hang
  // Entries are made and dropped by the issuing thread only.
  std::map<std::pair<std::vector<int>, bool>, Cached> held_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  AllScratch scratch_ ABSL_GUARDED_BY(mutex_);
  // Frees scratch memory; null: none was freed yet.
  std::shared_ptr<NcclThread> frees_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_BROADCAST_H_
