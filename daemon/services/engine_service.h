// refitd.v1.Engine over the daemon: checks the authorizer and translates.
#ifndef REFITD_DAEMON_SERVICES_ENGINE_SERVICE_H_
#define REFITD_DAEMON_SERVICES_ENGINE_SERVICE_H_

#include "daemon/services/common.h"
#include "refitd/v1/engine.grpc.pb.h"

namespace refitd {

// `daemon` and `authorizer` must outlive the server. Thread-safe.
class EngineService final : public v1::Engine::CallbackService {
 public:
  EngineService(Daemon* daemon, const Authorizer* authorizer)
      : daemon_(daemon), authorizer_(authorizer) {}

  grpc::ServerBidiReactor<v1::EngineMessage, v1::EngineEvent>* Attach(
      grpc::CallbackServerContext* context) noexcept override;
  grpc::ServerReadReactor<v1::LayoutChunk>* RegisterLayout(
      grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept override;
  grpc::ServerUnaryReactor* RegisterRegion(grpc::CallbackServerContext* context,
                                           const v1::RegisterRegionRequest* request,
                                           v1::RegisterRegionResponse* response) noexcept override;
  grpc::ServerUnaryReactor* ReleaseRegion(grpc::CallbackServerContext* context,
                                          const v1::ReleaseRegionRequest* request,
                                          v1::ReleaseRegionResponse* response) noexcept override;

 private:
  Daemon* const daemon_;
  const Authorizer* const authorizer_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_ENGINE_SERVICE_H_
