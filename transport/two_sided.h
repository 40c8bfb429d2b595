// Memory of which one side is mapped at an address that never changes, while the other side waits
// to be written by other processes. Flip exchanges the two, whatever the size, in microseconds on
// the host and in milliseconds on a GPU: only mappings change.
//
// Used by one thread at a time.
#ifndef REFITD_TRANSPORT_TWO_SIDED_H_
#define REFITD_TRANSPORT_TWO_SIDED_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// Descriptors of the sides of two-sided memory that another process made.
struct SharedSides {
  UniqueFd front;
  UniqueFd back;
  int64_t bytes = 0;  // of each
};

class TwoSided {
 public:
  virtual ~TwoSided() = default;
  TwoSided(const TwoSided&) = delete;
  TwoSided& operator=(const TwoSided&) = delete;

  // Of the side that is mapped; on a device an address of that device.
  char* data() const { return data_; }
  // Of each side. On a device a multiple of the driver's granularity.
  int64_t bytes() const { return bytes_; }
  // A new descriptor of a side, by which other processes map it.
  virtual absl::StatusOr<UniqueFd> Share(bool back) const = 0;
  // Makes data() writable; has no effect if it is. Memory that was opened by descriptors of another
  // process is read-only until then, and must not be flipped before.
  virtual absl::Status AllowWrites() = 0;
  // Makes the other side equal to the mapped one, on which all work must have ended. Waits until
  // the bytes are there.
  virtual absl::Status CopyToBack() = 0;
  // Maps the other side at another address, to be read until UnmapBack; neither CopyToBack nor Flip
  // may come in between. Returns the address, on a device one of that device. FAILED_PRECONDITION:
  // it is mapped already.
  virtual absl::StatusOr<char*> MapBack() = 0;
  // All work on that mapping must have ended. Has no effect where there is none.
  virtual void UnmapBack() = 0;
  // The other side is mapped at data() from now on. Nothing may read or write there meanwhile, and
  // a device's work must have ended. DATA_LOSS: neither side is mapped any more; other errors:
  // nothing has changed.
  virtual absl::Status Flip() = 0;

 protected:
  TwoSided(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

 private:
  char* const data_;
  const int64_t bytes_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TWO_SIDED_H_
