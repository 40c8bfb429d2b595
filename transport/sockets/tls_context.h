// TLS between daemons, as the host wire uses it: version 1.3, AES-GCM, certificates of both ends,
// no resumption. The user of a connection checks whose certificate the other end has, and whether
// that identity may connect.
#ifndef REFITD_TRANSPORT_SOCKETS_TLS_CONTEXT_H_
#define REFITD_TRANSPORT_SOCKETS_TLS_CONTEXT_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/tls/certificates.h"
#include "transport/tls/openssl_ptr.h"

namespace refitd {

// Gives the current certificates, so that each handshake uses replaced files. Thread-safe.
using WireCertificates = std::function<std::shared_ptr<const Certificates>()>;

// Makes the TLS ends of connections. Thread-safe.
class TlsContexts {
 public:
  explicit TlsContexts(WireCertificates current) : current_(std::move(current)) {}

  // Both make the TLS end of the socket `fd` and leave `fd` to the caller. UNAVAILABLE: OpenSSL
  // refuses the certificates.
  absl::StatusOr<SslPtr> Accept(int fd) { return Make(fd, true); }
  absl::StatusOr<SslPtr> Dial(int fd) { return Make(fd, false); }
  // The identity in this daemon's certificate.
  std::string identity() const { return current_()->identity; }

 private:
  absl::StatusOr<SslPtr> Make(int fd, bool accept);

  const WireCertificates current_;
  Mutex mutex_;
  std::shared_ptr<const Certificates> used_ ABSL_GUARDED_BY(mutex_);
  ContextPtr context_ ABSL_GUARDED_BY(mutex_);  // made of used_
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_TLS_CONTEXT_H_
