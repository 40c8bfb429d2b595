// The cuda transport: copies between GPU memory of any mapped processes, by our kernel on the
// source's GPU, and by copy engines for what is large and contiguous.
//
// A transfer is planned into tasks for each source device (copy_plan.h); one kernel a device runs
// them in batches, stores straight into the destinations, on its own device or a peer's, and adds
// up digests (transport/digest.h) of what it read by the source's metadata and of what it stored. A
// prepared transfer keeps its tasks in device memory and is replayed by one launch a device. No
// kernel runs on a destination's GPU, unless it is the source's too, except for
// Submit(ReadbackJob), and where the source is host memory (the bytes of a call): those are few.
//
// Transfers whose pieces are all in host memory go to the host transport given. A transfer may read
// host memory and write device memory; into host memory from a device: UNIMPLEMENTED.
//
// Threads: one a device issues work, in order of submission; one a device waits for it (P7 for
// communicators to come). P4: device work that does not end within `limit` is reported as
// DEADLINE_EXCEEDED naming the device; its memory is kept until it does end. An error that costs
// the context (illegal address, ECC) is reported to every transfer, and once to `lost`: the process
// can use no GPU any more, and every group with device memory has to count as dirty (P2).
#ifndef REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_
#define REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/memory.h"
#include "transport/transport.h"

namespace refitd {

struct CudaTransportOptions {
  // Thread blocks of a copy kernel, one a multiprocessor. 64 fill a link; a copy within a device
  // and a read-back are bound by its memory, which takes all multiprocessors (more blocks than a
  // device has cost nothing).
  int blocks = 64;
  int local_blocks = 256;
  // Contiguous boxes of this size and more go to copy engines where nothing is digested; 0: none.
  int64_t engine_bytes = 0;
  std::chrono::milliseconds limit{60'000};
  std::function<void(absl::Status)> lost;  // on a thread of the transport
};

// As Transport says; thread-safe. The destructor waits for what was submitted, at most `limit`;
// what has not ended by then is told so, and its memory is never given back. `memory` is of
// CudaMemory::Create, `kernel` (which tests replace) an image for cuModuleLoadData. UNIMPLEMENTED:
// built without nvcc, so that there is no kernel.
absl::StatusOr<std::unique_ptr<Transport>> MakeCudaTransport(
    std::shared_ptr<CudaMemory> memory, std::unique_ptr<Transport> host,
    const CudaTransportOptions& options, std::string_view kernel = CopyKernelImage());

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_CUDA_TRANSPORT_H_
