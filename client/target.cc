#include "client/target.h"

#include <sys/un.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/tls/grpc_credentials.h"
#include "transport/tls/probe.h"

namespace refitd::client {
namespace {

std::string Either(const std::string& given, const char* variable) {
  if (!given.empty()) return given;
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

absl::Status CheckSocketPath(const std::string& path) {
  constexpr size_t kLimit = sizeof(sockaddr_un::sun_path) - 1;
  if (!path.empty() && path.size() <= kLimit && path.find('\0') == std::string::npos) {
    return absl::OkStatus();
  }
  return InvalidField("socket", "socket: a path of {} bytes; a unix socket's has 1 to {}",
                      path.size(), kLimit);
}

absl::Status CheckAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  const bool port = colon != std::string::npos && colon > 0 && colon + 1 < address.size() &&
                    address.find_first_not_of("0123456789", colon + 1) == std::string::npos;
  if (port && address.size() <= kMaxCoordinatorBytes &&
      address.find_first_of(std::string_view("/ \t\n\0", 5)) == std::string::npos) {
    return absl::OkStatus();
  }
  return InvalidField("address", "address: \"{}\" is not HOST:PORT",
                      address.substr(0, kMaxCoordinatorBytes));
}

absl::StatusOr<Target> TcpTarget(const ConnectOptions& options, std::string address) {
  REFITD_RETURN_IF_ERROR(CheckAddress(address));
  Target target{.name = std::move(address), .tcp = true};
  target.tls = {.certificate = Either(options.tls.certificate, "REFITD_TLS_CERTIFICATE"),
                .key = Either(options.tls.key, "REFITD_TLS_KEY"),
                .roots = Either(options.tls.roots, "REFITD_TLS_ROOTS")};
  REFITD_RETURN_IF_ERROR(CheckTlsFiles(target.tls, "tls_certificate", "tls_key", "tls_roots"));
  target.server = Either(options.tls.server, "REFITD_TLS_SERVER");
  if (!target.server.empty()) {
    REFITD_RETURN_IF_ERROR(CheckIdentityPattern(target.server, "tls_server"));
  }
  if (target.tls.empty() && !options.insecure) {
    return InvalidField(
        "address",
        "address: {} is reached over TCP, which takes certificates (tls_certificate, "
        "tls_key, tls_roots), or insecure in so many words",
        target.name);
  }
  return target;
}

}  // namespace

// A target is a URI, so special characters of the path are escaped.
std::string UnixTarget(std::string_view path) {
  std::string target = "unix:";
  for (const char c : path) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("/._-~").find(c) != std::string_view::npos;
    target += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return target;
}

std::string Target::uri() const { return tcp ? "dns:///" + name : UnixTarget(name); }

absl::StatusOr<Target> TargetOf(const ConnectOptions& options) {
  if (!options.address.empty()) return TcpTarget(options, options.address);
  std::string path = Either(options.socket, "REFITD_SOCKET");
  if (path.empty()) path = kDefaultSocket;
  REFITD_RETURN_IF_ERROR(CheckSocketPath(path));
  return Target{.name = std::move(path)};
}

std::string DaemonName(const ConnectOptions& options) {
  const auto target = TargetOf(options);
  return target.ok() ? target->name : "";
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsOf(const Target& target) {
  if (target.tls.empty()) return grpc::InsecureChannelCredentials();
  const auto loaded = LoadCertificates(target.tls);
  if (!loaded.ok()) return Prefixed(loaded.status(), "tls");
  return TlsChannel(**loaded, target.server);
}

absl::Status WhyNoAnswer(const Target& target, TimePoint deadline) {
  if (!target.tcp) return absl::OkStatus();
  if (target.tls.empty()) return ProbeTcp(target.name, deadline);
  REFITD_ASSIGN_OR_RETURN(const auto own, LoadCertificates(target.tls));
  return ProbeTls(target.name, *own, target.server, deadline);
}

}  // namespace refitd::client
