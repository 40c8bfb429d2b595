#include "daemon/services/trainer_service.h"

#include <utility>

#include "daemon/link/trainer_messages.h"
#include "daemon/services/common.h"
#include "daemon/services/hello.h"
#include "daemon/services/region_calls.h"
#include "daemon/services/register_layout.h"
#include "daemon/services/status.h"
#include "daemon/services/trainer_events.h"
#include "proto/convert.h"
#include "refitd/v1/trainer.grpc.pb.h"

namespace refitd {
namespace {

struct TrainerRole {
  static constexpr Rpc kRpc = Rpc::kTrainerAttach;
  using Message = v1::TrainerMessage;
  using Event = v1::TrainerEvent;
  static MemberId Hello(Daemon* daemon, const Message& message, const Peer& peer,
                        std::shared_ptr<MemberSink> sink) {
    return daemon->attaches().Attach(ArrivalOf(message.hello(), peer), std::move(sink));
  }
  static bool Answer(Daemon* /*daemon*/, MemberId /*member*/, const Message& message) {
    return !message.has_detach();
  }
};

// Thread-safe.
class TrainerService final : public v1::Trainer::CallbackService {
 public:
  TrainerService(Daemon* daemon, const Authorizer* authorizer)
      : daemon_(daemon), authorizer_(authorizer) {}

  grpc::ServerBidiReactor<v1::TrainerMessage, v1::TrainerEvent>* Attach(
      grpc::CallbackServerContext* context) noexcept override {
    return new AttachReactor<TrainerRole>(daemon_, authorizer_, context);
  }

  grpc::ServerReadReactor<v1::LayoutChunk>* RegisterLayout(
      grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept override {
    return new RegisterLayoutReactor(daemon_,
                                     authorizer_->Admit(*context, {Rpc::kTrainerRegisterLayout}),
                                     /*engine=*/false, response);
  }

  grpc::ServerUnaryReactor* RegisterRegion(grpc::CallbackServerContext* context,
                                           const v1::RegisterRegionRequest* request,
                                           v1::RegisterRegionResponse* response) noexcept override {
    return AnswerRegisterRegion(daemon_, *authorizer_, context, *request, /*engine=*/false,
                                response);
  }

  grpc::ServerUnaryReactor* ReleaseRegion(grpc::CallbackServerContext* context,
                                          const v1::ReleaseRegionRequest* request,
                                          v1::ReleaseRegionResponse* response) noexcept override {
    return AnswerReleaseRegion(daemon_, *authorizer_, context, *request, /*engine=*/false,
                               response);
  }

  grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext* context,
                                  const v1::BeginRequest* request,
                                  v1::BeginResponse* response) noexcept override {
    return Hand<BeginReply>(
        context, Rpc::kTrainerBegin, *request, [&] { return EventOf(*request, MaxDuration()); },
        [response](const BeginReply& begun) { Fill(begun, response); });
  }

  grpc::ServerUnaryReactor* LeaseSlot(grpc::CallbackServerContext* context,
                                      const v1::LeaseSlotRequest* request,
                                      v1::LeaseSlotResponse* response) noexcept override {
    return Hand<LeaseSlotReply>(
        context, Rpc::kTrainerLeaseSlot, *request, [&] { return EventOf(*request); },
        [response](const LeaseSlotReply& leased) { Fill(leased, response); });
  }

  grpc::ServerUnaryReactor* ReleaseSlot(grpc::CallbackServerContext* context,
                                        const v1::ReleaseSlotRequest* request,
                                        v1::ReleaseSlotResponse* /*response*/) noexcept override {
    return Hand<EmptyReply>(context, Rpc::kTrainerReleaseSlot, *request,
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
    return Hand<CommitReply>(
        context, Rpc::kTrainerCommit, *request, [&] { return EventOf(*request); },
        [response](const CommitReply& committed) { Fill(committed, response); });
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* /*response*/) noexcept override {
    return Hand<EmptyReply>(context, Rpc::kTrainerAbort, *request,
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

  grpc::ServerUnaryReactor* GetUpdate(grpc::CallbackServerContext* context,
                                      const v1::GetUpdateRequest* request,
                                      v1::GetUpdateResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kTrainerGetUpdate, request->group()}, response,
                     [&](const Peer&) { return refitd::GetUpdate(daemon_, *request); });
  }

 private:
  Duration MaxDuration() const { return daemon_->options().group.max_duration; }

  // Hands the event that `make()` returns to the caller's group, once the authorizer has admitted
  // the caller. `fill(reply)` fills the response if the group's reply is OK.
  template <typename Reply, typename Request, typename Make, typename FillIn>
  grpc::ServerUnaryReactor* Hand(grpc::CallbackServerContext* context, Rpc rpc,
                                 const Request& request, Make make, FillIn fill) {
    return AnswerLater(
        daemon_, *authorizer_, context, {rpc},
        [&](CallId call, const Peer& peer, ReplyFunction reply) {
          daemon_->calls().Call(call, CallerOf(request.lease(), peer), make(), std::move(reply));
        },
        [fill](const ReplyPayload& payload) { fill(PayloadAs<Reply>(payload)); });
  }
  template <typename Reply, typename Request, typename Make>
  grpc::ServerUnaryReactor* Hand(grpc::CallbackServerContext* context, Rpc rpc,
                                 const Request& request, Make make) {
    return Hand<Reply>(context, rpc, request, make, [](const Reply&) {});
  }

  Daemon* const daemon_;
  const Authorizer* const authorizer_;
};

REFITD_METHOD_IS_NOEXCEPT(TrainerService, Attach, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, RegisterLayout, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, RegisterRegion, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, ReleaseRegion, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, Begin, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, LeaseSlot, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, ReleaseSlot, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, PushBucket, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, Commit, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, Abort, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, Refit, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(TrainerService, GetUpdate, nullptr, nullptr, nullptr);

}  // namespace

std::unique_ptr<grpc::Service> MakeTrainerService(Daemon* daemon, const Authorizer* authorizer) {
  return std::make_unique<TrainerService>(daemon, authorizer);
}

}  // namespace refitd
