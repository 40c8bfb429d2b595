// One TCP connection, in the clear or under TLS. Never blocks. Not thread-safe; may be handed from
// thread to thread. The threads that use it must have SIGPIPE blocked, since OpenSSL writes without
// MSG_NOSIGNAL.
#ifndef REFITD_TRANSPORT_SOCKETS_CONNECTION_H_
#define REFITD_TRANSPORT_SOCKETS_CONNECTION_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/host_address.h"
#include "transport/sockets/tls_context.h"

namespace refitd {

// The most bytes that one Write encrypts before it sends: so many that the calls of the kernel cost
// little beside the encryption, so few that the records are still in the processor's cache.
inline constexpr int64_t kTlsBatchBytes = int64_t{256} << 10;

// The bytes that one key encrypts before it is replaced. AES-GCM keeps its promises for 2^24.5
// records (RFC 8446, 5.5), of 16 KiB at most and most of them of that size: 388 GB.
inline constexpr int64_t kTlsKeyBytes = int64_t{64} << 30;

class Connection {
 public:
  Connection() = default;
  // `ssl`: null for a connection in the clear; it must be over `fd`.
  Connection(UniqueFd fd, SslPtr ssl) : fd_(std::move(fd)), ssl_(std::move(ssl)) {}
  Connection(Connection&&) noexcept = default;
  Connection& operator=(Connection&& other) noexcept {
    ssl_ = std::move(other.ssl_);  // before what it is over
    records_ = std::move(other.records_);
    untold_ = other.untold_;
    key_bytes_ = other.key_bytes_;
    encrypted_ = other.encrypted_;
    fd_ = std::move(other.fd_);
    return *this;
  }

  // Puts TLS over a connection in the clear.
  void StartTls(SslPtr ssl) { ssl_ = std::move(ssl); }

  bool open() const { return fd_.valid(); }
  bool tls() const { return ssl_ != nullptr; }
  int fd() const { return fd_.get(); }

  // Goes on with the TLS handshake. True: it is done, or there is none. False: it waits for the
  // other end. UNAVAILABLE: the connection ended. UNAUTHENTICATED: TLS failed, or found a wrong
  // byte. Read and Write have the same errors.
  absl::StatusOr<bool> Handshake();
  // Reads up to `bytes` > 0 bytes. 0: none are there. UNAVAILABLE: the connection ended or broke.
  absl::StatusOr<int64_t> Read(char* data, int64_t bytes);
  // Writes the start of `head` and then of `body`, which may be empty, and returns how many bytes
  // it wrote. 0: the other end takes none now. After that, the same bytes, or more, must be written
  // next.
  absl::StatusOr<int64_t> Write(std::span<const char> head, std::span<const char> body);
  // How long bytes that were sent have been unacknowledged, without the time in which the other end
  // had no room for more. 0: the kernel does not tell.
  Duration Busy() const;
  // Takes another limit in place of kTlsKeyBytes.
  void SetKeyBytesForTest(int64_t bytes) { key_bytes_ = bytes; }
  // The identity in the other end's certificate; empty without TLS.
  std::string PeerIdentity() const;

 private:
  // Records that OpenSSL made and the kernel has not taken yet.
  struct Records {
    std::vector<char> bytes;
    size_t sent = 0;  // of `bytes`
  };

  void CollectRecords();
  absl::StatusOr<bool> SendRecords();
  absl::Status Encrypt(std::span<const char> head, std::span<const char> body);
  absl::StatusOr<int64_t> WriteTls(std::span<const char> head, std::span<const char> body);

  UniqueFd fd_;
  std::unique_ptr<Records> records_;  // null: OpenSSL writes to the socket
  int64_t untold_ = 0;                // bytes that are in records_, which Write has yet to return
  int64_t key_bytes_ = kTlsKeyBytes;
  // Bytes encrypted since the last change of key; the key is changed when they reach key_bytes_.
  int64_t encrypted_ = 0;
  SslPtr ssl_;  // destroyed first
};

// Begins to connect to `host`. The socket becomes writable when the attempt has ended. `from`: the
// local address.
absl::StatusOr<UniqueFd> DialTcp(const HostAddress& from, const HostAddress& host, uint16_t port);
// The outcome of a DialTcp whose attempt has ended.
absl::Status DialOutcome(int fd);
// Sets the options that every connection of the wire has.
void PrepareSocket(int fd);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_CONNECTION_H_
