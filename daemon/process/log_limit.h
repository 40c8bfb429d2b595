// Limits how often lines of one kind are logged whose cause is up to strangers. A log that
// strangers can fill hides what matters, and costs disk (P10).
#ifndef REFITD_DAEMON_PROCESS_LOG_LIMIT_H_
#define REFITD_DAEMON_PROCESS_LOG_LIMIT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

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

// A LogLimit for each identity, so that one that is refused all the time hides no other's
// refusals. Thread-safe.
class LogLimits {
 public:
  // Identities that have a limit of their own at a time; further ones share one.
  static constexpr size_t kIdentities = 256;

  // As LogLimit::Admit.
  std::optional<int64_t> Admit(const std::string& identity, TimePoint now) {
    return LimitOf(identity, now)->Admit(now);
  }

 private:
  struct Entry {
    TimePoint last;
    std::shared_ptr<LogLimit> limit = std::make_shared<LogLimit>();
  };
  std::shared_ptr<LogLimit> LimitOf(const std::string& identity, TimePoint now) {
    MutexLock lock(&mutex_);
    if (entries_.size() >= kIdentities && !entries_.contains(identity)) {
      std::erase_if(entries_,
                    [&](const auto& e) { return now - e.second.last >= LogLimit::kWindow; });
      if (entries_.size() >= kIdentities) return others_;
    }
    Entry& entry = entries_[identity];
    entry.last = now;
    return entry.limit;
  }

  const std::shared_ptr<LogLimit> others_ = std::make_shared<LogLimit>();
  Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_LOG_LIMIT_H_
