// RegisterLayout of both roles: collects the chunks of a client stream, then registers the layout
// with the daemon.
#ifndef REFITD_DAEMON_SERVICES_REGISTER_LAYOUT_H_
#define REFITD_DAEMON_SERVICES_REGISTER_LAYOUT_H_

#include <grpcpp/grpcpp.h>

#include <utility>

#include "daemon/node/daemon.h"
#include "daemon/node/member_calls.h"
#include "daemon/services/common.h"
#include "daemon/services/trainer_events.h"
#include "proto/convert.h"

namespace refitd {

// Collects the chunks of one call, registers the layout, answers, and then deletes itself.
class RegisterLayoutReactor final : public grpc::ServerReadReactor<v1::LayoutChunk> {
 public:
  RegisterLayoutReactor(Daemon* daemon, absl::StatusOr<Peer> peer, bool engine,
                        v1::LayoutRegistered* response)
      : daemon_(daemon), peer_(std::move(peer)), engine_(engine), response_(response) {
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
      caller_ = CallerOf(chunk_.lease(), *peer_);
      first_ = false;
      const absl::Status status = daemon_->calls().CheckLease(caller_, engine_);
      hold_ = daemon_->calls().HoldFor(caller_);
      if (!status.ok()) return Finish(ToGrpc(status));
    }
    if (absl::Status status = Take(); !status.ok()) return Refuse(status);
    StartRead(&chunk_);
  }
  void OnDone() noexcept override { delete this; }

 private:
  // P10: what a chunk becomes is counted before the next one is asked for.
  absl::Status Take() {
    REFITD_RETURN_IF_ERROR(decoder_.Add(chunk_));
    return hold_.GrowTo(decoder_.bytes());
  }
  void Refuse(const absl::Status& why) {
    if (engine_) daemon_->calls().LayoutRefused(caller_, why);
    Finish(ToGrpc(why));
  }
  void Register() {
    absl::StatusOr<Layout> layout = std::move(decoder_).Finish();
    if (!layout.ok()) return Refuse(layout.status());
    // The daemon always answers. If the caller cancels meanwhile, only this object waits for the
    // answer.
    daemon_->calls().RegisterLayout(
        daemon_->NewCall(), caller_, engine_, *std::move(layout),
        [this](const absl::StatusOr<MemberCalls::RegisteredLayout>& registered) {
          if (registered.ok()) {
            response_->set_digest(registered->digest);
            response_->set_pieces(registered->pieces);
            response_->set_bytes(registered->bytes);
          }
          Finish(ToGrpc(registered.status()));
        },
        std::move(hold_));
  }

  Daemon* const daemon_;
  const absl::StatusOr<Peer> peer_;
  const bool engine_;
  v1::LayoutRegistered* const response_;
  v1::LayoutChunk chunk_;
  Caller caller_;
  bool first_ = true;
  ByteLedger::Hold hold_;  // of what the decoder has
  LayoutDecoder decoder_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_REGISTER_LAYOUT_H_
