#include <utility>

#include "daemon/checks/bucket.h"
#include "daemon/link/member_actions.h"
#include "daemon/node/life.h"
#include "daemon/services/member_requests.h"
#include "daemon/services/member_service.h"
#include "daemon/services/services.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

struct EngineRole {
  static constexpr bool kEngine = true;
  static constexpr Rpc kRpc = Rpc::kEngineAttach;
  static constexpr Rpc kRegisterLayout = Rpc::kEngineRegisterLayout;
  static constexpr Rpc kRegisterRegion = Rpc::kEngineRegisterRegion;
  static constexpr Rpc kReleaseRegion = Rpc::kEngineReleaseRegion;
  using Message = v1::EngineMessage;
  using Event = v1::EngineEvent;
  static bool Answer(Daemon* daemon, MemberId member, const Message& message) {
    switch (message.kind_case()) {
      case Message::kReady:
        daemon->calls().HandleEngineEvent(member, ReadyOf(member, message.ready()));
        return true;
      case Message::kProcessed:
        daemon->calls().HandleEngineEvent(
            member, ProcessedEvent{member, UpdateId(message.processed().update_id())});
        return true;
      case Message::kAck: {
        const v1::Ack& ack = message.ack();
        if (ack.part() < 0) return true;  // ignored like any part that was not handed out
        daemon->calls().HandleEngineEvent(
            member, AckEvent{member, UpdateId(ack.update_id()), PartSeq(ack.part())});
        return true;
      }
      case Message::kFailed: {
        const v1::Failed& failed = message.failed();
        // The rank did fail, so a text that would be refused elsewhere is cleaned here.
        daemon->calls().HandleEngineEvent(
            member, EngineFailed{member, UpdateId(failed.update_id()),
                                 CleanText(Escaped(failed.reason()), kMaxReasonBytes)});
        return true;
      }
      default:
        return !message.has_detach();
    }
  }
};

using EngineService = MemberService<v1::Engine::CallbackService, EngineRole>;

static_assert(AreNoexcept(&EngineService::Attach, &EngineService::RegisterLayout,
                          &EngineService::RegisterRegion, &EngineService::ReleaseRegion));

}  // namespace

std::unique_ptr<grpc::Service> MakeEngineService(Daemon* daemon, const Authorizer* authorizer) {
  return std::make_unique<EngineService>(daemon, authorizer);
}

}  // namespace refitd
