// The statuses that refitd returns most often, with formatted messages.
#ifndef REFITD_TRANSPORT_BASE_ERRORS_H_
#define REFITD_TRANSPORT_BASE_ERRORS_H_

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {

// INVALID_ARGUMENT: a value is malformed or out of its range.
template <typename... Args>
absl::Status Invalid(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

// The same of a field or an argument of that name, which the failure then has. An index is not part
// of a name.
template <typename... Args>
absl::Status InvalidField(std::string_view field, fmt::format_string<Args...> format,
                          Args&&... args) {
  return AboutField(Invalid(format, std::forward<Args>(args)...), field);
}

// FAILED_PRECONDITION: the call does not fit the present state, or two values disagree.
template <typename... Args>
absl::Status Precondition(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kFailedPrecondition, format, std::forward<Args>(args)...);
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_ERRORS_H_
