// Shows the guard what gRPC's TLS connections bring, after OpenSSL has decrypted it.
//
// This library defines SSL_read(), which libgrpc then calls in place of OpenSSL's. A connection is
// known by what OpenSSL keeps beside it from SSL_new on, which gRPC calls while it is handed an
// accepted descriptor. SSL_read fails once the guard has ended the connection.
//
// Thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_TLS_GUARD_H_
#define REFITD_DAEMON_SOCKETS_TLS_GUARD_H_

namespace refitd {

// To be called once in a process, before any TLS connection is made.
void GuardTls();

// While it lives, TLS connections that this thread makes are those of a watched descriptor.
class TlsBeginning {
 public:
  explicit TlsBeginning(int fd);
  ~TlsBeginning();
  TlsBeginning(const TlsBeginning&) = delete;
  TlsBeginning& operator=(const TlsBeginning&) = delete;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_TLS_GUARD_H_
