#include "transport/cuda/call_watch.h"

#if defined(REFITD_CUDA)
#include <pthread.h>

#include <optional>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// Pinning does ten times as much (record 117). It is one call for all of a region: copies across
// the border of two ranges that were pinned apart are refused.
constexpr int64_t kPinnedBytesPerSecond = int64_t{1} << 30;

}  // namespace

CallWatch::CallWatch(std::chrono::milliseconds limit, std::shared_ptr<LostContext> lost,
                     std::function<std::string(int)> name, std::function<void()> looked)
    : limit_(limit),
      lost_(std::move(lost)),
      name_(std::move(name)),
      looked_(std::move(looked)),
      late_clock_(limit),
      thread_([this] { Watch(); }) {
  (void)pthread_setname_np(thread_.native_handle(), "refitd-gpu-call");
}

CallWatch::~CallWatch() { Stop(); }

void CallWatch::Stop() {
  {
    MutexLock lock(&mutex_);
    stops_ = true;
    stopped_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void CallWatch::Watch() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (stops_) return;
      (void)stopped_.WaitUntil(&mutex_, late_clock_.NextLook());
      late_clock_.Look();
    }
    Judge();
    if (looked_ != nullptr) looked_();
  }
}

void CallWatch::Judge() {
  std::optional<Running> late;
  {
    MutexLock lock(&mutex_);
    for (const auto& [number, call] : running_) {
      if (late_clock_.Late(call.since)) late = call;
    }
  }
  if (!late.has_value()) return;
  lost_->Lose(Error(absl::StatusCode::kDeadlineExceeded,
                    "device {}: {}: the driver did not return within {} ms", name_(late->device),
                    late->what, (limit_ + late->extra).count()));
}

uint64_t CallWatch::Begin(int device, const char* what, int64_t bytes) {
  const auto extra = std::chrono::seconds(bytes / kPinnedBytesPerSecond);
  MutexLock lock(&mutex_);
  running_[next_] = {device, what, extra, Clock::now() + extra};
  return next_++;
}

void CallWatch::End(uint64_t number) {
  MutexLock lock(&mutex_);
  running_.erase(number);
}

}  // namespace refitd

#endif  // REFITD_CUDA
