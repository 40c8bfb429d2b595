#include "client/call.h"
#include "client/connection.h"
#include "client/trainer.h"
#include "refitd/v1/operator.grpc.pb.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::client {

absl::StatusOr<uint64_t> ReplaceGroup(const ConnectOptions& connect) {
  REFITD_RETURN_IF_ERROR(CheckConnectOptions(connect));
  if (!connect.spec) return InvalidField("spec", "spec is missing: replacing a group needs it");
  const TimePoint deadline = After(connect.wait);
  REFITD_ASSIGN_OR_RETURN(const auto connection, Connection::Open(connect, deadline));
  const std::unique_ptr<v1::Operator::StubInterface> stub =
      v1::Operator::NewStub(connection->channel());
  v1::CreateGroupRequest request;
  request.set_group(connect.group);
  *request.mutable_spec() = SpecToProto(*connect.spec);
  request.set_replace(true);
  const std::string what = fmt::format("CreateGroup {}", connect.group);
  const auto made = CallAndWait<v1::Operator::StubInterface::async_interface,
                                v1::CreateGroupRequest, v1::CreateGroupResponse>(
      stub->async(), &v1::Operator::StubInterface::async_interface::CreateGroup, std::move(request),
      deadline + connection->call_margin(), what);
  if (!made.ok()) return NameDaemon(what, connection->socket(), made.status());
  return made->incarnation();
}

}  // namespace refitd::client
