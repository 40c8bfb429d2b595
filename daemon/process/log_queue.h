// Log lines that are made under a mutex and written after it was released, since writing takes
// system calls. Lines are written in the order of Add, whichever threads write them.
//
// Thread-safe. Write never waits for another thread that writes: that thread takes the new lines
// too. If that thread is stuck (a pipe that nobody reads), at most kMaxLines wait; later lines are
// dropped, and counted in the line that follows (P10).
#ifndef REFITD_DAEMON_PROCESS_LOG_QUEUE_H_
#define REFITD_DAEMON_PROCESS_LOG_QUEUE_H_

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/process/log.h"
#include "transport/base/mutex.h"

namespace refitd {

class LogQueue {
 public:
  static constexpr size_t kMaxLines = 10'000;
  using Sink = std::function<void(LogLevel, const std::string&)>;

  // The lines go to the daemon's log.
  LogQueue()
      : LogQueue([](LogLevel level, const std::string& message) { LogMessage(level, message); },
                 [](int64_t dropped) {
                   return fmt::format("{} lines were dropped: the log took no more", dropped);
                 }) {}
  // The lines go to `sink`, which one thread at a time calls without the queue's mutex.
  // `dropped_line` makes the line that counts what was dropped.
  LogQueue(Sink sink, std::function<std::string(int64_t)> dropped_line)
      : sink_(std::move(sink)), dropped_line_(std::move(dropped_line)) {}
  ~LogQueue() { Write(); }

  // A caller that adds a line must call Write once it holds no mutex.
  void Add(LogLevel level, std::string message) {
    MutexLock lock(&mutex_);
    if (lines_.size() >= kMaxLines) {
      ++dropped_;
      return;
    }
    lines_.emplace_back(level, std::move(message));
  }

  void Write() {
    for (Lines lines = Take(); !lines.empty(); lines = TakeMore()) {
      for (const auto& [level, message] : lines) sink_(level, message);
    }
  }

 private:
  using Lines = std::vector<std::pair<LogLevel, std::string>>;

  // Empty: there are no lines, or another thread writes.
  Lines Take() {
    MutexLock lock(&mutex_);
    return writing_ ? Lines() : TakeLines();
  }
  Lines TakeMore() {
    MutexLock lock(&mutex_);
    return TakeLines();
  }
  Lines TakeLines() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (const int64_t dropped = std::exchange(dropped_, 0); dropped > 0) {
      lines_.emplace_back(LogLevel::kWarning, dropped_line_(dropped));
    }
    writing_ = !lines_.empty();
    return std::exchange(lines_, {});
  }

  const Sink sink_;
  const std::function<std::string(int64_t)> dropped_line_;

  Mutex mutex_;
  Lines lines_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_LOG_QUEUE_H_
