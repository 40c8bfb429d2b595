// Memory with two sides: data() shows the one at an address that never changes, while the other
// waits to be written by other processes. Flip exchanges the two. Where it only changes mappings,
// that takes microseconds on the host and milliseconds on a GPU, whatever the size. A GPU without
// room for two sides has them in host memory, and its own memory at data() holds a copy of the one
// that it shows: then a flip copies the other side there.
//
// Used by one thread at a time.
#ifndef REFITD_TRANSPORT_TWO_SIDED_H_
#define REFITD_TRANSPORT_TWO_SIDED_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// Where the sides of a device's memory lie. kHost: in sealed memfds, which the device reads and
// writes. Host memory has its sides in memfds, whatever this says.
enum class SidesIn : uint8_t { kDevice, kHost };

// Descriptors of the sides of two-sided memory that another process made.
struct SharedSides {
  UniqueFd front;
  UniqueFd back;
  int64_t bytes = 0;  // of each
  SidesIn in = SidesIn::kDevice;
};

class TwoSided {
 public:
  virtual ~TwoSided() = default;
  TwoSided(const TwoSided&) = delete;
  TwoSided& operator=(const TwoSided&) = delete;

  // Of the side that is shown; on a device an address of that device.
  char* data() const { return data_; }
  // Of each side. On a device a multiple of the driver's granularity.
  int64_t bytes() const { return bytes_; }
  // A new descriptor of a side, by which other processes map it.
  virtual absl::StatusOr<UniqueFd> Share(bool back) const = 0;
  // Makes data() writable; has no effect if it is. Memory that was opened by descriptors of another
  // process must not be written before, nor be flipped. Only a copy of a side (SidesIn::kHost) is
  // writable all the time; what is written there reaches the sides by CopyToBack.
  virtual absl::Status AllowWrites() = 0;
  // Makes both sides equal to what data() shows, on which all work must have ended. Waits until the
  // bytes are there.
  virtual absl::Status CopyToBack() = 0;
  // Maps the other side at another address, to be read until UnmapBack; neither CopyToBack nor Flip
  // may come in between. Returns the address, on a device one of that device. FAILED_PRECONDITION:
  // it is mapped already.
  virtual absl::StatusOr<char*> MapBack() = 0;
  // All work on that mapping must have ended. Has no effect where there is none.
  virtual void UnmapBack() = 0;
  // data() shows the other side from now on. Nothing may read or write there meanwhile, and a
  // device's work must have ended. DATA_LOSS: it shows neither side any more; other errors: nothing
  // has changed.
  virtual absl::Status Flip() = 0;

 protected:
  TwoSided(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

 private:
  char* const data_;
  const int64_t bytes_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TWO_SIDED_H_
