// The transport's own memory, device or pinned, which is reused so that small transfers make no
// call that may wait for a device. Private to transport/cuda/.
//
// A buffer returns to its pool when it is destroyed, on any thread and without a call to the
// driver; it must be destroyed only when the device is done with it. Trim, on the thread that may
// call the driver, frees surplus memory (P8); OnSurplus wakes that thread even if the device has no
// work. Thread-safe.
#ifndef REFITD_TRANSPORT_CUDA_BUFFERS_H_
#define REFITD_TRANSPORT_CUDA_BUFFERS_H_

#if defined(REFITD_CUDA)
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/cuda/api.h"

namespace refitd {

class ScratchBuffers;

// Memory of a pool, or none (the default). Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : pool_(std::move(other.pool_)),
        address_(std::exchange(other.address_, 0)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  uint64_t address() const { return address_; }                     // aligned to 256 bytes
  char* host() const { return reinterpret_cast<char*>(address_); }  // pinned buffers only
  int64_t bytes() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }

 private:
  friend class ScratchBuffers;
  Buffer(std::shared_ptr<ScratchBuffers> pool, uint64_t address, int64_t bytes)
      : pool_(std::move(pool)), address_(address), bytes_(bytes) {}
  std::shared_ptr<ScratchBuffers> pool_;
  uint64_t address_ = 0;
  int64_t bytes_ = 0;
};

class ScratchBuffers : public std::enable_shared_from_this<ScratchBuffers> {
 public:
  enum class Kind : uint8_t { kDevice, kPinned };

  // Trim frees what is free beyond `most_kept` bytes.
  ScratchBuffers(std::shared_ptr<CudaContexts> contexts, int device, Kind kind, int64_t most_kept)
      : contexts_(std::move(contexts)), device_(device), kind_(kind), most_kept_(most_kept) {}
  ~ScratchBuffers();
  ScratchBuffers(const ScratchBuffers&) = delete;
  ScratchBuffers& operator=(const ScratchBuffers&) = delete;

  // A buffer of at least `bytes`. Errors: the driver's, mostly RESOURCE_EXHAUSTED.
  absl::StatusOr<Buffer> Take(int64_t bytes);
  void Trim();
  // `call` runs whenever a buffer came back and there is memory to trim. It runs on the thread that
  // destroyed the buffer, which may hold mutexes, and it must not call the driver.
  void OnSurplus(std::function<void()> call);
  // Call it if the device hangs: no memory is freed any more, because freeing would wait for the
  // device.
  void Abandon();

 private:
  friend class Buffer;
  struct Free {
    uint64_t address = 0;
    int64_t bytes = 0;
  };

  void GiveBack(uint64_t address, int64_t bytes);
  absl::StatusOr<uint64_t> Allocate(int64_t bytes);
  void Release(const std::vector<Free>& buffers);

  const std::shared_ptr<CudaContexts> contexts_;
  const int device_;
  const Kind kind_;
  const int64_t most_kept_;
  Mutex mutex_;
  std::vector<Free> free_ ABSL_GUARDED_BY(mutex_);
  int64_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> on_surplus_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_BUFFERS_H_
