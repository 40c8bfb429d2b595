// Why a TLS connection does not come about, in words.
//
// gRPC tells that a handshake failed, but not always why: in TLS 1.3 a server refuses a client's
// certificate after the client has finished the handshake, and gRPC's server just closes the
// connection then. A probe makes a connection of its own and looks at what happens; before an end
// after the handshake counts as a refusal, a second connection must end the same way.
#ifndef REFITD_TRANSPORT_TLS_PROBE_H_
#define REFITD_TRANSPORT_TLS_PROBE_H_

#include <string>

#include "absl/status/status.h"
#include "transport/base/ids.h"
#include "transport/tls/certificates.h"

namespace refitd {

// Connects to `address` ("HOST:PORT") with `own`, verifies the server as TlsChannel does, and waits
// for a refusal for a moment. `server_pattern`: what the server's identity must match; empty: the
// server's certificate must be for the host of the address. OK: the server took the connection, or
// did not refuse it in time.
// UNAVAILABLE: it can't be reached. UNAUTHENTICATED: this side does not take the server's
// certificate, or the server does not take this side's. Blocks until `deadline` at most (P4), but
// for the time that resolving a host's name takes.
absl::Status ProbeTls(const std::string& address, const Certificates& own,
                      const std::string& server_pattern, TimePoint deadline);

// Connects without TLS. OK: the connection stands. UNAVAILABLE: it does not.
absl::Status ProbeTcp(const std::string& address, TimePoint deadline);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_PROBE_H_
