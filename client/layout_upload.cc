#include "client/layout_upload.h"

#include <grpcpp/support/client_callback.h>

#include <memory>
#include <utility>

#include "client/call.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

// Owns itself until gRPC is done with it: whoever waits may give up earlier.
class Upload final : public grpc::ClientWriteReactor<v1::LayoutChunk> {
 public:
  explicit Upload(std::vector<v1::LayoutChunk> chunks) : chunks_(std::move(chunks)) {}

  void Begin(v1::Engine::StubInterface::async_interface* stub, TimePoint deadline,
             std::shared_ptr<Upload> self) {
    self_ = std::move(self);
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::duration_cast<std::chrono::microseconds>(Until(deadline)));
    stub->RegisterLayout(&context_, &response_, this);
    WriteNext();
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  absl::Status Wait(TimePoint deadline) {
    MutexLock lock(&mutex_);
    while (!done_) {
      if (cond_.WaitUntil(&mutex_, deadline) || done_) continue;
      context_.TryCancel();
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "RegisterLayout: no answer from the daemon");
    }
    return status_;
  }

 private:
  void WriteNext() {
    if (next_ == chunks_.size()) return StartWritesDone();
    StartWrite(&chunks_[next_++]);
  }
  // A write that failed: the daemon has answered already, OnDone brings it.
  void OnWriteDone(bool ok) override {
    if (ok) WriteNext();
  }
  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<Upload> self;  // dies last
    MutexLock lock(&mutex_);
    status_ = FromGrpc(status);
    done_ = true;
    self.swap(self_);
    cond_.NotifyAll();
  }

  // gRPC's callbacks only, one at a time.
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

absl::Status UploadLayout(v1::Engine::StubInterface::async_interface* stub,
                          std::vector<v1::LayoutChunk> chunks, TimePoint deadline,
                          const std::stop_token& stop) {
  auto upload = std::make_shared<Upload>(std::move(chunks));
  upload->Begin(stub, deadline, upload);
  const std::stop_callback cancel(stop, [&upload] { upload->Cancel(); });
  return upload->Wait(deadline + kCleanupLimit);
}

}  // namespace refitd::client
