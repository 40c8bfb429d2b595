// The cuda transport: copies between GPU memory of any mapped processes, by our kernel on the
// source's GPU, and by copy engines beside it for what is large and contiguous.
//
// A transfer is planned into tasks for each source device (copy_plan.h); one kernel a device runs
// them in batches, stores straight into the destinations, on its own device or a peer's, and adds
// up digests (transport/digest/digest.h) of what it read by the source's metadata and of what it
// stored. A prepared transfer keeps its tasks in device memory and is replayed by one launch a
// device. No kernel runs on a destination's GPU, unless it is the source's too, except for
// Submit(ReadbackJob), and where the source is host memory (the bytes of a call): those are few.
//
// A transfer with a broadcast is two: its source's bytes into every slot (relay.h), then from the
// slots into the destinations, by kernels on the destinations' devices.
//
// Transfers whose pieces are all in host memory go to the host transport given. A transfer may read
// host memory and write device memory; into host memory from a device: UNIMPLEMENTED.
//
// Threads: one a device issues work, in order of submission; one a device waits for it; one issues
// broadcasts (P7), and one waits for those; one plans, and one looks after the calls of the driver
// that planning makes.
//
// P4: the GPUs are lost to this process where an error costs a context (illegal address, ECC), or
// where a device or such a call does not end within `limit` (DEADLINE_EXCEEDED, naming the device).
// That is told to `lost`, once; nothing is begun any more. Every group with device memory has to
// count as dirty then (P2), and the process to end: nothing else stops a device that hangs, which
// may wake and go on. So `done` still comes only after the last byte (P1, P6): of a transfer that
// hangs when its device is done after all, or from the destructor.
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

struct NcclApi;  // of FindNccl (nccl.h)

struct CudaTransportOptions {
  // Thread blocks of a copy kernel, one a multiprocessor. 64 fill a link; a copy within a device
  // and a read-back are bound by its memory, which takes all multiprocessors (more blocks than a
  // device has cost nothing).
  int blocks = 64;
  int local_blocks = 256;
  // Contiguous boxes of this size and more go to other devices by copy engines, but under
  // kTransfer; 0: none. A copy costs 1.4 us to issue, in which a link moves half a MiB. Only with
  // drivers that take batches of copies (CUDA 13).
  int64_t engine_bytes = 2 << 20;
  // What a device hands to the next at a time in a broadcast by kChain, at most: a copy begins some
  // microseconds after the one before it, and every device a chunk after the one before it.
  int64_t relay_chunk_bytes = 64 << 20;
  std::chrono::milliseconds limit{60'000};
  // For broadcasts by kNccl and kSymmetric; null: there are none, and `no_nccl` says why.
  std::shared_ptr<const NcclApi> nccl{};
  std::string no_nccl = "there is no NCCL";
  // kSymmetric: receivers gather their shares by copy engines, without a kernel.
  bool symmetric_copy_engines = true;
  // Memory of a device, and pinned, that is kept for the next transfers.
  int64_t kept_device_bytes = 256 << 20;
  int64_t kept_pinned_bytes = 64 << 20;
  // On a thread of the transport; one that hangs in the driver may call it after the transport was
  // destroyed.
  std::function<void(absl::Status)> lost;
};

// As Transport says; thread-safe. The destructor waits for what was submitted, at most `limit`;
// what has not ended by then is told so, and its memory is never given back, since a device may
// still use it. `memory` is of
// CudaMemory::Create, `kernel` (which tests replace) an image for cuModuleLoadData. UNIMPLEMENTED:
// built without nvcc, so that there is no kernel.
absl::StatusOr<std::unique_ptr<Transport>> MakeCudaTransport(
    std::shared_ptr<CudaMemory> memory, std::unique_ptr<Transport> host,
    const CudaTransportOptions& options, std::string_view kernel = CopyKernelImage());

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_
