#include "transport/tls/test_certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/rsa.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cstdint>
#include <filesystem>
#include <fstream>

#include "transport/base/status.h"

namespace refitd {
namespace {

template <typename Write>
std::string PemOf(const Write& write) {
  BIO* bio = BIO_new(BIO_s_mem());
  REFITD_CHECK(write(bio) == 1);
  char* data = nullptr;
  const long bytes = BIO_get_mem_data(bio, &data);
  std::string pem(data, static_cast<size_t>(bytes));
  BIO_free_all(bio);
  return pem;
}

void SetName(X509* certificate, const std::string& name) {
  X509_NAME* subject = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.data()),
                             static_cast<int>(name.size()), -1, 0);
}

void Extend(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  REFITD_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* NewCertificate(EVP_PKEY* key, long from, long until) {
  X509* certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  uint64_t serial = 0;
  REFITD_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial)) == 1);
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate), serial >> 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), from);
  X509_gmtime_adj(X509_getm_notAfter(certificate), until);
  X509_set_pubkey(certificate, key);
  return certificate;
}

void WriteFile(const std::string& path, const std::string& text) {
  const std::string fresh = path + ".new";
  std::ofstream(fresh, std::ios::binary) << text;
  std::filesystem::rename(fresh, path);
}

}  // namespace

struct TestAuthority::Impl {
  EVP_PKEY* key = nullptr;
  X509* root = nullptr;
  ~Impl() {
    X509_free(root);
    EVP_PKEY_free(key);
  }
};

TestAuthority::TestAuthority(const std::string& name, const TestAuthority* issuer)
    : impl_(std::make_unique<Impl>()) {
  impl_->key = EVP_EC_gen("P-256");
  REFITD_CHECK(impl_->key != nullptr);
  constexpr long kDay = 86'400;
  impl_->root = NewCertificate(impl_->key, -kDay, kDay);
  SetName(impl_->root, name);
  const Impl& signer = issuer == nullptr ? *impl_ : *issuer->impl_;
  X509_set_issuer_name(impl_->root, X509_get_subject_name(signer.root));
  Extend(impl_->root, impl_->root, NID_basic_constraints, "critical,CA:TRUE");
  Extend(impl_->root, impl_->root, NID_key_usage, "critical,keyCertSign,cRLSign");
  Extend(impl_->root, impl_->root, NID_subject_key_identifier, "hash");
  REFITD_CHECK(X509_sign(impl_->root, signer.key, EVP_sha256()) > 0);
  root_ = PemOf([&](BIO* bio) { return PEM_write_bio_X509(bio, impl_->root); });
}

TestAuthority::~TestAuthority() = default;

IssuedCertificate TestAuthority::Issue(const CertificateRequest& request) const {
  EVP_PKEY* key = request.weak_key ? EVP_RSA_gen(1024) : EVP_EC_gen("P-256");
  X509* certificate = NewCertificate(key, request.from_seconds, request.until_seconds);
  if (!request.until_text.empty()) {
    ASN1_STRING* const until = ASN1_STRING_type_new(V_ASN1_GENERALIZEDTIME);
    REFITD_CHECK(until != nullptr && ASN1_STRING_set(until, request.until_text.data(),
                                                     static_cast<int>(request.until_text.size())));
    X509_set1_notAfter(certificate, until);
    ASN1_STRING_free(until);
  }
  SetName(certificate, "member");
  X509_set_issuer_name(certificate, X509_get_subject_name(impl_->root));
  Extend(certificate, impl_->root, NID_basic_constraints, "critical,CA:FALSE");
  Extend(certificate, impl_->root, NID_key_usage, "critical,digitalSignature");
  Extend(certificate, impl_->root, NID_ext_key_usage, "serverAuth,clientAuth");
  Extend(certificate, impl_->root, NID_authority_key_identifier, "keyid");
  std::string names;
  const auto add = [&names](const std::string& kind, const std::vector<std::string>& values) {
    for (const std::string& value : values) {
      if (!names.empty()) names += ',';
      names.append(kind).append(":").append(value);
    }
  };
  add("URI", request.uris);
  add("DNS", request.names);
  add("IP", request.addresses);
  if (!names.empty()) Extend(certificate, impl_->root, NID_subject_alt_name, names);
  REFITD_CHECK(X509_sign(certificate, impl_->key, EVP_sha256()) > 0);
  IssuedCertificate issued;
  issued.certificate = PemOf([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); });
  issued.key = PemOf([&](BIO* bio) {
    return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
  X509_free(certificate);
  EVP_PKEY_free(key);
  return issued;
}

std::shared_ptr<const Certificates> IssueCertificates(const TestAuthority& signer,
                                                      const std::string& identity,
                                                      const TestAuthority& root,
                                                      long until_seconds) {
  const IssuedCertificate issued =
      signer.Issue({.uris = {identity}, .until_seconds = until_seconds});
  auto own = std::make_shared<Certificates>();
  own->certificate = issued.certificate;
  own->key = issued.key;
  own->roots = root.root();
  own->identity = identity;
  return own;
}

void WriteTlsFiles(const TlsFiles& files, const IssuedCertificate& own, const std::string& roots) {
  WriteFile(files.certificate, own.certificate);
  WriteFile(files.key, own.key);
  WriteFile(files.roots, roots);
}

TlsFiles TlsFilesIn(const std::string& folder, const std::string& name) {
  const std::string base = folder + "/" + name;
  return {.certificate = base + ".crt", .key = base + ".key", .roots = base + ".roots"};
}

}  // namespace refitd
