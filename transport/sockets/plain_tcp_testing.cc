#include "transport/sockets/plain_tcp_testing.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr char kLoopback[] = "127.0.0.1";
constexpr size_t kPipeBytes = size_t{1} << 20;

sockaddr_in At(const std::string& host, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  REFITD_CHECK(inet_pton(AF_INET, host.c_str(), &address.sin_addr) == 1);
  address.sin_port = htons(port);
  return address;
}

// Takes one notification that the kernel is done with a range of sends, waiting for it, and adds
// the number of these sends to `*done`. False: the connection broke.
bool TakeNotification(int fd, uint32_t* done, bool* copied) {
  alignas(cmsghdr) char control[256];
  msghdr message{};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (recvmsg(fd, &message, MSG_ERRQUEUE) < 0) {
    if (errno != EAGAIN && errno != EINTR) return false;
    pollfd entry{fd, 0, 0};  // POLLERR comes unasked
    return poll(&entry, 1, -1) >= 0 || errno == EINTR;
  }
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    sock_extended_err error{};
    std::memcpy(&error, CMSG_DATA(at), sizeof(error));
    if (error.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
    *done += error.ee_data - error.ee_info + 1;
    if ((error.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0) *copied = true;
  }
  return true;
}

}  // namespace

absl::StatusOr<UniqueFd> ListenOnLoopback(uint16_t* port) { return ListenOn(kLoopback, port); }

absl::StatusOr<UniqueFd> ListenOn(const std::string& address, uint16_t* port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in local = At(address, 0);
  socklen_t length = sizeof(local);
  auto* const own = reinterpret_cast<sockaddr*>(&local);
  if (!fd.valid() || bind(fd.get(), own, length) != 0 || listen(fd.get(), 1) != 0 ||
      getsockname(fd.get(), own, &length) != 0) {
    return ErrnoError(errno, "listen on " + address);
  }
  *port = ntohs(local.sin_port);
  return fd;
}

absl::StatusOr<UniqueFd> AcceptOne(int listener) {
  UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd.valid()) return ErrnoError(errno, "accept");
  return fd;
}

absl::StatusOr<UniqueFd> DialLoopback(uint16_t port) { return DialPlain(kLoopback, port); }

absl::StatusOr<UniqueFd> DialPlain(const std::string& address, uint16_t port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in to = At(address, port);
  const int on = 1;
  if (!fd.valid() || connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0 ||
      setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) {
    return ErrnoError(errno, fmt::format("connect to {} port {}", address, port));
  }
  return fd;
}

bool SendAll(int fd, const void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = send(fd, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

bool ReceiveAll(int fd, void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = recv(fd, static_cast<char*>(data) + done, bytes - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

bool SendAllZeroCopy(int fd, const void* data, size_t bytes, bool* copied) {
  const int on = 1;
  if (setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on)) != 0) return false;
  uint32_t sent = 0;
  uint32_t done = 0;
  for (size_t moved = 0; moved < bytes || done < sent;) {
    if (moved < bytes) {
      const ssize_t n = send(fd, static_cast<const char*>(data) + moved, bytes - moved,
                             MSG_NOSIGNAL | MSG_ZEROCOPY);
      if (n > 0) {
        moved += static_cast<size_t>(n);
        ++sent;
        continue;
      }
      // ENOBUFS: too many notifications wait to be taken. If none does, waiting would not help.
      if (errno != EINTR && (errno != ENOBUFS || done == sent)) return false;
    }
    if (done < sent && !TakeNotification(fd, &done, copied)) return false;
  }
  return true;
}

bool SendAllSpliced(int fd, const void* data, size_t bytes) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  const UniqueFd out(ends[0]);
  const UniqueFd in(ends[1]);
  fcntl(in.get(), F_SETPIPE_SZ, kPipeBytes);
  for (size_t moved = 0; moved < bytes;) {
    iovec part{const_cast<char*>(static_cast<const char*>(data)) + moved, bytes - moved};
    ssize_t in_pipe = vmsplice(in.get(), &part, 1, 0);
    if (in_pipe <= 0) return false;
    moved += static_cast<size_t>(in_pipe);
    while (in_pipe > 0) {
      const ssize_t n = splice(out.get(), nullptr, fd, nullptr, static_cast<size_t>(in_pipe),
                               SPLICE_F_MOVE | (moved < bytes ? SPLICE_F_MORE : 0));
      if (n <= 0) return false;
      in_pipe -= n;
    }
  }
  return true;
}

}  // namespace refitd
