// The cuda transport: copies between GPU memory of any mapped processes. Kernels on the source's
// GPU copy; copy engines beside them move large contiguous boxes.
//
// A transfer is planned into tasks for each source device (copy_plan.h). The kernels of each such
// device (CopyKernel) take the tasks, store directly into the destinations, on their own device or
// a peer, and add up digests (transport/digest/digest.h) of what they read by the source's metadata
// and of what they stored. A prepared transfer keeps its tasks in device memory; a replay launches
// each kernel that has tasks, once on each device. A kernel runs on a destination's GPU only if the
// source is on the same GPU, for Submit(ReadbackJob), and if the source is host memory (the bytes
// of a call), which is rare.
//
// A transfer with a broadcast has two steps: its source's bytes go into every slot (relay.h), then
// from the slots into the destinations, by kernels on the destinations' devices.
//
// Transfers whose pieces are all in host memory are passed to the given host transport. A transfer
// may read host memory and write device memory; writing host memory from a device is UNIMPLEMENTED.
//
// Threads: for each device, one that issues work, in order of submission, and one that waits for
// it; one that issues broadcasts (P7), and one that waits for them; one that plans transfers
// without a kept plan, and one that watches the calls of the driver that planning makes.
//
// P4: this process loses its GPUs if an error destroys a context (illegal address, ECC), or if a
// device or a call of the driver does not end within `limit` (DEADLINE_EXCEEDED, naming the
// device). Then `lost` is called, once, and no new work is begun. Every group with device memory
// must then count as dirty (P2), and the process must end, because nothing else stops a device that
// hangs: it may go on later. For the same reason `done` still comes only after the last byte
// (P1, P6): for a transfer that hangs, when its device is done after all, or from the destructor.
#ifndef REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_
#define REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/memory.h"
#include "transport/transport.h"

namespace refitd {

struct NcclApi;  // what FindNccl (nccl.h) loads

struct CudaTransportOptions {
  // A multiprocessor runs one to three thread blocks of a kernel. 64 blocks fill a link. A copy
  // within a device and a read-back are bound by the device's memory, which needs all
  // multiprocessors (blocks that find no multiprocessor cost nothing).
  int blocks = 64;
  int local_blocks = 512;
  // Copy engines move contiguous boxes of this size and more to other devices, except under
  // kTransfer; 0: copy engines are not used. A copy costs 1.4 us to issue, in which a link moves
  // half a MiB. Only with drivers that take batches of copies (CUDA 13).
  int64_t engine_bytes = 2 << 20;
  // The most bytes that a device hands to the next at a time in a broadcast by kChain. Small chunks
  // cost time because each copy begins 8 us after the copy before (docs/decisions.md); large chunks
  // because each device begins a chunk later than the device before.
  int64_t relay_chunk_bytes = 128 << 20;
  std::chrono::milliseconds limit{60'000};
  // NCCL, for broadcasts by kNccl and kSymmetric. Null: these methods are missing, and `no_nccl`
  // says why.
  std::shared_ptr<const NcclApi> nccl{};
  std::string no_nccl = "there is no NCCL";
  // kSymmetric: receivers gather their shares by copy engines, without a kernel.
  bool symmetric_copy_engines = true;
  // The most free memory of a device, and the most free pinned memory, that is kept for the next
  // transfers.
  int64_t kept_device_bytes = 256 << 20;
  int64_t kept_pinned_bytes = 64 << 20;
  // Called on a thread of the transport; a thread that hangs in the driver may call it after the
  // transport was destroyed.
  std::function<void(absl::Status)> lost;
};

// Makes a cuda transport, which is thread-safe. Its destructor waits for submitted work, at most
// `limit`; work that has not ended by then fails, and its memory is never freed, since a device may
// still use it. `memory` comes from CudaMemory::Create; `kernel` (which tests replace) is an image
// for cuModuleLoadData. UNIMPLEMENTED: built without nvcc, so that there is no kernel.
absl::StatusOr<std::unique_ptr<Transport>> MakeCudaTransport(
    std::shared_ptr<CudaMemory> memory, std::unique_ptr<Transport> host,
    const CudaTransportOptions& options, std::string_view kernel = CopyKernelImage());

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_
