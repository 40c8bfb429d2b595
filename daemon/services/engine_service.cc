#include "daemon/services/engine_service.h"

#include <utility>

#include "daemon/checks/bucket.h"
#include "daemon/node/life.h"
#include "daemon/services/hello.h"
#include "daemon/services/region_calls.h"
#include "daemon/services/register_layout.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

struct EngineRole {
  static constexpr Rpc kRpc = Rpc::kEngineAttach;
  using Message = v1::EngineMessage;
  using Event = v1::EngineEvent;
  static MemberId Hello(Daemon* daemon, const Message& message, const Peer& peer,
                        std::shared_ptr<MemberSink> sink) {
    return daemon->attaches().Attach(ArrivalOf(message.hello(), peer), std::move(sink));
  }
  static bool Answer(Daemon* daemon, MemberId member, const Message& message) {
    switch (message.kind_case()) {
      case Message::kReady:
        daemon->calls().Happened(member, ReadyEvent{member, UpdateId(message.ready().update_id())});
        return true;
      case Message::kAck: {
        const v1::Ack& ack = message.ack();
        if (ack.part() < 0) return true;  // ignored like any part that was not handed out
        daemon->calls().Happened(member,
                                 AckEvent{member, UpdateId(ack.update_id()), PartSeq(ack.part())});
        return true;
      }
      case Message::kFailed: {
        const v1::Failed& failed = message.failed();
        // The rank did fail, so a text that would be refused elsewhere is cleaned here.
        daemon->calls().Happened(
            member, EngineFailed{member, UpdateId(failed.update_id()),
                                 CleanText(Escaped(failed.reason()), kMaxReasonBytes)});
        return true;
      }
      default:
        return !message.has_detach();
    }
  }
};

}  // namespace

grpc::ServerBidiReactor<v1::EngineMessage, v1::EngineEvent>* EngineService::Attach(
    grpc::CallbackServerContext* context) noexcept {
  return new AttachReactor<EngineRole>(daemon_, authorizer_, context);
}

grpc::ServerReadReactor<v1::LayoutChunk>* EngineService::RegisterLayout(
    grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept {
  return new RegisterLayoutReactor(daemon_,
                                   authorizer_->Admit(*context, {Rpc::kEngineRegisterLayout}),
                                   /*engine=*/true, response);
}

grpc::ServerUnaryReactor* EngineService::RegisterRegion(
    grpc::CallbackServerContext* context, const v1::RegisterRegionRequest* request,
    v1::RegisterRegionResponse* response) noexcept {
  return AnswerRegisterRegion(daemon_, *authorizer_, context, *request, /*engine=*/true, response);
}

grpc::ServerUnaryReactor* EngineService::ReleaseRegion(
    grpc::CallbackServerContext* context, const v1::ReleaseRegionRequest* request,
    v1::ReleaseRegionResponse* response) noexcept {
  return AnswerReleaseRegion(daemon_, *authorizer_, context, *request, /*engine=*/true, response);
}

}  // namespace refitd
