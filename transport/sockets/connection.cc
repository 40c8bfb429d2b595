#include "transport/sockets/connection.h"

#include <linux/tcp.h>  // its tcp_info has more than that of netinet/tcp.h
#include <netinet/in.h>
#include <openssl/err.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// OpenSSL counts in int, and writes a record of this size at most.
constexpr int64_t kRecordBytes = 16384;

absl::Status Broken(const std::string& why) { return absl::UnavailableError(why); }

// The reason why the last call of OpenSSL failed. `saved`: errno after that call.
absl::Status TlsError(const SSL* ssl, int why, int saved) {
  const unsigned long error = ERR_peek_error();
  ERR_clear_error();
  if (why == SSL_ERROR_ZERO_RETURN) return Broken("it was closed");
  if (why == SSL_ERROR_SYSCALL) {
    return saved == 0 ? Broken("it was closed") : Broken(std::strerror(saved));
  }
  if (ERR_GET_REASON(error) == SSL_R_UNEXPECTED_EOF_WHILE_READING) return Broken("it was closed");
  if (ERR_GET_REASON(error) == SSL_R_CERTIFICATE_VERIFY_FAILED) {
    return Error(absl::StatusCode::kUnauthenticated, "TLS: its certificate is refused: {}",
                 X509_verify_cert_error_string(SSL_get_verify_result(ssl)));
  }
  const char* const reason = ERR_reason_error_string(error);
  return Error(absl::StatusCode::kUnauthenticated, "TLS: {}",
               reason == nullptr ? "no reason given" : reason);
}

// The result of an operation of OpenSSL that returned `result`, not above 0.
absl::StatusOr<int64_t> TlsResult(const SSL* ssl, int result, int saved) {
  const int why = SSL_get_error(ssl, result);
  if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE) return 0;
  return TlsError(ssl, why, saved);
}

// Encrypts the start of `head` and then of `body` into one record. A head and the start of its body
// share a record, so that a small message is one packet.
int WriteRecord(SSL* ssl, std::span<const char> head, std::span<const char> body) {
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
  return SSL_write(ssl, next.data(), static_cast<int>(std::min<size_t>(next.size(), INT_MAX)));
}

// A BIO that appends what is written to a std::vector<char>, its data.
const BIO_METHOD* AppendingMethod() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "records");
    REFITD_CHECK(made != nullptr);
    BIO_meth_set_write_ex(made, [](BIO* bio, const char* data, size_t bytes, size_t* written) {
      auto* const out = static_cast<std::vector<char>*>(BIO_get_data(bio));
      out->insert(out->end(), data, data + bytes);
      *written = bytes;
      return 1;
    });
    BIO_meth_set_ctrl(
        made, [](BIO*, int what, long, void*) -> long { return what == BIO_CTRL_FLUSH ? 1 : 0; });
    return made;
  }();
  return method;
}

}  // namespace

absl::StatusOr<bool> Connection::Handshake() {
  if (ssl_ == nullptr) return true;
  ERR_clear_error();
  errno = 0;
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    CollectRecords();
    return true;
  }
  REFITD_RETURN_IF_ERROR(TlsResult(ssl_.get(), result, errno).status());
  return false;
}

// Makes OpenSSL hand its records over instead of writing each to the socket, unless the kernel
// makes them.
void Connection::CollectRecords() {
  if (records_ != nullptr || BIO_get_ktls_send(SSL_get_wbio(ssl_.get()))) return;
  BIO* const bio = BIO_new(AppendingMethod());
  REFITD_CHECK(bio != nullptr);
  records_ = std::make_unique<Records>();
  BIO_set_data(bio, &records_->bytes);
  BIO_set_init(bio, 1);
  SSL_set0_wbio(ssl_.get(), bio);
}

absl::StatusOr<int64_t> Connection::Read(char* data, int64_t bytes) {
  if (ssl_ != nullptr) {
    ERR_clear_error();
    errno = 0;
    const int n = SSL_read(ssl_.get(), data, static_cast<int>(std::min<int64_t>(bytes, INT_MAX)));
    const int saved = errno;
    if (n > 0) return n;
    // OpenSSL may have made a record itself: the alert that tells the other end what was wrong.
    if (records_ != nullptr) (void)SendRecords();
    return TlsResult(ssl_.get(), n, saved);
  }
  for (;;) {
    const ssize_t n = recv(fd_.get(), data, static_cast<size_t>(bytes), MSG_DONTWAIT);
    if (n > 0) return n;
    if (n == 0) return Broken("it was closed");
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return Broken(std::strerror(errno));
  }
}

// Sends what the kernel takes of records_. True: it took all.
absl::StatusOr<bool> Connection::SendRecords() {
  while (records_->sent < records_->bytes.size()) {
    const ssize_t n = send(fd_.get(), records_->bytes.data() + records_->sent,
                           records_->bytes.size() - records_->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      records_->sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR) {
      return Broken(std::strerror(errno));
    }
  }
  records_->bytes.clear();
  records_->sent = 0;
  return true;
}

// Makes records of the start of `head` and then of `body`.
absl::Status Connection::Encrypt(std::span<const char> head, std::span<const char> body) {
  if (encrypted_ >= key_bytes_ && SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) {
    encrypted_ = 0;  // the next write tells the other end, and uses a new key
  }
  do {
    const int n = WriteRecord(ssl_.get(), head, body);
    const int saved = errno;
    if (n <= 0) return TlsError(ssl_.get(), SSL_get_error(ssl_.get(), n), saved);
    untold_ += n;
    encrypted_ += n;
    const size_t of_head = std::min(head.size(), static_cast<size_t>(n));
    head = head.subspan(of_head);
    body = body.subspan(static_cast<size_t>(n) - of_head);
  } while (untold_ < kTlsBatchBytes && !(head.empty() && body.empty()));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Connection::WriteTls(std::span<const char> head,
                                             std::span<const char> body) {
  if (records_ == nullptr) {
    const int n = WriteRecord(ssl_.get(), head, body);
    if (n > 0) return n;
    return TlsResult(ssl_.get(), n, errno);
  }
  // Bytes whose records the kernel did not take count as not written, so they come again here.
  if (untold_ == 0) REFITD_RETURN_IF_ERROR(Encrypt(head, body));
  REFITD_ASSIGN_OR_RETURN(const bool all, SendRecords());
  return all ? std::exchange(untold_, 0) : 0;
}

absl::StatusOr<int64_t> Connection::Write(std::span<const char> head, std::span<const char> body) {
  if (ssl_ != nullptr) return WriteTls(head, body);
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

Duration Connection::Busy() const {
  tcp_info info{};
  socklen_t length = sizeof(info);
  constexpr size_t kNeeded = offsetof(tcp_info, tcpi_rwnd_limited) + sizeof(info.tcpi_rwnd_limited);
  if (getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || length < kNeeded) {
    return Duration(0);
  }
  const uint64_t busy = info.tcpi_busy_time - std::min(info.tcpi_rwnd_limited, info.tcpi_busy_time);
  return std::chrono::microseconds(static_cast<int64_t>(busy));
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
