#include "transport/tls/probe.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <string_view>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/tls/openssl_ptr.h"

namespace refitd {
namespace {

using absl::StatusCode;

// How long a server may take to refuse a certificate after the handshake.
constexpr Duration kRefusalLimit = std::chrono::milliseconds(500);
// How many connections must end after the handshake until that counts as a refusal.
constexpr int kProbesThatAgree = 2;
constexpr std::string_view kAlpn = "\x02h2";

using AddressesPtr = std::unique_ptr<addrinfo, Freer<freeaddrinfo>>;

BioPtr Open(const std::string& pem) {
  return BioPtr(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// The server's certificate as OpenSSL's callback saw it, which runs inside SSL_connect on the same
// thread; OpenSSL keeps no certificate that it refuses.
struct Shown {
  std::string identity;
  std::string why;  // the reason for refusing it; empty: it was not refused
};
thread_local Shown* shown = nullptr;

int Look(int good, X509_STORE_CTX* context) {
  if (shown == nullptr) return good;
  shown->identity = IdentityOfX509(X509_STORE_CTX_get0_cert(context));
  if (good == 0 && shown->why.empty()) {
    shown->why = X509_verify_cert_error_string(X509_STORE_CTX_get_error(context));
  }
  return good;
}

ContextPtr ContextOf(const Certificates& own) {
  ContextPtr context(SSL_CTX_new(TLS_client_method()));
  REFITD_CHECK(context != nullptr);
  SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  const BioPtr chain = Open(own.certificate);
  if (X509Ptr leaf(PEM_read_bio_X509(chain.get(), nullptr, nullptr, nullptr)); leaf != nullptr) {
    SSL_CTX_use_certificate(context.get(), leaf.get());
  }
  while (X509* next = PEM_read_bio_X509(chain.get(), nullptr, nullptr, nullptr)) {
    SSL_CTX_add0_chain_cert(context.get(), next);
  }
  const BioPtr key_text = Open(own.key);
  const KeyPtr key(PEM_read_bio_PrivateKey(key_text.get(), nullptr, nullptr, nullptr));
  if (key != nullptr) SSL_CTX_use_PrivateKey(context.get(), key.get());
  const BioPtr roots = Open(own.roots);
  while (X509Ptr root{PEM_read_bio_X509(roots.get(), nullptr, nullptr, nullptr)}) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context.get()), root.get());
  }
  ERR_clear_error();
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, Look);
  return context;
}

// False: `deadline` passed.
bool WaitFor(int fd, short events, TimePoint deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count(), INT_MAX)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

std::string HostOf(const std::string& address) {
  std::string host = address.substr(0, std::min(address.rfind(':'), address.size()));
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return host;
}

absl::StatusOr<UniqueFd> ConnectTo(const std::string& address, const std::string& host,
                                   TimePoint deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const std::string port = address.substr(address.rfind(':') + 1);
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list); error != 0) {
    return Error(StatusCode::kUnavailable, "{}: {}", address, gai_strerror(error));
  }
  const AddressesPtr addresses(list);
  int error = ETIMEDOUT;
  for (const addrinfo* next = list; next != nullptr; next = next->ai_next) {
    UniqueFd fd(socket(next->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) continue;
    if (connect(fd.get(), next->ai_addr, next->ai_addrlen) == 0) return fd;
    error = errno;
    if (error != EINPROGRESS) continue;
    error = ETIMEDOUT;
    if (!WaitFor(fd.get(), POLLOUT, deadline)) continue;
    socklen_t bytes = sizeof(error);
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error == 0) return fd;
  }
  return Error(StatusCode::kUnavailable, "{}: {}", address, std::strerror(error));
}

// While it lives, writes of this thread to a connection that the other side has closed fail and
// raise no SIGPIPE, which would end a trainer's or an engine's process.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    pending_before_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;
  ~NoSigpipe() {
    constexpr timespec kNow{0, 0};
    while (!pending_before_ && sigtimedwait(&sigpipe_, nullptr, &kNow) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t sigpipe_{};
  sigset_t before_{};
  bool pending_before_ = false;
};

// Repeats an operation of OpenSSL until it has ended, well or not. False: `deadline` passed.
template <typename Operation>
bool Repeat(SSL* ssl, int fd, TimePoint deadline, int* result, const Operation& operation) {
  for (;;) {
    ERR_clear_error();
    *result = operation();
    const int why = SSL_get_error(ssl, *result);
    if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) return true;
    if (!WaitFor(fd, why == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline)) return false;
  }
}

bool IsAddress(const std::string& host) {
  in6_addr any{};
  return inet_pton(AF_INET, host.c_str(), &any) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &any) == 1;
}

std::string HandshakeError() {
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = ERR_reason_error_string(error);
  return reason == nullptr ? "the connection broke" : reason;
}

