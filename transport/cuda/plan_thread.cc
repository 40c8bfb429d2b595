#include "transport/cuda/plan_thread.h"

#if defined(REFITD_CUDA)
#include <pthread.h>

#include <algorithm>
#include <utility>

namespace refitd {

PlanThread::PlanThread(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost,
                       std::function<std::string(int)> name)
    : lost_(std::move(lost)), calls_(limit, lost_, std::move(name), [this] { FailQueued(); }) {}

// The destructor runs after Stop, perhaps on the thread of this object.
PlanThread::~PlanThread() = default;

void PlanThread::Start() {
  worker_ = std::thread([self = shared_from_this()] { self->Work(); });
  (void)pthread_setname_np(worker_.native_handle(), "refitd-gpu-plan");
}

void PlanThread::Submit(std::shared_ptr<PlanJob> job) {
  {
    MutexLock lock(&mutex_);
    if (!stopping_) {
      queued_.push_back(std::move(job));
      changed_.NotifyAll();
      return;
    }
  }
  job->Fail(absl::UnavailableError("the transport ends"));
}

void PlanThread::Stop(Clock::time_point deadline) {
  const absl::Status gone = absl::UnavailableError("the transport ends");
  Jobs left;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    left.swap(queued_);
    changed_.NotifyAll();
  }
  for (const std::shared_ptr<PlanJob>& job : left) job->Fail(gone);
  bool ended = false;
  std::shared_ptr<PlanJob> given_up;
  {
    constexpr auto kGrace = std::chrono::seconds(1);
    const Clock::time_point last = std::max(deadline, Clock::now() + kGrace);
    MutexLock lock(&mutex_);
    while (!worked_ && changed_.WaitUntil(&mutex_, last)) {
    }
    ended = worked_;
    given_up = std::move(planning_);
    planning_ = nullptr;
  }
  if (given_up != nullptr) given_up->GiveUp(gone);
  calls_.Stop();
  if (ended) {
    worker_.join();
  } else {
    worker_.detach();  // the thread hangs inside the driver
  }
}

void PlanThread::Work() {
  while (true) {
    std::shared_ptr<PlanJob> job;
    {
      MutexLock lock(&mutex_);
      while (queued_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (queued_.empty()) break;
      job = std::move(queued_.front());
      queued_.pop_front();
      planning_ = job;
    }
    PlanOne(job);
  }
  MutexLock lock(&mutex_);
  worked_ = true;
  changed_.NotifyAll();
}

void PlanThread::PlanOne(const std::shared_ptr<PlanJob>& job) {
  absl::Status lost = lost_->status();
  if (lost.ok()) {
    job->Plan();
    lost = lost_->status();
  }
  {
    MutexLock lock(&mutex_);
    if (planning_ == nullptr) return;  // given up meanwhile, and failed
    planning_ = nullptr;
  }
  if (lost.ok()) {
    job->Start();
  } else {
    job->Fail(lost);
  }
}

void PlanThread::FailQueued() {
  const absl::Status lost = lost_->status();
  if (lost.ok()) return;
  Jobs behind;
  {
    MutexLock lock(&mutex_);
    behind.swap(queued_);
  }
  for (const std::shared_ptr<PlanJob>& job : behind) job->Fail(lost);
}

}  // namespace refitd

#endif  // REFITD_CUDA
