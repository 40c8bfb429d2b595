// What a transfer comes down to on GPUs: for each device that runs something, a list of tasks for
// the copy kernel (copy_task.h). Pure: no CUDA call, so that all of it is tested where there is no
// GPU, the tasks run by an interpreter that shares the kernel's code.
#ifndef REFITD_TRANSPORT_CUDA_COPY_PLAN_H_
#define REFITD_TRANSPORT_CUDA_COPY_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/cuda/copy_task.h"
#include "transport/transport.h"

namespace refitd {

// Who reaches what, asked once a piece.
class CopyAddresses {
 public:
  virtual ~CopyAddresses() = default;
  // Where the bytes live: a device's ordinal, or kHostMemory. INTERNAL: neither a mapped region nor
  // host memory.
  static constexpr int kHostMemory = -1;
  virtual absl::StatusOr<int> DeviceOf(const BoundPiece& piece) = 0;
  // The address of piece.data for tasks of `device`. UNAVAILABLE: it can't reach it.
  virtual absl::StatusOr<uint64_t> On(int device, const BoundPiece& piece) = 0;
};

struct DeviceTasks {
  int device = 0;
  std::vector<CopyTask> tasks;     // for the kernel; run in any order, each by one thread block
  std::vector<LinearCopy> copies;  // for copy engines; only where nothing is digested
};

struct CudaCopyPlan {
  std::vector<DeviceTasks> devices;  // ascending; none has neither tasks nor copies
  // Destination pieces that are written; digests not filled in. A task's `sum` is an index into it:
  // of the digest of what was stored, and of the source pass.
  std::vector<PieceDigest> sums;
  std::vector<int64_t> bytes;  // per destination
  // Sums of whole source pieces (want_source_digests) follow those of `sums` in the tasks' numbers.
  uint32_t source_sums = 0;
  int64_t task_sums() const { return static_cast<int64_t>(sums.size()) + source_sums; }
};

// `verification`: what the tasks compute; a prepared transfer is planned once for each that is
// asked for. Errors: INTERNAL a malformed program, as the host transport's; those of CopyAddresses.
absl::StatusOr<CudaCopyPlan> PlanCopies(const Transfer& transfer, Verification verification,
                                        CopyAddresses* addresses);

// Digests of pieces where they lie, on their own devices: the sum of job.pieces[i] has number i.
absl::StatusOr<CudaCopyPlan> PlanReadback(const ReadbackJob& job, CopyAddresses* addresses);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_PLAN_H_
