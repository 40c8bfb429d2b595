// The wire over GPU memory: NCCL between daemons, over the network that it finds there.
//
// An epoch is one communicator with one rank a daemon, on the device that Open names. Memory of
// operations is of that device, or of one that it reaches: a staging slot. Rank 0's address holds
// NCCL's unique id; the others' say who they are. Broadcasts are ncclBroadcast, exchanges grouped
// sends and receives. Communicators are nonblocking and polled against the operation's timeout
// (P4). What fails is aborted, and `done` comes when the device has ended what NCCL put there (P6).
//
// Beyond what transport/wire.h says:
//   - OK on the sender means that its memory is no longer read, not that a peer has received it.
//   - Whether peers are at the same operation is not checked again: NCCL does not look. P5 rests on
//     the agreement before (docs/protocol.md); bytes are verified by their digests after.
//   - An epoch that is opened and never connected by all is given back late at rank 0, up to two
//     seconds after Close: until then NCCL listens for its ranks.
//
// Threads: those of wire_epochs.h ("refitd-nwire" an epoch, "refitd-nwire-a"); what may hang inside
// NCCL runs on a watched one (thread.h) and is told as a loss of the GPUs.
//
// No CUDA and no NCCL type appears here.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_
#define REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/cuda/memory.h"
#include "transport/wire_epochs.h"

namespace refitd {

struct NcclApi;  // of FindNccl (nccl.h)

// This daemon's end of an epoch, for people and status calls.
struct DeviceEpochStatus {
  EpochId epoch;
  int device = 0;  // ordinal
  int rank = 0;
  int size = 0;
  // "open", "connecting", "connected", "lost": as transport/wire.h says; "closing": until it is
  // given back.
  std::string_view state;
  WireStats moved;
  absl::Status status;  // why it was lost; OK: it was not
};

// As Wire; thread-safe.
class DeviceWire : public EpochWire {
 public:
  // Wire::Open, with the device (ordinal) whose communicator it is. INVALID_ARGUMENT: also no such
  // device. Takes some 100 ms the first time.
  virtual absl::StatusOr<std::string> OpenOn(int device, EpochId epoch, int rank, int size) = 0;
  // On device 0.
  absl::StatusOr<std::string> Open(EpochId epoch, int rank, int size) override {
    return OpenOn(0, epoch, rank, size);
  }
  // Those that are open, or not yet given back. Waits for nothing.
  virtual std::vector<DeviceEpochStatus> Describe() const = 0;
  // Epochs of which this was rank 0 and that never connected, since the start.
  virtual int64_t Abandoned() const = 0;

 protected:
  using EpochWire::EpochWire;
};

struct NcclWireOptions {
  // What NCCL or a device does not end so long after it was aborted has hung: `lost` is told, as
  // CudaTransportOptions::lost.
  std::chrono::milliseconds limit{60'000};
  // For NCCL to make a unique id, in Open.
  std::chrono::milliseconds opening{20'000};
  std::function<void(absl::Status)> lost;
};

// `memory` is of CudaMemory::Create. UNIMPLEMENTED: CUDA is not compiled in.
absl::StatusOr<std::unique_ptr<DeviceWire>> MakeNcclWire(std::shared_ptr<const NcclApi> api,
                                                         const std::shared_ptr<CudaMemory>& memory,
                                                         const NcclWireOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_
