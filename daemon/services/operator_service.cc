#include "daemon/services/operator_service.h"

#include <utility>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "daemon/node/group_spec.h"
#include "daemon/node/operators.h"
#include "daemon/services/status.h"

namespace refitd {
namespace {

// One caller that watches updates. Deletes itself.
class WatchReactor : public grpc::ServerWriteReactor<v1::UpdateStatus> {
 public:
  using Stream = EventStream<v1::UpdateStatus, WatchReactor>;

  WatchReactor(Daemon* daemon, grpc::CallbackServerContext* context, absl::Status admitted,
               const v1::WatchUpdatesRequest& request)
      : daemon_(daemon), context_(context), stream_(std::make_shared<Stream>(this)) {
    // The caller must learn that it is watching before anything changes.
    StartSendInitialMetadata();
    if (admitted.ok()) {
      absl::StatusOr<uint64_t> watch = Watch(request);
      admitted = watch.status();
      if (watch.ok()) watch_ = *watch;
    }
    if (!admitted.ok()) stream_->End(admitted);
  }

  void OnWriteDone(bool ok) noexcept override {
    stream_->Written(ok);
    if (!ok) stream_->End(absl::OkStatus());
  }
  void GiveUp() { context_->TryCancel(); }
  void OnCancel() noexcept override { stream_->End(absl::CancelledError("the caller went away")); }
  void OnDone() noexcept override {
    stream_->Detach();
    daemon_->operators().StopWatching(watch_);
    delete this;
  }

 private:
  // Turns what the watcher is told into messages of the stream.
  struct Sink : UpdateSink {
    explicit Sink(std::shared_ptr<Stream> to) : stream(std::move(to)) {}
    void Send(UpdateNews news) override { stream->Send(ToWire(news.group, news.update)); }
    void End(absl::Status status) override { stream->End(std::move(status)); }
    const std::shared_ptr<Stream> stream;
  };

  absl::StatusOr<uint64_t> Watch(const v1::WatchUpdatesRequest& request) {
    REFITD_ASSIGN_OR_RETURN(Watchers::Wish wish, WishOf(request));
    return daemon_->operators().Watch(std::move(wish), std::make_shared<Sink>(stream_));
  }

  Daemon* const daemon_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Stream> stream_;
  uint64_t watch_ = 0;  // 0: not watching
};

absl::StatusOr<v1::CreateGroupResponse> CreateGroupOf(Daemon* daemon,
                                                      const v1::CreateGroupRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckName(request.group(), "group"));
  REFITD_RETURN_IF_ERROR(CheckText(request.request_id(), kMaxRequestIdBytes, "request_id"));
  REFITD_ASSIGN_OR_RETURN(const Operators::Created made,
                          daemon->operators().CreateGroup(request.group(), SpecOf(request.spec()),
                                                          request.replace(), request.request_id()));
  v1::CreateGroupResponse response;
  response.set_incarnation(made.incarnation);
  response.set_created(made.created);
  return response;
}

}  // namespace

grpc::ServerUnaryReactor* OperatorService::CreateGroup(grpc::CallbackServerContext* context,
                                                       const v1::CreateGroupRequest* request,
                                                       v1::CreateGroupResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return CreateGroupOf(daemon_, *request); });
}

grpc::ServerUnaryReactor* OperatorService::DeleteGroup(grpc::CallbackServerContext* context,
                                                       const v1::DeleteGroupRequest* request,
                                                       v1::DeleteGroupResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&]() -> absl::StatusOr<v1::DeleteGroupResponse> {
    if (absl::Status status = daemon_->operators().DeleteGroup(request->group()); !status.ok())
      return status;
    return v1::DeleteGroupResponse();
  });
}

grpc::ServerUnaryReactor* OperatorService::AbortUpdate(
    grpc::CallbackServerContext* context, const v1::AbortUpdateRequest* request,
    v1::AbortUpdateResponse* /*response*/) noexcept {
  return AnswerLater(
      daemon_, *door_, context,
      [&](CallId call, const Peer& /*peer*/, ReplyFunction reply) {
        daemon_->operators().AbortUpdate(call, request->group(),
                                         std::string(Shorten(request->reason(), kMaxReasonBytes)),
                                         std::move(reply));
      },
      [](const ReplyPayload&) {});
}

grpc::ServerUnaryReactor* OperatorService::GetStatus(grpc::CallbackServerContext* context,
                                                     const v1::GetStatusRequest* /*request*/,
                                                     v1::GetStatusResponse* response) noexcept {
  return AnswerNow(*door_, context, response,
                   [&]() -> absl::StatusOr<v1::GetStatusResponse> { return StatusOf(daemon_); });
}

grpc::ServerUnaryReactor* OperatorService::ListGroups(grpc::CallbackServerContext* context,
                                                      const v1::ListGroupsRequest* /*request*/,
                                                      v1::ListGroupsResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&]() -> absl::StatusOr<v1::ListGroupsResponse> {
    return refitd::ListGroups(daemon_);
  });
}

grpc::ServerUnaryReactor* OperatorService::GetGroup(grpc::CallbackServerContext* context,
                                                    const v1::GetGroupRequest* request,
                                                    v1::GetGroupResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return refitd::GetGroup(daemon_, *request); });
}

grpc::ServerUnaryReactor* OperatorService::ListMembers(grpc::CallbackServerContext* context,
                                                       const v1::ListMembersRequest* request,
                                                       v1::ListMembersResponse* response) noexcept {
  return AnswerNow(*door_, context, response,
                   [&] { return refitd::ListMembers(daemon_, *request); });
}

grpc::ServerUnaryReactor* OperatorService::GetUpdateStatistics(
    grpc::CallbackServerContext* context, const v1::GetUpdateStatisticsRequest* request,
    v1::GetUpdateStatisticsResponse* response) noexcept {
  return AnswerNow(*door_, context, response,
                   [&] { return refitd::GetUpdateStatistics(daemon_, *request); });
}

grpc::ServerWriteReactor<v1::UpdateStatus>* OperatorService::WatchUpdates(
    grpc::CallbackServerContext* context, const v1::WatchUpdatesRequest* request) noexcept {
  return new WatchReactor(daemon_, context, door_->Admit(*context).status(), *request);
}

}  // namespace refitd
