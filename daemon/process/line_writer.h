// Writes lines on a thread of its own, so that nobody who has something to log waits for a disk, a
// journal, or a pipe that nobody reads (P4). The daemon's log and its audit log are written by it.
//
// Invariants
//  1. Lines are written in the order of Add, each once.
//  2. At most kMaxLines lines and kMaxBytes bytes wait. Later ones are dropped, and counted in a
//     line that follows (P10).
//  3. The destructor waits at most kEndLimit for a sink that takes no lines. Then it leaves the
//     thread behind, with what the thread needs.
//
// Thread-safe. Add takes no system call but the one that wakes the thread, so it may be called
// under a mutex.
#ifndef REFITD_DAEMON_PROCESS_LINE_WRITER_H_
#define REFITD_DAEMON_PROCESS_LINE_WRITER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/process/log.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// Opens a file that is appended to, for log lines. Never waits: a FIFO that nobody reads is
// UNAVAILABLE. Writes to the descriptor may block.
absl::StatusOr<UniqueFd> OpenForLines(const std::string& path, mode_t mode);

class LineWriter {
 public:
  static constexpr size_t kMaxLines = 10'000;
  static constexpr size_t kMaxBytes = size_t{16} << 20;
  static constexpr std::chrono::milliseconds kEndLimit{1'000};

  struct Line {
    LogLevel level = LogLevel::kInfo;
    std::chrono::system_clock::time_point time{};  // of Add
    std::string text;
  };
  // Called by the thread alone, without a mutex.
  using Sink = std::function<void(const Line&)>;

  // `dropped` makes the text of the line that counts what was dropped.
  LineWriter(Sink sink, std::function<std::string(int64_t)> dropped);
  ~LineWriter();
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  void Add(LogLevel level, std::string text);
  // True: all lines that were added before are written. False: they were not within `limit`.
  bool Flush(std::chrono::milliseconds limit = kEndLimit);

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_LINE_WRITER_H_
