// The process at the other end of a unix socket, as the kernel reports it (P9).
//
// Credentials are those of the process that called connect(); they stay the same if another process
// holds the socket later. The pidfd is taken when the connection is accepted, so that it can't name
// a later process with the same number (see PeerOf). Values are immutable and thread-safe to copy.
#ifndef REFITD_DAEMON_SOCKETS_PEER_CREDENTIALS_H_
#define REFITD_DAEMON_SOCKETS_PEER_CREDENTIALS_H_

#include <sys/types.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

struct PeerCredentials {
  pid_t pid = 0;  // 0: the process is in a pid namespace that this process can't see
  uid_t uid = static_cast<uid_t>(-1);
  gid_t gid = static_cast<gid_t>(-1);
  std::vector<gid_t> groups;  // supplementary; empty if the kernel does not report them
  // Null: pid is 0, the process has ended already, or the kernel has no pidfds.
  std::shared_ptr<const UniqueFd> pidfd;
};

// Reads the credentials of a connected unix socket. With `with_pidfd` also opens the peer's pidfd:
// by SO_PEERPIDFD if the kernel has it, else by pidfd_open() of the pid. The latter could name
// another process only if between connect() and this call the peer ended, its socket lived on in a
// child, and its pid was reused. UNAVAILABLE: not a connected unix socket.
absl::StatusOr<PeerCredentials> PeerOf(int socket, bool with_pidfd);

// Whether the process is known to have ended. False: it runs, or has no pidfd.
bool HasEnded(const PeerCredentials& peer);

// Calls pidfd_open(2). Invalid: errno says why. (Some releases of the C library declare it without
// C linkage.)
UniqueFd OpenPidfd(pid_t pid);

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_PEER_CREDENTIALS_H_
