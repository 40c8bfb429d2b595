// What the conversions of peer messages share. Private to peer_convert.cc and
// peer_program_convert.cc.
#ifndef REFITD_DAEMON_PEER_CHECKS_H_
#define REFITD_DAEMON_PEER_CHECKS_H_

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/base/status.h"

namespace refitd::peer {

template <typename... Args>
absl::Status Invalid(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

inline absl::Status InRange(int64_t value, int64_t low, int64_t high, std::string_view field) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Invalid("{} is {}, outside of {} to {}", field, value, low, high);
}

inline absl::Status NotNegative(int64_t value, std::string_view field) {
  return InRange(value, 0, std::numeric_limits<int64_t>::max(), field);
}

inline absl::Status AtMost(int64_t entries, int64_t limit, std::string_view field) {
  if (entries <= limit) return absl::OkStatus();
  return Invalid("{} has {} entries, more than {}", field, entries, limit);
}

inline absl::StatusOr<MemberId> MemberOf(uint64_t id, std::string_view field) {
  if (id == 0) return Invalid("{} is 0, which is no member", field);
  return MemberId(id);
}

}  // namespace refitd::peer

#endif  // REFITD_DAEMON_PEER_CHECKS_H_
