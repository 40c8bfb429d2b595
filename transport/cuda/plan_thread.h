// The thread that plans submitted transfers of the cuda transport, in order, so that callers never
// wait for a plan or for the opening of a handle; and a watch of the calls of the driver that
// planning makes, on this thread and on callers' threads (Transport::Prepare). Private to
// transport/cuda/.
//
//   Submit -> queued -> planning -> started
//                |          +--> given up by Stop: GiveUp
//                +--> the GPUs are lost, Stop: failed
//
// P4: if such a call hangs (call_watch.h), the jobs that wait behind it fail. The job that made the
// call fails when the call returns, or when Stop gives the job up; it has read and written nothing
// yet.
#ifndef REFITD_TRANSPORT_CUDA_PLAN_THREAD_H_
#define REFITD_TRANSPORT_CUDA_PLAN_THREAD_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "transport/base/mutex.h"
#include "transport/cuda/call_watch.h"
#include "transport/cuda/lost_context.h"

namespace refitd {

// A job to plan. Exactly one of Start, Fail and GiveUp is called, once.
class PlanJob {
 public:
  virtual ~PlanJob() = default;
  // Must make its calls of the driver inside a CallWatch::Call.
  virtual void Plan() = 0;
  virtual void Start() = 0;
  // Called after Plan, or instead of Plan.
  virtual void Fail(const absl::Status& status) = 0;
  // Does what Fail does, but is called on another thread while Plan hangs, so memory that Plan uses
  // must stay.
  virtual void GiveUp(const absl::Status& status) = 0;
};

// Plans jobs in order. Thread-safe; its thread keeps a reference to it.
class PlanThread : public std::enable_shared_from_this<PlanThread> {
 public:
  using Clock = std::chrono::steady_clock;

  // `name` gives a device's name, for messages.
  PlanThread(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost,
             std::function<std::string(int)> name);
  ~PlanThread();
  PlanThread(const PlanThread&) = delete;
  PlanThread& operator=(const PlanThread&) = delete;

  void Start();
  void Submit(std::shared_ptr<PlanJob> job);
  // Fails the jobs that wait with UNAVAILABLE; the job that is being planned may go on until
  // `deadline`.
  void Stop(Clock::time_point deadline);

  CallWatch* calls() { return &calls_; }

 private:
  using Jobs = std::deque<std::shared_ptr<PlanJob>>;

  void Work();
  void PlanOne(const std::shared_ptr<PlanJob>& job);
  // Fails the queued jobs, if the GPUs are lost.
  void FailQueued();

  const std::shared_ptr<LostContext> lost_;

  Mutex mutex_;
  CondVar changed_;
  Jobs queued_ ABSL_GUARDED_BY(mutex_);
  // Null: no job is being planned, or it was given up.
  std::shared_ptr<PlanJob> planning_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool worked_ ABSL_GUARDED_BY(mutex_) = false;  // the worker ended

  std::thread worker_;
  CallWatch calls_;  // last: its thread uses the other members
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_PLAN_THREAD_H_
