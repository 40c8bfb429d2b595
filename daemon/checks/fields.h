// Checks of single fields that several calls of the node share (P10). Pure.
#ifndef REFITD_DAEMON_CHECKS_FIELDS_H_
#define REFITD_DAEMON_CHECKS_FIELDS_H_

#include <chrono>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/base/status.h"

namespace refitd {

inline Duration Millis(int64_t ms) { return std::chrono::milliseconds(ms); }

// A wait that a caller asks for: not negative, and short enough to add to a clock.
inline absl::StatusOr<Duration> CheckMillis(int64_t ms, std::string_view field) {
  constexpr int64_t kMaxMillis = 7 * 24 * 3600 * int64_t{1000};
  if (ms < 0 || ms > kMaxMillis) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: {} is not in 0..{}", field, ms,
                 kMaxMillis);
  }
  return Millis(ms);
}

inline absl::Status CheckText(std::string_view text, size_t limit, std::string_view field) {
  if (text.size() <= limit) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{}: {} bytes are more than {}", field,
               text.size(), limit);
}

// A text for people, which terminals show: CheckText, and no control characters.
inline absl::Status CheckLine(std::string_view text, size_t limit, std::string_view field) {
  REFITD_RETURN_IF_ERROR(CheckText(text, limit, field));
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const unsigned char next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0xff;
    const bool c0 = byte < 0x20 || byte == 0x7f;
    const bool c1 =
        byte == 0xc2 && next < 0xa0;  // UTF-8 encodes U+0080 to U+009F as C2 80 to C2 9F
    if (!c0 && !c1) continue;
    return Error(absl::StatusCode::kInvalidArgument, "{}: a control character at byte {}", field,
                 i);
  }
  return absl::OkStatus();
}

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_FIELDS_H_
