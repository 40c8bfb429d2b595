// RegisterRegion and ReleaseRegion of both roles.
#ifndef REFITD_DAEMON_SERVICES_REGION_CALLS_H_
#define REFITD_DAEMON_SERVICES_REGION_CALLS_H_

#include <string>
#include <utility>

#include "daemon/checks/bucket_message.h"
#include "daemon/node/daemon.h"
#include "daemon/node/member_memory.h"
#include "daemon/policy/rpcs.h"
#include "daemon/services/common.h"
#include "daemon/services/trainer_events.h"

namespace refitd {

inline grpc::ServerUnaryReactor* AnswerRegisterRegion(Daemon* daemon, const Authorizer& authorizer,
                                                      grpc::CallbackServerContext* context,
                                                      const v1::RegisterRegionRequest& request,
                                                      bool engine,
                                                      v1::RegisterRegionResponse* response) {
  const Rpc rpc = engine ? Rpc::kEngineRegisterRegion : Rpc::kTrainerRegisterRegion;
  return AnswerOnce(
      daemon, authorizer, context, {rpc}, response, [&](const Peer& peer, auto reply) {
        const DeviceRef block = BlockOf(request);
        daemon->memory().RegisterDevice(
            CallerOf(request.lease(), peer), engine,
            {std::string(block.handle), std::string(block.device), block.byte_offset, block.bytes},
            [reply](const absl::StatusOr<MemberMemory::Registered>& registered) {
              if (!registered.ok()) return reply(registered.status());
              v1::RegisterRegionResponse answer;
              answer.set_region_id(registered->id.value());
              answer.set_bytes(registered->bytes);
              reply(std::move(answer));
            });
      });
}

inline grpc::ServerUnaryReactor* AnswerReleaseRegion(Daemon* daemon, const Authorizer& authorizer,
                                                     grpc::CallbackServerContext* context,
                                                     const v1::ReleaseRegionRequest& request,
                                                     bool engine,
                                                     v1::ReleaseRegionResponse* response) {
  const Rpc rpc = engine ? Rpc::kEngineReleaseRegion : Rpc::kTrainerReleaseRegion;
  return AnswerOnce(daemon, authorizer, context, {rpc}, response,
                    [&](const Peer& peer, auto reply) {
                      daemon->memory().Release(CallerOf(request.lease(), peer), engine,
                                               RegionId(request.region_id()),
                                               [reply](const absl::Status& status) {
                                                 if (!status.ok()) return reply(status);
                                                 reply(v1::ReleaseRegionResponse());
                                               });
                    });
}

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_REGION_CALLS_H_
