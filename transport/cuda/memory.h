// GPU memory of other processes, mapped into this process; and pools made by this process, for
// other processes to map.
//
// A region's address (`data()`) is where its own device reaches it; it is what MemorySpan and
// BoundPiece carry. A kernel or copy that runs on another device may need another address: a legacy
// CUDA IPC handle is opened once for each device that works on it (an opened handle serves only the
// device that was current; enabling peers is not enough), whereas a VMM mapping has one address for
// all devices. CudaRegion::On gives the address.
//
// Legacy handles (cudaIpcGetMemHandle) name a whole block of cudaMalloc, whatever address in it
// they were made from. A handle that is open already is not opened again: both users hold the same
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
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/cuda/driver.h"

namespace refitd {

inline constexpr size_t kCudaIpcHandleBytes = 64;  // CUipcMemHandle, cudaIpcMemHandle_t

// A region of GPU memory. Immutable. Destroying it closes all its mappings.
class CudaRegion {
 public:
  virtual ~CudaRegion() = default;
  int device() const { return device_; }  // ordinal in this process
  char* data() const { return data_; }    // on that device; not to be dereferenced by the host
  int64_t bytes() const { return bytes_; }
  // The address at which kernels and copies of `device` reach data(); mapped at the first call.
  // UNAVAILABLE says why the device can't reach it.
  virtual absl::StatusOr<char*> On(int device) const = 0;

 protected:
  CudaRegion(int device, char* data, int64_t bytes) : device_(device), data_(data), bytes_(bytes) {}

 private:
  const int device_;
  char* const data_;
  const int64_t bytes_;
};

// Memory that this process made, for other processes to import: by ImportVmm with a duplicate of
// `descriptor` and region->bytes(). The memory is freed when the region, every descriptor and every
// import of it are gone.
struct CudaPool {
  std::shared_ptr<const CudaRegion> region;
  UniqueFd descriptor;
};

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
};

class CudaMemory {
 public:
  // Loads the driver; no context yet. UNAVAILABLE: no driver, no device, or CUDA is not compiled
  // in.
  static absl::StatusOr<std::shared_ptr<CudaMemory>> Create(
      const std::string& library = "libcuda.so.1", const CudaMemoryOptions& options = {});
  virtual ~CudaMemory() = default;

  virtual const std::vector<CudaDevice>& devices() const = 0;
  // The ordinal of the device. FAILED_PRECONDITION: no device has this UUID; the message names the
  // devices that exist.
  virtual absl::StatusOr<int> DeviceOf(std::string_view uuid) const = 0;

  // Opens the block that a legacy handle names; it must lie on `device`. INVALID_ARGUMENT: the
  // handle does not have kCudaIpcHandleBytes. FAILED_PRECONDITION: the driver refuses it (stale, of
  // this process, of another device, not of cudaMalloc).
  virtual absl::StatusOr<std::shared_ptr<const CudaRegion>> OpenLegacy(int device,
                                                                       std::string_view handle) = 0;
  // Maps `bytes` of memory of cuMemCreate, exported as a POSIX descriptor, for every device that
  // can reach `device`. FAILED_PRECONDITION: the driver refuses it, or it is not of `device`;
  // INVALID_ARGUMENT: `bytes` is not the allocation's size.
  virtual absl::StatusOr<std::shared_ptr<const CudaRegion>> ImportVmm(int device, UniqueFd fd,
                                                                      int64_t bytes) = 0;
  // Makes new memory by cuMemCreate on `device`: `bytes`, rounded up to the driver's granularity of
  // 2 MiB, all zeros, accessible to every device that can reach `device`. INVALID_ARGUMENT: `bytes`
  // is not between 1 and the device's memory; RESOURCE_EXHAUSTED: too little memory is free;
  // DEADLINE_EXCEEDED: a device hung, now or before.
  virtual absl::StatusOr<CudaPool> MakePool(int device, int64_t bytes) = 0;
  // Drops a pool that nothing uses any more, and calls the watchers, which let go of it at once or
  // soon. The pool's memory is freed when the last of them has let go.
  virtual void GiveBack(CudaPool pool) = 0;
  // GiveBack calls `let_go` on its own thread; never again after UnwatchPools returned.
  virtual void WatchPools(const void* watcher, std::function<void(const CudaRegion&)> let_go) = 0;
  virtual void UnwatchPools(const void* watcher) = 0;
  // INVALID_ARGUMENT, RESOURCE_EXHAUSTED: as MakePool.
  virtual absl::StatusOr<std::unique_ptr<CudaBuffer>> MakeBuffer(int device, int64_t bytes) = 0;
  // The open region that holds [data, data + bytes), by the addresses of the region's own device;
  // null if there is none. Fast, because it is called for every piece.
  virtual std::shared_ptr<const CudaRegion> Find(const char* data, int64_t bytes) const = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_MEMORY_H_
