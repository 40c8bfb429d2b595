#include "daemon/sockets/spare_descriptor.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>

#include "daemon/process/log.h"

namespace refitd {
namespace {

constexpr std::chrono::seconds kLogInterval{10};

UniqueFd OpenReserve() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

SpareDescriptor::SpareDescriptor(std::string path) : path_(std::move(path)), fd_(OpenReserve()) {}

void SpareDescriptor::Restore() {
  if (!fd_.valid()) fd_ = OpenReserve();
}

SpareDescriptor::Outcome SpareDescriptor::Shed(int listen_fd,
                                               const std::function<void(const UniqueFd&)>& refuse) {
  fd_.Reset();
  UniqueFd connection(accept4(listen_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const int error = errno;
  if (!connection.valid()) {
    Restore();
    return error == EAGAIN ? Outcome::kNoneWaits : Outcome::kFailed;
  }
  refuse(connection);
  connection.Reset();
  Restore();
  Count();
  return Outcome::kRefused;
}

void SpareDescriptor::Count() {
  ++since_logged_;
  const auto now = std::chrono::steady_clock::now();
  if (logged_ && now - *logged_ < kLogInterval) return;
  LogError("out of file descriptors: refused {} connections to {} (see LimitNOFILE)", since_logged_,
           path_);
  logged_ = now;
  since_logged_ = 0;
}

}  // namespace refitd
