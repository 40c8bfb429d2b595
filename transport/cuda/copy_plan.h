// What a transfer comes down to on GPUs: for each device that runs something, a list of tasks for
// the copy kernel (copy_task.h). Pure: no CUDA call, so that all of it is tested where there is no
// GPU, the tasks run by an interpreter that shares the kernel's code (copy_interpreter.h).
//
// A task runs on its source's device and stores to the destination's; where the source is host
// memory, on the destination's. Programs are refused as the host transport refuses them
// (bound_moves.h); digests are those that it would compute (P1).
#ifndef REFITD_TRANSPORT_CUDA_COPY_PLAN_H_
#define REFITD_TRANSPORT_CUDA_COPY_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/cuda/copy_task.h"
#include "transport/transport.h"

namespace refitd {

// Of one device in one plan (P10). Layouts decide how many tasks a transfer becomes: a piece whose
// strides leave no two elements together is many. 512 MiB of tasks; a GPU full of weights that lie
// as they should takes half a million.
inline constexpr int64_t kMaxDeviceTasks = int64_t{1} << 22;

// Who reaches what, asked once a piece (and device that runs tasks over it).
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

// Contiguous pieces for copy engines, in any order. Of equal length, as the driver takes a batch.
struct EngineCopies {
  std::vector<unsigned long long> sources;  // addresses
  std::vector<unsigned long long> destinations;
  std::vector<size_t> bytes;
};

// A device's copies to others are issued to so many lanes, a stream each. Measured: with one for
// each of four receivers all links are full; with two for each, eight in all, they are at 0.8.
// However many there are, a device copies to one receiver at a time, the lanes' in the order in
// which they were first issued: several sources must begin with different ones, or half the links
// stand idle.
inline constexpr size_t kEngineLanes = 4;

struct DeviceTasks {
  int device = 0;
  // At most a 16th of the bytes go to other devices, by kernel or engine: memory bounds it, not a
  // link.
  bool local = false;
  // For the kernels; run in any order, each by one thread block. The last `apart` of them, and no
  // others, are for the kernel of elements that lie apart (LiesApart in copy_task.h).
  std::vector<CopyTask> tasks;
  size_t apart = 0;
  // Beside `tasks`; at most kEngineLanes, none empty. To be issued in this order: of a
  // plan's sources with lanes the nth begins with its nth receiver.
  std::vector<EngineCopies> lanes;
};

struct CudaCopyPlan {
  std::vector<DeviceTasks> devices;  // ascending; none has neither tasks nor lanes
  // Under kReadback, for destinations with readback_now: digests of what was moved where it lies
  // now. To be run after all of `devices` ended, on the destinations' devices, with
  // CopyLaunch::source_sums pointing at the *stored* sums: proof_sum is an index into those.
  std::vector<DeviceTasks> readback;
  // Destination pieces that are written; digests not filled in. A task's `sum` is an index into it:
  // of the digest of what was stored, and of the source pass. Verified: the two sums are equal
  // (kTransfer: all; kReadback: those of destinations with readback_now; the others' source sums
  // are what a ReadbackJob must find).
  std::vector<PieceDigest> sums;
  std::vector<int64_t> bytes;  // per destination
  // Sums of whole source pieces (want_source_digests) follow those of `sums` in the numbers of
  // source sums: piece i of the transfer has sums.size() + i.
  uint32_t source_sums = 0;
  int64_t task_sums() const { return static_cast<int64_t>(sums.size()) + source_sums; }
};

struct CopyPlanOptions {
  // Tasks have at most so many bytes, fewer where a device has little to do: about
  // tasks_wanted tasks, of no less than least_task_bytes.
  int64_t most_task_bytes = 256 << 10;
  int64_t least_task_bytes = 32 << 10;
  int64_t tasks_wanted = 1024;
  // Of a device's first tasks: between two tasks a multiprocessor runs dry for a microsecond or
  // two, which memory does not hide, and a large model's tasks would be a million. The last ones
  // stay small: all blocks end together.
  int64_t most_first_task_bytes = 1 << 20;
  // Contiguous pieces of this size and more that go to another device are moved by copy engines,
  // except under kTransfer, which digests what the kernel stores; 0: none are.
  int64_t engine_bytes = 0;
};

// `verification`: what the tasks compute; a prepared transfer is planned once for each that is
// asked for. Order of a device's tasks: destinations' devices take turns, in proportion to what
// each gets, each source device starting with another one; parts of one chunk for several
// destinations are close together. Errors: INTERNAL a malformed program, as the host transport's;
// UNIMPLEMENTED into host memory; RESOURCE_EXHAUSTED more than kMaxDeviceTasks; those of
// CopyAddresses.
absl::StatusOr<CudaCopyPlan> PlanCopies(const Transfer& transfer, Verification verification,
                                        CopyAddresses* addresses,
                                        const CopyPlanOptions& options = {});

// Digests of pieces where they lie, on their own devices: the sum of job.pieces[i] is source sum i.
// Pieces in host memory are read by the lowest device of the others (0: there is none).
absl::StatusOr<CudaCopyPlan> PlanReadback(const ReadbackJob& job, CopyAddresses* addresses,
                                          const CopyPlanOptions& options = {});

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_PLAN_H_
