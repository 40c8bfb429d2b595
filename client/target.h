// The daemon of a member or a tool, and the way to it: over its unix socket, or over TCP.
//
// P9: over TCP with mutual TLS, or in the clear only if the caller says `insecure`. Certificates
// are read when a channel is made, so that every lease begins with those of the moment.
#ifndef REFITD_CLIENT_TARGET_H_
#define REFITD_CLIENT_TARGET_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/types.h"
#include "transport/base/ids.h"
#include "transport/tls/certificates.h"

namespace refitd::client {

struct Target {
  std::string name;  // path of the socket, or "HOST:PORT"; for messages
  bool tcp = false;
  TlsFiles tls{};        // empty: no TLS
  std::string server{};  // the identity that the daemon must have (TlsOptions::server)

  // The target's URI for gRPC.
  std::string uri() const;
};

// Returns the target that the options and the environment name: `address`, else `socket`, else
// REFITD_SOCKET, else kDefaultSocket; certificates from the options, else from
// REFITD_TLS_CERTIFICATE, REFITD_TLS_KEY, REFITD_TLS_ROOTS and REFITD_TLS_SERVER. INVALID_ARGUMENT
// names field and value.
absl::StatusOr<Target> TargetOf(const ConnectOptions& options);

// The name of TargetOf, for messages; empty if the options name none.
std::string DaemonName(const ConnectOptions& options);

// Makes the target's credentials. The errors are those of LoadCertificates, with `tls` before the
// message.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsOf(const Target& target);

// Finds out by a connection of its own why a daemon over TCP does not answer. OK: the daemon takes
// connections. UNAUTHENTICATED: one side refuses the other's certificate. UNAVAILABLE: the daemon
// can't be reached.
absl::Status WhyNoAnswer(const Target& target, TimePoint deadline);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_TARGET_H_
