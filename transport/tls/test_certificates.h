// Certificates for tests, made when a test runs.
#ifndef REFITD_TRANSPORT_TLS_TEST_CERTIFICATES_H_
#define REFITD_TRANSPORT_TLS_TEST_CERTIFICATES_H_

#include <memory>
#include <string>
#include <vector>

#include "transport/tls/certificates.h"

namespace refitd {

struct CertificateRequest {
  std::vector<std::string> uris{};
  std::vector<std::string> names{};
  std::vector<std::string> addresses{"127.0.0.1"};
  long from_seconds = -3600;  // from now
  long until_seconds = 3600;
  std::string until_text{};  // in place of until_seconds: a GeneralizedTime, which may be malformed
  bool weak_key = false;     // RSA of 1,024 bits
};

struct IssuedCertificate {
  std::string certificate;  // PEM
  std::string key;
};

// A root with a key of its own; or, with `issuer`, an authority between that one and certificates.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name, const TestAuthority* issuer = nullptr);
  ~TestAuthority();
  TestAuthority(const TestAuthority&) = delete;
  TestAuthority& operator=(const TestAuthority&) = delete;

  const std::string& root() const { return root_; }  // its own certificate, PEM
  IssuedCertificate Issue(const CertificateRequest& request) const;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
  std::string root_;
};

// A certificate of `identity` (a URI) that `signer` issued, with its key; its holder trusts `root`.
// It is good for `until_seconds` from now.
std::shared_ptr<const Certificates> IssueCertificates(const TestAuthority& signer,
                                                      const std::string& identity,
                                                      const TestAuthority& root,
                                                      long until_seconds = 3600);
// Writes each file under another name first and renames it then, as issuers' tools do.
void WriteTlsFiles(const TlsFiles& files, const IssuedCertificate& own, const std::string& roots);
// FOLDER/NAME.crt, FOLDER/NAME.key and FOLDER/NAME.roots.
TlsFiles TlsFilesIn(const std::string& folder, const std::string& name);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_TEST_CERTIFICATES_H_
