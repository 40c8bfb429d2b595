#include "transport/tls/certificates.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/tls/openssl_ptr.h"

namespace refitd {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  // A FIFO or a device in place of a file must not make the reader wait (P4).
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return ErrnoError(errno, path);
  std::string text;
  std::array<char, 16384> buffer;
  for (;;) {
    const ssize_t n = read(file.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(errno, path);
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(n));
    if (text.size() > kMaxPemFileBytes) {
      return Error(kInvalid, "{}: more than {} bytes", path, kMaxPemFileBytes);
    }
  }
}

BioPtr Open(std::string_view pem) {
  return BioPtr(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

X509Ptr NextCertificate(BIO* bio) {
  return X509Ptr(PEM_read_bio_X509(bio, nullptr, nullptr, nullptr));
}

// All certificates of a PEM text. Empty: there is none, or what follows one is malformed.
std::vector<X509Ptr> AllCertificates(std::string_view pem) {
  const BioPtr bio = Open(pem);
  std::vector<X509Ptr> found;
  while (X509Ptr next = NextCertificate(bio.get())) found.push_back(std::move(next));
  // At the end of the text, the error is that no further block begins.
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (!ended) found.clear();
  return found;
}

// A key that is encrypted is refused, since nobody is there to type its password.
int NoPassword(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*user*/) { return -1; }

KeyPtr KeyOf(std::string_view pem) {
  const BioPtr bio = Open(pem);
  KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  return key;
}

std::chrono::sys_seconds TimeOf(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return {};
  return std::chrono::sys_seconds(std::chrono::seconds(timegm(&parts)));
}

std::string Day(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "?";
  std::array<char, 32> text{};
  const size_t n = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return {text.data(), n};
}

bool Plain(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7F; });
}

// Checks that OpenSSL accepts the chain and the key. It refuses keys and signatures below its
// security level; without this check the first handshake would fail.
absl::Status CheckUsable(const std::vector<X509Ptr>& chain, EVP_PKEY* key,
                         const std::string& path) {
  // One context serves all checks, since making an SSL_CTX takes much longer than making an SSL.
  static SSL_CTX* const context = SSL_CTX_new(TLS_method());
  const SslPtr ssl(context == nullptr ? nullptr : SSL_new(context));
  if (ssl == nullptr) return Error(absl::StatusCode::kInternal, "OpenSSL gives no context");
  bool taken = SSL_use_certificate(ssl.get(), chain.front().get()) == 1;
  for (size_t i = 1; taken && i < chain.size(); ++i) {
    taken = SSL_add1_chain_cert(ssl.get(), chain[i].get()) == 1;
  }
  if (taken && SSL_use_PrivateKey(ssl.get(), key) == 1) return absl::OkStatus();
  const char* why = ERR_reason_error_string(ERR_peek_last_error());
  const std::string reason = why == nullptr ? "no reason given" : why;
  ERR_clear_error();
  return Error(kInvalid, "{}: OpenSSL does not take it: {}", path, reason);
}

