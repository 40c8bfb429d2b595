// Owners of OpenSSL's objects. Each frees its object as OpenSSL asks.
#ifndef REFITD_TRANSPORT_TLS_OPENSSL_PTR_H_
#define REFITD_TRANSPORT_TLS_OPENSSL_PTR_H_

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>

namespace refitd {

// A deleter of std::unique_ptr that calls the C function `Free`.
template <auto Free>
struct Freer {
  template <typename T>
  void operator()(T* value) const {
    Free(value);
  }
};
using BioPtr = std::unique_ptr<BIO, Freer<BIO_free_all>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;
using X509Ptr = std::unique_ptr<X509, Freer<X509_free>>;
using NamesPtr = std::unique_ptr<GENERAL_NAMES, Freer<GENERAL_NAMES_free>>;
using ContextPtr = std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>>;
using SslPtr = std::unique_ptr<SSL, Freer<SSL_free>>;

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_OPENSSL_PTR_H_
