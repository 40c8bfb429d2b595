// The calls that trainers and engines have in common: Attach, RegisterLayout, RegisterRegion,
// ReleaseRegion.
#ifndef REFITD_DAEMON_SERVICES_MEMBER_SERVICE_H_
#define REFITD_DAEMON_SERVICES_MEMBER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <string>
#include <utility>

#include "daemon/checks/bucket_message.h"
#include "daemon/node/daemon.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/member_memory.h"
#include "daemon/services/common.h"
#include "daemon/services/member_requests.h"
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
    // The stream ended or was cancelled: a cancelled one lacks the last chunk, and Finish fails.
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
  // P10: the bytes of a decoded chunk are counted before the next chunk is asked for.
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
            response_->set_kept(registered->kept);
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

// `Service` is the generated service of the role. `Role`: see AttachReactor; it also has kEngine,
// kRegisterLayout, kRegisterRegion and kReleaseRegion. Thread-safe.
template <typename Service, typename Role>
class MemberService : public Service {
 public:
  MemberService(Daemon* daemon, const Authorizer* authorizer)
      : daemon_(daemon), authorizer_(authorizer) {}

  grpc::ServerBidiReactor<typename Role::Message, typename Role::Event>* Attach(
      grpc::CallbackServerContext* context) noexcept final {
    return new AttachReactor<Role>(daemon_, authorizer_, context);
  }

  grpc::ServerReadReactor<v1::LayoutChunk>* RegisterLayout(
      grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept final {
    return new RegisterLayoutReactor(daemon_, authorizer_->Admit(*context, {Role::kRegisterLayout}),
                                     Role::kEngine, response);
  }

  grpc::ServerUnaryReactor* RegisterRegion(grpc::CallbackServerContext* context,
                                           const v1::RegisterRegionRequest* request,
                                           v1::RegisterRegionResponse* response) noexcept final {
    return AnswerOnce(daemon_, *authorizer_, context, {Role::kRegisterRegion}, response,
                      [&](const Peer& peer, auto reply) {
                        const DeviceRef block = BlockOf(*request);
                        daemon_->memory().RegisterDevice(
                            CallerOf(request->lease(), peer), Role::kEngine,
                            {std::string(block.handle), std::string(block.device),
                             block.byte_offset, block.bytes},
                            [reply](const absl::StatusOr<MemberMemory::Registered>& registered) {
                              if (!registered.ok()) return reply(registered.status());
                              v1::RegisterRegionResponse answer;
                              answer.set_region_id(registered->id.value());
                              answer.set_bytes(registered->bytes);
                              reply(std::move(answer));
                            });
                      });
  }

  grpc::ServerUnaryReactor* ReleaseRegion(grpc::CallbackServerContext* context,
                                          const v1::ReleaseRegionRequest* request,
                                          v1::ReleaseRegionResponse* response) noexcept final {
    return AnswerOnce(daemon_, *authorizer_, context, {Role::kReleaseRegion}, response,
                      [&](const Peer& peer, auto reply) {
                        daemon_->memory().Release(CallerOf(request->lease(), peer), Role::kEngine,
                                                  RegionId(request->region_id()),
                                                  [reply](const absl::Status& status) {
                                                    if (!status.ok()) return reply(status);
                                                    reply(v1::ReleaseRegionResponse());
                                                  });
                      });
  }

 protected:
  Daemon* const daemon_;
  const Authorizer* const authorizer_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_MEMBER_SERVICE_H_
