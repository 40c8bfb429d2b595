// grpc.reflection.v1alpha.ServerReflection: lists the server's services and their descriptors. It
// takes the place of gRPC's own service, which does not ask who calls.
#ifndef REFITD_DAEMON_SERVICES_REFLECTION_SERVICE_H_
#define REFITD_DAEMON_SERVICES_REFLECTION_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <string>
#include <utility>
#include <vector>

#include "daemon/services/authorizer.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"

namespace refitd {

// The answer to one request; `services` are the server's. Pure, but for the generated descriptors.
grpc::reflection::v1alpha::ServerReflectionResponse Reflect(
    const grpc::reflection::v1alpha::ServerReflectionRequest& request,
    const std::vector<std::string>& services);

// `authorizer` must outlive the server. `services`: full names of the server's services.
// Thread-safe.
class ReflectionService final
    : public grpc::reflection::v1alpha::ServerReflection::CallbackService {
 public:
  ReflectionService(const Authorizer* authorizer, std::vector<std::string> services)
      : authorizer_(authorizer), services_(std::move(services)) {}

  grpc::ServerBidiReactor<grpc::reflection::v1alpha::ServerReflectionRequest,
                          grpc::reflection::v1alpha::ServerReflectionResponse>*
  ServerReflectionInfo(grpc::CallbackServerContext* context) noexcept override;

 private:
  const Authorizer* const authorizer_;
  const std::vector<std::string> services_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_REFLECTION_SERVICE_H_
