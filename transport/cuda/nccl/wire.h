// The wire over GPU memory: NCCL between daemons, over the network that NCCL finds.
//
// An epoch is one communicator with one rank per daemon, on the device that OpenOn names. The
// memory of operations is a staging slot on that device, or on one that it reaches. Rank 0's
// address holds NCCL's unique id; the other addresses only identify their ranks. Broadcasts are
// ncclBroadcast, exchanges grouped sends and receives. Communicators are nonblocking and polled
// against the operation's timeout (P4). A failed operation is aborted, and `done` comes when the
// device has ended NCCL's work (P6).
//
// Differences from transport/wire.h:
//   - OK on the sender means that its memory is no longer read, not that a peer has received it.
//   - It is not checked again that peers run the same operation, because NCCL does not check. P5
//     relies on the agreement before (docs/protocol.md); the digests verify the bytes afterwards.
//   - Rank 0 frees an epoch that not all ranks connected up to two seconds after Close; until then
//     NCCL listens for the ranks.
//
// Threads: those of wire_epochs.h ("refitd-nwire" for each epoch, "refitd-nwire-a"). Calls that may
// hang inside NCCL run on a watched thread (thread.h), and a hang is reported as a loss of the
// GPUs.
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
  // "open", "connecting", "connected", "lost": as transport/wire.h says; "closing": closed, but not
  // freed yet.
  std::string_view state;
  WireStats moved;
  absl::Status status;  // why it was lost; OK if it was not lost
};

// A wire between GPUs. Thread-safe.
class DeviceWire : public EpochWire {
 public:
  // Does what Wire::Open does, for a communicator on the device with this ordinal. INVALID_ARGUMENT
  // also: there is no such device. Takes some 100 ms the first time.
  virtual absl::StatusOr<std::string> OpenOn(int device, EpochId epoch, int rank, int size) = 0;
  // On device 0.
  absl::StatusOr<std::string> Open(EpochId epoch, int rank, int size) override {
    return OpenOn(0, epoch, rank, size);
  }
  // Describes the epochs that are open or not yet freed. Waits for nothing.
  virtual std::vector<DeviceEpochStatus> Describe() const = 0;
  // The number of epochs since the start in which this daemon was rank 0 and that never connected.
  virtual int64_t Abandoned() const = 0;

 protected:
  using EpochWire::EpochWire;
};

struct NcclWireOptions {
  // If NCCL or a device does not end within this time after an abort, it hangs, and `lost` is
  // called as CudaTransportOptions::lost.
  std::chrono::milliseconds limit{60'000};
  // The time limit for NCCL to make a unique id, in Open.
  std::chrono::milliseconds opening{20'000};
  std::function<void(absl::Status)> lost;
};

// `memory` is of CudaMemory::Create. UNIMPLEMENTED: CUDA is not compiled in.
absl::StatusOr<std::unique_ptr<DeviceWire>> MakeNcclWire(std::shared_ptr<const NcclApi> api,
                                                         const std::shared_ptr<CudaMemory>& memory,
                                                         const NcclWireOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_
