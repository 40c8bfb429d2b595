// refitd.v1.Trainer over the daemon: checks the door and translates.
#ifndef REFITD_DAEMON_SERVICES_TRAINER_SERVICE_H_
#define REFITD_DAEMON_SERVICES_TRAINER_SERVICE_H_

#include "daemon/services/common.h"
#include "refitd/v1/trainer.grpc.pb.h"

namespace refitd {

// `daemon` and `door` must outlive the server. Thread-safe.
class TrainerService final : public v1::Trainer::CallbackService {
 public:
  TrainerService(Daemon* daemon, const Door* door) : daemon_(daemon), door_(door) {}

  grpc::ServerBidiReactor<v1::TrainerMessage, v1::TrainerEvent>* Attach(
      grpc::CallbackServerContext* context) noexcept override;
  grpc::ServerReadReactor<v1::LayoutChunk>* RegisterLayout(
      grpc::CallbackServerContext* context, v1::LayoutRegistered* response) noexcept override;
  grpc::ServerUnaryReactor* RegisterRegion(grpc::CallbackServerContext* context,
                                           const v1::RegisterRegionRequest* request,
                                           v1::RegisterRegionResponse* response) noexcept override;
  grpc::ServerUnaryReactor* ReleaseRegion(grpc::CallbackServerContext* context,
                                          const v1::ReleaseRegionRequest* request,
                                          v1::ReleaseRegionResponse* response) noexcept override;
  grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext* context,
                                  const v1::BeginRequest* request,
                                  v1::BeginResponse* response) noexcept override;
  grpc::ServerUnaryReactor* LeaseSlot(grpc::CallbackServerContext* context,
                                      const v1::LeaseSlotRequest* request,
                                      v1::LeaseSlotResponse* response) noexcept override;
  grpc::ServerUnaryReactor* ReleaseSlot(grpc::CallbackServerContext* context,
                                        const v1::ReleaseSlotRequest* request,
                                        v1::ReleaseSlotResponse* response) noexcept override;
  grpc::ServerUnaryReactor* PushBucket(grpc::CallbackServerContext* context,
                                       const v1::PushBucketRequest* request,
                                       v1::PushBucketResponse* response) noexcept override;
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const v1::CommitRequest* request,
                                   v1::CommitResponse* response) noexcept override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) noexcept override;
  grpc::ServerUnaryReactor* Refit(grpc::CallbackServerContext* context,
                                  const v1::RefitRequest* request,
                                  v1::CommitResponse* response) noexcept override;
  grpc::ServerUnaryReactor* GetUpdate(grpc::CallbackServerContext* context,
                                      const v1::GetUpdateRequest* request,
                                      v1::GetUpdateResponse* response) noexcept override;

 private:
  Daemon* const daemon_;
  const Door* const door_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_TRAINER_SERVICE_H_
