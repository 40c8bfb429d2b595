#include "daemon/services/engine_service.h"

#include <utility>

#include "proto/convert.h"

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

// Collects the chunks, then registers. Deletes itself.
class RegisterLayoutReactor : public grpc::ServerReadReactor<v1::LayoutChunk> {
 public:
  RegisterLayoutReactor(Node* node, absl::StatusOr<Peer> peer, v1::LayoutRegistered* response)
      : node_(node), peer_(std::move(peer)), response_(response) {
    if (peer_.ok()) {
      StartRead(&chunk_);
    } else {
      Finish(ToGrpc(peer_.status()));
    }
  }

  void OnReadDone(bool ok) override {
    // The end of the stream, or its cancellation: the decoder tells by the last chunk.
    if (!ok) return Register();
    if (first_) {
      lease_ = chunk_.lease();
      first_ = false;
      const absl::Status status = node_->CheckEngineLease(lease_, *peer_);
      if (!status.ok()) return Finish(ToGrpc(status));
    }
    if (absl::Status status = decoder_.Add(chunk_); !status.ok()) return Finish(ToGrpc(status));
    StartRead(&chunk_);
  }
  void OnDone() override { delete this; }

 private:
  void Register() {
    absl::StatusOr<Layout> layout = std::move(decoder_).Finish();
    if (!layout.ok()) return Finish(ToGrpc(layout.status()));
    // Always answered: whoever cancels meanwhile leaves only this object waiting for that.
    node_->RegisterEngineLayout(node_->NewCall(), lease_, *peer_, *std::move(layout),
                                [this](const absl::StatusOr<v1::LayoutRegistered>& registered) {
                                  if (registered.ok()) *response_ = *registered;
                                  Finish(ToGrpc(registered.status()));
                                });
  }

  Node* const node_;
  const absl::StatusOr<Peer> peer_;
  v1::LayoutRegistered* const response_;
  v1::LayoutChunk chunk_;
  v1::Lease lease_;
  bool first_ = true;
  LayoutDecoder decoder_;
};

}  // namespace

grpc::ServerBidiReactor<v1::EngineMessage, v1::EngineEvent>* EngineService::Attach(
    grpc::CallbackServerContext* context) {
  return new AttachReactor<EngineRole>(node_, context, door_->Admit(*context));
}

grpc::ServerReadReactor<v1::LayoutChunk>* EngineService::RegisterLayout(
    grpc::CallbackServerContext* context, v1::LayoutRegistered* response) {
  return new RegisterLayoutReactor(node_, door_->Admit(*context), response);
}

}  // namespace refitd
