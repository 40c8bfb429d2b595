// Records the loss of this process's GPUs, and reports it once; decides what counts as late.
// Private to transport/cuda/.
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

// Whether the process lost its GPUs, shared by all code that uses them. The cause is an error that
// destroys a context, or a device or a call that does not end. Only the first loss is reported.
// Thread-safe.
class LostContext {
 public:
  explicit LostContext(std::function<void(absl::Status)> report) : report_(std::move(report)) {}
  // Returns `status`, and loses the GPUs if that is an error that destroys the context: it then
  // becomes the status of all later jobs.
  absl::Status Note(const absl::Status& status);
  // Records and reports the loss, with this reason and its code.
  void Lose(const absl::Status& why);
  // OK if the GPUs are not lost, else the reason.
  absl::Status status() const;

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  const std::function<void(absl::Status)> report_;
};

// Decides what is late, for one thread that looks at least four times per limit. Time in which this
// process did not run at all (SIGSTOP, a machine that slept) is not counted.
class LateClock {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LateClock(std::chrono::milliseconds limit) : limit_(limit) {}
  void Look() {
    const Clock::time_point now = Clock::now();
    if (now - last_look_ > limit_ / 2) resumed_ = now;
    last_look_ = now;
  }
  // Whether work begun at `since` was late at the last look.
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
