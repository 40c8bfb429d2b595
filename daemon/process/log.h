// The daemon's log: text or JSON, one line for each event, whatever the message contains.
//
// Log once, where an error is first detected; return a status everywhere else. Control characters
// are escaped, so that no peer's text can forge a line. Thread-safe.
//
// After SetLogging a thread of its own writes the lines (line_writer.h): nobody who logs waits for
// a pipe that nobody reads (P4), and lines that can't be written are dropped and counted (P10).
// Before SetLogging, the log is text, at level info, on stderr, written by the caller.
#ifndef REFITD_DAEMON_PROCESS_LOG_H_
#define REFITD_DAEMON_PROCESS_LOG_H_

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"

namespace refitd {

enum class LogFormat : uint8_t { kText, kJson };
enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

struct LogConfig {
  LogFormat format = LogFormat::kText;
  LogLevel level = LogLevel::kInfo;
  std::string file;  // appended to; empty: stderr
  bool operator==(const LogConfig&) const = default;
};

// Errors: those of opening the file. Starts a thread.
absl::Status SetLogging(const LogConfig& config);
// For code that ends the process. False: the log did not take all lines within `limit`, and a
// thread may hang in writing, so that the process must end by _exit.
bool FlushLog(std::chrono::milliseconds limit = std::chrono::seconds(1));

bool LogEnabled(LogLevel level);
void LogMessage(LogLevel level, std::string_view message);

template <typename... Args>
void Log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (LogEnabled(level)) LogMessage(level, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogWarning(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kWarning, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kError, format, std::forward<Args>(args)...);
}

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_LOG_H_
