// Statuses of Abseil as statuses of gRPC, and back, with what is known of a failure in the details.
// Both use the same numbers as codes. Header only; thread-safe.
#ifndef REFITD_PROTO_GRPC_STATUS_H_
#define REFITD_PROTO_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"
#include "proto/failure.h"

namespace refitd {

// All of it fits into gRPC's metadata, whatever the text and the names (proto/failure.h).
inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), StatusText(status), StatusDetails(status)};
}

// gRPC itself answers without a text, for instance where a listener does not serve the method: the
// code is then the text.
inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  std::string text = status.error_message();
  if (text.empty()) text = absl::StatusCodeToString(code);
  if (code == absl::StatusCode::kUnimplemented && status.error_message().empty()) {
    text += ": this listener does not serve the method";
  }
  return WithStatusDetails(absl::Status(code, text), status.error_details());
}

}  // namespace refitd

#endif  // REFITD_PROTO_GRPC_STATUS_H_
