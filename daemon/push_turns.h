// Who gets a mutex next when some callers are many and in no hurry.
//
// A trainer may have hundreds of pushes under way, each with half a millisecond of work under the
// node's mutex, and a mutex goes to whoever asks at the right moment, not to who waited longest.
// Measured: with 30 pushes at once the end of a transfer waited 5 ms for the mutex, in which all
// slots were full and the links idle (docs/decisions.md). So pushes come one at a time, and only
// when nobody ahead waits: what frees slots waits for one push at most.
//
// Thread-safe. Nothing waits here for longer than others hold the mutex.
#ifndef REFITD_DAEMON_PUSH_TURNS_H_
#define REFITD_DAEMON_PUSH_TURNS_H_

#include <atomic>

#include "absl/base/thread_annotations.h"
#include "transport/base/mutex.h"

namespace refitd {

class PushTurns {
 public:
  PushTurns() = default;
  PushTurns(const PushTurns&) = delete;
  PushTurns& operator=(const PushTurns&) = delete;

  // Holds the mutex, ahead of all pushes that wait for it.
  class ABSL_SCOPED_LOCKABLE Ahead {
   public:
    Ahead(PushTurns* turns, Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
      turns->ahead_.fetch_add(1);
      mutex_->Lock();
      if (turns->ahead_.fetch_sub(1) == 1) turns->ahead_.notify_all();
    }
    ~Ahead() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
    Ahead(const Ahead&) = delete;
    Ahead& operator=(const Ahead&) = delete;

   private:
    Mutex* const mutex_;
  };

  // Whether somebody waits in an Ahead.
  bool AnyAhead() const { return ahead_.load() > 0; }

  // The turn of one push, to be held while it takes the mutex and has it.
  class Turn {
   public:
    explicit Turn(PushTurns* turns) : lock_(&turns->one_) {
      for (int ahead = turns->ahead_.load(); ahead > 0; ahead = turns->ahead_.load()) {
        turns->ahead_.wait(ahead);
      }
    }

   private:
    const MutexLock lock_;
  };

 private:
  Mutex one_;
  std::atomic<int> ahead_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PUSH_TURNS_H_
