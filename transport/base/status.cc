#include "transport/base/status.h"

#include <cerrno>
#include <system_error>

namespace refitd {
namespace {

absl::StatusCode CodeOfErrno(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
      return absl::StatusCode::kPermissionDenied;
    case EADDRINUSE:
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

}  // namespace

absl::Status ErrnoError(int error, std::string_view what) {
  return Error(CodeOfErrno(error), "{}: {} (errno {})", what,
               std::generic_category().message(error), error);
}

std::string_view Shorten(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

}  // namespace refitd
