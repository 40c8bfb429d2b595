#include "transport/tls/resumption.h"

#include <openssl/crypto.h>
#include <openssl/ssl.h>

#include "transport/base/status.h"

namespace refitd {
namespace {

// OpenSSL calls it at the end of SSL_new, for each connection, whoever makes it.
void ConnectionMade(void* parent, void* /*value*/, CRYPTO_EX_DATA* /*data*/, int /*index*/,
                    long /*number*/, void* /*argument*/) {
  SSL_set_num_tickets(static_cast<SSL*>(parent), 0);
}

}  // namespace

void TurnOffTlsResumption() {
  REFITD_CHECK(CRYPTO_get_ex_new_index(CRYPTO_EX_INDEX_SSL, 0, nullptr, ConnectionMade, nullptr,
                                       nullptr) >= 0);
}

}  // namespace refitd
