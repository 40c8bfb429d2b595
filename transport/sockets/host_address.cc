#include "transport/sockets/host_address.h"

#include <arpa/inet.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

using absl::StatusCode;

absl::StatusOr<HostAddress> InterfaceAddress(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return ErrnoError(errno, "getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<std::string> names;
  std::optional<HostAddress> found;
  bool exists = false;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (std::find(names.begin(), names.end(), entry->ifa_name) == names.end()) {
      names.push_back(entry->ifa_name);
    }
    if (interface != entry->ifa_name) continue;
    exists = true;
    if (entry->ifa_addr == nullptr) continue;
    const auto host = FromSockaddr(entry->ifa_addr);
    if (!host.ok() || !WhyUnusable(*host).empty()) continue;
    if (!found.has_value() || (found->family == AF_INET6 && host->family == AF_INET)) {
      found = *host;
    }
  }
  if (found.has_value()) return *found;
  return Error(StatusCode::kNotFound, "network interface \"{}\" {}; there are: {}",
               Shorten(interface, 64), exists ? "has no address that peers can reach" : "not found",
               fmt::join(names, ", "));
}

absl::StatusOr<HostAddress> LiteralAddress(const std::string& text) {
  HostAddress host;
  if (inet_pton(AF_INET, text.c_str(), host.ip.data()) == 1) {
    host.family = AF_INET;
  } else if (inet_pton(AF_INET6, text.c_str(), host.ip.data()) == 1) {
    host.family = AF_INET6;
  } else {
    return Error(StatusCode::kInvalidArgument, "\"{}\" is not a numeric address",
                 Shorten(text, 64));
  }
  const std::string unusable = WhyUnusable(host);
  if (!unusable.empty()) {
    return Error(StatusCode::kInvalidArgument, "address {} is {}: peers can't reach it", text,
                 unusable);
  }
  return host;
}

absl::Status TryBind(const HostAddress& host) {
  const UniqueFd fd(socket(host.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_storage storage = host.Sockaddr(0, &length);
  if (fd.valid() && bind(fd.get(), reinterpret_cast<const sockaddr*>(&storage), length) == 0) {
    return absl::OkStatus();
  }
  return ErrnoError(errno, fmt::format("bind to {}", host.Text()));
}

}  // namespace

sockaddr_storage HostAddress::Sockaddr(uint16_t port, socklen_t* length) const {
  sockaddr_storage storage{};
  if (family == AF_INET) {
    auto* in = reinterpret_cast<sockaddr_in*>(&storage);
    in->sin_family = AF_INET;
    in->sin_port = htons(port);
    std::memcpy(&in->sin_addr, ip.data(), 4);
    *length = sizeof(*in);
  } else {
    auto* in = reinterpret_cast<sockaddr_in6*>(&storage);
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(port);
    std::memcpy(&in->sin6_addr, ip.data(), 16);
    *length = sizeof(*in);
  }
  return storage;
}

std::string HostAddress::Text() const {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, ip.data(), text, sizeof(text));
  return text;
}

absl::StatusOr<HostAddress> FromSockaddr(const sockaddr* address) {
  HostAddress host;
  host.family = address->sa_family;
  if (host.family == AF_INET) {
    std::memcpy(host.ip.data(), &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
  } else if (host.family == AF_INET6) {
    std::memcpy(host.ip.data(), &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, 16);
  } else {
    return Error(StatusCode::kInvalidArgument, "address family {}", host.family);
  }
  return host;
}

std::string WhyUnusable(const HostAddress& host) {
  if (host.family == AF_INET) {
    if (host.ip[0] == 0) return "unspecified";
    if (host.ip[0] >= 224) return "multicast, reserved or broadcast";
    return "";
  }
  in6_addr in{};
  std::memcpy(&in, host.ip.data(), 16);
  if (IN6_IS_ADDR_UNSPECIFIED(&in)) return "unspecified";
  if (IN6_IS_ADDR_MULTICAST(&in)) return "multicast";
  if (IN6_IS_ADDR_LINKLOCAL(&in)) return "link-local (it means another interface on each host)";
  return "";
}

absl::StatusOr<HostAddress> FindHostAddress(const std::string& interface,
                                            const std::string& literal) {
  REFITD_ASSIGN_OR_RETURN(const HostAddress host,
                          literal.empty() ? InterfaceAddress(interface) : LiteralAddress(literal));
  REFITD_RETURN_IF_ERROR(TryBind(host));
  return host;
}

}  // namespace refitd
