// The loss of this process's GPUs, told once; and what counts as late. Private to transport/cuda/.
#ifndef REFITD_TRANSPORT_CUDA_LOST_CONTEXT_H_
#define REFITD_TRANSPORT_CUDA_LOST_CONTEXT_H_

#if defined(REFITD_CUDA)
#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "transport/base/mutex.h"

namespace refitd {

// Whether the process lost its use of GPUs, shared by all that use them: to an error that costs a
// context, or to a device or a call that does not end. The first loss is told, later ones are not.
// Thread-safe.
class LostContext {
 public:
  explicit LostContext(std::function<void(absl::Status)> tell) : tell_(std::move(tell)) {}
  // Passes `status` through; an error that costs the context becomes the one of all jobs.
  absl::Status Note(const absl::Status& status);
  // Lost for this reason, with its code.
  void Lose(const absl::Status& why);
  // OK: not lost.
  absl::Status status() const;

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  const std::function<void(absl::Status)> tell_;
};

// Decides what is late, for one thread that looks often: at least four times a limit. Time in which
// this process did not run at all (SIGSTOP, a machine that slept) counts for nobody.
class LateClock {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LateClock(std::chrono::milliseconds limit) : limit_(limit) {}
  void Look() {
    const Clock::time_point now = Clock::now();
    if (now - last_look_ > limit_ / 2) resumed_ = now;
    last_look_ = now;
  }
  // At the last look.
  bool Late(Clock::time_point since) const {
    return last_look_ - std::max(since, resumed_) > limit_;
  }
  Clock::time_point NextLook() const { return Clock::now() + limit_ / 8; }

 private:
  const Clock::duration limit_;
  Clock::time_point last_look_;
  Clock::time_point resumed_;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_LOST_CONTEXT_H_
