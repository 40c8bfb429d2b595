#include "daemon/refitctl/operator_client.h"

#include <google/protobuf/util/json_util.h>

#include "client/types.h"
#include "proto/grpc_status.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

constexpr std::chrono::seconds kWhyLimit{2};

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const client::Target& target) {
  REFITD_ASSIGN_OR_RETURN(const auto credentials, client::CredentialsOf(target));
  grpc::ChannelArguments arguments;
  // A local daemon that starts should be found at once, not after gRPC's first backoff of a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // gRPC takes the smallest backoff as the limit of one attempt as well. An attempt includes a TLS
  // handshake over TCP, and takes long where the daemon's machine is busy.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 10'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  // Proxies of the environment are meant for the web.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // The status of many groups can exceed gRPC's default.
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(target.uri(), credentials, arguments);
}

}  // namespace

client::ConnectOptions ConnectOf(const GlobalOptions& options) {
  client::ConnectOptions connect;
  connect.socket = options.socket;
  connect.address = options.address;
  connect.tls = options.tls;
  connect.insecure = options.insecure;
  connect.wait = options.timeout;
  return connect;
}

absl::Status StatusOfCall(const grpc::Status& status, const client::Target& target) {
  if (status.ok()) return absl::OkStatus();
  const absl::Status failed = FromGrpc(status);
  if (absl::IsUnavailable(failed)) {
    const absl::Status why =
        client::WhyNoAnswer(target, std::chrono::steady_clock::now() + kWhyLimit);
    if (absl::IsUnauthenticated(why)) return why;
    return Prefixed(failed, "no daemon answers at {}", target.name);
  }
  if (absl::IsDeadlineExceeded(failed)) {
    return Prefixed(failed, "{}: no answer in time (--timeout)", target.name);
  }
  return failed;
}

OperatorClient::OperatorClient(const GlobalOptions& options) : timeout_(options.timeout) {
  const absl::StatusOr<client::Target> target = client::TargetOf(ConnectOf(options));
  ready_ = target.status();
  if (!target.ok()) return;
  target_ = *target;
  const auto channel = MakeChannel(target_);
  ready_ = channel.status();
  if (!channel.ok()) return;
  stub_ = v1::Operator::NewStub(*channel);
  health_ = grpc::health::v1::Health::NewStub(*channel);
}

absl::StatusOr<grpc::health::v1::HealthCheckResponse> OperatorClient::CheckHealth(
    const std::string& service) const {
  REFITD_RETURN_IF_ERROR(ready_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout_);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  REFITD_RETURN_IF_ERROR(StatusOfCall(health_->Check(&context, request, &response), target_));
  return response;
}

std::string ToJson(const google::protobuf::Message& message, bool pretty) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = pretty;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  // Can't fail for messages without Any.
  REFITD_CHECK(google::protobuf::util::MessageToJsonString(message, &text, options).ok());
  if (!pretty) text += "\n";
  return text;
}

}  // namespace refitd::refitctl
