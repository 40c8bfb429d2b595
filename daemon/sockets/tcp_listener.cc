#include "daemon/sockets/tcp_listener.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;

constexpr int kBacklog = 1024;  // connections that the kernel may queue

// Probes a silent peer. Otherwise the connection of a peer that left while the network was down, or
// whose reset was lost, would stay for hours (P8).
constexpr int kProbeAfterSeconds = 10;
constexpr int kProbeEverySeconds = 5;
constexpr int kProbes = 3;

void Set(const UniqueFd& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof(value));
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

// The port, in network byte order.
in_port_t& PortOf(sockaddr_storage* address) {
  return address->ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(address)->sin_port;
}

absl::StatusOr<UniqueFd> Listen(const sockaddr_storage& where, socklen_t bytes) {
  UniqueFd fd(socket(where.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid() && errno == EAFNOSUPPORT) return absl::UnavailableError("no such address family");
  if (!fd.valid()) return ErrnoError(errno, "socket");
  // Connections of a process that ended just now must not keep a daemon from its port.
  Set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  // Accepted connections inherit these.
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfterSeconds);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeEverySeconds);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  if (where.ss_family == AF_INET6) Set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&where), bytes) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    if (errno == EADDRINUSE) return absl::AlreadyExistsError("in use");
    if (errno == EADDRNOTAVAIL) return absl::UnavailableError("no such address here");
    return ErrnoError(errno, "bind");
  }
  return fd;
}

absl::StatusOr<in_port_t> BoundPort(const UniqueFd& fd) {
  sockaddr_storage bound{};
  socklen_t bytes = sizeof(bound);
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) != 0) {
    return ErrnoError(errno, "getsockname");
  }
  return PortOf(&bound);
}

}  // namespace

absl::StatusOr<std::vector<TcpListener>> ListenTcp(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return Error(StatusCode::kInvalidArgument, "\"{}\" is not HOST:PORT", address);
  }
  const std::string named = address.substr(0, colon);
  std::string host = named;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &list);
      error != 0) {
    return Error(StatusCode::kUnavailable, "{}: {}", address, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, FreeAddresses> addresses(list);
  std::vector<TcpListener> listeners;
  absl::Status missing = absl::UnavailableError("no address");
  in_port_t port = 0;
  for (const addrinfo* next = list; next != nullptr; next = next->ai_next) {
    sockaddr_storage where{};
    __builtin_memcpy(&where, next->ai_addr, next->ai_addrlen);
    if (port != 0) PortOf(&where) = port;
    absl::StatusOr<UniqueFd> fd = Listen(where, next->ai_addrlen);
    // A family that this machine lacks is no error if another family is there.
    if (absl::IsUnavailable(fd.status())) {
      missing = fd.status();
      continue;
    }
    if (!fd.ok()) return Prefixed(fd.status(), "{}", address);
    REFITD_ASSIGN_OR_RETURN(port, BoundPort(*fd));
    listeners.push_back({*std::move(fd), fmt::format("{}:{}", named, ntohs(port))});
  }
  if (listeners.empty()) return Prefixed(missing, "{}", address);
  return listeners;
}

}  // namespace refitd
