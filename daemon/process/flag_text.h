// Texts of command lines: durations, and names that were mistyped.
//
// Pure; thread-safe.
#ifndef REFITD_DAEMON_PROCESS_FLAG_TEXT_H_
#define REFITD_DAEMON_PROCESS_FLAG_TEXT_H_

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace refitd {

// "500ms", "1.5s", "2m" and "1h" as milliseconds, rounded; a number without a unit counts `bare`.
// INVALID_ARGUMENT quotes the text; it may be negative, and callers check its range.
absl::StatusOr<std::chrono::milliseconds> ParseDuration(std::string_view text,
                                                        std::chrono::milliseconds bare);

// "30s", "1500ms": the text that ParseDuration takes, in the largest unit that is exact.
std::string FormatDuration(std::chrono::milliseconds duration);

// The name that is most like `word`, if they differ in at most a third of its characters; else "".
std::string Nearest(std::string_view word, const std::vector<std::string>& names);

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_FLAG_TEXT_H_
