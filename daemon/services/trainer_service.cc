#include "daemon/services/trainer_service.h"

#include <utility>
#include <variant>

#include "daemon/services/hello.h"
#include "daemon/services/region_calls.h"
#include "daemon/services/register_layout.h"
#include "daemon/services/status.h"
#include "daemon/services/trainer_events.h"
#include "proto/convert.h"

namespace refitd {
namespace {

struct TrainerRole {
  static constexpr Rpc kRpc = Rpc::kTrainerAttach;
  using Message = v1::TrainerMessage;
  using Event = v1::TrainerEvent;
  static MemberId Hello(Daemon* daemon, const Message& message, const Peer& peer,
                        std::shared_ptr<MemberSink> sink) {
    return daemon->arrivals().Attach(ArrivalOf(message.hello(), peer), std::move(sink));
  }
  static bool Answer(Daemon* /*daemon*/, MemberId /*member*/, const Message& message) {
    return !message.has_detach();
  }
};

void Fill(const CommitReply& committed, v1::CommitResponse* response) {
  response->set_version(committed.version.value());
  response->set_bytes(committed.bytes);
  response->set_seconds(std::chrono::duration<double>(committed.elapsed).count());
  response->set_left_out_tensors(committed.left_out_tensors);
  response->set_left_out_bytes(committed.left_out_bytes);
  for (const InstanceOutcome& outcome : committed.instances) {
    *response->add_instances() = ToWire(outcome);
  }
  for (const BroadcastTotals& totals : committed.pushed) {
    *response->add_pushed() = BroadcastTotalsToWire(totals.method, totals.bytes, totals.buckets);
  }
}

}  // namespace

grpc::ServerBidiReactor<v1::TrainerMessage, v1::TrainerEvent>* TrainerService::Attach(
    grpc::CallbackServerContext* context) noexcept {
  return new AttachReactor<TrainerRole>(daemon_, door_, context);
}

grpc::ServerReadReactor<v1::LayoutChunk>* TrainerService::RegisterLayout(
    grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept {
  return new RegisterLayoutReactor(daemon_, door_->Admit(*context, {Rpc::kTrainerRegisterLayout}),
                                   /*engine=*/false, response);
}

grpc::ServerUnaryReactor* TrainerService::RegisterRegion(
    grpc::CallbackServerContext* context, const v1::RegisterRegionRequest* request,
    v1::RegisterRegionResponse* response) noexcept {
  return AnswerRegisterRegion(daemon_, *door_, context, *request, /*engine=*/false, response);
}

grpc::ServerUnaryReactor* TrainerService::ReleaseRegion(
    grpc::CallbackServerContext* context, const v1::ReleaseRegionRequest* request,
    v1::ReleaseRegionResponse* response) noexcept {
  return AnswerReleaseRegion(daemon_, *door_, context, *request, /*engine=*/false, response);
}

grpc::ServerUnaryReactor* TrainerService::Begin(grpc::CallbackServerContext* context,
                                                const v1::BeginRequest* request,
                                                v1::BeginResponse* response) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerBegin},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        daemon_->trainer_calls().Call(call, CallerOf(request->lease(), peer),
                                      EventOf(*request, daemon_->options().group.max_duration),
                                      std::move(reply));
      },
      [response](const ReplyPayload& payload) {
        const auto& begun = PayloadAs<BeginReply>(payload);
        response->set_update_id(begun.update.value());
        response->set_remaining_ms(ToMillis(begun.remaining));
        response->set_instances(begun.instances);
        response->set_leasable_slots(begun.leasable_slots);
      });
}

grpc::ServerUnaryReactor* TrainerService::LeaseSlot(grpc::CallbackServerContext* context,
                                                    const v1::LeaseSlotRequest* request,
                                                    v1::LeaseSlotResponse* response) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerLeaseSlot},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        daemon_->trainer_calls().Call(call, CallerOf(request->lease(), peer), EventOf(*request),
                                      std::move(reply));
      },
      [response](const ReplyPayload& payload) {
        const auto& leased = PayloadAs<LeaseSlotReply>(payload);
        response->set_slot(leased.grant.slot.value());
        response->set_grant(leased.grant.grant.value());
        response->set_bytes(leased.slot_bytes);
        response->set_byte_offset(int64_t{leased.grant.slot.value()} * leased.slot_bytes);
        response->set_expires_ms(ToMillis(leased.expires));
      });
}

grpc::ServerUnaryReactor* TrainerService::ReleaseSlot(
    grpc::CallbackServerContext* context, const v1::ReleaseSlotRequest* request,
    v1::ReleaseSlotResponse* /*response*/) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerReleaseSlot},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        ReleaseSlotEvent event;
        event.grant = {SlotIndex(request->slot()), GrantId(request->grant())};
        daemon_->trainer_calls().Call(call, CallerOf(request->lease(), peer), event,
                                      std::move(reply));
      },
      [](const ReplyPayload&) {});
}

grpc::ServerUnaryReactor* TrainerService::PushBucket(grpc::CallbackServerContext* context,
                                                     const v1::PushBucketRequest* request,
                                                     v1::PushBucketResponse* response) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerPushBucket},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        daemon_->trainer_calls().PushBucket(call, CallerOf(request->lease(), peer),
                                            PushOf(*request), std::move(reply));
      },
      [response](const ReplyPayload& payload) {
        const auto& pushed = PayloadAs<BucketReply>(payload);
        response->set_group_seq(pushed.group_seq);
        response->set_bytes(pushed.bytes);
      });
}

grpc::ServerUnaryReactor* TrainerService::Commit(grpc::CallbackServerContext* context,
                                                 const v1::CommitRequest* request,
                                                 v1::CommitResponse* response) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerCommit},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        daemon_->trainer_calls().Call(call, CallerOf(request->lease(), peer), EventOf(*request),
                                      std::move(reply));
      },
      [response](const ReplyPayload& payload) { Fill(PayloadAs<CommitReply>(payload), response); });
}

grpc::ServerUnaryReactor* TrainerService::Abort(grpc::CallbackServerContext* context,
                                                const v1::AbortRequest* request,
                                                v1::AbortResponse* /*response*/) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerAbort},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        daemon_->trainer_calls().Call(call, CallerOf(request->lease(), peer), EventOf(*request),
                                      std::move(reply));
      },
      [](const ReplyPayload&) {});
}

grpc::ServerUnaryReactor* TrainerService::Refit(grpc::CallbackServerContext* context,
                                                const v1::RefitRequest* request,
                                                v1::CommitResponse* response) noexcept {
  return AnswerLater(
      daemon_, *door_, context, {Rpc::kTrainerRefit},
      [&](CallId call, const Peer& peer, ReplyFunction reply) {
        daemon_->trainer_calls().Refit(call, CallerOf(request->lease(), peer),
                                       EventOf(*request, daemon_->options().group.max_duration),
                                       request->binding_generation(), std::move(reply));
      },
      [response](const ReplyPayload& payload) { Fill(PayloadAs<CommitReply>(payload), response); });
}

grpc::ServerUnaryReactor* TrainerService::GetUpdate(grpc::CallbackServerContext* context,
                                                    const v1::GetUpdateRequest* request,
                                                    v1::GetUpdateResponse* response) noexcept {
  return AnswerNow(*door_, context, {Rpc::kTrainerGetUpdate, request->group()}, response,
                   [&](const Peer&) { return refitd::GetUpdate(daemon_, *request); });
}

}  // namespace refitd
