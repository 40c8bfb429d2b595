// The thread that plans what is submitted to the cuda transport, in order, so that callers never
// wait for a plan or for the opening of a handle; and another that watches the calls of the driver
// that planning makes, here and on callers' threads (Transport::Prepare). Private to
// transport/cuda/.
//
//   Submit -> queued -> planning -> started
//                |          +--> Stop gave up: GiveUp
//                +--> the GPUs are lost, Stop: failed
//
// P4: such a call may hang behind a device that does. One that takes longer than `limit` is told as
// a loss of the GPUs (LostContext), and jobs that wait behind it fail then. The one that it belongs
// to fails when the call returns, or when Stop gives it up: it has read and written nothing yet.
#ifndef REFITD_TRANSPORT_CUDA_PLAN_THREAD_H_
#define REFITD_TRANSPORT_CUDA_PLAN_THREAD_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "transport/base/mutex.h"
#include "transport/cuda/device_queue.h"

namespace refitd {

// Start, Fail or GiveUp is called, once.
class PlanJob {
 public:
  virtual ~PlanJob() = default;
  // Calls of the driver are made inside a PlanThread::Watched.
  virtual void Plan() = 0;
  virtual void Start() = 0;
  // After Plan, or without.
  virtual void Fail(const absl::Status& status) = 0;
  // As Fail, but beside a Plan that hangs, on another thread: what that uses must stay.
  virtual void GiveUp(const absl::Status& status) = 0;
};

// Thread-safe; its threads hold it too.
class PlanThread : public std::enable_shared_from_this<PlanThread> {
 public:
  using Clock = std::chrono::steady_clock;

  // `name`: of a device, for messages.
  PlanThread(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost,
             std::function<std::string(int)> name);
  ~PlanThread();
  PlanThread(const PlanThread&) = delete;
  PlanThread& operator=(const PlanThread&) = delete;

  void Start();
  void Submit(std::shared_ptr<PlanJob> job);
  // Jobs that wait fail, UNAVAILABLE; the one that is being planned may go on until `deadline`.
  void Stop(Clock::time_point deadline);

  // A call of the driver about a device, as long as it lives.
  class Watched {
   public:
    Watched(PlanThread* thread, int device) : thread_(thread), number_(thread->BeginCall(device)) {}
    ~Watched() { thread_->EndCall(number_); }
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

   private:
    PlanThread* const thread_;
    const uint64_t number_;
  };

 private:
  using Jobs = std::deque<std::shared_ptr<PlanJob>>;
  struct Call {
    int device = 0;
    Clock::time_point since;
  };

  void Work();
  void PlanOne(const std::shared_ptr<PlanJob>& job);
  void Watch();
  void JudgeCalls();
  uint64_t BeginCall(int device);
  void EndCall(uint64_t number);

  const std::chrono::milliseconds limit_;
  const std::shared_ptr<LostContext> lost_;
  const std::function<std::string(int)> name_;

  Mutex mutex_;
  CondVar changed_;   // but for calls, which are many
  CondVar watching_;  // Stop alone
  Jobs queued_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<PlanJob> planning_ ABSL_GUARDED_BY(mutex_);  // null: none, or it was given up
  std::map<uint64_t, Call> calls_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_call_ ABSL_GUARDED_BY(mutex_) = 1;
  LateClock late_clock_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool worked_ ABSL_GUARDED_BY(mutex_) = false;  // the worker ended
  bool watch_ends_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread worker_;
  std::thread watcher_;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_PLAN_THREAD_H_
