// A stranger's bytes to the host wire's listener under TLS, while an epoch is open. The first byte
// chooses what the stranger is:
//   0 without TLS: the input is all that it says;
//   1 an attacker between a daemon and the listener, who changes the daemon's side of a handshake:
//     4 bytes say where and how, the others are what is put there;
//   2 a holder of a good certificate without the epoch's token: the input is what it says under
//   TLS.
// The listener ends each connection, tells nobody a token, and the epoch works on (P4, P9, P10).
#include <dlfcn.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>

#include "tests/fuzz/one_in.h"
#include "tests/fuzz/stranger.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"
#include "transport/sockets/socket_wire.h"
#include "transport/sockets/tls_context.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

// A handshake's first flight of the listener has its certificate and little else.
constexpr size_t kMaxFlightBytes = 16 << 10;

WireCertificates MakeCertificates() {
  const TestAuthority root("fuzz");
  return [own = IssueCertificates(root, "spiffe://fuzz/daemon", root)] { return own; };
}

struct Pair : WirePair {
  explicit Pair(const WireCertificates& certificates = MakeCertificates())
      : WirePair({.certificates = certificates}), contexts(certificates) {}

  TlsContexts contexts;  // of strangers
};

// Returns the bytes that come next; empty at the end. The end must come by itself, not by the time
// limit.
std::string_view Hear(int fd, std::array<char, 4096>* buffer) {
  ssize_t n = 0;
  do {
    n = recv(fd, buffer->data(), buffer->size(), 0);
  } while (n < 0 && errno == EINTR);  // libFuzzer's alarm
  // EPIPE: a reset that came after the listener's orderly end.
  REFITD_CHECK(n >= 0 || errno == ECONNRESET || errno == EPIPE);
  return {buffer->data(), n > 0 ? static_cast<size_t>(n) : 0};
}

// Says no more, and hears the listener to its end.
void HearTheEnd(int fd) {
  shutdown(fd, SHUT_WR);
  std::array<char, 4096> buffer;
  size_t total = 0;
  for (std::string_view heard; !(heard = Hear(fd, &buffer)).empty();) total += heard.size();
  REFITD_CHECK(total <= kMaxFlightBytes);
}

void FuzzClear(const Pair& pair, std::string_view in) {
  const UniqueFd fd = Dial(pair.address);
  Say(fd.get(), in);
  HearTheEnd(fd.get());
}

// Changes the bytes that pass, once.
class Tamper {
 public:
  explicit Tamper(std::string_view in) {
    std::array<uint8_t, 4> head{};
    for (size_t i = 0; i < head.size() && i < in.size(); ++i) head[i] = static_cast<uint8_t>(in[i]);
    at_ = static_cast<size_t>(head[0]) << 8 | head[1];
    how_ = head[2] % 4;
    count_ = head[3];
    with_ = in.substr(std::min(in.size(), head.size()));
  }

  // True: the bytes were changed.
  bool Change(std::string* flight) {
    if (at_ >= flight->size()) {
      at_ -= flight->size();
      return false;
    }
    if (how_ == 0) flight->insert(at_, with_);
    if (how_ == 1) flight->erase(at_, count_);
    if (how_ == 2) flight->replace(at_, with_.size(), with_);
    if (how_ == 3) {
      for (size_t i = 0; i < with_.size() && at_ + i < flight->size(); ++i) {
        (*flight)[at_ + i] = static_cast<char>((*flight)[at_ + i] ^ with_[i]);
      }
    }
    return true;
  }

 private:
  size_t at_ = 0;
  int how_ = 0;
  size_t count_ = 0;
  std::string with_;
};

// A daemon's end of TLS, whose bytes this file carries.
struct Client {
  explicit Client(Pair& pair) : fd(Dial(pair.address)), ssl(*pair.contexts.Dial(fd.get())) {
    SSL_set_verify(ssl.get(), SSL_VERIFY_NONE, nullptr);  // strangers believe anything
    SSL_set0_rbio(ssl.get(), BIO_new(BIO_s_mem()));
    SSL_set0_wbio(ssl.get(), BIO_new(BIO_s_mem()));
  }

