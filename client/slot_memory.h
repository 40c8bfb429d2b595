// The staging pool as a member sees it: shared host memory, or memory of the member's GPU, imported
// through the driver, which is loaded at run time. Also memory of the same kind in which tensors
// larger than a slot are joined.
//
// A mapping lives as long as its last shared_ptr, so code that holds views on it must hold one
// (P6). Device memory is freed when the daemon and every member have let go of it (P8).
//
// Builds without CUDA too: then, and without a driver, mapping a GPU's pool is an error that says
// so. Thread-safe.
#ifndef REFITD_CLIENT_SLOT_MEMORY_H_
#define REFITD_CLIENT_SLOT_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/types.h"
#include "transport/base/unique_fd.h"
#include "transport/host/memory.h"
#include "transport/two_sided.h"

namespace refitd::client {

// Memory in which the parts of a tensor are joined. Used by one thread at a time.
class JoinBuffer {
 public:
  virtual ~JoinBuffer() = default;
  virtual char* data() const = 0;
  // Copies `bytes` to `offset`; [offset, offset + bytes) must lie inside. `from` is no longer read
  // when this returns.
  virtual absl::Status Store(int64_t offset, const char* from, int64_t bytes) = 0;
};

// Makes a buffer in host memory. RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<JoinBuffer>> NewHostBuffer(int64_t bytes);

// The memory of a mapped staging pool. Immutable.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;
  char* data() const { return data_; }  // on a GPU not to be dereferenced by the host
  int64_t bytes() const { return bytes_; }
  // Makes a JoinBuffer on the same device. RESOURCE_EXHAUSTED: no memory.
  virtual absl::StatusOr<std::unique_ptr<JoinBuffer>> NewBuffer(int64_t bytes) const = 0;

 protected:
  SlotMemory(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

 private:
  char* const data_;
  const int64_t bytes_;
};

// Whether ConnectOptions::device is not the host.
bool OnDevice(const std::string& device);

// Maps the pool of a sealed memfd. The errors are those of HostRegion::Map.
absl::StatusOr<std::shared_ptr<const SlotMemory>> MapHostSlots(const UniqueFd& fd, int64_t bytes,
                                                               Access access);
// Maps the pool of an exported allocation on the GPU `device`. UNAVAILABLE: no driver at `library`,
// no GPU, or built without CUDA; FAILED_PRECONDITION: the GPU is not among those that this process
// sees, or the driver refuses the descriptor.
absl::StatusOr<std::shared_ptr<const SlotMemory>> MapDeviceSlots(UniqueFd fd, int64_t bytes,
                                                                 const std::string& device,
                                                                 const std::string& library);

// Makes two-sided memory on the device of the options. Errors as of MapDeviceSlots;
// INVALID_ARGUMENT, RESOURCE_EXHAUSTED: `bytes`.
absl::StatusOr<std::unique_ptr<TwoSided>> MakeTwoSided(int64_t bytes, const ConnectOptions& options,
                                                       SidesIn in);
// Opens such memory of another process. Errors as of MapDeviceSlots; INVALID_ARGUMENT: the
// descriptors are of other memory.
absl::StatusOr<std::unique_ptr<TwoSided>> OpenTwoSided(SharedSides sides,
                                                       const ConnectOptions& options);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_SLOT_MEMORY_H_