// Whether this side takes the certificate that the server has shown. OK: it does. `pattern`: as
// `server_pattern` of ProbeTls.
absl::Status CheckShown(const Shown& server, const std::string& address, const std::string& host,
                        const std::string& pattern) {
  const std::string who =
      server.identity.empty() ? "somebody without a SPIFFE ID or DNS name" : server.identity;
  if (!server.why.empty()) {
    return Error(StatusCode::kUnauthenticated, "the certificate of {} at {} is refused here: {}{}",
                 who, address, server.why,
                 pattern.empty() ? fmt::format(" (it must be for {})", host) : "");
  }
  if (pattern.empty() || MatchesIdentity(pattern, server.identity)) return absl::OkStatus();
  return Error(StatusCode::kUnauthenticated, "{} is \"{}\", which does not match \"{}\"", address,
               server.identity, pattern);
}

// Describes a certificate, as in "spiffe://prod/a (signed by /CN=root, valid until Jan  1 00:00:00
// 2026 GMT)"
std::string Describe(const Certificates& own) {
  std::string who =
      own.identity.empty() ? "somebody without a SPIFFE ID or DNS name" : own.identity;
  const BioPtr text = Open(own.certificate);
  const X509Ptr leaf(PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr));
  const BioPtr until(BIO_new(BIO_s_mem()));
  if (leaf == nullptr || ASN1_TIME_print(until.get(), X509_get0_notAfter(leaf.get())) != 1) {
    return who;
  }
  char* data = nullptr;
  const long bytes = BIO_get_mem_data(until.get(), &data);
  std::array<char, 256> issuer{};
  X509_NAME_oneline(X509_get_issuer_name(leaf.get()), issuer.data(),
                    static_cast<int>(issuer.size()));
  return fmt::format("{} (signed by {}, valid until {})", who, issuer.data(),
                     std::string_view(data, static_cast<size_t>(bytes)));
}

}  // namespace

absl::Status ProbeTcp(const std::string& address, TimePoint deadline) {
  return ConnectTo(address, HostOf(address), deadline).status();
}

namespace {

// Makes one connection. `server_pattern`: as in ProbeTls. `closed`: the server ended the connection
// after the handshake.
absl::Status ProbeOnce(const std::string& address, const Certificates& own,
                       const std::string& server_pattern, TimePoint deadline, bool* closed) {
  const std::string host = HostOf(address);
  REFITD_ASSIGN_OR_RETURN(const UniqueFd fd, ConnectTo(address, host, deadline));
  const ContextPtr context = ContextOf(own);
  const SslPtr ssl(SSL_new(context.get()));
  REFITD_CHECK(ssl != nullptr && SSL_set_fd(ssl.get(), fd.get()) == 1);
  SSL_set_alpn_protos(ssl.get(), reinterpret_cast<const unsigned char*>(kAlpn.data()),
                      static_cast<unsigned>(kAlpn.size()));
  if (server_pattern.empty()) {
    if (IsAddress(host)) {
      X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host.c_str());
    } else {
      SSL_set1_host(ssl.get(), host.c_str());
      SSL_set_tlsext_host_name(ssl.get(), host.c_str());
    }
  }
  Shown server_side;
  shown = &server_side;
  int result = 0;
  const bool ended =
      Repeat(ssl.get(), fd.get(), deadline, &result, [&] { return SSL_connect(ssl.get()); });
  shown = nullptr;
  if (!ended) {
    return Error(StatusCode::kUnavailable, "{}: the TLS handshake did not end in time", address);
  }
  const std::string broken = result == 1 ? "" : HandshakeError();
  REFITD_RETURN_IF_ERROR(CheckShown(server_side, address, host, server_pattern));
  if (result != 1) {
    return Error(StatusCode::kUnavailable, "the TLS handshake with {} failed: {}", address, broken);
  }
  char byte = 0;
  const TimePoint limit = std::min(deadline, std::chrono::steady_clock::now() + kRefusalLimit);
  const bool ended_in_time =
      Repeat(ssl.get(), fd.get(), limit, &result, [&] { return SSL_read(ssl.get(), &byte, 1); });
  ERR_clear_error();
  *closed = ended_in_time && result != 1;
  return absl::OkStatus();
}

}  // namespace

absl::Status ProbeTls(const std::string& address, const Certificates& own,
                      const std::string& server_pattern, TimePoint deadline) {
  const NoSigpipe no_sigpipe;
  // A server also closes connections because it ends, or is out of descriptors. A refusal comes
  // again.
  for (int i = 0; i < kProbesThatAgree; ++i) {
    bool closed = false;
    REFITD_RETURN_IF_ERROR(ProbeOnce(address, own, server_pattern, deadline, &closed));
    if (!closed) return absl::OkStatus();
  }
  return Error(StatusCode::kUnauthenticated,
               "{} closed the connection after the handshake, as it does when it refuses a "
               "certificate: that of {}; its log says why",
               address, Describe(own));
}

}  // namespace refitd
