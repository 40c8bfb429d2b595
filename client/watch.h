// A thread that waits inside a call of this library can look after something else now and then:
// Python's main thread looks whether a signal came, since only that thread runs signal handlers.
#ifndef REFITD_CLIENT_WATCH_H_
#define REFITD_CLIENT_WATCH_H_

#include <chrono>
#include <functional>

#include "transport/base/mutex.h"

namespace refitd::client {

// While this object lives, waits of the thread that made it call the function `look` every kEvery.
// If `look` returns false, the wait ends as if its deadline had passed. `look` may itself call this
// library.
class Watch {
 public:
  static constexpr std::chrono::milliseconds kEvery{50};

  explicit Watch(std::function<bool()> look);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  friend bool WaitWatched(CondVar*, Mutex*, std::chrono::steady_clock::time_point);
  const std::function<bool()> look_;
};

// Waits as CondVar::WaitUntil does; `look` is called without the mutex. False: the deadline passed,
// or `look` returned false.
bool WaitWatched(CondVar* cond, Mutex* mutex, std::chrono::steady_clock::time_point deadline)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_WATCH_H_
