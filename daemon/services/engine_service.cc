#include "daemon/services/engine_service.h"

#include <utility>

#include "daemon/services/register_layout.h"

namespace refitd {
namespace {

struct EngineRole {
  using Message = v1::EngineMessage;
  using Event = v1::EngineEvent;
  static MemberId Hello(Node* node, const Message& message, const Peer& peer,
                        std::shared_ptr<EngineSink> sink) {
    return node->AttachEngine(message.hello(), peer, std::move(sink));
  }
  static bool Answer(Node* node, MemberId member, const Message& message) {
    switch (message.kind_case()) {
      case Message::kReady:
        node->Ready(member, message.ready());
        return true;
      case Message::kAck:
        node->Ack(member, message.ack());
        return true;
      case Message::kFailed:
        node->Failed(member, message.failed());
        return true;
      default:
        return !message.has_detach();
    }
  }
};

struct EngineLayouts {
  static absl::Status CheckLease(Node* node, const v1::Lease& lease, const Peer& peer) {
    return node->CheckEngineLease(lease, peer);
  }
  static void Register(Node* node, const v1::Lease& lease, const Peer& peer, Layout layout,
                       LayoutReply reply) {
    node->RegisterEngineLayout(node->NewCall(), lease, peer, std::move(layout), std::move(reply));
  }
};

}  // namespace

grpc::ServerBidiReactor<v1::EngineMessage, v1::EngineEvent>* EngineService::Attach(
    grpc::CallbackServerContext* context) noexcept {
  return new AttachReactor<EngineRole>(node_, context, door_->Admit(*context));
}

grpc::ServerReadReactor<v1::LayoutChunk>* EngineService::RegisterLayout(
    grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept {
  return new RegisterLayoutReactor<EngineLayouts>(node_, door_->Admit(*context), response);
}

grpc::ServerUnaryReactor* EngineService::RegisterRegion(
    grpc::CallbackServerContext* context, const v1::RegisterRegionRequest* request,
    v1::RegisterRegionResponse* response) noexcept {
  return AnswerOnce(node_, *door_, context, response, [&](const Peer& peer, auto reply) {
    node_->RegisterRegion(*request, peer, /*engine=*/true, std::move(reply));
  });
}

grpc::ServerUnaryReactor* EngineService::ReleaseRegion(
    grpc::CallbackServerContext* context, const v1::ReleaseRegionRequest* request,
    v1::ReleaseRegionResponse* response) noexcept {
  return AnswerOnce(node_, *door_, context, response, [&](const Peer& peer, auto reply) {
    node_->ReleaseRegion(*request, peer, /*engine=*/true, std::move(reply));
  });
}

}  // namespace refitd
