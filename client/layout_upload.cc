#include "client/layout_upload.h"

#include <utility>

#include "client/call.h"
#include "proto/convert.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

constexpr int64_t kLayoutChunkBytes = 1 << 20;  // well below any message limit

// Owns itself until gRPC is done with it, because the waiting thread may give up earlier.
class Upload final : public grpc::ClientWriteReactor<v1::LayoutChunk> {
 public:
  explicit Upload(std::vector<v1::LayoutChunk> chunks) : chunks_(std::move(chunks)) {
    static_assert(
        noexcept(OnWriteDone(true))&& noexcept(OnDone(std::declval<const grpc::Status&>())));
  }

  void Begin(const StartUpload& start, TimePoint deadline, std::shared_ptr<Upload> self) {
    self_ = std::move(self);
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::duration_cast<std::chrono::microseconds>(Until(deadline)));
    start(&context_, &response_, this);
    WriteNext();
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  absl::StatusOr<v1::LayoutRegistered> Wait(TimePoint deadline) {
    MutexLock lock(&mutex_);
    while (!done_) {
      if (cond_.WaitUntil(&mutex_, deadline) || done_) continue;
      context_.TryCancel();
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "RegisterLayout: no answer from the daemon");
    }
    REFITD_RETURN_IF_ERROR(status_);
    return response_;
  }

 private:
  void WriteNext() {
    if (next_ == chunks_.size()) return StartWritesDone();
    StartWrite(&chunks_[next_++]);
  }
  // If a write failed, the daemon has answered already, and OnDone brings the answer.
  void OnWriteDone(bool ok) noexcept override {
    if (ok) WriteNext();
  }
  void OnDone(const grpc::Status& status) noexcept override {
    std::shared_ptr<Upload> self;  // destroyed last
    MutexLock lock(&mutex_);
    status_ = FromGrpc(status);
    done_ = true;
    self.swap(self_);
    cond_.NotifyAll();
  }

  // Used by gRPC's callbacks only, one at a time.
  std::vector<v1::LayoutChunk> chunks_;
  size_t next_ = 0;
  grpc::ClientContext context_;
  v1::LayoutRegistered response_;
  std::shared_ptr<Upload> self_;

  Mutex mutex_;
  CondVar cond_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<v1::LayoutRegistered> UploadLayout(const StartUpload& start,
                                                  std::vector<v1::LayoutChunk> chunks,
                                                  TimePoint deadline, const std::stop_token& stop) {
  auto upload = std::make_shared<Upload>(std::move(chunks));
  upload->Begin(start, deadline, upload);
  const std::stop_callback cancel(stop, [&upload] { upload->Cancel(); });
  return upload->Wait(deadline + kCleanupLimit);
}

absl::StatusOr<Registration::Registered> Registration::Upload(Connection* connection,
                                                              const StartUpload& start,
                                                              Layout layout,
                                                              const std::stop_token& stop) {
  REFITD_RETURN_IF_ERROR(connection->ToProto(&layout));
  layout.binding_generation = ++binding_generation_;
  const absl::StatusOr<v1::LayoutRegistered> answer =
      UploadLayout(start, EncodeLayout(layout, connection->lease(), kLayoutChunkBytes),
                   After(kRegisterLimit + connection->call_margin()), stop);
  REFITD_RETURN_IF_ERROR(NameDaemon("RegisterLayout", connection->socket(), answer.status()));
  return Registered{layout.binding_generation, answer->kept()};
}

absl::StatusOr<Registration::Registered> Registration::Register(Connection* connection,
                                                                const StartUpload& start,
                                                                Layout layout) {
  for (const TensorSpec& tensor : layout.tensors) {
    REFITD_RETURN_IF_ERROR(AboutField(ValidateTensor(tensor), "layout.tensors"));
  }
  REFITD_ASSIGN_OR_RETURN(const Registered registered, Upload(connection, start, layout, {}));
  if (!keep_) return registered;
  layout_regions_ = regions_->Of(layout);
  layout_ = std::move(layout);
  return registered;
}

absl::StatusOr<uint64_t> Registration::RegisterAgain(Connection* connection,
                                                     const StartUpload& start,
                                                     const std::stop_token& stop) {
  if (!layout_) return uint64_t{0};
  layout_->flips = 0;  // counts those of a lease
  REFITD_ASSIGN_OR_RETURN(const Registered registered, Upload(connection, start, *layout_, stop));
  return registered.binding_generation;
}

}  // namespace refitd::client
