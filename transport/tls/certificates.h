// Certificates as files, and the identity that a certificate gives its holder.
//
// A daemon and a client each have three PEM files: their certificate with the rest of its chain,
// its private key, and the roots that they trust in others. cert-manager, SPIRE's helper and
// step-ca write such files and replace them before they expire.
//
// LoadCertificates gives either files that fit together or an error, so that a set of files that
// is replaced one by one is never used half-way (P10). Values are immutable and thread-safe.
#ifndef REFITD_TRANSPORT_TLS_CERTIFICATES_H_
#define REFITD_TRANSPORT_TLS_CERTIFICATES_H_

#include <openssl/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/identity.h"

namespace refitd {

inline constexpr size_t kMaxPemFileBytes = size_t{1} << 20;

// Paths; all three are empty, or none is.
struct TlsFiles {
  std::string certificate;  // the own certificate first, then the rest of its chain
  std::string key;
  std::string roots;  // any number of them
  bool empty() const { return certificate.empty() && key.empty() && roots.empty(); }
  bool operator==(const TlsFiles&) const = default;
};

// INVALID_ARGUMENT if only some of the three are named, or if a path has a zero byte. `fields` are
// the names of the three settings, for the message.
absl::Status CheckTlsFiles(const TlsFiles& files, std::string_view certificate_field,
                           std::string_view key_field, std::string_view roots_field);

struct Certificates {
  std::string certificate;  // PEM, as in the files
  std::string key;
  std::string roots;
  std::string identity;  // of the certificate, see IdentityOf; empty: the certificate has none
  int root_count = 0;
  // In whole seconds, since nanoseconds in 64 bits end in the year 2262, and certificates without
  // an end have the year 9999.
  std::chrono::sys_seconds expires;
  bool operator==(const Certificates&) const = default;
};

// NOT_FOUND, PERMISSION_DENIED: a file can't be read. INVALID_ARGUMENT: a file is not PEM or too
// large, the key is not the certificate's, the certificate is not valid yet or not any more, or has
// no date there. The message names the file.
absl::StatusOr<std::shared_ptr<const Certificates>> LoadCertificates(const TlsFiles& files);
// The same of texts in PEM. `files` are the names that messages give to the texts.
absl::StatusOr<std::shared_ptr<const Certificates>> ParseCertificates(std::string certificate,
                                                                      std::string key,
                                                                      std::string roots,
                                                                      const TlsFiles& files);

// The subject alternative names of a certificate name its holder: "spiffe://..." if they
// have exactly one URI and that is a SPIFFE ID; else "dns:NAME" of the first DNS name; else empty.
// Several URIs, or a SPIFFE ID that is malformed (IsSpiffeId), give no identity.
std::string IdentityOf(const std::vector<std::string>& uris, const std::vector<std::string>& names);
// The same for a certificate in PEM. Empty also if `pem` is no certificate.
std::string IdentityOfPem(std::string_view pem);
std::string IdentityOfX509(const X509* certificate);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_CERTIFICATES_H_
