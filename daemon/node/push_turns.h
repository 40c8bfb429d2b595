// Orders the callers of a mutex when some of them are many and in no hurry.
//
// A trainer may have hundreds of pushes under way, each with some tenths of a millisecond of work
// under the daemon's mutex, and a mutex is not fair: it goes to the caller that asks at the right
// moment. In a measurement with 30 pushes at once, the end of a transfer waited 6 ms for the mutex,
// and meanwhile all slots were full and the links idle (docs/decisions.md). So pushes take the
// mutex one at a time and let callers that free slots go ahead, which then wait for at most one
// push.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_PUSH_TURNS_H_
#define REFITD_DAEMON_NODE_PUSH_TURNS_H_

#include <chrono>

#include "absl/base/thread_annotations.h"
#include "transport/base/mutex.h"

namespace refitd {

class PushTurns {
 public:
  // `longest`: an endless row of callers ahead keeps pushes off for no longer than this (P4).
  explicit PushTurns(std::chrono::milliseconds longest = std::chrono::milliseconds(10))
      : longest_(longest) {}
  PushTurns(const PushTurns&) = delete;
  PushTurns& operator=(const PushTurns&) = delete;

  // Takes the mutex, ahead of all pushes that wait for it.
  void LockAhead(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) {
    Come();
    mutex->Lock();
    Go();
  }

  // Whether a caller waits in LockAhead.
  bool AnyAhead() {
    MutexLock lock(&gate_);
    return ahead_ > 0;
  }

  // The place of one push. The push holds this place while it waits for the mutex and while it has
  // the mutex.
  class Push {
   public:
    explicit Push(PushTurns* turns) : lock_(&turns->one_) { turns->LetAhead(); }

   private:
    const MutexLock lock_;
  };

 private:
  void Come() {
    MutexLock lock(&gate_);
    ++ahead_;
  }
  void Go() {
    MutexLock lock(&gate_);
    if (--ahead_ == 0) none_ahead_.NotifyOne();
  }
  void LetAhead() {
    MutexLock lock(&gate_);
    const auto deadline = std::chrono::steady_clock::now() + longest_;
    while (ahead_ > 0 && none_ahead_.WaitUntil(&gate_, deadline)) {
    }
  }

  const std::chrono::milliseconds longest_;
  Mutex one_;  // taken before gate_
  Mutex gate_;
  CondVar none_ahead_;
  int ahead_ ABSL_GUARDED_BY(gate_) = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PUSH_TURNS_H_
