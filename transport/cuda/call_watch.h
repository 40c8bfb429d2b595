// Watches calls of the driver. Private to transport/cuda/.
//
// P4: a call may hang if a device hangs. A call that takes longer than `limit`, and what its bytes
// take beyond that, is reported as a loss of the GPUs (LostContext). The call goes on, so memory
// that it uses must stay until it returns (P6).
#ifndef REFITD_TRANSPORT_CUDA_CALL_WATCH_H_
#define REFITD_TRANSPORT_CUDA_CALL_WATCH_H_

#if defined(REFITD_CUDA)
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "transport/base/mutex.h"
#include "transport/cuda/lost_context.h"

namespace refitd {

// Watches calls on a thread of its own. Thread-safe.
class CallWatch {
 public:
  // `name` gives a device's name, for messages. `looked` is called after each look, on the watching
  // thread.
  CallWatch(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost,
            std::function<std::string(int)> name, std::function<void()> looked = nullptr);
  // Calls Stop.
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // Ends the watching. Not to be called on the watching thread.
  void Stop();

  // Marks a call of the driver about a device, or several in a row, as under way while this object
  // lives.
  class Call {
   public:
    // `watch` may be null: then the call is not watched. `what` is a static text that names the
    // call in messages. `bytes`: of host memory that it pins or lets go, whose pages the kernel
    // goes through.
    Call(CallWatch* watch, int device, const char* what, int64_t bytes = 0)
        : watch_(watch), number_(watch == nullptr ? 0 : watch->Begin(device, what, bytes)) {}
    ~Call() {
      if (watch_ != nullptr) watch_->End(number_);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    CallWatch* const watch_;
    const uint64_t number_;
  };

 private:
  using Clock = LateClock::Clock;
  struct Running {
    int device = 0;
    const char* what = nullptr;
    std::chrono::milliseconds extra{};  // beyond the limit
    Clock::time_point since;            // `extra` later than its begin
  };

  uint64_t Begin(int device, const char* what, int64_t bytes);
  void End(uint64_t number);
  void Watch();
  void Judge();

  const std::chrono::milliseconds limit_;
  const std::shared_ptr<LostContext> lost_;
  const std::function<std::string(int)> name_;
  const std::function<void()> looked_;

  Mutex mutex_;
  CondVar stopped_;  // calls do not notify this, because they are many
  std::map<uint64_t, Running> running_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  LateClock late_clock_ ABSL_GUARDED_BY(mutex_);
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: it uses the other members
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_CALL_WATCH_H_
