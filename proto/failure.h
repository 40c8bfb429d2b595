// Failures (transport/base/failure.h) as messages, and as the details of a gRPC status.
//
// The details are the bytes of the trailing metadata "grpc-status-details-bin": a
// v1::StatusDetails, which is google.rpc.Status field by field. A message of kMaxStatusTextBytes
// (three times as many where gRPC writes its bytes as "%E2") and details of kMaxStatusDetailsBytes
// (a third more in base64) fit together into the 8 KiB of metadata that gRPC takes.
//
// Pure; thread-safe.
#ifndef REFITD_PROTO_FAILURE_H_
#define REFITD_PROTO_FAILURE_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/failure.h"

namespace refitd {

inline constexpr size_t kMaxStatusTextBytes = 1024;
// The failure, the message once more, and some 50 bytes around them.
inline constexpr size_t kMaxStatusDetailsBytes = kMaxFailureBytes + kMaxStatusTextBytes + 128;
static_assert(3 * kMaxStatusTextBytes + kMaxStatusDetailsBytes / 3 * 4 + 512 <= 8192);

void ToProto(const Failure& failure, v1::Failure* message);
// Sets message field `failure` of `message` if there is anything to say.
template <typename Message>
void SetFailure(const Failure& failure, Message* message) {
  if (failure != Failure()) ToProto(failure, message->mutable_failure());
}
// INVALID_ARGUMENT: a field is beyond its limit.
absl::StatusOr<Failure> FailureFromProto(const v1::Failure& message);

// The status's message as gRPC carries it: UTF-8 of at most kMaxStatusTextBytes, cut at its head.
std::string StatusText(const absl::Status& status);
// The details of a status; "" if it carries no failure. Ranks of communicators stay out, since a
// caller does not know them.
std::string StatusDetails(const absl::Status& status);
// The status with the failure that its details hold. Details that are malformed, or of another
// kind, say nothing.
absl::Status WithStatusDetails(absl::Status status, std::string_view details);

}  // namespace refitd

#endif  // REFITD_PROTO_FAILURE_H_
