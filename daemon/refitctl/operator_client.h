// refitctl's connection to a daemon's Operator and Health services.
//
// Every call has a deadline (P4). Thread-safe, like the stub under it.
#ifndef REFITD_DAEMON_REFITCTL_OPERATOR_CLIENT_H_
#define REFITD_DAEMON_REFITCTL_OPERATOR_CLIENT_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"
#include "client/target.h"
#include "client/types.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "refitd/v1/operator.grpc.pb.h"

namespace refitd::refitctl {

// Options that every command takes.
struct GlobalOptions {
  std::string socket;   // empty: kDefaultSocket
  std::string address;  // "host:port"; empty: use the socket
  client::TlsOptions tls;
  bool insecure = false;
  std::chrono::milliseconds timeout{10'000};
  bool json = false;
};

// The way by which a member of refitctl connects: socket, address, certificates.
client::ConnectOptions ConnectOf(const GlobalOptions& options);

// Message and code of `status`, which came from `target`. If the daemon did not answer, the message
// says that it can't be reached, and why.
absl::Status StatusOfCall(const grpc::Status& status, const client::Target& target);

// Has the methods that OperatorClient::Call takes.
using Rpcs = v1::Operator::Stub;

class OperatorClient {
 public:
  // Connects at the first call. If the options are wrong, every call says so.
  explicit OperatorClient(const GlobalOptions& options);

  // Calls a method of the daemon. With `wait_for_ready` the call waits until the deadline
  // for the daemon to appear. Without it the call fails at once if no daemon listens.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Rpcs::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const std::type_identity_t<Request>& request = {},
                                bool wait_for_ready = false) const {
    if (!ready_.ok()) return ready_;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout_);
    context.set_wait_for_ready(wait_for_ready);
    Response response;
    const grpc::Status status = (stub_.get()->*method)(&context, request, &response);
    if (!status.ok()) return StatusOfCall(status, target_);
    return response;
  }
  // The same of a method that takes a group's name alone.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Rpcs::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const std::string& group) const {
    Request request;
    request.set_group(group);
    return Call(method, request);
  }
  // NOT_FOUND: the daemon knows no such service.
  absl::StatusOr<grpc::health::v1::HealthCheckResponse> CheckHealth(
      const std::string& service) const;

  // For streams, whose caller sets up the context and asks for `ready` before.
  absl::Status ready() const { return ready_; }
  Rpcs& stub() const { return *stub_; }
  grpc::health::v1::Health::Stub& health() const { return *health_; }
  const client::Target& target() const { return target_; }

 private:
  // Constant after construction.
  absl::Status ready_;
  client::Target target_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Rpcs> stub_;
  std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

// Any message as JSON with the proto's field names; `pretty`: over several lines.
std::string ToJson(const google::protobuf::Message& message, bool pretty);

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_OPERATOR_CLIENT_H_
