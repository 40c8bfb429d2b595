#include "daemon/sockets/tls_guard.h"

#include <dlfcn.h>
#include <openssl/crypto.h>
#include <openssl/ssl.h>

#include <string_view>

#include "daemon/sockets/connection_guard.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

int place = -1;  // of a connection's number beside OpenSSL's own data; constant after GuardTls
thread_local ConnectionLedger::Id beginning = 0;

// OpenSSL calls it at the end of SSL_new, for each connection, whoever makes it.
void ConnectionMade(void* /*parent*/, void* /*value*/, CRYPTO_EX_DATA* data, int index,
                    long /*number*/, void* /*argument*/) {
  static_assert(sizeof(void*) >= sizeof(ConnectionLedger::Id));
  if (beginning != 0) CRYPTO_set_ex_data(data, index, reinterpret_cast<void*>(beginning));
}

using Read = int(SSL*, void*, int);
Read* OpenSslRead() {
  static auto* const found = reinterpret_cast<Read*>(dlsym(RTLD_NEXT, "SSL_read"));
  REFITD_CHECK(found != nullptr);
  return found;
}

bool Taken(SSL* connection, std::string_view bytes) {
  if (place < 0) return true;
  const auto id = reinterpret_cast<ConnectionLedger::Id>(SSL_get_ex_data(connection, place));
  return id == 0 || ConnectionGuard::TakeDecrypted(id, bytes);
}

}  // namespace

void GuardTls() {
  REFITD_CHECK(place < 0);
  place =
      CRYPTO_get_ex_new_index(CRYPTO_EX_INDEX_SSL, 0, nullptr, ConnectionMade, nullptr, nullptr);
  REFITD_CHECK(place >= 0);
}

TlsBeginning::TlsBeginning(int fd) { beginning = ConnectionGuard::IdOf(fd); }
TlsBeginning::~TlsBeginning() { beginning = 0; }

}  // namespace refitd

// Takes the place of OpenSSL's for all code of the process but OpenSSL's own. gRPC and this project
// end a connection whose read fails, whatever SSL_get_error makes of it.
extern "C" __attribute__((visibility("default"))) int SSL_read(SSL* ssl, void* buffer, int size) {
  const int read = refitd::OpenSslRead()(ssl, buffer, size);
  if (read <= 0) return read;
  const std::string_view bytes(static_cast<const char*>(buffer), static_cast<size_t>(read));
  return refitd::Taken(ssl, bytes) ? read : -1;
}
