// Limits how often lines of one kind are logged whose cause is up to strangers. A log that
// strangers can fill hides what matters, and costs disk (P10).
#ifndef REFITD_DAEMON_PROCESS_LOG_LIMIT_H_
#define REFITD_DAEMON_PROCESS_LOG_LIMIT_H_

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"

namespace refitd {

// Thread-safe.
class LogLimit {
 public:
  static constexpr int kLines = 20;
  static constexpr Duration kWindow = std::chrono::seconds(10);

  // Must be called before each line. nullopt: the line must be left out. Else the line may be
  // logged, and the result tells how many lines were left out since the last logged one.
  std::optional<int64_t> Admit(TimePoint now) {
    MutexLock lock(&mutex_);
    if (!began_ || now - *began_ >= kWindow) {
      began_ = now;
      logged_ = 0;
    }
    if (logged_ >= kLines) {
      ++left_out_;
      return std::nullopt;
    }
    ++logged_;
    const int64_t before = left_out_;
    left_out_ = 0;
    return before;
  }

 private:
  Mutex mutex_;
  std::optional<TimePoint> began_ ABSL_GUARDED_BY(mutex_);
  int logged_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_LOG_LIMIT_H_
