// GPU memory of other processes, mapped into this process; and pools made by this process, for
// other processes to map.
//
// A region's address (`data()`) is where its own device reaches it; it is what MemorySpan and
// BoundPiece carry. A kernel or copy that runs on another device may need another address: a legacy
// CUDA IPC handle is opened once for each device that works on it (an opened handle serves only the
// device that was current; enabling peers is not enough), whereas a VMM mapping has one address for
// all devices. DeviceRegion::On gives the address.
//
// Legacy handles (cudaIpcGetMemHandle) name a whole block of cudaMalloc, whatever address in it
// they were made from. A handle that is open already is not opened again: both users share its
// region. P6: a region is closed when its last shared_ptr is destroyed, and every copy holds one
// until it has ended. P8: the memory of a dead process is therefore freed when its last copy ended
// (measured: the memory lives until then, docs/decisions.md). P10: sizes come from the driver,
// never from the member that registered.
//
// Contexts: each device's primary context is retained when a region or a copy first needs the
// device (it takes about 0.5 GiB of the device's memory), and is never released.
//
// No CUDA type appears here; this also builds without CUDA, and then Create is an error that says
// so. Thread-safe. Calls that open or close take up to milliseconds, so they must not run under the
// node's mutex or on a gRPC thread. P4: they may hang if a device hangs; that is reported
// (CudaMemoryOptions::lost), and memory that such a call uses stays until it returns.
#ifndef REFITD_TRANSPORT_CUDA_MEMORY_H_
#define REFITD_TRANSPORT_CUDA_MEMORY_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/cuda/driver.h"
#include "transport/device_memory.h"
#include "transport/two_sided.h"

namespace refitd {

// The size of a CUipcMemHandle and of a cudaIpcMemHandle_t.
inline constexpr size_t kCudaIpcHandleBytes = kBlockHandleBytes;

// Memory of one device that only this process uses. Used by one thread at a time; freed when
// destroyed.
class CudaBuffer {
 public:
  virtual ~CudaBuffer() = default;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Copies `bytes` from `from`, which the device must reach, to data() + offset. The copy is done
  // when this returns; it does not wait for other streams. INVALID_ARGUMENT: outside of the buffer.
  virtual absl::Status Store(int64_t offset, const char* from, int64_t bytes) = 0;

 protected:
  CudaBuffer(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

 private:
  char* const data_;
  const int64_t bytes_;
};

struct CudaMemoryOptions {
  // If a device does not zero a pool within this time, or a call of the driver does not open, make
  // or close memory, it hangs and the GPUs are lost.
  std::chrono::milliseconds limit{60'000};
  // Called when the GPUs are lost; the process must then end. Called on any thread.
  std::function<void(absl::Status)> lost{};
  // No other code of this process uses the devices: their contexts then get no stack for kernels,
  // which saves 264 MiB on an H200. Others' kernels may need a stack that the driver can't know.
  bool own_contexts = false;
};

// Blocks are those of cudaMalloc, by their legacy handle; descriptors export memory of cuMemCreate.
// Pools are made by cuMemCreate too, in units of the driver's granularity of 2 MiB. DeviceOf takes
// a UUID, and its error names the devices that exist.
class CudaMemory : public DeviceMemory {
 public:
  // Loads the driver, and makes no context yet. UNAVAILABLE: no driver, no device, or CUDA is not
  // compiled in.
  static absl::StatusOr<std::shared_ptr<CudaMemory>> Create(
      const std::string& library = "libcuda.so.1", const CudaMemoryOptions& options = {});

  virtual const std::vector<CudaDevice>& devices() const = 0;
  std::string NameOf(int device) const final {
    for (const CudaDevice& each : devices()) {
      if (each.ordinal == device) return each.uuid;
    }
    return "";
  }

  // GiveBack calls the watchers, which drop their references to the pool at once or soon; the
  // pool's memory is freed with the last of these. `let_go` runs on the thread that called
  // GiveBack, and never again after UnwatchPools returned.
  virtual void WatchPools(const void* watcher, std::function<void(const DeviceRegion&)> let_go) = 0;
  virtual void UnwatchPools(const void* watcher) = 0;
  // Makes a buffer. INVALID_ARGUMENT and RESOURCE_EXHAUSTED mean what they mean for MakePool.
  virtual absl::StatusOr<std::unique_ptr<CudaBuffer>> MakeBuffer(int device, int64_t bytes) = 0;
  // Makes two-sided memory on `device`, of `bytes` rounded up to the driver's granularity a side,
  // accessible to that device alone. Its bytes are not set. Each side is shared as a descriptor
  // that ImportDescriptor takes, or, where the sides lie in host memory, PinHost. Errors as of
  // MakePool.
  virtual absl::StatusOr<std::unique_ptr<TwoSided>> MakeTwoSided(int device, int64_t bytes,
                                                                 SidesIn in) = 0;
  // Opens such memory of another process. Errors as of ImportDescriptor and PinHost.
  virtual absl::StatusOr<std::unique_ptr<TwoSided>> OpenTwoSided(int device, SharedSides sides) = 0;
  // The open region that holds [data, data + bytes), by the addresses of the region's own device;
  // null if there is none. Fast, because it is called for every piece.
  virtual std::shared_ptr<const DeviceRegion> Find(const char* data, int64_t bytes) const = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_MEMORY_H_
