// refitd.v1.Operator over the daemon: checks the authorizer and translates.
#ifndef REFITD_DAEMON_SERVICES_OPERATOR_SERVICE_H_
#define REFITD_DAEMON_SERVICES_OPERATOR_SERVICE_H_

#include "daemon/services/common.h"
#include "daemon/sockets/name_lookup.h"
#include "refitd/v1/operator.grpc.pb.h"

namespace refitd {

// `daemon` and `authorizer` must outlive the server. Thread-safe.
class OperatorService final : public v1::Operator::CallbackService {
 public:
  OperatorService(Daemon* daemon, const Authorizer* authorizer)
      : daemon_(daemon), authorizer_(authorizer) {}

  grpc::ServerUnaryReactor* CreateGroup(grpc::CallbackServerContext* context,
                                        const v1::CreateGroupRequest* request,
                                        v1::CreateGroupResponse* response) noexcept override;
  grpc::ServerUnaryReactor* DeleteGroup(grpc::CallbackServerContext* context,
                                        const v1::DeleteGroupRequest* request,
                                        v1::DeleteGroupResponse* response) noexcept override;
  grpc::ServerUnaryReactor* AbortUpdate(grpc::CallbackServerContext* context,
                                        const v1::AbortUpdateRequest* request,
                                        v1::AbortUpdateResponse* response) noexcept override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) noexcept override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) noexcept override;
  grpc::ServerUnaryReactor* ListGroups(grpc::CallbackServerContext* context,
                                       const v1::ListGroupsRequest* request,
                                       v1::ListGroupsResponse* response) noexcept override;
  grpc::ServerUnaryReactor* GetGroup(grpc::CallbackServerContext* context,
                                     const v1::GetGroupRequest* request,
                                     v1::GetGroupResponse* response) noexcept override;
  grpc::ServerUnaryReactor* ListMembers(grpc::CallbackServerContext* context,
                                        const v1::ListMembersRequest* request,
                                        v1::ListMembersResponse* response) noexcept override;
  grpc::ServerUnaryReactor* GetUpdateStatistics(
      grpc::CallbackServerContext* context, const v1::GetUpdateStatisticsRequest* request,
      v1::GetUpdateStatisticsResponse* response) noexcept override;
  grpc::ServerUnaryReactor* CheckAccess(grpc::CallbackServerContext* context,
                                        const v1::CheckAccessRequest* request,
                                        v1::CheckAccessResponse* response) noexcept override;
  grpc::ServerWriteReactor<v1::UpdateStatus>* WatchUpdates(
      grpc::CallbackServerContext* context,
      const v1::WatchUpdatesRequest* request) noexcept override;

 private:
  Daemon* const daemon_;
  const Authorizer* const authorizer_;
  NameLookup names_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_OPERATOR_SERVICE_H_
