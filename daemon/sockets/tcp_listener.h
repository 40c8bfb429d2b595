// Listening TCP sockets for "HOST:PORT" as LoadConfig has checked it.
//
// The daemon accepts connections itself (accept_loop.h): gRPC 1.51 never accepts on a listener
// again once accept() has failed for lack of descriptors. Thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_TCP_LISTENER_H_
#define REFITD_DAEMON_SOCKETS_TCP_LISTENER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

struct TcpListener {
  UniqueFd socket;      // listens, non-blocking
  std::string address;  // the "HOST:PORT" asked for, with the port in use
};

// One listener for each address that HOST means, all on the same port: "localhost" may mean two.
// Port 0 takes a free port. Two daemons never share a port. ALREADY_EXISTS: the port is in use.
// UNAVAILABLE: this machine lacks the address. RESOURCE_EXHAUSTED: out of descriptors.
// INVALID_ARGUMENT: not HOST:PORT.
absl::StatusOr<std::vector<TcpListener>> ListenTcp(const std::string& address);

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_TCP_LISTENER_H_
