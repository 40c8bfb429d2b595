// The wire over host memory: TCP sockets of our own, under TLS or in the clear. docs/decisions.md
// has the reasons.
//
// A peer may connect if it shows the token of an open communicator, which the control plane gave to
// the communicator's ranks alone, and under TLS also a certificate that the roots signed, with the
// identity that the rank's address names. Anybody else costs a bounded amount of memory and a line
// of the log (transport/sockets/listener.h).
//
// In the clear (no `certificates`), bytes are neither encrypted nor authenticated: the network of
// the interface must be trusted (P9).
//
// Threads: "refitd-wire-N", one a communicator, which runs its operations in order and does their
// socket work; "refitd-lane-I", under TLS one for each further stream of a communicator
// (transport/sockets/lane.h); "refitd-wire-io", which takes connections until they are a
// communicator's; "refitd-wire", which joins the threads of closed communicators and answers calls
// on communicators that do not exist.
#ifndef REFITD_TRANSPORT_SOCKETS_SOCKET_WIRE_H_
#define REFITD_TRANSPORT_SOCKETS_SOCKET_WIRE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/sockets/tls_context.h"
#include "transport/wire.h"

namespace refitd {

struct SocketWireOptions {
  std::string interface = "lo";     // see FindHostAddress
  std::string address{};            // a numeric local address to bind instead
  uint16_t port = 0;                // to listen on; 0: a free one
  int streams = 1;                  // connections between two ranks, 1 to kMaxWireStreams
  WireCertificates certificates{};  // null: in the clear
  std::string identities{};         // a pattern that peers must match (CheckIdentityPattern)
  // Lines about refused strangers, of whom there may be any number. Thread-safe; null: none.
  std::function<void(const std::string& line)> log{};
};

// Errors: those of FindHostAddress. INVALID_ARGUMENT: `streams` is out of its range. The wire
// listens while a communicator is open; Open fails if the port is in use.
absl::StatusOr<std::unique_ptr<Wire>> MakeSocketWire(SocketWireOptions options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_SOCKET_WIRE_H_
