#include "transport/sockets/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

#include "transport/base/status.h"

namespace refitd {
namespace {

// OpenSSL counts in int, and writes a record of this size at most.
constexpr int64_t kRecordBytes = 16384;

absl::Status Broken(const std::string& why) { return absl::UnavailableError(why); }

// The reason why the last call of OpenSSL failed. `saved`: errno after that call.
absl::Status TlsError(int why, int saved) {
  const unsigned long error = ERR_peek_error();
  ERR_clear_error();
  if (why == SSL_ERROR_ZERO_RETURN) return Broken("it was closed");
  if (why == SSL_ERROR_SYSCALL) {
    return saved == 0 ? Broken("it was closed") : Broken(std::strerror(saved));
  }
  if (ERR_GET_REASON(error) == SSL_R_UNEXPECTED_EOF_WHILE_READING) return Broken("it was closed");
  const char* const reason = ERR_reason_error_string(error);
  return Error(absl::StatusCode::kUnauthenticated, "TLS: {}",
               reason == nullptr ? "no reason given" : reason);
}

// The result of an operation of OpenSSL that returned `result`, not above 0.
absl::StatusOr<int64_t> TlsResult(const SSL* ssl, int result, int saved) {
  const int why = SSL_get_error(ssl, result);
  if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE) return 0;
  return TlsError(why, saved);
}

absl::StatusOr<int64_t> WriteTls(SSL* ssl, std::span<const char> head, std::span<const char> body) {
  // A head and the start of its body share a record, so that a small message is one packet.
  std::array<char, kRecordBytes> joined;
  std::span<const char> next = head.empty() ? body : head;
  if (!head.empty() && !body.empty()) {
    const size_t rest = std::min(joined.size() - head.size(), body.size());
    std::memcpy(joined.data(), head.data(), head.size());
    std::memcpy(joined.data() + head.size(), body.data(), rest);
    next = {joined.data(), head.size() + rest};
  }
  ERR_clear_error();
  errno = 0;
  const int written =
      SSL_write(ssl, next.data(), static_cast<int>(std::min<size_t>(next.size(), INT_MAX)));
  if (written > 0) return written;
  return TlsResult(ssl, written, errno);
}

}  // namespace

absl::StatusOr<bool> Connection::Handshake() {
  if (ssl_ == nullptr) return true;
  ERR_clear_error();
  errno = 0;
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) return true;
  REFITD_RETURN_IF_ERROR(TlsResult(ssl_.get(), result, errno).status());
  return false;
}

absl::StatusOr<int64_t> Connection::Read(char* data, int64_t bytes) {
  if (ssl_ != nullptr) {
    ERR_clear_error();
    errno = 0;
    const int n = SSL_read(ssl_.get(), data, static_cast<int>(std::min<int64_t>(bytes, INT_MAX)));
    if (n > 0) return n;
    return TlsResult(ssl_.get(), n, errno);
  }
  for (;;) {
    const ssize_t n = recv(fd_.get(), data, static_cast<size_t>(bytes), MSG_DONTWAIT);
    if (n > 0) return n;
    if (n == 0) return Broken("it was closed");
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return Broken(std::strerror(errno));
  }
}

absl::StatusOr<int64_t> Connection::Write(std::span<const char> head, std::span<const char> body) {
  if (ssl_ != nullptr) return WriteTls(ssl_.get(), head, body);
  std::array<iovec, 2> parts{iovec{const_cast<char*>(head.data()), head.size()},
                             iovec{const_cast<char*>(body.data()), body.size()}};
  msghdr message{};
  message.msg_iov = head.empty() ? &parts[1] : parts.data();
  message.msg_iovlen = head.empty() || body.empty() ? 1 : 2;
  for (;;) {
    const ssize_t n = sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return n;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return Broken(std::strerror(errno));
  }
}

std::string Connection::PeerIdentity() const {
  if (ssl_ == nullptr) return "";
  const X509Ptr certificate(SSL_get1_peer_certificate(ssl_.get()));
  return certificate == nullptr ? "" : IdentityOfX509(certificate.get());
}

void PrepareSocket(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

absl::StatusOr<UniqueFd> DialTcp(const HostAddress& from, const HostAddress& host, uint16_t port) {
  UniqueFd fd(socket(host.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoError(errno, "a socket");
  PrepareSocket(fd.get());
  socklen_t length = 0;
  if (from.family == host.family) {
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
    const sockaddr_storage local = from.Sockaddr(0, &length);
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&local), length) != 0) {
      return ErrnoError(errno, fmt::format("bind to {}", from.Text()));
    }
  }
  const sockaddr_storage remote = host.Sockaddr(port, &length);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&remote), length) != 0 &&
      errno != EINPROGRESS) {
    return ErrnoError(errno, fmt::format("{} port {}", host.Text(), port));
  }
  return fd;
}

absl::Status DialOutcome(int fd) {
  int error = 0;
  socklen_t bytes = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
  return error == 0 ? absl::OkStatus() : Broken(std::strerror(error));
}

}  // namespace refitd
