// Plans a transfer on GPUs: for each device that runs tasks, a list of tasks for the copy kernels
// (copy_task.h). Pure: no CUDA call, so all of it is tested without a GPU, where an interpreter
// that shares the kernel's code runs the tasks (copy_interpreter_testing.h).
//
// A task runs on its source's device and stores to the destination's device; if the source is host
// memory, it runs on the destination's device. Wrong programs are refused as the host transport
// refuses them (bound_moves.h), and digests are equal to those of the host transport (P1).
#ifndef REFITD_TRANSPORT_CUDA_COPY_PLAN_H_
#define REFITD_TRANSPORT_CUDA_COPY_PLAN_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/cuda/copy_task.h"
#include "transport/transport.h"

namespace refitd {

// The most tasks of one device in one plan (P10): 512 MiB. Layouts decide how many tasks a transfer
// needs: a piece no two of whose elements are adjacent needs many. A GPU full of weights in
// ordinary layouts needs half a million.
inline constexpr int64_t kMaxDeviceTasks = int64_t{1} << 22;

// Tells where pieces lie and at which address a device reaches them. A plan asks once for each
// piece (and once for each device that runs tasks over the piece).
class CopyAddresses {
 public:
  virtual ~CopyAddresses() = default;
  // The device that has the piece's bytes: its ordinal, or kHostMemory. INTERNAL: neither in a
  // mapped region nor in host memory.
  static constexpr int kHostMemory = -1;
  virtual absl::StatusOr<int> DeviceOf(const BoundPiece& piece) = 0;
  // The address of piece.data for tasks of `device`. UNAVAILABLE: the device can't reach it.
  virtual absl::StatusOr<uint64_t> On(int device, const BoundPiece& piece) = 0;
};

// Copies of contiguous pieces for copy engines, in any order. The lists have equal length, as the
// driver takes a batch.
struct EngineCopies {
  std::vector<unsigned long long> sources;  // addresses
  std::vector<unsigned long long> destinations;
  std::vector<size_t> bytes;
};

// The number of lanes (a stream each) to which a device's copies to other devices are issued.
// Measured: with one lane for each of four receivers all links are full; with two for each, eight
// in all, links reach 0.8 of that. Whatever the number, a device copies to one receiver at a time,
// in the order in which lanes were first issued: several sources must begin with different
// receivers, or half the links are idle.
inline constexpr size_t kEngineLanes = 4;

// The range of numbers that a device's tasks have for one kind of sum; it may have gaps.
struct SumRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

struct DeviceTasks {
  int device = 0;
  // True if at most a 16th of the bytes go to other devices, by kernel or engine: then memory is
  // the limit, not a link.
  bool local = false;
  // Tasks for the kernels, which run them in any order, sorted by kernel; counts[k]: those of
  // kernel k.
  std::vector<CopyTask> tasks;
  std::array<size_t, kCopyKernels> counts{};
  uint32_t slices = 1;  // of a task of the plain kernel (CopyLaunch::slices)
  SumRange sums;        // CopyTask::sum
  SumRange proof_sums;  // CopyTask::proof_sum
  // Copies beside `tasks`; at most kEngineLanes lanes, none empty, to be issued in this order.
  // Among a plan's sources with lanes, the nth begins with its nth receiver.
  std::vector<EngineCopies> lanes;
};

// Sorts the tasks by kernel, stably; returns how many each kernel has.
std::array<size_t, kCopyKernels> SortByKernel(std::vector<CopyTask>* tasks);

struct CudaCopyPlan {
  std::vector<DeviceTasks> devices;  // ascending; none has neither tasks nor lanes
  // Under kReadback, for destinations with readback_now: tasks that compute digests of the moved
  // bytes at their destinations. They must run after all of `devices` ended, on the destinations'
  // devices, with CopyLaunch::source_sums pointing at the *stored* sums, which their proof_sum
  // indexes.
  std::vector<DeviceTasks> readback;
  // Destination pieces that are written; digests are not filled in. A task's `sum` is an index into
  // this list, for the digest of what was stored and for that of the source pass. Verification
  // passes if the two digests are equal: under kTransfer for all, under kReadback for destinations
  // with readback_now; for the others a ReadbackJob must find the source sums.
  std::vector<PieceDigest> sums;
  std::vector<int64_t> bytes;  // per destination
  // The number of sums of whole source pieces (want_source_digests). Among the source sums they
  // follow those of `sums`: piece i of the transfer has number sums.size() + i.
  uint32_t source_sums = 0;
  int64_t task_sums() const { return static_cast<int64_t>(sums.size()) + source_sums; }
};

struct CopyPlanOptions {
  // Tasks have at most most_task_bytes. A device that has little to do gets smaller tasks, about
  // tasks_wanted of them, but of at least least_task_bytes.
  int64_t most_task_bytes = 256 << 10;
  int64_t least_task_bytes = 32 << 10;
  int64_t tasks_wanted = 1024;
  // The most bytes of a device's first tasks. They are larger because a multiprocessor is idle for
  // a microsecond or two between tasks, and a large model would have a million small tasks. The
  // last tasks stay small, so that all blocks end together.
  int64_t most_first_task_bytes = 1 << 20;
  // Copy engines move contiguous pieces of this size and more to other devices, except under
  // kTransfer, which digests what the kernel stores; 0: copy engines are not used.
  int64_t engine_bytes = 0;
};

// Plans a transfer for `verification`; a prepared transfer is planned once for each verification
// that is asked for. In the order of a device's tasks, the destinations' devices alternate in
// proportion to their bytes, and each source device starts with a different destination device. The
// parts of one chunk for several destinations are close together. Errors: INTERNAL: a malformed
// program, as for the host transport. UNIMPLEMENTED: a destination in host memory.
// RESOURCE_EXHAUSTED: more than kMaxDeviceTasks. The errors of CopyAddresses are passed on.
absl::StatusOr<CudaCopyPlan> PlanCopies(const Transfer& transfer, Verification verification,
                                        CopyAddresses* addresses,
                                        const CopyPlanOptions& options = {});

// Plans digests of pieces, each on its own device: the sum of job.pieces[i] is source sum i. Pieces
// in host memory are read by the lowest of the other pieces' devices (by device 0 if there are no
// others).
absl::StatusOr<CudaCopyPlan> PlanReadback(const ReadbackJob& job, CopyAddresses* addresses,
                                          const CopyPlanOptions& options = {});

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_PLAN_H_
