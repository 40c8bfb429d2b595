#include "daemon/sockets/peer_credentials.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>

#include "transport/base/status.h"

#ifndef SO_PEERPIDFD  // since Linux 6.5; the distribution's headers are older
#define SO_PEERPIDFD 77
#endif

namespace refitd {
namespace {

// The kernel's own bound on supplementary groups.
constexpr size_t kMaxGroups = 65'536;

std::vector<gid_t> PeerGroups(int socket) {
  std::vector<gid_t> groups(32);
  for (;;) {
    socklen_t bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
      groups.resize(bytes / sizeof(gid_t));
      return groups;
    }
    // ERANGE: `bytes` now says how much room the groups take.
    if (errno != ERANGE || bytes / sizeof(gid_t) > kMaxGroups) return {};
    groups.resize(bytes / sizeof(gid_t));
  }
}

bool HungUp(int socket) {
  pollfd entry{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return poll(&entry, 1, 0) == 1;
}

// Null: the process has ended, or the kernel has no pidfds.
absl::StatusOr<std::shared_ptr<const UniqueFd>> PidfdOf(int socket, pid_t pid) {
  int pidfd = -1;
  socklen_t bytes = sizeof(pidfd);
  int error = 0;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) != 0) {
    error = errno;
    pidfd = -1;
    if (error == ENOPROTOOPT) {
      pidfd = OpenPidfd(pid).Release();
      error = errno;
      // If the peer has left already, the number may mean another process by now.
      if (pidfd >= 0 && HungUp(socket)) {
        ::close(pidfd);
        return nullptr;
      }
    }
  }
  if (pidfd >= 0) return std::make_shared<const UniqueFd>(pidfd);
  if (error == EMFILE || error == ENFILE || error == ENOMEM) {
    return ErrnoError(error, fmt::format("pidfd of pid {}", pid));
  }
  return nullptr;
}

}  // namespace

UniqueFd OpenPidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0U)));
}

bool HasEnded(const PeerCredentials& peer) {
  if (peer.pidfd == nullptr) return false;
  pollfd entry{peer.pidfd->get(), POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

absl::StatusOr<PeerCredentials> PeerOf(int socket, bool with_pidfd) {
  ucred kernel{};
  socklen_t bytes = sizeof(kernel);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &kernel, &bytes) != 0) {
    return ErrnoError(errno, "peer credentials");
  }
  // The kernel reports this for sockets that have no peer with credentials (TCP, unconnected).
  if (kernel.uid == static_cast<uid_t>(-1)) {
    return Error(absl::StatusCode::kUnavailable, "peer credentials: not a connected unix socket");
  }
  PeerCredentials peer{
      .pid = kernel.pid, .uid = kernel.uid, .gid = kernel.gid, .groups = {}, .pidfd = nullptr};
  peer.groups = PeerGroups(socket);
  if (with_pidfd && peer.pid > 0) {
    REFITD_ASSIGN_OR_RETURN(peer.pidfd, PidfdOf(socket, peer.pid));
  }
  return peer;
}

}  // namespace refitd