  std::string Flight() {
    std::string bytes(BIO_ctrl_pending(SSL_get_wbio(ssl.get())), '\0');
    if (!bytes.empty()) {
      BIO_read(SSL_get_wbio(ssl.get()), bytes.data(), static_cast<int>(bytes.size()));
    }
    return bytes;
  }
  // Gives what comes next to TLS. False: nothing more comes.
  bool Feed() {
    std::array<char, 4096> buffer;
    const std::string_view heard = Hear(fd.get(), &buffer);
    if (heard.empty()) return false;
    BIO_write(SSL_get_rbio(ssl.get()), heard.data(), static_cast<int>(heard.size()));
    return true;
  }

  UniqueFd fd;
  SslPtr ssl;
};

// Runs the handshake through `tamper`, which may be null. True: the client's end is through it.
bool Shake(Client* client, Tamper* tamper) {
  for (;;) {
    const bool done = SSL_do_handshake(client->ssl.get()) == 1;
    std::string flight = client->Flight();
    const bool changed = tamper != nullptr && tamper->Change(&flight);
    Say(client->fd.get(), flight);
    if (done) return true;
    if (changed || !client->Feed()) return false;
  }
}

void FuzzHandshake(Pair& pair, std::string_view in) {
  Client client(pair);
  Tamper tamper(in);
  Shake(&client, &tamper);
  HearTheEnd(client.fd.get());
}

void FuzzUnderTls(Pair& pair, std::string_view in) {
  Client client(pair);
  REFITD_CHECK(Shake(&client, nullptr));
  if (!in.empty()) {
    REFITD_CHECK(SSL_write(client.ssl.get(), in.data(), static_cast<int>(in.size())) > 0);
  }
  Say(client.fd.get(), client.Flight());
  shutdown(client.fd.get(), SHUT_WR);
  std::string heard;
  for (;;) {
    std::array<char, 256> plain;
    const int n = SSL_read(client.ssl.get(), plain.data(), plain.size());
    if (n > 0) heard.append(plain.data(), static_cast<size_t>(n));
    if (n <= 0 && !client.Feed()) break;
  }
  // No answer, or one that says nothing of an epoch or token.
  REFITD_CHECK(heard.empty() || heard.size() == kGreetingBytes);
  if (heard.empty()) return;
  GreetingBytes bytes;
  std::copy(heard.begin(), heard.end(), bytes.begin());
  const auto answer = DecodeGreeting(bytes);
  REFITD_CHECK(answer.has_value() && answer->kind == GreetingKind::kUnknown &&
               answer->token == WireToken{});
}

// The function of the library after this program, which with a sanitizer has its own.
template <typename F>
F* Next(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  REFITD_CHECK(found != nullptr);
  return reinterpret_cast<F*>(found);
}

}  // namespace
}  // namespace refitd

// libFuzzer calls it before all else. OpenSSL gets the C library's own allocator: OpenSSL's code
// has no checks of the address sanitizer, whose allocator takes a third of the time.
extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  static const auto allocate = refitd::Next<void*(size_t)>("malloc");
  static const auto resize = refitd::Next<void*(void*, size_t)>("realloc");
  static const auto release = refitd::Next<void(void*)>("free");
  REFITD_CHECK(CRYPTO_set_mem_functions(
                   [](size_t bytes, const char*, int) { return allocate(bytes); },
                   [](void* at, size_t bytes, const char*, int) { return resize(at, bytes); },
                   [](void* at, const char*, int) { release(at); }) == 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const pair = new refitd::Pair;
  if (size == 0) return 0;
  const std::string_view in(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      refitd::FuzzClear(*pair, in);
      break;
    case 1:
      refitd::FuzzHandshake(*pair, in);
      break;
    default:
      refitd::FuzzUnderTls(*pair, in);
      break;
  }
  ERR_clear_error();
  // An epoch that a stranger harmed would stay so.
  if (refitd::OneIn(16, in)) pair->CheckBroadcast();
  return 0;
}
