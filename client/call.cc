#include "client/call.h"

#include "transport/base/failure.h"

namespace refitd::client {
absl::Status NameDaemon(std::string_view what, std::string_view socket,
                        const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  // gRPC's own deadline carries no failure. A daemon that says what its wait left has answered.
  if (absl::IsDeadlineExceeded(status) && FailureOf(status) != Failure()) return status;
  return SuspectDaemon(Prefixed(status, "{}: daemon at {}", what, socket), socket);
}

absl::Status SuspectDaemon(absl::Status status, std::string_view socket) {
  Failure failure = FailureOf(status);
  if (status.ok() || !failure.suspects.empty()) return status;
  failure.Add({SuspectRole::kDaemon, std::string(socket), "", std::nullopt, 0});
  failure.may_be_retried = true;
  return WithFailure(std::move(status), failure);
}

}  // namespace refitd::client
