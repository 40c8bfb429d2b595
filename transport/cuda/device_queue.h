// One device's work: jobs issued in order by one thread, their ends awaited by another. Private to
// transport/cuda/.
//
//   Submit -> queued -> issuing -> running -> ended
//                |         |          |
//                +---------+----------+--> late: Fail, and if still queued, ended at once
//
// P4: a job is late when the device ended nothing for `limit` and the job is older than that. It is
// told with Fail; End follows when the device is done after all. While it runs, the job is kept,
// and with it all memory that it names (P6).
//
// A lost context (api.h) fails every job on every device, and is told once.
#ifndef REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_
#define REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_

#if defined(REFITD_CUDA)
#include <chrono>
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

namespace refitd {

// Whether the process lost its use of GPUs, shared by all queues. Thread-safe.
class LostContext {
 public:
  explicit LostContext(std::function<void(absl::Status)> tell) : tell_(std::move(tell)) {}
  // Passes `status` through; an error that costs the context becomes the one of all jobs.
  absl::Status Note(const absl::Status& status);
  // OK: not lost.
  absl::Status status() const;

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  const std::function<void(absl::Status)> tell_;
};

// What a job issues to, valid on the issuer's thread, the device's context current.
struct DeviceStreams {
  const CudaApi& api;
  CUfunction kernel = nullptr;
  CUstream main = nullptr;
  CUstream engine = nullptr;  // for copies; joined with `main` after the job where it was used
  CUevent before_engine = nullptr;
  bool engine_used = false;
};

class DeviceJob {
 public:
  virtual ~DeviceJob() = default;
  // Nobody waits any more: it is not begun.
  virtual bool Cancelled() const = 0;
  // Calls that return at once only.
  virtual absl::Status Issue(DeviceStreams* streams) = 0;
  // The job is late, or the context is lost. At most once, before End.
  virtual void Fail(const absl::Status& status) = 0;
  // The device is done with it, or never began. Once, unless the process gives the device up.
  virtual void End(const absl::Status& status) = 0;
};

struct DeviceQueueOptions {
  std::string name;         // of the device, for messages
  std::string_view kernel;  // image; outlives the queue
  std::chrono::milliseconds limit{0};
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
  // Ends the threads when all jobs have ended, at the latest at `deadline`: then jobs that have not
  // ended fail, and what they and the device hold is never given back.
  void Stop(std::chrono::steady_clock::time_point deadline);

  BufferPool* memory() const { return memory_.get(); }
  BufferPool* pinned() const { return pinned_.get(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class JobState : uint8_t { kQueued, kIssuing, kRunning };
  struct Entry {
    std::shared_ptr<DeviceJob> job;
    Clock::time_point submitted;
    JobState state = JobState::kQueued;
    bool failed = false;
    CUevent event = nullptr;  // null while running: nothing was issued
    absl::Status issued;      // what issuing it came to
  };
  using Entries = std::vector<std::shared_ptr<Entry>>;

  void IssueAll();
  void WaitForAll();
  std::shared_ptr<Entry> NextToIssue();
  void IssueOne(Entry* entry);
  absl::Status Begin();
  absl::Status IssueWork(DeviceJob* job, CUevent* event);
  absl::Status CloseJob(const DeviceStreams& streams, CUevent* event);
  // The end of the first job in order, if it came: true.
  bool TakeEnd(Entry* first);
  void FailLate();
  bool Late(const Entry& entry, Clock::time_point now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  CUstream main_ = nullptr;
  CUstream engine_ = nullptr;
  CUevent engine_event_ = nullptr;
  bool begun_ = false;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<CUevent> events_ ABSL_GUARDED_BY(mutex_);  // not in use
  Clock::time_point last_end_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool given_up_ ABSL_GUARDED_BY(mutex_) = false;
  int threads_ended_ ABSL_GUARDED_BY(mutex_) = 0;

  std::thread issuer_;
  std::thread waiter_;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_DEVICE_QUEUE_H_
