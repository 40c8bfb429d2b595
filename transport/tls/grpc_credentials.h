// gRPC credentials for mutual TLS, made of Certificates.
//
// Both ends present a certificate and verify the other's against their roots (P9). A server takes
// the certificates of the moment for each handshake, so that replaced files count from then on and
// open connections go on. A channel keeps the certificates that it was made with.
#ifndef REFITD_TRANSPORT_TLS_GRPC_CREDENTIALS_H_
#define REFITD_TRANSPORT_TLS_GRPC_CREDENTIALS_H_

#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>

#include <functional>
#include <memory>
#include <string>

#include "transport/tls/certificates.h"

namespace refitd {

// Lets this process's gRPC, as server and as client, agree to TLS 1.3 and nothing older. Changes
// the environment: to be called before any thread, and before gRPC's first use of TLS.
void RequireTls13();

using CertificateSource = std::function<std::shared_ptr<const Certificates>()>;

// `current` is called for each handshake, on gRPC's threads, and never returns null.
std::shared_ptr<grpc::ServerCredentials> TlsServer(CertificateSource current);

// `server`: a pattern of identities (CheckIdentityPattern) that the server's certificate must
// match; empty: the certificate must be for the host that is connected to (DNS name or IP address).
// `refused`, if set, hears of servers that do not match, on gRPC's threads.
std::shared_ptr<grpc::ChannelCredentials> TlsChannel(
    const Certificates& own, const std::string& server,
    std::function<void(const std::string& why)> refused = nullptr);

// The identity of the certificate with which a server's caller was let in. UNAUTHENTICATED: the
// certificate gives none, or there is no certificate.
absl::StatusOr<std::string> CallerIdentity(const grpc::ServerContextBase& context);

// The identity of the certificate that the server of a call showed. The call must have received
// something. Empty: the certificate gives no identity, or the connection is in the clear.
std::string ServerIdentity(const grpc::ClientContext& context);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_GRPC_CREDENTIALS_H_
