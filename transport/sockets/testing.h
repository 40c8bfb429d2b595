// Helpers of this folder's tests: strangers and peers that speak to a wire by hand.
#ifndef REFITD_TRANSPORT_SOCKETS_TESTING_H_
#define REFITD_TRANSPORT_SOCKETS_TESTING_H_

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <catch2/catch.hpp>
#include <string>
#include <string_view>

#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"

namespace refitd {

inline SocketAddress Decode(const std::string& encoded, CommunicatorId communicator, int rank,
                            int size) {
  const auto address = DecodeSocketAddress(encoded, communicator, rank, size);
  REQUIRE(address.status() == absl::OkStatus());
  return *address;
}

// A blocking connection whose reads end after a minute.
inline UniqueFd DialByHand(const SocketAddress& address) {
  UniqueFd fd(socket(address.host.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_storage to = address.host.Sockaddr(address.port, &length);
  REQUIRE(connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) == 0);
  const timeval limit{60, 0};
  REQUIRE(setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
  return fd;
}

inline bool Say(int fd, std::string_view bytes) {
  return send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// Up to `bytes` bytes; fewer if the connection ended before.
inline std::string Listen(int fd, size_t bytes) {
  std::string heard(bytes, '\0');
  size_t have = 0;
  while (have < bytes) {
    const ssize_t n = recv(fd, heard.data() + have, bytes - have, 0);
    if (n <= 0) break;
    have += static_cast<size_t>(n);
  }
  heard.resize(have);
  return heard;
}

template <size_t N>
std::string_view View(const std::array<char, N>& bytes) {
  return {bytes.data(), bytes.size()};
}

// The hello by which rank `from` greets the rank with this address.
inline Greeting HelloTo(const SocketAddress& address, int from) {
  return {GreetingKind::kHello, address.communicator, static_cast<uint32_t>(from), address.rank, 0,
          address.token};
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_TESTING_H_
