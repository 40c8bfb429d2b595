#include "transport/tls/refusals.h"

#include <openssl/crypto.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>

#include <array>
#include <utility>

#include "transport/base/status.h"
#include "transport/tls/certificates.h"

namespace refitd {
namespace {

// Called when the context of a verification is destroyed; its result and its certificate are still
// there. OpenSSL verifies the chain of this process's own certificate too; such a context has no
// other certificates, and is passed over.
void ContextGone(void* parent, void* /*value*/, CRYPTO_EX_DATA* /*data*/, int /*index*/,
                 long /*number*/, void* observer) {
  auto* context = static_cast<X509_STORE_CTX*>(parent);
  const int error = X509_STORE_CTX_get_error(context);
  const X509* certificate = X509_STORE_CTX_get0_cert(context);
  if (error == X509_V_OK || certificate == nullptr ||
      X509_STORE_CTX_get0_untrusted(context) == nullptr) {
    return;
  }
  std::array<char, 256> issuer{};
  X509_NAME_oneline(X509_get_issuer_name(certificate), issuer.data(),
                    static_cast<int>(issuer.size()));
  (*static_cast<const RefusalObserver*>(observer))(IdentityOfX509(certificate), issuer.data(),
                                                   X509_verify_cert_error_string(error));
}

}  // namespace

void ObserveTlsRefusals(RefusalObserver observer) {
  // Lives as long as the process, since OpenSSL may call it until the end.
  auto* kept = new RefusalObserver(std::move(observer));
  REFITD_CHECK(CRYPTO_get_ex_new_index(CRYPTO_EX_INDEX_X509_STORE_CTX, 0, kept, nullptr, nullptr,
                                       ContextGone) >= 0);
}

}  // namespace refitd
