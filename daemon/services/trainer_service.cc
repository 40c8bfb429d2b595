#include <utility>

#include "daemon/link/trainer_messages.h"
#include "daemon/services/common.h"
#include "daemon/services/member_requests.h"
#include "daemon/services/member_service.h"
#include "daemon/services/services.h"
#include "daemon/services/status.h"
#include "refitd/v1/trainer.grpc.pb.h"

namespace refitd {
namespace {

struct TrainerRole {
  static constexpr bool kEngine = false;
  static constexpr Rpc kRpc = Rpc::kTrainerAttach;
  static constexpr Rpc kRegisterLayout = Rpc::kTrainerRegisterLayout;
  static constexpr Rpc kRegisterRegion = Rpc::kTrainerRegisterRegion;
  static constexpr Rpc kReleaseRegion = Rpc::kTrainerReleaseRegion;
  using Message = v1::TrainerMessage;
  using Event = v1::TrainerEvent;
  static bool Answer(Daemon* /*daemon*/, MemberId /*member*/, const Message& message) {
    return !message.has_detach();
  }
};

void Fill(const EmptyReply& /*reply*/, google::protobuf::Message* /*response*/) {}

// Thread-safe.
class TrainerService final : public MemberService<v1::Trainer::CallbackService, TrainerRole> {
 public:
  using MemberService::MemberService;

  grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext* context,
                                  const v1::BeginRequest* request,
                                  v1::BeginResponse* response) noexcept override {
    return Hand<BeginReply>(context, Rpc::kTrainerBegin, *request, response,
                            [&] { return EventOf(*request, MaxDuration()); });
  }

  grpc::ServerUnaryReactor* LeaseSlot(grpc::CallbackServerContext* context,
                                      const v1::LeaseSlotRequest* request,
                                      v1::LeaseSlotResponse* response) noexcept override {
    return Hand<LeaseSlotReply>(context, Rpc::kTrainerLeaseSlot, *request, response,
                                [&] { return EventOf(*request); });
  }

  grpc::ServerUnaryReactor* ReleaseSlot(grpc::CallbackServerContext* context,
                                        const v1::ReleaseSlotRequest* request,
                                        v1::ReleaseSlotResponse* response) noexcept override {
    return Hand<EmptyReply>(context, Rpc::kTrainerReleaseSlot, *request, response,
                            [&] { return EventOf(*request); });
  }

  grpc::ServerUnaryReactor* PushBucket(grpc::CallbackServerContext* context,
                                       const v1::PushBucketRequest* request,
                                       v1::PushBucketResponse* response) noexcept override {
    return AnswerLater(
        daemon_, *authorizer_, context, {Rpc::kTrainerPushBucket},
        [&](CallId call, const Peer& peer, ReplyFunction reply) {
          daemon_->calls().PushBucket(call, CallerOf(request->lease(), peer), PushOf(*request),
                                      std::move(reply));
        },
        [response](const ReplyPayload& payload) {
          Fill(PayloadAs<BucketReply>(payload), response);
        });
  }

  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const v1::CommitRequest* request,
                                   v1::CommitResponse* response) noexcept override {
    return Hand<CommitReply>(context, Rpc::kTrainerCommit, *request, response,
                             [&] { return EventOf(*request); });
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) noexcept override {
    return Hand<EmptyReply>(context, Rpc::kTrainerAbort, *request, response,
                            [&] { return EventOf(*request); });
  }

  grpc::ServerUnaryReactor* Refit(grpc::CallbackServerContext* context,
                                  const v1::RefitRequest* request,
                                  v1::CommitResponse* response) noexcept override {
    return AnswerLater(
        daemon_, *authorizer_, context, {Rpc::kTrainerRefit},
        [&](CallId call, const Peer& peer, ReplyFunction reply) {
          daemon_->calls().Refit(call, CallerOf(request->lease(), peer),
                                 EventOf(*request, MaxDuration()), request->binding_generation(),
                                 std::move(reply));
        },
        [response](const ReplyPayload& payload) {
          Fill(PayloadAs<CommitReply>(payload), response);
        });
  }

  grpc::ServerUnaryReactor* Rollback(grpc::CallbackServerContext* context,
                                     const v1::TrainerRollbackRequest* request,
                                     v1::CommitResponse* response) noexcept override {
    return Hand<CommitReply>(context, Rpc::kTrainerRollback, *request, response,
                             [&] { return EventOf(*request); });
  }

  grpc::ServerUnaryReactor* ReleasePrevious(
      grpc::CallbackServerContext* context, const v1::TrainerReleasePreviousRequest* request,
      v1::TrainerReleasePreviousResponse* response) noexcept override {
    return Hand<EmptyReply>(context, Rpc::kTrainerReleasePrevious, *request, response,
                            [&] { return EventOf(*request); });
  }

  grpc::ServerUnaryReactor* GetUpdate(grpc::CallbackServerContext* context,
                                      const v1::GetUpdateRequest* request,
                                      v1::GetUpdateResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kTrainerGetUpdate, request->group()}, response,
                     [&](const Peer&) { return refitd::GetUpdate(daemon_, *request); });
  }

 private:
  Duration MaxDuration() const { return daemon_->options().group.max_duration; }

  // Hands the event that `make()` returns to the caller's group, once the authorizer has admitted
  // the caller. The group's reply fills the response if it is OK.
  template <typename Reply, typename Request, typename Response, typename Make>
  grpc::ServerUnaryReactor* Hand(grpc::CallbackServerContext* context, Rpc rpc,
                                 const Request& request, Response* response, Make make) {
    return AnswerLater(
        daemon_, *authorizer_, context, {rpc},
        [&](CallId call, const Peer& peer, ReplyFunction reply) {
          daemon_->calls().Call(call, CallerOf(request.lease(), peer), make(), std::move(reply));
        },
        [response](const ReplyPayload& payload) { Fill(PayloadAs<Reply>(payload), response); });
  }
};

static_assert(AreNoexcept(&TrainerService::Attach, &TrainerService::RegisterLayout,
                          &TrainerService::RegisterRegion, &TrainerService::ReleaseRegion,
                          &TrainerService::Begin, &TrainerService::LeaseSlot,
                          &TrainerService::ReleaseSlot, &TrainerService::PushBucket,
                          &TrainerService::Commit, &TrainerService::Abort, &TrainerService::Refit,
                          &TrainerService::Rollback, &TrainerService::ReleasePrevious,
                          &TrainerService::GetUpdate));

}  // namespace

std::unique_ptr<grpc::Service> MakeTrainerService(Daemon* daemon, const Authorizer* authorizer) {
  return std::make_unique<TrainerService>(daemon, authorizer);
}

}  // namespace refitd
