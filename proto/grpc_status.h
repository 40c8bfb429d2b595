// Statuses of Abseil as statuses of gRPC, and back, with what is known of a failure in the details.
// Both use the same numbers as codes. Header only; thread-safe.
#ifndef REFITD_PROTO_GRPC_STATUS_H_
#define REFITD_PROTO_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "proto/failure.h"

namespace refitd {

// All of it fits into gRPC's metadata, whatever the text and the names (proto/failure.h).
inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), StatusText(status), StatusDetails(status)};
}

inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return WithStatusDetails(
      absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()),
      status.error_details());
}

}  // namespace refitd

#endif  // REFITD_PROTO_GRPC_STATUS_H_
