#include "daemon/services/operator_service.h"

#include <utility>

namespace refitd {
namespace {

// One caller that watches updates. Deletes itself.
class WatchReactor : public grpc::ServerWriteReactor<v1::UpdateStatus> {
 public:
  using Stream = EventStream<v1::UpdateStatus, WatchReactor>;

  WatchReactor(Node* node, grpc::CallbackServerContext* context, absl::Status admitted,
               const v1::WatchUpdatesRequest& request)
      : node_(node), context_(context), stream_(std::make_shared<Stream>(this)) {
    // The caller must learn that it is watching before anything changes.
    StartSendInitialMetadata();
    if (admitted.ok()) {
      absl::StatusOr<uint64_t> watch = node_->Watch(request, stream_);
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
    node_->StopWatching(watch_);
    delete this;
  }

 private:
  Node* const node_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Stream> stream_;
  uint64_t watch_ = 0;  // 0: not watching
};

}  // namespace

grpc::ServerUnaryReactor* OperatorService::CreateGroup(grpc::CallbackServerContext* context,
                                                       const v1::CreateGroupRequest* request,
                                                       v1::CreateGroupResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return node_->CreateGroup(*request); });
}

grpc::ServerUnaryReactor* OperatorService::DeleteGroup(grpc::CallbackServerContext* context,
                                                       const v1::DeleteGroupRequest* request,
                                                       v1::DeleteGroupResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&]() -> absl::StatusOr<v1::DeleteGroupResponse> {
    if (absl::Status status = node_->DeleteGroup(*request); !status.ok()) return status;
    return v1::DeleteGroupResponse();
  });
}

grpc::ServerUnaryReactor* OperatorService::AbortUpdate(
    grpc::CallbackServerContext* context, const v1::AbortUpdateRequest* request,
    v1::AbortUpdateResponse* /*response*/) noexcept {
  return AnswerLater(
      node_, *door_, context,
      [&](CallId call, const Peer& /*peer*/, ReplyFunction reply) {
        node_->AbortUpdate(call, *request, std::move(reply));
      },
      [](const ReplyPayload&) {});
}

grpc::ServerUnaryReactor* OperatorService::GetStatus(grpc::CallbackServerContext* context,
                                                     const v1::GetStatusRequest* /*request*/,
                                                     v1::GetStatusResponse* response) noexcept {
  return AnswerNow(*door_, context, response,
                   [&]() -> absl::StatusOr<v1::GetStatusResponse> { return node_->GetStatus(); });
}

grpc::ServerUnaryReactor* OperatorService::ListGroups(grpc::CallbackServerContext* context,
                                                      const v1::ListGroupsRequest* /*request*/,
                                                      v1::ListGroupsResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return node_->ListGroups(); });
}

grpc::ServerUnaryReactor* OperatorService::GetGroup(grpc::CallbackServerContext* context,
                                                    const v1::GetGroupRequest* request,
                                                    v1::GetGroupResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return node_->GetGroup(*request); });
}

grpc::ServerUnaryReactor* OperatorService::ListMembers(grpc::CallbackServerContext* context,
                                                       const v1::ListMembersRequest* request,
                                                       v1::ListMembersResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return node_->ListMembers(*request); });
}

grpc::ServerUnaryReactor* OperatorService::GetUpdateStatistics(
    grpc::CallbackServerContext* context, const v1::GetUpdateStatisticsRequest* request,
    v1::GetUpdateStatisticsResponse* response) noexcept {
  return AnswerNow(*door_, context, response, [&] { return node_->GetUpdateStatistics(*request); });
}

grpc::ServerWriteReactor<v1::UpdateStatus>* OperatorService::WatchUpdates(
    grpc::CallbackServerContext* context, const v1::WatchUpdatesRequest* request) noexcept {
  return new WatchReactor(node_, context, door_->Admit(*context).status(), *request);
}

}  // namespace refitd
