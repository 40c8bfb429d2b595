// The wire over GPU memory: NCCL between daemons, over the network that NCCL finds.
//
// A communicator has one rank per daemon, and for each of its rails (device_wire.h) a communicator
// of NCCL on that device, so that as many network adapters carry bytes as GPUs have adapters near
// them. The memory of operations is a staging slot on the first device, or on one that all reach;
// the other rails' kernels read and write it over NVLink or PCIe. Equal shares
// of an operation's bytes cross by as many rails as have 1 MiB each. Rank 0's address holds NCCL's
// unique ids; the other addresses only identify their ranks. Broadcasts are ncclBroadcast,
// exchanges grouped sends and receives. Communicators are nonblocking and polled against the
// operation's timeout (P4). A failed operation is aborted on all rails, and `done` comes when the
// devices have ended NCCL's work (P6).
//
// Differences from transport/wire.h:
//   - OK on the sender means that its memory is no longer read, not that a peer has received it.
//   - Nothing checks again that peers run the same operation, because NCCL does not check it. P5
//     relies on the agreement before (docs/protocol.md); the digests verify the bytes afterwards.
//   - Rank 0 frees a communicator that not all ranks connected up to two seconds a rail after
//   Close;
//     until then NCCL listens for the ranks.
//
// Threads: those of wire_communicators.h ("refitd-nwire" for each communicator, "refitd-nwire-a").
// Calls that may hang inside NCCL run on a watched thread (thread.h), and a hang is reported as a
// loss of the GPUs.
//
// No CUDA and no NCCL type appears here.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_
#define REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_

#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/cuda/memory.h"
#include "transport/device_wire.h"

namespace refitd {

struct NcclApi;  // what FindNccl (nccl.h) loads

struct NcclWireOptions {
  // If NCCL or a device does not end within this time after an abort, it hangs, and `lost` is
  // called as CudaTransportOptions::lost.
  std::chrono::milliseconds limit{60'000};
  // The time limit for NCCL to make a unique id, in Open.
  std::chrono::milliseconds opening{20'000};
  std::function<void(absl::Status)> lost;
};

// `memory` must come from CudaMemory::Create. UNIMPLEMENTED: CUDA is not compiled in.
absl::StatusOr<std::unique_ptr<DeviceWire>> MakeNcclWire(std::shared_ptr<const NcclApi> api,
                                                         const std::shared_ptr<CudaMemory>& memory,
                                                         const NcclWireOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_NCCL_WIRE_H_
