// The daemon's certificates, which follow their files.
//
// Handshakes take Current(), so that replaced files count for new connections and open ones go on:
// no lease ends because a certificate was renewed. Files that do not fit together are not taken
// over; the certificates that were read before stay in force. Thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_CERTIFICATE_STORE_H_
#define REFITD_DAEMON_SOCKETS_CERTIFICATE_STORE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/tls/certificates.h"

namespace refitd {

class CertificateStore {
 public:
  // Called for each change (with OK) and for files that can't be taken over (with the reason), both
  // times with the certificates that are then in force, and without any mutex.
  using OnReload = std::function<void(const absl::Status& taken, const Certificates& in_force)>;
  // `on_reload` may be null. Errors: as of LoadCertificates; also INVALID_ARGUMENT: the certificate
  // gives no identity.
  static absl::StatusOr<std::unique_ptr<CertificateStore>> Create(const TlsFiles& files,
                                                                  OnReload on_reload = nullptr);

  // Never null.
  std::shared_ptr<const Certificates> Current() const;
  // Reads the files and takes them over if they changed. Logs a change, and files that can't be
  // taken over when two calls in a row have found them so: an issuer's tool may be half-way.
  void Refresh();

 private:
  CertificateStore(TlsFiles files, OnReload on_reload, std::shared_ptr<const Certificates> first);

  const TlsFiles files_;
  const OnReload on_reload_;
  mutable Mutex mutex_;
  std::shared_ptr<const Certificates> current_ ABSL_GUARDED_BY(mutex_);
  std::string problem_ ABSL_GUARDED_BY(mutex_);  // of the last refresh
  std::string logged_ ABSL_GUARDED_BY(mutex_);   // the problem that was logged last
};

// "spiffe://..., valid until 2026-01-01T00:00:00Z, 2 roots"
std::string Describe(const Certificates& certificates);

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_CERTIFICATE_STORE_H_