absl::Status CheckTimes(const X509* certificate, const std::string& path) {
  const ASN1_TIME* from = X509_get0_notBefore(certificate);
  const ASN1_TIME* until = X509_get0_notAfter(certificate);
  const int begins = X509_cmp_current_time(from);  // 0: it is no date
  const int ends = X509_cmp_current_time(until);
  if (begins == 0 || ends == 0) {
    return Error(kInvalid, "{}: the certificate's dates are malformed", path);
  }
  if (begins > 0) {
    return Error(kInvalid, "{}: the certificate is not valid before {}", path, Day(from));
  }
  if (ends < 0) {
    return Error(kInvalid, "{}: the certificate expired at {}", path, Day(until));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files, std::string_view certificate_field,
                           std::string_view key_field, std::string_view roots_field) {
  if (files.empty()) return absl::OkStatus();
  for (const auto& [path, field] : {std::pair(&files.certificate, certificate_field),
                                    {&files.key, key_field},
                                    {&files.roots, roots_field}}) {
    if (path->empty()) {
      return InvalidField(field, "{} is empty: TLS needs all of {}, {} and {}", field,
                          certificate_field, key_field, roots_field);
    }
    if (path->find('\0') != std::string::npos) {
      return InvalidField(field, "{} has a zero byte after \"{}\"", field, path->c_str());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Certificates>> LoadCertificates(const TlsFiles& files) {
  REFITD_ASSIGN_OR_RETURN(std::string certificate, ReadPem(files.certificate));
  REFITD_ASSIGN_OR_RETURN(std::string key, ReadPem(files.key));
  REFITD_ASSIGN_OR_RETURN(std::string roots, ReadPem(files.roots));
  return ParseCertificates(std::move(certificate), std::move(key), std::move(roots), files);
}

absl::StatusOr<std::shared_ptr<const Certificates>> ParseCertificates(std::string certificate,
                                                                      std::string key,
                                                                      std::string roots,
                                                                      const TlsFiles& files) {
  auto loaded = std::make_shared<Certificates>();
  loaded->certificate = std::move(certificate);
  loaded->key = std::move(key);
  loaded->roots = std::move(roots);
  const std::vector<X509Ptr> chain = AllCertificates(loaded->certificate);
  if (chain.empty()) return Error(kInvalid, "{}: no certificate in PEM", files.certificate);
  const KeyPtr own_key = KeyOf(loaded->key);
  if (own_key == nullptr) {
    return Error(kInvalid, "{}: no private key in PEM without a password", files.key);
  }
  if (X509_check_private_key(chain.front().get(), own_key.get()) != 1) {
    ERR_clear_error();
    return Error(kInvalid, "{}: not the key of the certificate in {}", files.key,
                 files.certificate);
  }
  REFITD_RETURN_IF_ERROR(CheckUsable(chain, own_key.get(), files.certificate));
  REFITD_RETURN_IF_ERROR(CheckTimes(chain.front().get(), files.certificate));
  const std::vector<X509Ptr> trusted = AllCertificates(loaded->roots);
  if (trusted.empty()) return Error(kInvalid, "{}: no certificate in PEM", files.roots);
  loaded->root_count = static_cast<int>(trusted.size());
  loaded->identity = IdentityOfX509(chain.front().get());
  loaded->expires = TimeOf(X509_get0_notAfter(chain.front().get()));
  return loaded;
}

std::string IdentityOf(const std::vector<std::string>& uris,
                       const std::vector<std::string>& names) {
  if (uris.size() == 1 && IsSpiffeId(uris.front())) return uris.front();
  if (!uris.empty() && std::any_of(uris.begin(), uris.end(), [](const std::string& uri) {
        return uri.starts_with(kSpiffeScheme);
      })) {
    return "";  // a malformed SPIFFE ID does not become another identity
  }
  if (names.empty() || names.front().size() > kMaxIdentityBytes || !Plain(names.front())) return "";
  std::string name = names.front();
  std::transform(name.begin(), name.end(), name.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  if (name.find('*') != std::string::npos) return "";  // a wildcard names nobody
  return std::string(kDnsScheme) + name;
}

std::string IdentityOfX509(const X509* certificate) {
  const NamesPtr names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::vector<std::string> uris;
  std::vector<std::string> dns;
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    int kind = 0;
    const void* value = GENERAL_NAME_get0_value(sk_GENERAL_NAME_value(names.get(), i), &kind);
    if (kind != GEN_URI && kind != GEN_DNS) continue;
    const auto* text = static_cast<const ASN1_STRING*>(value);
    std::string name(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                     static_cast<size_t>(ASN1_STRING_length(text)));
    (kind == GEN_URI ? uris : dns).push_back(std::move(name));
  }
  return IdentityOf(uris, dns);
}

std::string IdentityOfPem(std::string_view pem) {
  const BioPtr bio = Open(pem);
  const X509Ptr certificate = NextCertificate(bio.get());
  ERR_clear_error();
  return certificate == nullptr ? "" : IdentityOfX509(certificate.get());
}

}  // namespace refitd
