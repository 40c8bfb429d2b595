// grpc.health.v1.Health: whether the daemon serves. In place of gRPC's own service, which asks
// nobody who calls.
#ifndef REFITD_DAEMON_SERVICES_HEALTH_SERVICE_H_
#define REFITD_DAEMON_SERVICES_HEALTH_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "daemon/services/door.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "transport/base/mutex.h"

namespace refitd {

// Watchers at a time; further ones get RESOURCE_EXHAUSTED (P10).
inline constexpr size_t kMaxHealthWatchers = 64;

// `door` must outlive the server. Thread-safe.
class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  explicit HealthService(const Door* door);
  ~HealthService() override;

  grpc::ServerUnaryReactor* Check(
      grpc::CallbackServerContext* context, const grpc::health::v1::HealthCheckRequest* request,
      grpc::health::v1::HealthCheckResponse* response) noexcept override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context,
      const grpc::health::v1::HealthCheckRequest* request) noexcept override;

  // From now on the daemon serves no more; watchers hear of it.
  void StopServing();

 private:
  struct State;
  class Watcher;

  const Door* const door_;
  const std::shared_ptr<State> state_;  // shared with watchers
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_HEALTH_SERVICE_H_
