// One device's work: jobs issued in order by one thread, their ends awaited by another. Private to
// transport/cuda/.
//
//   Submit -> queued -> issuing -> running -> ended
//                |         |          |
//                |         +----------+--> Stop gave up: Fail, and kept for ever
//                +--> the GPUs are lost: ended at once
//
// P4: a job is late when the device ended nothing for `limit` and the job is older than that. That
// is told at once, as a loss of the GPUs (LostContext), and fails what is queued. What is being
// issued or runs is not ended by it: the device, or a call of the driver, may still read and write
// all that the job names. It ends, as failed, when the device is done after all; until then it is
// kept, and with it its memory (P6). Nothing but the end of the process stops a device: whoever is
// told of the loss sees to that.
//
// A lost context (api.h) is such a loss too: what runs ends as the driver says of each device.
#ifndef REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_
#define REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_

#if defined(REFITD_CUDA)
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
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
#include "transport/cuda/lost_context.h"

namespace refitd {

// What a job issues to, valid on the issuer's thread, the device's context current.
struct DeviceStreams {
  const CudaApi& api;
  CUfunction kernel = nullptr;        // kCopyKernel
  CUfunction apart_kernel = nullptr;  // kCopyApartKernel
  CUstream main = nullptr;
  // For copy engines; the first `lanes_used` are joined with `main` after the job. They do not wait
  // for what is on `main`.
  std::array<CUstream, kEngineLanes> lanes{};
  size_t lanes_used = 0;
};

class DeviceJob {
 public:
  virtual ~DeviceJob() = default;
  // Nobody waits any more: it is not begun.
  virtual bool Cancelled() const = 0;
  // Calls that return at once, or as soon as the device has room for more: they wait for the
  // device's work at most, never for anybody else.
  virtual absl::Status Issue(DeviceStreams* streams) = 0;
  // Stop gave the device up while the job is being issued or runs: End does not follow. At most
  // once.
  virtual void Fail(const absl::Status& status) = 0;
  // The device is done with it, or never began. Once, unless Fail was called.
  virtual void End(const absl::Status& status) = 0;
};

struct DeviceQueueOptions {
  std::string name;         // of the device, for messages
  std::string threads{};    // their names' beginning; empty: "refitd-gpu-N" and "refitd-gpuw-N"
  std::string_view kernel;  // image; outlives the queue. Empty: jobs launch none
  std::chrono::milliseconds limit{0};
  // Free memory of the pools beyond this goes back to the driver.
  int64_t kept_device_bytes = 0;
  int64_t kept_pinned_bytes = 0;
};

// Thread-safe; its threads hold it too.
class DeviceQueue : public std::enable_shared_from_this<DeviceQueue> {
 public:
  DeviceQueue(std::shared_ptr<CudaContexts> contexts, int device, DeviceQueueOptions options,
              std::shared_ptr<LostContext> lost);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  void Start();
  void Submit(std::shared_ptr<DeviceJob> job);
  // What is submitted from now on ends at once, UNAVAILABLE.
  void Close();
  // Closes, and ends the threads when all jobs have ended, at the latest at `deadline`: then jobs
  // that have not ended fail, and what they and the device hold is never given back: false.
  bool Stop(std::chrono::steady_clock::time_point deadline);

  BufferPool* memory() const { return memory_.get(); }
  BufferPool* pinned() const { return pinned_.get(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class JobState : uint8_t { kQueued, kIssuing, kRunning };
  struct Entry {
    std::shared_ptr<DeviceJob> job;
    Clock::time_point submitted;
    JobState state = JobState::kQueued;
    CUevent event = nullptr;  // null while running: nothing was issued
    absl::Status issued;      // what issuing it came to
  };
  using Entries = std::vector<std::shared_ptr<Entry>>;

  void IssueAll();
  void WaitForAll();
  // False: the queue ends. A null entry: there is only memory to give back.
  bool NextToIssue(std::shared_ptr<Entry>* entry);
  void IssueOne(Entry* entry);
  absl::Status Begin();
  absl::Status IssueWork(DeviceJob* job, CUevent* event);
  absl::Status CloseJob(const DeviceStreams& streams, CUevent* event);
  // The end of the first job in order, if it came: true.
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
  const std::shared_ptr<BufferPool> memory_;
  const std::shared_ptr<BufferPool> pinned_;

  // The issuer's alone.
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  CUfunction apart_kernel_ = nullptr;
  CUstream main_ = nullptr;
  std::array<CUstream, kEngineLanes> lanes_{};
  CUevent lane_event_ = nullptr;
  bool begun_ = false;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<CUevent> events_ ABSL_GUARDED_BY(mutex_);  // not in use
  Clock::time_point last_end_ ABSL_GUARDED_BY(mutex_);
  LateClock late_clock_ ABSL_GUARDED_BY(mutex_);
  bool late_ ABSL_GUARDED_BY(mutex_) = false;     // what the device does ends as failed
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
