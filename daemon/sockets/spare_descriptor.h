// A file descriptor kept in reserve for the moment when descriptors have run out: it is given up to
// accept one waiting connection, which can then be refused at once instead of being left waiting
// (P4), and taken back.
//
// Not thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_SPARE_DESCRIPTOR_H_
#define REFITD_DAEMON_SOCKETS_SPARE_DESCRIPTOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "transport/base/unique_fd.h"

namespace refitd {

class SpareDescriptor {
 public:
  // `path` names the listening socket in the log.
  explicit SpareDescriptor(std::string path);

  bool valid() const { return fd_.valid(); }
  // Takes the reserve back, if it was lost and a descriptor is free again.
  void Restore();

  enum class Outcome : uint8_t {
    kRefused,    // one connection was refused and closed
    kNoneWaits,  // no connection waits: accept4 reports EMFILE even then
    kFailed,     // no connection could be accepted with the reserve either
  };
  // Called after accept4 on `listen_fd`, which does not block, has failed for want of descriptors.
  // `refuse` may tell the client why. The log says how many were refused, at most once in 10 s.
  Outcome Shed(int listen_fd, const std::function<void(const UniqueFd&)>& refuse);

 private:
  void Count();

  const std::string path_;
  UniqueFd fd_;
  int64_t since_logged_ = 0;
  std::optional<std::chrono::steady_clock::time_point> logged_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_SPARE_DESCRIPTOR_H_
