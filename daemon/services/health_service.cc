#include "daemon/services/health_service.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "daemon/checks/bucket.h"
#include "daemon/node/operators.h"
#include "daemon/policy/quota.h"
#include "daemon/services/common.h"

namespace refitd {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

constexpr std::string_view kInstancePrefix = "refitd.v1.Engine/";

HealthCheckResponse ResponseOf(HealthCheckResponse::ServingStatus status) {
  HealthCheckResponse response;
  response.set_status(status);
  return response;
}

HealthCheckResponse ResponseOf(InstanceHealth health) {
  switch (health) {
    case InstanceHealth::kServing:
      return ResponseOf(HealthCheckResponse::SERVING);
    case InstanceHealth::kNotServing:
      return ResponseOf(HealthCheckResponse::NOT_SERVING);
    case InstanceHealth::kUnknown:
      break;
  }
  return ResponseOf(HealthCheckResponse::SERVICE_UNKNOWN);
}

// The request context of a request for this name.
RequestContext ContextOf(const absl::StatusOr<HealthName>& name, Rpc daemon, Rpc instance) {
  if (!name.ok() || name->group.empty()) return {.rpc = daemon};
  return {.rpc = instance, .group = name->group};
}

}  // namespace

absl::StatusOr<HealthName> ParseHealthName(std::string_view service) {
  if (service.empty()) return HealthName{};
  if (!service.starts_with(kInstancePrefix)) {
    return Error(absl::StatusCode::kNotFound, "service: '{}' is neither empty nor {}GROUP/INSTANCE",
                 Shorten(service, kMaxNameBytes), kInstancePrefix);
  }
  const std::string_view rest = service.substr(kInstancePrefix.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string_view instance = slash == rest.size() ? "" : rest.substr(slash + 1);
  REFITD_RETURN_IF_ERROR(CheckName(rest.substr(0, slash), "service: GROUP"));
  REFITD_RETURN_IF_ERROR(CheckName(instance, "service: INSTANCE"));
  return HealthName{std::string(rest.substr(0, slash)), std::string(instance)};
}

struct HealthService::State {
  using Stream = WatchReactorBase<HealthCheckResponse>::Stream;

  Mutex mutex;
  bool serving ABSL_GUARDED_BY(mutex) = true;
  std::map<std::shared_ptr<Stream>, std::string> watchers ABSL_GUARDED_BY(mutex);  // identities

  // OK: the identity may have one more watcher.
  absl::Status CheckRoom(const std::string& identity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const auto held = std::count_if(watchers.begin(), watchers.end(),
                                    [&](const auto& entry) { return entry.second == identity; });
    return CheckPlace("callers watch health", kMaxHealthWatchers, watchers.size(),
                      static_cast<size_t>(held), identity);
  }

  HealthCheckResponse Now() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return ResponseOf(serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
  }
};

// One caller that watches the daemon, or a name that no service has.
class HealthService::Watcher final : public WatchReactorBase<HealthCheckResponse> {
 public:
  // `known`: the name is the daemon's.
  Watcher(std::shared_ptr<State> state, grpc::CallbackServerContext* context,
          const absl::StatusOr<Peer>& peer, bool known)
      : WatchReactorBase(context), state_(std::move(state)) {
    absl::Status admitted = peer.status();
    {
      MutexLock lock(&state_->mutex);
      if (admitted.ok()) admitted = state_->CheckRoom(IdentityOf(*peer));
      if (admitted.ok()) {
        stream()->Queue(known ? state_->Now() : ResponseOf(InstanceHealth::kUnknown));
        if (known) state_->watchers.emplace(stream(), IdentityOf(*peer));
      }
    }
    if (admitted.ok()) {
      stream()->Flush();
    } else {
      stream()->End(admitted);
    }
  }

 private:
  void Stop() override {
    MutexLock lock(&state_->mutex);
    state_->watchers.erase(stream());
  }

  const std::shared_ptr<State> state_;
};

// One caller that watches an instance.
class HealthService::InstanceWatcher final : public WatchReactorBase<HealthCheckResponse> {
 public:
  InstanceWatcher(Daemon* daemon, grpc::CallbackServerContext* context,
                  const absl::StatusOr<Peer>& peer, const HealthName& name)
      : WatchReactorBase(context), daemon_(daemon) {
    absl::Status admitted = peer.status();
    if (admitted.ok()) {
      const absl::StatusOr<uint64_t> watch = daemon_->operators().WatchInstance(
          IdentityOf(*peer), name.group, name.instance, std::make_shared<Sink>(stream()));
      admitted = watch.status();
      if (watch.ok()) watch_ = *watch;
    }
    if (!admitted.ok()) stream()->End(admitted);
  }

 private:
  struct Sink : ReadinessSink {
    explicit Sink(std::shared_ptr<Stream> to) : stream(std::move(to)) {}
    void Send(InstanceHealth health) override { stream->Send(ResponseOf(health)); }
    void End(absl::Status status) override { stream->End(std::move(status)); }
    const std::shared_ptr<Stream> stream;
  };

  void Stop() override { daemon_->operators().StopWatchingInstance(watch_); }

  Daemon* const daemon_;
  uint64_t watch_ = 0;  // 0: not watching
};

HealthService::HealthService(Daemon* daemon, const Authorizer* authorizer)
    : daemon_(daemon), authorizer_(authorizer), state_(std::make_shared<State>()) {}
HealthService::~HealthService() = default;

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) noexcept {
  const absl::StatusOr<HealthName> name = ParseHealthName(request->service());
  const RequestContext request_context =
      ContextOf(name, Rpc::kHealthCheck, Rpc::kHealthCheckInstance);
  return AnswerNow(*authorizer_, context, request_context, response,
                   [&](const Peer&) -> absl::StatusOr<HealthCheckResponse> {
                     REFITD_RETURN_IF_ERROR(name.status());
                     if (!name->group.empty()) {
                       REFITD_ASSIGN_OR_RETURN(
                           const Readiness readiness,
                           daemon_->operators().ReadinessOf(name->group, name->instance));
                       return ResponseOf(readiness.ready ? InstanceHealth::kServing
                                                         : InstanceHealth::kNotServing);
                     }
                     MutexLock lock(&state_->mutex);
                     return state_->Now();
                   });
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext* context, const HealthCheckRequest* request) noexcept {
  const absl::StatusOr<HealthName> name = ParseHealthName(request->service());
  absl::StatusOr<Peer> admitted =
      authorizer_->Admit(*context, ContextOf(name, Rpc::kHealthWatch, Rpc::kHealthWatchInstance));
  if (admitted.ok() && absl::IsInvalidArgument(name.status())) admitted = name.status();
  if (name.ok() && !name->group.empty()) {
    return new InstanceWatcher(daemon_, context, admitted, *name);
  }
  return new Watcher(state_, context, admitted, /*known=*/name.ok());
}

void HealthService::StopServing() {
  std::map<std::shared_ptr<State::Stream>, std::string> watchers;
  HealthCheckResponse now;
  {
    MutexLock lock(&state_->mutex);
    if (!std::exchange(state_->serving, false)) return;
    watchers = state_->watchers;
    now = state_->Now();
  }
  for (const auto& [stream, identity] : watchers) stream->Send(now);
}

}  // namespace refitd
