// Memory of devices that the host cannot read, as the daemon sees it: it opens what members share,
// and makes staging slots, without knowing the kind of device. `transport/cuda/memory.h` implements
// it.
//
// A region's address (`data()`) is where its own device reaches it; it is what MemorySpan and
// BoundPiece carry. P6: a region is closed when its last shared_ptr is destroyed, and every copy
// holds one until it has ended.
//
// Thread-safe. Calls that open, make or close memory take up to milliseconds, so they must not run
// under the daemon's mutex or on a gRPC thread.
#ifndef REFITD_TRANSPORT_DEVICE_MEMORY_H_
#define REFITD_TRANSPORT_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// The size of the handle by which a process names a block of its device memory.
inline constexpr size_t kBlockHandleBytes = 64;

// A region of device memory. Immutable. Destroying it closes all its mappings.
class DeviceRegion {
 public:
  virtual ~DeviceRegion() = default;
  DeviceRegion(const DeviceRegion&) = delete;
  DeviceRegion& operator=(const DeviceRegion&) = delete;

  int device() const { return device_; }  // ordinal in this process
  char* data() const { return data_; }    // on that device; not to be dereferenced by the host
  int64_t bytes() const { return bytes_; }
  // The address at which kernels and copies of `device` reach data(); mapped at the first call.
  // UNAVAILABLE says why the device can't reach it.
  virtual absl::StatusOr<char*> On(int device) const = 0;

 protected:
  DeviceRegion(int device, char* data, int64_t bytes)
      : device_(device), data_(data), bytes_(bytes) {}

 private:
  const int device_;
  char* const data_;
  const int64_t bytes_;
};

// Memory that this process made, for other processes to import: by ImportDescriptor with a
// duplicate of `descriptor` and region->bytes(). The memory is freed when the region, every
// descriptor and every import of it are gone.
struct DevicePool {
  std::shared_ptr<const DeviceRegion> region;
  UniqueFd descriptor;
};

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // The ordinal of the device that members call `name`. FAILED_PRECONDITION: there is none.
  virtual absl::StatusOr<int> DeviceOf(std::string_view name) const = 0;
  // The name of the device; empty: there is none of this ordinal.
  virtual std::string NameOf(int device) const = 0;

  // Opens the block that another process's handle names; it must lie on `device`. INVALID_ARGUMENT:
  // the handle does not have kBlockHandleBytes. FAILED_PRECONDITION: the driver refuses it (stale,
  // of this process, of another device, of another allocator).
  virtual absl::StatusOr<std::shared_ptr<const DeviceRegion>> OpenBlock(
      int device, std::string_view handle) = 0;
  // Maps `bytes` of memory that another process exported as a descriptor, for every device that can
  // reach `device`. FAILED_PRECONDITION: the driver refuses it, or it is not of `device`;
  // INVALID_ARGUMENT: `bytes` is not the allocation's size.
  virtual absl::StatusOr<std::shared_ptr<const DeviceRegion>> ImportDescriptor(int device,
                                                                               UniqueFd fd,
                                                                               int64_t bytes) = 0;
  // Maps `bytes` of another process's sealed memfd as host memory that all devices read and write,
  // and that counts as memory of `device`. Makes pages where there are none. Errors as of
  // HostRegion::Map; FAILED_PRECONDITION, RESOURCE_EXHAUSTED: the driver refuses it.
  virtual absl::StatusOr<std::shared_ptr<const DeviceRegion>> PinHost(int device,
                                                                      const UniqueFd& fd,
                                                                      int64_t bytes) = 0;
  // Makes new memory on `device`: `bytes`, rounded up to the driver's granularity, all zeros,
  // accessible to every device that can reach `device`. INVALID_ARGUMENT: `bytes` is not between 1
  // and the device's memory; RESOURCE_EXHAUSTED: too little memory is free; DEADLINE_EXCEEDED: a
  // device hung, now or before.
  virtual absl::StatusOr<DevicePool> MakePool(int device, int64_t bytes) = 0;
  // Drops a pool that nothing uses any more. Copies that still run may hold its memory a little
  // longer.
  virtual void GiveBack(DevicePool pool) = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DEVICE_MEMORY_H_
