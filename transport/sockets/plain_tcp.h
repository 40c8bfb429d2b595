// Plain TCP over loopback to compare with in benchmarks: bytes from one process's memory into
// another's over one connection, with large sends and receives and nothing else. No product code
// uses it. The functions block.
#ifndef REFITD_TRANSPORT_SOCKETS_PLAIN_TCP_H_
#define REFITD_TRANSPORT_SOCKETS_PLAIN_TCP_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// Listens on a free port of loopback, which goes to `port`. The listening end accepts one
// connection by AcceptOne.
absl::StatusOr<UniqueFd> ListenOnLoopback(uint16_t* port);
absl::StatusOr<UniqueFd> AcceptOne(int listener);
absl::StatusOr<UniqueFd> DialLoopback(uint16_t port);

// Send all `bytes` bytes, and receive as many. Both work on any stream socket. False: the other end
// is gone.
bool SendAll(int fd, const void* data, size_t bytes);
bool ReceiveAll(int fd, void* data, size_t bytes);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_PLAIN_TCP_H_
