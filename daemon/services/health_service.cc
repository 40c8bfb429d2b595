#include "daemon/services/health_service.h"

#include <set>
#include <utility>

#include "daemon/services/common.h"

namespace refitd {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

struct HealthService::State {
  using Stream = EventStream<HealthCheckResponse, Watcher>;

  Mutex mutex;
  bool serving ABSL_GUARDED_BY(mutex) = true;
  std::set<std::shared_ptr<Stream>> watchers ABSL_GUARDED_BY(mutex);

  HealthCheckResponse Now() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    HealthCheckResponse response;
    response.set_status(serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
    return response;
  }
};

// One caller that watches. Deletes itself.
class HealthService::Watcher final : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  using Stream = State::Stream;

  Watcher(std::shared_ptr<State> state, grpc::CallbackServerContext* context,
          const absl::Status& admitted, const std::string& service)
      : state_(std::move(state)), context_(context), stream_(std::make_shared<Stream>(this)) {
    absl::Status refused = admitted;
    {
      MutexLock lock(&state_->mutex);
      if (refused.ok() && state_->watchers.size() >= kMaxHealthWatchers) {
        refused = absl::ResourceExhaustedError("64 callers watch health already");
      }
      if (refused.ok()) {
        HealthCheckResponse first = state_->Now();
        if (!service.empty()) first.set_status(HealthCheckResponse::SERVICE_UNKNOWN);
        stream_->Queue(std::move(first));
        if (service.empty()) state_->watchers.insert(stream_);
      }
    }
    if (refused.ok()) {
      stream_->Flush();
    } else {
      stream_->End(refused);
    }
  }

  void OnWriteDone(bool ok) noexcept override {
    stream_->Written(ok);
    if (!ok) stream_->End(absl::OkStatus());
  }
  void GiveUp() { context_->TryCancel(); }
  void OnCancel() noexcept override { stream_->End(absl::CancelledError("the caller went away")); }
  void OnDone() noexcept override {
    stream_->Detach();
    {
      MutexLock lock(&state_->mutex);
      state_->watchers.erase(stream_);
    }
    delete this;
  }

 private:
  const std::shared_ptr<State> state_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Stream> stream_;
};

HealthService::HealthService(const Door* door) : door_(door), state_(std::make_shared<State>()) {}
HealthService::~HealthService() = default;

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) noexcept {
  return AnswerNow(*door_, context, {Rpc::kHealthCheck}, response,
                   [&](const Peer&) -> absl::StatusOr<HealthCheckResponse> {
                     if (!request->service().empty()) {
                       return absl::NotFoundError("the health of single services is not told");
                     }
                     MutexLock lock(&state_->mutex);
                     return state_->Now();
                   });
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext* context, const HealthCheckRequest* request) noexcept {
  return new Watcher(state_, context, door_->Admit(*context, {Rpc::kHealthWatch}).status(),
                     request->service());
}

void HealthService::StopServing() {
  std::set<std::shared_ptr<State::Stream>> watchers;
  HealthCheckResponse now;
  {
    MutexLock lock(&state_->mutex);
    if (!std::exchange(state_->serving, false)) return;
    watchers = state_->watchers;
    now = state_->Now();
  }
  for (const auto& stream : watchers) stream->Send(now);
}

}  // namespace refitd
