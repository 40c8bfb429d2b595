// The two statuses that refitd returns most often, with formatted messages.
#ifndef REFITD_TRANSPORT_BASE_ERRORS_H_
#define REFITD_TRANSPORT_BASE_ERRORS_H_

#include <fmt/format.h>

#include <utility>

#include "absl/status/status.h"
#include "transport/base/status.h"

namespace refitd {

// INVALID_ARGUMENT: a value is malformed or out of its range.
template <typename... Args>
absl::Status Invalid(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

// FAILED_PRECONDITION: the call does not fit the present state, or two values disagree.
template <typename... Args>
absl::Status Precondition(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kFailedPrecondition, format, std::forward<Args>(args)...);
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_ERRORS_H_
