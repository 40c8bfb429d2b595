// Statuses: the macros that Abseil's release lacks, errno in words, and formatted errors. No
// exceptions cross refitd's code.
#ifndef REFITD_TRANSPORT_BASE_STATUS_H_
#define REFITD_TRANSPORT_BASE_STATUS_H_

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace refitd {

// Makes a status from a format, as in `Error(absl::StatusCode::kNotFound, "region {} of {}", id,
// name)`.
template <typename... Args>
absl::Status Error(absl::StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return absl::Status(code, fmt::format(format, std::forward<Args>(args)...));
}

// Makes the status "<what>: <strerror> (errno <n>)". Its code is the one that fits `error`: not
// found for ENOENT, permission denied for EACCES and EPERM, already exists for EADDRINUSE and
// EEXIST, resource exhausted for EMFILE, ENFILE, ENOMEM, ENOSPC and EDQUOT, else unavailable.
absl::Status ErrnoError(int error, std::string_view what);

// The start of UTF-8 `text`, at most `max_bytes` long, cut between characters so that it stays
// UTF-8, as messages must be.
std::string_view Shorten(std::string_view text, size_t max_bytes);

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

}  // namespace refitd

#define REFITD_CONCAT_INNER(a, b) a##b
#define REFITD_CONCAT(a, b) REFITD_CONCAT_INNER(a, b)

// Returns from the function if `expr`, an absl::Status, is not OK.
#define REFITD_RETURN_IF_ERROR(expr)               \
  do {                                             \
    absl::Status refitd_status = (expr);           \
    if (!refitd_status.ok()) return refitd_status; \
  } while (false)

// REFITD_ASSIGN_OR_RETURN(auto x, F()) declares x from a StatusOr, or returns the StatusOr's error.
#define REFITD_ASSIGN_OR_RETURN(lhs, expr) \
  REFITD_ASSIGN_OR_RETURN_IMPL(REFITD_CONCAT(refitd_or_, __LINE__), lhs, expr)
#define REFITD_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                 \
  if (!tmp.ok()) return std::move(tmp).status();     \
  lhs = std::move(tmp).value()

// Ends the process if `condition` is false. This is only for bugs of refitd itself; all other
// errors are statuses.
#define REFITD_CHECK(condition)                                                          \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#endif  // REFITD_TRANSPORT_BASE_STATUS_H_
