// grpc.health.v1.Health: whether the daemon serves, and which engine instances are ready. It takes
// the place of gRPC's own service, which does not ask who calls.
//
// Services: "" is the daemon, which serves until it drains. "refitd.v1.Engine/GROUP/INSTANCE" is an
// instance, which serves while it is ready (daemon/group/readiness.h); any daemon of the group
// answers for all instances of the group. A caller that may not ask about a group gets
// PERMISSION_DENIED, whether the group exists or not (P9).
#ifndef REFITD_DAEMON_SERVICES_HEALTH_SERVICE_H_
#define REFITD_DAEMON_SERVICES_HEALTH_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/services/authorizer.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace refitd {

class Daemon;

// The most watchers of the daemon at a time; further ones get RESOURCE_EXHAUSTED (P10).
// InstanceReadiness::kMaxWatchers bounds those of instances.
inline constexpr size_t kMaxHealthWatchers = 64;

// The meaning of a health service's name.
struct HealthName {
  std::string group;  // empty: the daemon itself
  std::string instance;
};
// NOT_FOUND: no service has such a name. INVALID_ARGUMENT: the name begins as an instance's, and
// what follows is not GROUP/INSTANCE.
absl::StatusOr<HealthName> ParseHealthName(std::string_view service);

// `daemon` and `authorizer` must outlive the server. Thread-safe.
class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  HealthService(Daemon* daemon, const Authorizer* authorizer);
  ~HealthService() override;

  grpc::ServerUnaryReactor* Check(
      grpc::CallbackServerContext* context, const grpc::health::v1::HealthCheckRequest* request,
      grpc::health::v1::HealthCheckResponse* response) noexcept override;
  // An unknown name gets SERVICE_UNKNOWN, and so does a name that becomes unknown. The watch goes
  // on, since the name may become known later.
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context,
      const grpc::health::v1::HealthCheckRequest* request) noexcept override;

  // Ends the daemon's serving, and sends that to its watchers. Watchers of instances get no change,
  // since engines go on with the version that they hold.
  void StopServing();

 private:
  struct State;
  class Watcher;
  class InstanceWatcher;

  Daemon* const daemon_;
  const Authorizer* const authorizer_;
  const std::shared_ptr<State> state_;  // shared with watchers
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_HEALTH_SERVICE_H_
