// The wire over host memory: TCP by the distribution's Gloo, used through its low-level API
// (device, context, pair, unbound buffer). docs/decisions.md has the reasons and what Gloo really
// does.
//
// Threads: one of Gloo's ("refitd-wire-io", does the socket work of all epochs), one an epoch
// ("refitd-wire-N"), a short-lived one while an epoch connects, and one ("refitd-wire") that joins
// the threads of closed epochs and answers calls on epochs that do not exist. All of them have
// every signal blocked: Gloo writes to sockets without MSG_NOSIGNAL.
//
// Gloo ends the process when bytes of a stranger on a data-plane connection claim to be a payload
// that no operation asked for. Listening sockets are open from Open until the peer connected, so
// the interface must be trusted (P9).
#ifndef REFITD_TRANSPORT_HOST_GLOO_WIRE_H_
#define REFITD_TRANSPORT_HOST_GLOO_WIRE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/wire.h"

namespace refitd {

struct GlooWireOptions {
  std::string interface = "lo";  // its first IPv4 address, else its first global IPv6 address
  std::string address;           // a numeric local address to bind instead
};

// NOT_FOUND: no such interface, or it has no address (names those that exist). INVALID_ARGUMENT:
// not an address, or one that peers can't reach. UNAVAILABLE: it can't be bound.
absl::StatusOr<std::unique_ptr<Wire>> MakeGlooWire(const GlooWireOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_GLOO_WIRE_H_
