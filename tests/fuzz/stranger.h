// A stranger's connection to the host wire's listener, for fuzz targets that make millions of them.
#ifndef REFITD_TESTS_FUZZ_STRANGER_H_
#define REFITD_TESTS_FUZZ_STRANGER_H_

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <chrono>
#include <string_view>
#include <thread>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"

namespace refitd {

// The error of one try to connect; 0: it is connected. libFuzzer's alarm may interrupt the call,
// which then goes on by itself.
inline int ConnectError(const UniqueFd& fd, const sockaddr_storage& to, socklen_t length) {
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) == 0) return 0;
  if (errno != EINTR) return errno;
  pollfd ready{fd.get(), POLLOUT, 0};
  while (poll(&ready, 1, -1) < 0) REFITD_CHECK(errno == EINTR);
  int error = 0;
  socklen_t size = sizeof(error);
  REFITD_CHECK(getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0);
  return error;
}

// A connection to that address. Reads from it end after 10 s. The machine may have no port left for
// a moment, since it remembers the ports of connections that ended for a minute.
inline UniqueFd Dial(const SocketAddress& address) {
  socklen_t length = 0;
  const sockaddr_storage to = address.host.Sockaddr(address.port, &length);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  for (;;) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REFITD_CHECK(fd.valid());
    const int error = ConnectError(fd, to, length);
    if (error == 0) {
      const timeval limit{10, 0};
      REFITD_CHECK(setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
      return fd;
    }
    REFITD_CHECK(error == EADDRNOTAVAIL && std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

inline void Say(int fd, std::string_view bytes) {
  // The other end may have closed the connection at an earlier byte.
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

}  // namespace refitd

#endif  // REFITD_TESTS_FUZZ_STRANGER_H_
