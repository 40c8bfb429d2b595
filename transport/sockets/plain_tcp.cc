#include "transport/sockets/plain_tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>

#include "transport/base/status.h"

namespace refitd {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

}  // namespace

absl::StatusOr<UniqueFd> ListenOnLoopback(uint16_t* port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in local = Loopback(0);
  socklen_t length = sizeof(local);
  auto* const address = reinterpret_cast<sockaddr*>(&local);
  if (!fd.valid() || bind(fd.get(), address, length) != 0 || listen(fd.get(), 1) != 0 ||
      getsockname(fd.get(), address, &length) != 0) {
    return ErrnoError(errno, "listen on loopback");
  }
  *port = ntohs(local.sin_port);
  return fd;
}

absl::StatusOr<UniqueFd> AcceptOne(int listener) {
  UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd.valid()) return ErrnoError(errno, "accept on loopback");
  return fd;
}

absl::StatusOr<UniqueFd> DialLoopback(uint16_t port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in to = Loopback(port);
  const int on = 1;
  if (!fd.valid() || connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0 ||
      setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) {
    return ErrnoError(errno, fmt::format("connect to port {} of loopback", port));
  }
  return fd;
}

bool SendAll(int fd, const void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = send(fd, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

bool ReceiveAll(int fd, void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = recv(fd, static_cast<char*>(data) + done, bytes - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace refitd
