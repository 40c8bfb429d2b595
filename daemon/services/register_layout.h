// RegisterLayout of both roles: collects the chunks of a client stream, then registers the layout
// with the node.
#ifndef REFITD_DAEMON_SERVICES_REGISTER_LAYOUT_H_
#define REFITD_DAEMON_SERVICES_REGISTER_LAYOUT_H_

#include <grpcpp/grpcpp.h>

#include <utility>

#include "daemon/node/node.h"
#include "daemon/services/common.h"
#include "proto/convert.h"

namespace refitd {

// `Role` has CheckLease(node, lease, peer) and Register(node, lease, peer, layout, reply). Deletes
// itself.
template <typename Role>
class RegisterLayoutReactor final : public grpc::ServerReadReactor<v1::LayoutChunk> {
 public:
  RegisterLayoutReactor(Node* node, absl::StatusOr<Peer> peer, v1::LayoutRegistered* response)
      : node_(node), peer_(std::move(peer)), response_(response) {
    if (peer_.ok()) {
      StartRead(&chunk_);
    } else {
      Finish(ToGrpc(peer_.status()));
    }
  }

  void OnReadDone(bool ok) noexcept override {
    // The stream ended or was cancelled; the decoder tells which by the last chunk.
    if (!ok) return Register();
    if (first_) {
      lease_ = chunk_.lease();
      first_ = false;
      const absl::Status status = Role::CheckLease(node_, lease_, *peer_);
      if (!status.ok()) return Finish(ToGrpc(status));
    }
    if (absl::Status status = decoder_.Add(chunk_); !status.ok()) return Finish(ToGrpc(status));
    StartRead(&chunk_);
  }
  void OnDone() noexcept override { delete this; }

 private:
  void Register() {
    absl::StatusOr<Layout> layout = std::move(decoder_).Finish();
    if (!layout.ok()) return Finish(ToGrpc(layout.status()));
    // The node always answers. If the caller cancels meanwhile, only this object waits for the
    // answer.
    Role::Register(node_, lease_, *peer_, *std::move(layout),
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

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_REGISTER_LAYOUT_H_
