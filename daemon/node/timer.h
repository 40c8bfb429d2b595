// The daemon's timer: a thread that takes a turn whenever the next deadline has come (P4).
//
// Invariant: the thread sleeps no longer than until the deadline that it found, or that Wake found
// to be earlier.
#ifndef REFITD_DAEMON_NODE_TIMER_H_
#define REFITD_DAEMON_NODE_TIMER_H_

#include <thread>

#include "daemon/node/turn.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"

namespace refitd {

// Both functions are called under the mutex.
class TimerHost {
 public:
  virtual ~TimerHost() = default;
  // The time of the next deadline. It may be far off but is never missing, so that the thread looks
  // again now and then.
  virtual TimePoint NextWake() = 0;
  // Called when that deadline has come.
  virtual void Ring(Turn& turn, TimePoint now) = 0;
};

class Timer {
 public:
  Timer(TimerHost* host, TurnHost* turns, Mutex* mutex)
      : host_(host), turns_(turns), mutex_(mutex) {}
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Called once, before all other functions.
  void Start();
  // A deadline may have moved. Called under the mutex.
  void Wake();
  // Ends the thread and waits for its end. Called without the mutex, on another thread.
  void Stop();

 private:
  void Loop();

  // Constant after construction.
  TimerHost* const host_;
  TurnHost* const turns_;
  Mutex* const mutex_;

  CondVar cond_;
  // Guarded by the mutex.
  TimePoint wakes_ = TimePoint::max();  // until when the thread sleeps
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_TIMER_H_
