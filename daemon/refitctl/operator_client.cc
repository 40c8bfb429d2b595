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

template <typename Request, typename Response>
absl::StatusOr<Response> OperatorClient::Call(
    grpc::Status (v1::Operator::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
    const Request& request, bool wait_for_ready) const {
  REFITD_RETURN_IF_ERROR(ready_);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout_);
  context.set_wait_for_ready(wait_for_ready);
  Response response;
  const grpc::Status status = (stub_.get()->*method)(&context, request, &response);
  REFITD_RETURN_IF_ERROR(StatusOfCall(status, target_));
  return response;
}

absl::StatusOr<v1::GetStatusResponse> OperatorClient::GetStatus(bool wait_for_ready) const {
  return Call(&v1::Operator::Stub::GetStatus, v1::GetStatusRequest(), wait_for_ready);
}

absl::StatusOr<v1::ListGroupsResponse> OperatorClient::ListGroups() const {
  return Call(&v1::Operator::Stub::ListGroups, v1::ListGroupsRequest(), false);
}

absl::StatusOr<v1::GetGroupResponse> OperatorClient::GetGroup(const std::string& group) const {
  v1::GetGroupRequest request;
  request.set_group(group);
  return Call(&v1::Operator::Stub::GetGroup, request, false);
}

absl::StatusOr<v1::ListMembersResponse> OperatorClient::ListMembers(
    const std::string& group) const {
  v1::ListMembersRequest request;
  request.set_group(group);
  return Call(&v1::Operator::Stub::ListMembers, request, false);
}

absl::StatusOr<v1::GetUpdateStatisticsResponse> OperatorClient::GetUpdateStatistics(
    const std::string& group) const {
  v1::GetUpdateStatisticsRequest request;
  request.set_group(group);
  return Call(&v1::Operator::Stub::GetUpdateStatistics, request, false);
}

absl::StatusOr<v1::CreateGroupResponse> OperatorClient::CreateGroup(
    const v1::CreateGroupRequest& request) const {
  return Call(&v1::Operator::Stub::CreateGroup, request, false);
}

absl::StatusOr<v1::DeleteGroupResponse> OperatorClient::DeleteGroup(
    const std::string& group) const {
  v1::DeleteGroupRequest request;
  request.set_group(group);
  return Call(&v1::Operator::Stub::DeleteGroup, request, false);
}

absl::StatusOr<v1::DrainResponse> OperatorClient::Drain(const std::string& group) const {
  v1::DrainRequest request;
  request.set_group(group);
  return Call(&v1::Operator::Stub::Drain, request, false);
}

absl::StatusOr<v1::AbortUpdateResponse> OperatorClient::AbortUpdate(
    const std::string& group, const std::string& reason) const {
  v1::AbortUpdateRequest request;
  request.set_group(group);
  request.set_reason(reason);
  return Call(&v1::Operator::Stub::AbortUpdate, request, false);
}

absl::StatusOr<v1::RollbackResponse> OperatorClient::Rollback(
    const v1::RollbackRequest& request) const {
  return Call(&v1::Operator::Stub::Rollback, request, false);
}

absl::StatusOr<v1::ReleasePreviousResponse> OperatorClient::ReleasePrevious(
    const std::string& group) const {
  v1::ReleasePreviousRequest request;
  request.set_group(group);
  return Call(&v1::Operator::Stub::ReleasePrevious, request, false);
}

absl::StatusOr<v1::CheckAccessResponse> OperatorClient::CheckAccess(
    const v1::CheckAccessRequest& request) const {
  return Call(&v1::Operator::Stub::CheckAccess, request, false);
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
