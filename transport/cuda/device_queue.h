// One device's work: one thread issues jobs in order, another waits for their ends. Private to
// transport/cuda/.
//
//   Submit -> queued -> issuing -> running -> ended
//                |         |          |
//                |         +----------+--> given up by Stop: Fail, and kept for ever
//                +--> the GPUs are lost: ended at once
//
// P4: a job is late if it is older than `limit` and the device ended no job for `limit`. A late job
// is reported at once as a loss of the GPUs (LostContext), and queued jobs fail. A job that is
// being issued or runs is not ended by that, because the device, or a call of the driver, may still
// read and write the job's memory. It ends, as failed, when the device is done after all; until
// then the queue keeps the job and its memory (P6). Only the end of the process stops a device; the
// receiver of the loss must end it.
//
// A lost context (api.h) is such a loss too; running jobs then end with the status that the driver
// gives for each device.
#ifndef REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_
#define REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_

#if defined(REFITD_CUDA)
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/mutex.h"
#include "transport/cuda/api.h"
#include "transport/cuda/buffers.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/copy_task.h"
#include "transport/cuda/lost_context.h"

namespace refitd {

// The streams and kernels that a job issues to. Valid on the issuer's thread, while the device's
// context is current.
struct DeviceStreams {
  const CudaApi& api;
  std::array<CUfunction, kCopyKernels> kernels{};  // by CopyKernel
  CUstream main = nullptr;
  // Streams for copy engines; the first `lanes_used` are joined with `main` after the job. They do
  // not wait for work on `main`.
  std::array<CUstream, kEngineLanes> lanes{};
  size_t lanes_used = 0;
};

class DeviceJob {
 public:
  virtual ~DeviceJob() = default;
  // True if nobody waits for the job any more; it is then not begun.
  virtual bool Cancelled() const = 0;
  // Issues the job. Its calls return at once, or once the device has room for more work; they may
  // wait for this device only. The work itself may wait for another device's.
  virtual absl::Status Issue(DeviceStreams* streams) = 0;
  // Called if Stop gave the device up while the job is being issued or runs; End is then not
  // called. At most once.
  virtual void Fail(const absl::Status& status) = 0;
  // Called when the device is done with the job, or the job was never begun. Once, unless Fail was
  // called.
  virtual void End(const absl::Status& status) = 0;
};

struct DeviceQueueOptions {
  std::string name;  // of the device, for messages
  // Beginning of the threads' names; empty: "refitd-gpu-N" and "refitd-gpuw-N".
  std::string threads{};
  std::string_view kernel;  // image; outlives the queue. Empty: jobs launch none
  std::chrono::milliseconds limit{0};
  // Free memory of the pools beyond these limits goes back to the driver.
  int64_t kept_device_bytes = 0;
  int64_t kept_pinned_bytes = 0;
};

// The work of one device. Thread-safe; its threads keep a reference to it.
class DeviceQueue : public std::enable_shared_from_this<DeviceQueue> {
 public:
  DeviceQueue(std::shared_ptr<CudaContexts> contexts, int device, DeviceQueueOptions options,
              std::shared_ptr<LostContext> lost);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  void Start();
  void Submit(std::shared_ptr<DeviceJob> job);
  // Jobs submitted from now on end at once with UNAVAILABLE.
  void Close();
  // Closes, and ends the threads when all jobs have ended. At `deadline` the jobs that have not
  // ended fail, their memory and the device's is never freed, and the result is false.
  bool Stop(std::chrono::steady_clock::time_point deadline);

  ScratchBuffers* memory() const { return memory_.get(); }
  ScratchBuffers* pinned() const { return pinned_.get(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class JobState : uint8_t { kQueued, kIssuing, kRunning };
  struct Entry {
    std::shared_ptr<DeviceJob> job;
    Clock::time_point submitted;
    JobState state = JobState::kQueued;
    CUevent event = nullptr;  // null while running: nothing was issued
    absl::Status issued;      // the status of issuing it
  };
  using Entries = std::vector<std::shared_ptr<Entry>>;

  void IssueAll();
  void WaitForAll();
  // Waits for the next entry to issue. False: the queue ends. A null entry: only memory must be
  // given back.
  bool NextToIssue(std::shared_ptr<Entry>* entry);
  void IssueOne(Entry* entry);
  absl::Status Begin();
  absl::Status IssueWork(DeviceJob* job, CUevent* event);
  absl::Status CloseJob(const DeviceStreams& streams, CUevent* event);
  // Returns whether the first job in order has ended; if so, removes the job and calls its End.
  bool TakeEnd(Entry* first);
  void JudgeLate();
  bool AnyLate() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndQueued(const absl::Status& status);
  void GiveUp();
  absl::Status TooLate() const;
  void Pause(const Entry& entry) const;
  absl::StatusOr<CUevent> TakeEvent();
  void Destroy();

  const std::shared_ptr<CudaContexts> contexts_;
  const int device_;
  const DeviceQueueOptions options_;
  const std::shared_ptr<LostContext> lost_;
  const std::shared_ptr<ScratchBuffers> memory_;
  const std::shared_ptr<ScratchBuffers> pinned_;

  // Only the issuing thread uses these fields.
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  std::array<CUfunction, kCopyKernels> kernels_{};
  CUstream main_ = nullptr;
  std::array<CUstream, kEngineLanes> lanes_{};
  CUevent lane_event_ = nullptr;
  bool begun_ = false;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<CUevent> events_ ABSL_GUARDED_BY(mutex_);  // events that no job uses
  Clock::time_point last_end_ ABSL_GUARDED_BY(mutex_);
  LateClock late_clock_ ABSL_GUARDED_BY(mutex_);
  bool late_ ABSL_GUARDED_BY(mutex_) = false;     // jobs that the device still runs end as failed
  bool surplus_ ABSL_GUARDED_BY(mutex_) = false;  // a pool has memory to give back
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool given_up_ ABSL_GUARDED_BY(mutex_) = false;
  int threads_ended_ ABSL_GUARDED_BY(mutex_) = 0;

  std::thread issuer_;
  std::thread waiter_;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_
