#include "transport/sockets/tls_context.h"

#include <openssl/err.h>
#include <openssl/pem.h>

#include "transport/base/status.h"

namespace refitd {
namespace {

// A record has at most 16 KiB; one read of the socket takes several. Strangers' connections have
// such buffers too, so they are not larger.
constexpr size_t kReadBytes = size_t{64} << 10;

BioPtr Open(const std::string& pem) {
  return BioPtr(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Says which certificates are sent behind this side's own in a handshake: those of its file, or, if
// there are none, those that lead from it to a root and stand among the roots. Left to itself,
// OpenSSL searches the latter anew in each handshake, verifies them, and sends the root too, which
// the other end then parses for nothing: a third of what a handshake costs either end.
void CompleteChain(SSL_CTX* context, bool in_file) {
  SSL_CTX_set_mode(context, SSL_MODE_NO_AUTO_CHAIN);
  if (in_file) return;
  // If no certificates lead from this side's certificate to a root, it is sent alone. The other end
  // then says why it refuses the certificate.
  SSL_CTX_build_cert_chain(context, SSL_BUILD_CHAIN_FLAG_IGNORE_ERROR |
                                        SSL_BUILD_CHAIN_FLAG_CLEAR_ERROR |
                                        SSL_BUILD_CHAIN_FLAG_NO_ROOT);
}

bool TakeCertificates(const Certificates& own, SSL_CTX* context) {
  const BioPtr chain = Open(own.certificate);
  const X509Ptr leaf(PEM_read_bio_X509(chain.get(), nullptr, nullptr, nullptr));
  if (leaf == nullptr || SSL_CTX_use_certificate(context, leaf.get()) != 1) return false;
  bool in_file = false;
  while (X509Ptr next{PEM_read_bio_X509(chain.get(), nullptr, nullptr, nullptr)}) {
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) return false;
    in_file = true;
  }
  const BioPtr key_text = Open(own.key);
  const KeyPtr key(PEM_read_bio_PrivateKey(key_text.get(), nullptr, nullptr, nullptr));
  if (key == nullptr || SSL_CTX_use_PrivateKey(context, key.get()) != 1) return false;
  const BioPtr roots = Open(own.roots);
  int count = 0;
  while (X509Ptr root{PEM_read_bio_X509(roots.get(), nullptr, nullptr, nullptr)}) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), root.get()) != 1) return false;
    ++count;
  }
  CompleteChain(context, in_file);
  ERR_clear_error();  // clears the errors that the ends of the texts left
  return count > 0;
}

absl::StatusOr<ContextPtr> ContextOf(const Certificates& own) {
  ContextPtr context(SSL_CTX_new(TLS_method()));
  REFITD_CHECK(context != nullptr);
  SSL_CTX* const raw = context.get();
  REFITD_CHECK(SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION) == 1);
  REFITD_CHECK(SSL_CTX_set_ciphersuites(raw, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384") == 1);
  // Without tickets a listener sends nothing that a dialler may leave unread when it closes.
  SSL_CTX_set_num_tickets(raw, 0);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(raw, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_ENABLE_KTLS);
  SSL_CTX_set_mode(raw, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_quiet_shutdown(raw, 1);
  SSL_CTX_set_read_ahead(raw, 1);
  SSL_CTX_set_default_read_buffer_len(raw, kReadBytes);
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  if (TakeCertificates(own, raw)) return context;
  ERR_clear_error();
  return absl::UnavailableError("OpenSSL does not take this daemon's certificates");
}

}  // namespace

absl::StatusOr<SslPtr> TlsContexts::Make(int fd, bool accept) {
  const std::shared_ptr<const Certificates> now = current_();
  SslPtr ssl;
  {
    MutexLock lock(&mutex_);
    if (now != used_) {
      REFITD_ASSIGN_OR_RETURN(context_, ContextOf(*now));
      used_ = now;
    }
    ssl.reset(SSL_new(context_.get()));
  }
  if (ssl == nullptr || SSL_set_fd(ssl.get(), fd) != 1) {
    ERR_clear_error();
    return absl::ResourceExhaustedError("OpenSSL has no memory for a connection");
  }
  if (accept) {
    SSL_set_accept_state(ssl.get());
  } else {
    SSL_set_connect_state(ssl.get());
  }
  return ssl;
}

}  // namespace refitd
