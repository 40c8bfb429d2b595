// A stranger's bytes to the host wire's listener under TLS, while a communicator is open. The first
// byte chooses what the stranger is:
//   0 without TLS: the input is all that it says;
//   1 an attacker between a daemon and the listener, who changes the daemon's side of a handshake:
//     4 bytes say where and how, the others are what is put there;
//   2 a holder of a good certificate without the communicator's token: the input is what it says
//   under TLS.
// The listener ends each connection, tells nobody a token, and the communicator works on (P4, P9,
// P10).
#include <dlfcn.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tests/fuzz/bare_tls_client.h"
#include "tests/fuzz/one_in.h"
#include "tests/fuzz/stranger.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"
#include "transport/sockets/socket_wire.h"
#include "transport/sockets/tls_context.h"
#include "transport/tls/certificates.h"
#include "transport/tls/openssl_ptr.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

// A handshake's first flight of the listener has its certificate and little else.
constexpr size_t kMaxFlightBytes = 16 << 10;

// Returns certificates that outlast a run of many hours.
std::shared_ptr<const Certificates> MakeCertificates() {
  const TestAuthority root("fuzz");
  return IssueCertificates(root, "spiffe://fuzz/daemon", root, 20 * 3600);
}

// Returns the record with which a daemon that has these certificates begins a connection.
std::string HelloOf(const std::shared_ptr<const Certificates>& own) {
  TlsContexts contexts([own] { return own; });
  const SslPtr ssl = *contexts.Dial(-1);
  SSL_set0_rbio(ssl.get(), BIO_new(BIO_s_mem()));
  SSL_set0_wbio(ssl.get(), BIO_new(BIO_s_mem()));
  REFITD_CHECK(SSL_do_handshake(ssl.get()) < 0);
  std::string hello(BIO_ctrl_pending(SSL_get_wbio(ssl.get())), '\0');
  REFITD_CHECK(BIO_read(SSL_get_wbio(ssl.get()), hello.data(), static_cast<int>(hello.size())) > 0);
  return hello;
}

struct Pair : WirePair {
  explicit Pair(const std::shared_ptr<const Certificates>& own = MakeCertificates())
      : WirePair({.certificates = [own] { return own; }}), stranger(HelloOf(own), *own) {}

  const BareTlsIdentity stranger;  // has the same certificate
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

// Runs the handshake through `tamper`, which may be null. True: the client's end is through it.
bool Shake(int fd, BareTlsClient* client, Tamper* tamper) {
  const auto say = [&](std::string flight) {
    const bool changed = tamper != nullptr && tamper->Change(&flight);
    Say(fd, flight);
    return !changed;
  };
  if (!say(client->FirstFlight())) return false;
  std::array<char, 4096> buffer;
  for (;;) {
    const std::string_view heard = Hear(fd, &buffer);
    if (heard.empty()) return false;
    const std::string flight = client->TakeFlight(heard);
    if (!flight.empty()) return say(flight);
  }
}

void FuzzHandshake(const Pair& pair, std::string_view in) {
  const UniqueFd fd = Dial(pair.address);
  BareTlsClient client(&pair.stranger);
  Tamper tamper(in);
  Shake(fd.get(), &client, &tamper);
  HearTheEnd(fd.get());
}

// Says `in` under TLS. Returns what the listener answers, under TLS, until it ends the connection.
std::string AskUnderTls(const Pair& pair, std::string_view in) {
  const UniqueFd fd = Dial(pair.address);
  BareTlsClient client(&pair.stranger);
  REFITD_CHECK(Shake(fd.get(), &client, nullptr));
  if (!in.empty()) Say(fd.get(), client.Encrypt(in));
  shutdown(fd.get(), SHUT_WR);
  std::string answer;
  std::array<char, 4096> buffer;
  for (std::string_view heard; !(heard = Hear(fd.get(), &buffer)).empty();) {
    answer += client.Decrypt(heard);
  }
  return answer;
}

// True: `in` is a whole hello, which the listener answers.
bool IsHello(std::string_view in) {
  if (in.size() != kGreetingBytes) return false;
  GreetingBytes bytes;
  std::copy(in.begin(), in.end(), bytes.begin());
  const auto greeting = DecodeGreeting(bytes);
  return greeting.has_value() && greeting->kind == GreetingKind::kHello;
}

void FuzzUnderTls(const Pair& pair, std::string_view in) {
  const std::string answer = AskUnderTls(pair, in);
  // No answer, or one that says nothing of a communicator or token. A hello is answered: whoever
  // has a certificate is heard.
  REFITD_CHECK(answer.empty() ? !IsHello(in) : answer.size() == kGreetingBytes);
  if (answer.empty()) return;
  GreetingBytes bytes;
  std::copy(answer.begin(), answer.end(), bytes.begin());
  const auto greeting = DecodeGreeting(bytes);
  REFITD_CHECK(greeting.has_value() && greeting->kind == GreetingKind::kUnknown &&
               greeting->token == WireToken{});
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
  // A communicator that a stranger harmed would stay so.
  if (refitd::OneIn(16, in)) pair->CheckBroadcast();
  return 0;
}
