// GPU memory of other processes, mapped into this one; and pools of this process's own, for others
// to map.
//
// A region's address (`data()`) is where its own device reaches it; it is what MemorySpan and
// BoundPiece carry. A kernel or copy that runs on another device may need another address: a legacy
// CUDA IPC handle is opened once for each device that works on it (CUDA: an opened handle serves
// the device that was current; enabling peers is not enough), a VMM mapping has one address for
// all. CudaRegion::On gives it.
//
// Legacy handles (cudaIpcGetMemHandle) name a whole block of cudaMalloc, whatever address they were
// taken of. A handle that is open already is not opened again: both hold the same region. P6: a
// region is closed when its last shared_ptr goes, which every copy holds until it has drained. P8:
// so a dead process's memory is given back when its last copy ended (measured: it lives until then,
// docs/decisions.md). P10: sizes come from the driver, never from who registered.
//
// Contexts: each device's primary one, retained when a region or a copy first needs the device
// (about 0.5 GiB of its memory), never released: they belong to the process.
//
// No CUDA type appears here; builds without CUDA too, and then Create says so. Thread-safe. Calls
// that open or close take up to milliseconds: never under the node's mutex, never on a gRPC thread.
// P4: they may hang behind a device that does; that is told (CudaMemoryOptions), and what such a
// call uses stays until it returns.
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

// Immutable. Destroying it closes every mapping of it.
class CudaRegion {
 public:
  virtual ~CudaRegion() = default;
  int device() const { return device_; }  // ordinal in this process
  char* data() const { return data_; }    // on that device; not to be dereferenced by the host
  int64_t bytes() const { return bytes_; }
  // Where kernels and copies of `device` reach data(); opened at the first call. UNAVAILABLE: the
  // device can't reach it, and why.
  virtual absl::StatusOr<char*> On(int device) const = 0;

 protected:
  CudaRegion(int device, char* data, int64_t bytes) : device_(device), data_(data), bytes_(bytes) {}

 private:
  const int device_;
  char* const data_;
  const int64_t bytes_;
};

// Memory that this process made, for others to import: ImportVmm with `descriptor` (a duplicate)
// and region->bytes(). The device has it back when the region, every descriptor and every import of
// it are gone.
struct CudaPool {
  std::shared_ptr<const CudaRegion> region;
  UniqueFd descriptor;
};

// Memory of one device for this process alone. One thread at a time; freed when destroyed.
class CudaBuffer {
 public:
  virtual ~CudaBuffer() = default;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Copies `bytes` from `from`, which the device reaches, to data() + offset; done when it returns,
  // whatever other streams do. INVALID_ARGUMENT: outside of the buffer.
  virtual absl::Status Store(int64_t offset, const char* from, int64_t bytes) = 0;

 protected:
  CudaBuffer(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

 private:
  char* const data_;
  const int64_t bytes_;
};

struct CudaMemoryOptions {
  // A device that has not zeroed a pool after so long hangs, as does a call of the driver that has
  // not opened, made or closed something: the GPUs are lost.
  std::chrono::milliseconds limit{60'000};
  // The GPUs are lost: the process has to end. On any thread.
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
  // The ordinal. FAILED_PRECONDITION: no device has this UUID; the message has those that there
  // are.
  virtual absl::StatusOr<int> DeviceOf(std::string_view uuid) const = 0;

  // The block that a legacy handle names, which lies on `device`. INVALID_ARGUMENT: not
  // kCudaIpcHandleBytes. FAILED_PRECONDITION: the driver refuses it (stale, of this process, of
  // another device, not of cudaMalloc).
  virtual absl::StatusOr<std::shared_ptr<const CudaRegion>> OpenLegacy(int device,
                                                                       std::string_view handle) = 0;
  // Memory of cuMemCreate, exported as a POSIX descriptor, `bytes` of it, accessible to every
  // device that can reach `device`. FAILED_PRECONDITION: the driver refuses it, or it is not of
  // `device`; INVALID_ARGUMENT: `bytes` is not what the allocation has.
  virtual absl::StatusOr<std::shared_ptr<const CudaRegion>> ImportVmm(int device, UniqueFd fd,
                                                                      int64_t bytes) = 0;
  // New memory of cuMemCreate on `device`, at least `bytes` (the driver's granularity, 2 MiB, is
  // what it is a multiple of), all zeros, accessible to every device that can reach `device`.
  // INVALID_ARGUMENT: `bytes` is not 1 to the device's memory; RESOURCE_EXHAUSTED: not so much is
  // free; DEADLINE_EXCEEDED: a device hung, now or before.
  virtual absl::StatusOr<CudaPool> MakePool(int device, int64_t bytes) = 0;
  // Drops a pool that nothing uses any more, and has all who watch let go of it: at once or soon.
  // What they keep of it until then keeps its memory.
  virtual void GiveBack(CudaPool pool) = 0;
  // `let_go` is called by GiveBack, on its thread; not any more once UnwatchPools returned.
  virtual void WatchPools(const void* watcher, std::function<void(const CudaRegion&)> let_go) = 0;
  virtual void UnwatchPools(const void* watcher) = 0;
  // INVALID_ARGUMENT, RESOURCE_EXHAUSTED: as MakePool.
  virtual absl::StatusOr<std::unique_ptr<CudaBuffer>> MakeBuffer(int device, int64_t bytes) = 0;
  // The region that holds [data, data + bytes), as its own device addresses it; null: none that is
  // open. Fast: called for every piece.
  virtual std::shared_ptr<const CudaRegion> Find(const char* data, int64_t bytes) const = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_MEMORY_H_
