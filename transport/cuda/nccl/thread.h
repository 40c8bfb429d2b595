// Two threads: the communicator thread makes all calls of NCCL, in the order in which they were
// requested; another thread watches for calls that do not return. Private to transport/cuda/.
//
//   Run, Post -> queued -> running -> returned
//                  |          +--> past its deadline by `limit`: reported as a loss of the GPUs
//                  +--> its deadline passed, Stop: not begun, and never will be
//
// P7: one thread issues all calls of all communicators, so their order is the same on each device.
// P4: Run returns at its deadline, or soon after (kGrace), whatever the call does. Calls are
// nonblocking groups that poll against the same deadline. Only calls that can't be given a time
// limit may hang (ncclCommAbort, cudaMalloc while a device hangs). A call that hangs is reported as
// a loss of the GPUs (LostContext), because only the end of the process stops it.
//
// Thread-safe; the threads keep a reference to the object.
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

// Pauses between two polls of NCCL or a device; the pause grows with the time since `since`, when
// polling began. NCCL answers a group in some 50 us, sockets move a slot in milliseconds, a
// communicator is made in a second.
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

  // Runs `call`, which must not wait beyond `deadline` and must own all that it touches, because it
  // may go on after this returned. `what` names the call in messages. DEADLINE_EXCEEDED, naming the
  // call that the thread runs: `call` was not begun and never will be, or it goes on and *began is
  // true. UNAVAILABLE: the thread ends. Else the status of `call`. Not to be called on the
  // communicator thread.
  absl::Status Run(const std::string& what, Clock::time_point deadline, Call call, bool* began);
  // Runs `call` after all others, without a result; does nothing after Stop began.
  void Post(const std::string& what, Clock::time_point deadline, std::function<void()> call);

  // Ends the threads. Calls queued by Run are not begun any more, posted calls still run. At
  // `deadline` at the latest this returns, and leaves a thread that hangs behind.
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
  CondVar watching_;  // used by Stop only
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
