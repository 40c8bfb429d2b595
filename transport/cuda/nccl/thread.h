// The communicator thread: every call of NCCL that this process makes, in the order in which they
// came; and another thread that watches for calls that do not return. Private to transport/cuda/.
//
//   Run, Post -> queued -> running -> returned
//                  |          +--> past its deadline by `limit`: told as a loss of the GPUs
//                  +--> its deadline passed, Stop: not begun, and never will be
//
// P7: one thread issues all calls of all communicators, so their order is the same on each device.
// P4: Run returns at its deadline, or soon after (kGrace), whatever the call does. Calls are
// nonblocking groups that poll against the same deadline; what is left to hang are calls that NCCL
// or the driver does not let anybody bound (ncclCommAbort, cudaMalloc behind a device that hangs).
// One that does is told as a loss (LostContext): nothing but the end of the process stops it.
//
// Thread-safe; its threads hold it too.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_THREAD_H_
#define REFITD_TRANSPORT_CUDA_NCCL_THREAD_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "transport/base/mutex.h"
#include "transport/cuda/lost_context.h"

namespace refitd {

// Between two looks at what NCCL or a device is at, by who has looked since then. NCCL answers a
// group in some 50 us, sockets move a slot in milliseconds, a communicator is made in a second.
void PauseOfPoll(std::chrono::steady_clock::time_point since);

class NcclThread : public std::enable_shared_from_this<NcclThread> {
 public:
  using Clock = std::chrono::steady_clock;
  using Call = std::function<absl::Status()>;

  NcclThread(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost);
  ~NcclThread();
  NcclThread(const NcclThread&) = delete;
  NcclThread& operator=(const NcclThread&) = delete;

  void Start();

  // Runs `call`, which waits for nothing beyond `deadline` and owns all that it touches: it may go
  // on after this returned. `what` names it in messages. DEADLINE_EXCEEDED, naming what the thread
  // is at: it was not begun, and will not be; or it goes on, and *began is true. UNAVAILABLE: the
  // thread ends. Else the call's own. Not on the communicator thread.
  absl::Status Run(const std::string& what, Clock::time_point deadline, Call call, bool* began);
  // Runs `call` behind all others, and tells nobody; not at all once Stop began.
  void Post(const std::string& what, Clock::time_point deadline, std::function<void()> call);

  // What is queued by Run is not begun any more, what was posted is; ends the threads when it has
  // returned, at the latest at `deadline`: then a thread that hangs is left to itself.
  void Stop(Clock::time_point deadline);

 private:
  struct Job {
    std::string what;
    Clock::time_point deadline;
    Call call;
    bool posted = false;
    bool began = false;
    bool ended = false;
    absl::Status status;
  };
  using Jobs = std::deque<std::shared_ptr<Job>>;

  void Work();
  void Watch();
  void JudgeRunning();
  absl::Status TooLate(const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::shared_ptr<Job>& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::chrono::milliseconds limit_;
  const std::shared_ptr<LostContext> lost_;

  mutable Mutex mutex_;
  CondVar changed_;
  CondVar watching_;  // Stop alone
  Jobs queued_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Job> running_ ABSL_GUARDED_BY(mutex_);
  LateClock late_clock_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool worked_ ABSL_GUARDED_BY(mutex_) = false;  // the worker ended
  bool watch_ends_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread worker_;
  std::thread watcher_;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_THREAD_H_
