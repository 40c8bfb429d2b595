// Host memory shared between processes: sealed memfd regions.
//
// P6: a region maps only descriptors that are memfds sealed against shrinking, so that no peer can
// turn a copy into SIGBUS; the mapping lives as long as its last shared_ptr, even if the process
// that gave it has ended.
#ifndef REFITD_TRANSPORT_HOST_MEMORY_H_
#define REFITD_TRANSPORT_HOST_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

inline constexpr int64_t kMaxRegionBytes = int64_t{1} << 44;  // 16 TiB: more than a node has

// The machine's physical memory.
int64_t MachineMemoryBytes();

// A new memfd of `bytes`, sealed against shrinking and growing. Close-on-exec. Errors:
// RESOURCE_EXHAUSTED, INVALID_ARGUMENT.
absl::StatusOr<UniqueFd> CreateSealedMemfd(const std::string& name, int64_t bytes);

// INVALID_ARGUMENT: not a memfd, not sealed against shrinking (F_SEAL_SHRINK), of huge pages,
// smaller than `bytes`, or bytes not in 1..kMaxRegionBytes.
absl::Status CheckSealedMemfd(const UniqueFd& fd, int64_t bytes);

// A second descriptor of the same memfd that cannot be mapped writable.
absl::StatusOr<UniqueFd> ReadOnlyDuplicate(const UniqueFd& fd);

enum class Access : uint8_t { kReadOnly, kReadWrite };

// A mapping. Immutable after Map; unmaps when destroyed. Thread-safe.
class HostRegion {
 public:
  // Maps [0, bytes) of `fd`. Errors: of CheckSealedMemfd; PERMISSION_DENIED: not writable where
  // kReadWrite is asked; RESOURCE_EXHAUSTED: mmap failed. `populate`: page tables are filled now
  // rather than at the first copy (registered regions do).
  static absl::StatusOr<std::shared_ptr<HostRegion>> Map(const UniqueFd& fd, int64_t bytes,
                                                         Access access, bool populate);
  ~HostRegion();
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Access access() const { return access_; }

 private:
  HostRegion(char* data, int64_t bytes, Access access)
      : data_(data), bytes_(bytes), access_(access) {}
  char* const data_;
  const int64_t bytes_;
  const Access access_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_MEMORY_H_
