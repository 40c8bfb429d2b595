// A stranger's connection to the host wire's listener, for fuzz targets that make millions of them.
#ifndef REFITD_TESTS_FUZZ_STRANGER_H_
#define REFITD_TESTS_FUZZ_STRANGER_H_

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
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

// Binds the socket to another address of the loopback network, with all its ports. False: the
// machine lets it not.
inline bool BindToNextAddress(const UniqueFd& fd) {
  static uint32_t next = INADDR_LOOPBACK;
  next = next < INADDR_LOOPBACK + 0xFFFF ? next + 1 : INADDR_LOOPBACK + 1;
  const int on = 1;
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(next);
  return setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on)) == 0 &&
         bind(fd.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0;
}

// A connection to that address. Reads from it end after 10 s. The machine remembers the ports of
// connections that ended for a minute: when none is left, other addresses of its own have more.
inline UniqueFd Dial(const SocketAddress& address) {
  socklen_t length = 0;
  const sockaddr_storage to = address.host.Sockaddr(address.port, &length);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  for (bool again = false;; again = true) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REFITD_CHECK(fd.valid());
    if (again && !BindToNextAddress(fd)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const int error = ConnectError(fd, to, length);
    if (error == 0) {
      const timeval limit{10, 0};
      REFITD_CHECK(setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
      return fd;
    }
    REFITD_CHECK(error == EADDRNOTAVAIL && std::chrono::steady_clock::now() < deadline);
  }
}

inline void Say(int fd, std::string_view bytes) {
  // The other end may have closed the connection at an earlier byte.
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

}  // namespace refitd

#endif  // REFITD_TESTS_FUZZ_STRANGER_H_
