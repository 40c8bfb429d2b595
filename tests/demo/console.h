// The demo's own output: lines that stay, and a progress line below them that is redrawn on a
// terminal and told in steps elsewhere.
//
// Thread-safe.
#ifndef REFITD_TESTS_DEMO_CONSOLE_H_
#define REFITD_TESTS_DEMO_CONSOLE_H_

#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>

#include "daemon/refitctl/format.h"
#include "transport/base/mutex.h"

namespace refitd::demo {

class Console {
 public:
  Console() {
    if (const auto terminal = TerminalSizeOf(STDOUT_FILENO)) block_.emplace(terminal->columns);
  }

  void Say(const std::string& line) {
    MutexLock lock(&mutex_);
    Write(block_ ? block_->Redraw({line}, {}) : line + "\n");
  }

  // `step` grows as the work goes on: without a terminal a line is shown once per step.
  void Progress(const std::string& line, int step) {
    MutexLock lock(&mutex_);
    if (block_) {
      Write(block_->Redraw({}, {line}));
    } else if (step != shown_step_) {
      shown_step_ = step;
      Write(line + "\n");
    }
  }

  void EndProgress() {
    MutexLock lock(&mutex_);
    if (block_) Write(block_->Redraw({}, {}));
    shown_step_ = -1;
  }

 private:
  static void Write(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  Mutex mutex_;
  std::optional<LiveBlock> block_ ABSL_GUARDED_BY(mutex_);
  int shown_step_ ABSL_GUARDED_BY(mutex_) = -1;
};

}  // namespace refitd::demo

#endif  // REFITD_TESTS_DEMO_CONSOLE_H_
