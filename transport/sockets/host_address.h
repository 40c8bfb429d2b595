// The IP address at which a wire over host memory listens, and which its peers dial. Pure but for
// FindHostAddress.
#ifndef REFITD_TRANSPORT_SOCKETS_HOST_ADDRESS_H_
#define REFITD_TRANSPORT_SOCKETS_HOST_ADDRESS_H_

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace refitd {

struct HostAddress {
  sa_family_t family = AF_UNSPEC;
  std::array<uint8_t, 16> ip{};  // of IPv4 only the first four bytes

  bool operator==(const HostAddress&) const = default;

  sockaddr_storage Sockaddr(uint16_t port, socklen_t* length) const;
  std::string Text() const;
};

// INVALID_ARGUMENT: neither IPv4 nor IPv6.
absl::StatusOr<HostAddress> FromSockaddr(const sockaddr* address);

// The reason why no peer could reach `host`, or "".
std::string WhyUnusable(const HostAddress& host);

// The numeric address `literal`; if that is empty, the first IPv4 address of `interface`, else its
// first global IPv6 address. NOT_FOUND: no such interface, or it has no address (names those that
// exist). INVALID_ARGUMENT: not an address, or one that peers can't reach. UNAVAILABLE: it can't be
// bound.
absl::StatusOr<HostAddress> FindHostAddress(const std::string& interface,
                                            const std::string& literal);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_HOST_ADDRESS_H_
