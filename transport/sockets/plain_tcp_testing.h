// Plain TCP to compare with in benchmarks: bytes from one process's memory into another's over one
// connection, with large sends and receives and nothing else. No product code uses it. The
// functions block.
#ifndef REFITD_TRANSPORT_SOCKETS_PLAIN_TCP_TESTING_H_
#define REFITD_TRANSPORT_SOCKETS_PLAIN_TCP_TESTING_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// Listens on a free port, which goes to `port`, of loopback or of an IPv4 address. The listening
// end accepts one connection by AcceptOne.
absl::StatusOr<UniqueFd> ListenOnLoopback(uint16_t* port);
absl::StatusOr<UniqueFd> ListenOn(const std::string& address, uint16_t* port);
absl::StatusOr<UniqueFd> AcceptOne(int listener);
absl::StatusOr<UniqueFd> DialLoopback(uint16_t port);
absl::StatusOr<UniqueFd> DialPlain(const std::string& address, uint16_t port);

// Send all `bytes` bytes, and receive as many. Both work on any stream socket. False: the other end
// is gone.
bool SendAll(int fd, const void* data, size_t bytes);
bool ReceiveAll(int fd, void* data, size_t bytes);

// Sends by MSG_ZEROCOPY, and returns when the kernel uses the memory no more. `*copied` becomes
// true if the kernel says that it copied nevertheless.
bool SendAllZeroCopy(int fd, const void* data, size_t bytes, bool* copied);
// Sends through a pipe by vmsplice and splice. The kernel may use the memory until the other end
// has received all.
bool SendAllSpliced(int fd, const void* data, size_t bytes);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_PLAIN_TCP_TESTING_H_
