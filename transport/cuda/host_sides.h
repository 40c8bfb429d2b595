// Host memory that devices read and write: sealed memfds that are mapped and pinned by the driver;
// and a device's two-sided memory whose sides lie in such memfds. Private to transport/cuda/.
#ifndef REFITD_TRANSPORT_CUDA_HOST_SIDES_H_
#define REFITD_TRANSPORT_CUDA_HOST_SIDES_H_

#if defined(REFITD_CUDA)
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/cuda/watched_driver.h"
#include "transport/host/memory.h"
#include "transport/two_sided.h"

namespace refitd {

// A memfd, mapped and pinned. Immutable; its destructor undoes both. Thread-safe.
class PinnedFile {
 public:
  // Maps [0, bytes) of `fd`, whose pages are made if there are none, and pins it for all devices.
  // `device`: by whose context the driver is called. Errors as of HostRegion::Map;
  // FAILED_PRECONDITION, RESOURCE_EXHAUSTED: the driver refuses it.
  static absl::StatusOr<std::unique_ptr<const PinnedFile>> Map(const WatchedDriver& driver,
                                                               int device, const UniqueFd& fd,
                                                               int64_t bytes);
  ~PinnedFile();
  PinnedFile(const PinnedFile&) = delete;
  PinnedFile& operator=(const PinnedFile&) = delete;

  char* data() const { return region_->data(); }  // for the host
  int64_t bytes() const { return region_->bytes(); }
  // The address for kernels and copies of `on`.
  absl::StatusOr<char*> On(int on) const;

 private:
  PinnedFile(WatchedDriver driver, int device, std::shared_ptr<const HostRegion> region)
      : driver_(std::move(driver)), device_(device), region_(std::move(region)) {}

  const WatchedDriver driver_;
  const int device_;
  const std::shared_ptr<const HostRegion> region_;
};

// Makes two-sided memory on `device` whose sides are memfds (SidesIn::kHost), of `bytes` rounded up
// to the driver's granularity. Its bytes are not set. Errors as of PinnedFile::Map and Allocate.
absl::StatusOr<std::unique_ptr<TwoSided>> MakeHostSides(const WatchedDriver& driver, int device,
                                                        int64_t bytes);
// Opens such memory of another process; what its front holds is copied to the device.
absl::StatusOr<std::unique_ptr<TwoSided>> OpenHostSides(const WatchedDriver& driver, int device,
                                                        SharedSides sides);

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_HOST_SIDES_H_
