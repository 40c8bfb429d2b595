#include "client/call.h"

namespace refitd::client {
absl::Status NameDaemon(std::string_view what, std::string_view socket,
                        const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  return Error(status.code(), "{}: daemon at {}: {}", what, socket, Message(status));
}

}  // namespace refitd::client
