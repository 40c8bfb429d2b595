#include "transport/cuda/buffers.h"

#if defined(REFITD_CUDA)
#include <algorithm>

#include "transport/base/status.h"

namespace refitd {
namespace {

// Rounds up to one of few sizes (powers of two, then whole MiB), so that free buffers fit the next
// transfer.
int64_t RoundUp(int64_t bytes) {
  constexpr int64_t kLeast = 4 << 10;
  constexpr int64_t kMiB = 1 << 20;
  if (bytes > kMiB) return (bytes + kMiB - 1) / kMiB * kMiB;
  int64_t rounded = kLeast;
  while (rounded < bytes) rounded *= 2;
  return rounded;
}

}  // namespace

Buffer::~Buffer() {
  if (pool_ != nullptr) pool_->GiveBack(address_, bytes_);
}

ScratchBuffers::~ScratchBuffers() {
  MutexLock lock(&mutex_);
  if (!abandoned_) Release(free_);
}

absl::StatusOr<Buffer> ScratchBuffers::Take(int64_t bytes) {
  const int64_t rounded = RoundUp(bytes);
  {
    // Take the smallest free buffer that fits, unless it is more than twice as large.
    MutexLock lock(&mutex_);
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i) {
      if (free_[i].bytes < rounded || free_[i].bytes > 2 * rounded) continue;
      if (best == free_.size() || free_[i].bytes < free_[best].bytes) best = i;
    }
    if (best != free_.size()) {
      const Free found = free_[best];
      free_[best] = free_.back();
      free_.pop_back();
      free_bytes_ -= found.bytes;
      return Buffer(shared_from_this(), found.address, found.bytes);
    }
  }
  REFITD_ASSIGN_OR_RETURN(const uint64_t address, Allocate(rounded));
  return Buffer(shared_from_this(), address, rounded);
}

void ScratchBuffers::Trim() {
  std::vector<Free> surplus;
  {
    MutexLock lock(&mutex_);
    if (abandoned_ || free_bytes_ <= most_kept_) return;
    // Free the largest first, because small buffers are needed again soon.
    std::sort(free_.begin(), free_.end(),
              [](const Free& a, const Free& b) { return a.bytes < b.bytes; });
    while (free_bytes_ > most_kept_) {
      surplus.push_back(free_.back());
      free_bytes_ -= free_.back().bytes;
      free_.pop_back();
    }
  }
  Release(surplus);
}

void ScratchBuffers::Abandon() {
  MutexLock lock(&mutex_);
  abandoned_ = true;
}

void ScratchBuffers::OnSurplus(std::function<void()> call) {
  MutexLock lock(&mutex_);
  on_surplus_ = std::move(call);
}

void ScratchBuffers::GiveBack(uint64_t address, int64_t bytes) {
  std::function<void()> tell;
  {
    MutexLock lock(&mutex_);
    free_.push_back({address, bytes});
    free_bytes_ += bytes;
    if (free_bytes_ > most_kept_ && !abandoned_) tell = on_surplus_;
  }
  if (tell) tell();
}

absl::StatusOr<uint64_t> ScratchBuffers::Allocate(int64_t bytes) {
  const CudaApi& api = contexts_->api();
  REFITD_ASSIGN_OR_RETURN(const CUcontext context, contexts_->Get(device_));
  const ScopedContext current(api, context);
  REFITD_RETURN_IF_ERROR(current.status());
  if (kind_ == Kind::kDevice) {
    CUdeviceptr address = 0;
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemAlloc, &address, static_cast<size_t>(bytes)));
    return static_cast<uint64_t>(address);
  }
  void* data = nullptr;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemHostAlloc, &data, static_cast<size_t>(bytes),
                                          CU_MEMHOSTALLOC_PORTABLE));
  return reinterpret_cast<uint64_t>(data);
}

// Errors are ignored, because after an error the context is lost, and its memory with it.
void ScratchBuffers::Release(const std::vector<Free>& buffers) {
  if (buffers.empty()) return;
  const absl::StatusOr<CUcontext> context = contexts_->Get(device_);
  if (!context.ok()) return;
  const ScopedContext current(contexts_->api(), *context);
  if (!current.status().ok()) return;
  for (const Free& buffer : buffers) {
    if (kind_ == Kind::kDevice) {
      (void)contexts_->api().cuMemFree(buffer.address);
    } else {
      (void)contexts_->api().cuMemFreeHost(reinterpret_cast<void*>(buffer.address));
    }
  }
}

}  // namespace refitd

#endif  // REFITD_CUDA
