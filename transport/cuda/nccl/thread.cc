#include "transport/cuda/nccl/thread.h"

#if defined(REFITD_CUDA)
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// A call that polls against its deadline returns within this time after it.
constexpr auto kGrace = std::chrono::milliseconds(200);

constexpr auto kYieldFor = std::chrono::microseconds(200);
constexpr auto kShortPause = std::chrono::microseconds(20);
constexpr auto kLongPause = std::chrono::microseconds(200);
constexpr auto kLongAfter = std::chrono::milliseconds(20);

}  // namespace

void PauseOfPoll(std::chrono::steady_clock::time_point since) {
  const auto age = std::chrono::steady_clock::now() - since;
  if (age < kYieldFor) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(age < kLongAfter ? kShortPause : kLongPause);
  }
}

NcclThread::NcclThread(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost)
    : limit_(limit), lost_(std::move(lost)), late_clock_(limit) {}

// The destructor runs on the thread that ended last.
NcclThread::~NcclThread() = default;

void NcclThread::Start() {
  worker_ = std::thread([self = shared_from_this()] { self->Work(); });
  watcher_ = std::thread([self = shared_from_this()] { self->Watch(); });
  (void)pthread_setname_np(worker_.native_handle(), "refitd-nccl");
  (void)pthread_setname_np(watcher_.native_handle(), "refitd-nccl-w");
}

absl::Status NcclThread::Run(const std::string& what, Clock::time_point deadline, Call call,
                             bool* began) {
  auto job = std::make_shared<Job>();
  job->what = what;
  job->deadline = deadline;
  job->call = std::move(call);
  *began = false;
  MutexLock lock(&mutex_);
  if (stopping_) return absl::UnavailableError("the communicator thread ends");
  queued_.push_back(job);
  changed_.NotifyAll();
  while (!job->ended) {
    const Clock::time_point last = job->began ? deadline + kGrace : deadline;
    if (changed_.WaitUntil(&mutex_, last) || job->ended) continue;
    // The call may have begun in the meantime.
    if (job->began && Clock::now() < deadline + kGrace) continue;
    *began = job->began;
    if (!job->began) Forget(job);
    return TooLate(*job);
  }
  *began = job->began;
  return job->status;
}

void NcclThread::Post(const std::string& what, Clock::time_point deadline,
                      std::function<void()> call) {
  auto job = std::make_shared<Job>();
  job->what = what;
  job->deadline = deadline;
  job->posted = true;
  job->call = [call = std::move(call)] {
    call();
    return absl::OkStatus();
  };
  MutexLock lock(&mutex_);
  if (stopping_) return;
  queued_.push_back(std::move(job));
  changed_.NotifyAll();
}

void NcclThread::Forget(const std::shared_ptr<Job>& job) {
  queued_.erase(std::remove(queued_.begin(), queued_.end(), job), queued_.end());
}

absl::Status NcclThread::TooLate(const Job& job) const {
  if (job.began) {
    return Error(absl::StatusCode::kDeadlineExceeded, "{} does not return", job.what);
  }
  if (running_ == nullptr) {
    return Error(absl::StatusCode::kDeadlineExceeded, "{}: its time was up before it began",
                 job.what);
  }
  return Error(absl::StatusCode::kDeadlineExceeded, "{} waits for another call of NCCL: {}",
               job.what, running_->what);
}

void NcclThread::Work() {
  while (true) {
    std::shared_ptr<Job> job;
    {
      MutexLock lock(&mutex_);
      while (queued_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (queued_.empty()) break;
      job = std::move(queued_.front());
      queued_.pop_front();
      job->began = true;
      running_ = job;
    }
    absl::Status status = job->call();
    job->call = nullptr;  // what the call owns is destroyed on this thread
    MutexLock lock(&mutex_);
    job->status = std::move(status);
    job->ended = true;
    running_ = nullptr;
    changed_.NotifyAll();
  }
  MutexLock lock(&mutex_);
  worked_ = true;
  changed_.NotifyAll();
}

void NcclThread::Watch() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (watch_ends_) return;
      (void)watching_.WaitUntil(&mutex_, late_clock_.NextLook());
      late_clock_.Look();
    }
    JudgeRunning();
  }
}

void NcclThread::JudgeRunning() {
  std::string late;
  {
    MutexLock lock(&mutex_);
    if (running_ == nullptr || !late_clock_.Late(running_->deadline)) return;
    late = running_->what;
  }
  lost_->Lose(Error(absl::StatusCode::kDeadlineExceeded,
                    "{} did not return within {} ms of its deadline", late, limit_.count()));
}

void NcclThread::Stop(Clock::time_point deadline) {
  Jobs refused;
  bool ended = false;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    for (const std::shared_ptr<Job>& job : queued_) {
      if (!job->posted) refused.push_back(job);
    }
    for (const std::shared_ptr<Job>& job : refused) {
      Forget(job);
      job->status = absl::UnavailableError("the communicator thread ends");
      job->ended = true;
    }
    changed_.NotifyAll();
    while (!worked_ && changed_.WaitUntil(&mutex_, deadline)) {
    }
    ended = worked_;
    watch_ends_ = true;
    watching_.NotifyAll();
  }
  watcher_.join();
  if (ended) {
    worker_.join();
  } else {
    worker_.detach();  // the thread hangs inside NCCL or the driver
  }
}

}  // namespace refitd

#endif  // REFITD_CUDA
