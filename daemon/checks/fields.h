// Checks of single fields that several messages share (P10). Pure.
#ifndef REFITD_DAEMON_CHECKS_FIELDS_H_
#define REFITD_DAEMON_CHECKS_FIELDS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/base/errors.h"
#include "transport/base/ids.h"
#include "transport/base/status.h"

namespace refitd {

inline Duration Millis(int64_t ms) { return std::chrono::milliseconds(ms); }

// Checks a wait that a caller asks for: it must not be negative, and be short enough to be added to
// a clock.
inline absl::StatusOr<Duration> CheckMillis(int64_t ms, std::string_view field) {
  constexpr int64_t kMaxMillis = 7 * 24 * 3600 * int64_t{1000};
  if (ms < 0 || ms > kMaxMillis) {
    return InvalidField(field, "{}: {} is not in 0..{}", field, ms, kMaxMillis);
  }
  return Millis(ms);
}

inline absl::Status InRange(int64_t value, int64_t low, int64_t high, std::string_view field) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(field, "{} is {}, outside of {} to {}", field, value, low, high);
}

inline absl::Status NotNegative(int64_t value, std::string_view field) {
  return InRange(value, 0, std::numeric_limits<int64_t>::max(), field);
}

inline absl::Status AtMost(int64_t entries, int64_t limit, std::string_view field) {
  if (entries <= limit) return absl::OkStatus();
  return InvalidField(field, "{} has {} entries, more than {}", field, entries, limit);
}

// OK: a list has as many entries as the list `names` beside it.
inline absl::Status SameLength(int got, size_t want, std::string_view field) {
  if (static_cast<size_t>(got) == want) return absl::OkStatus();
  return InvalidField(field, "{} has {} entries where names has {}", field, got, want);
}

inline absl::Status CheckText(std::string_view text, size_t limit, std::string_view field) {
  if (text.size() <= limit) return absl::OkStatus();
  return InvalidField(field, "{}: {} bytes are more than {}", field, text.size(), limit);
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
    return InvalidField(field, "{}: a control character at byte {}", field, i);
  }
  return absl::OkStatus();
}

inline constexpr size_t kMaxCoordinatorBytes = 262;  // a host name, a colon, a port

// OK: the text is empty, or one address "HOST:PORT". Several addresses are refused by name: who
// coordinates a group is whoever answers to one name.
inline absl::Status CheckCoordinator(std::string_view text, std::string_view field) {
  if (text.empty()) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckLine(text, kMaxCoordinatorBytes, field));
  if (text.find(',') != std::string_view::npos) {
    return InvalidField(
        field,
        "{}: '{}' names several daemons: name one HOST:PORT, which is resolved anew whenever a "
        "daemon joins",
        field, text);
  }
  const size_t colon = text.rfind(':');
  const std::string_view port = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string_view::npos;
  const bool plain = text.find_first_of("/ ") == std::string_view::npos;
  if (colon != std::string_view::npos && colon > 0 && digits && plain) return absl::OkStatus();
  return InvalidField(field, "{}: '{}' is not HOST:PORT", field, text);
}

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_FIELDS_H_
