// These tests count the certificates that each end of a handshake sends, and how often a handshake
// verifies any.
#include "transport/sockets/tls_context.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>

#include "transport/base/unique_fd.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

const TestAuthority& Root() {
  static const TestAuthority root("root");
  return root;
}

// An authority below the root.
const TestAuthority& Middle() {
  static const TestAuthority middle("middle", &Root());
  return middle;
}

// Returns the files of a daemon whose certificate `signer` issued. `chain` follows the certificate
// in its file.
WireCertificates Daemon(const TestAuthority& signer, const std::string& chain,
                        const std::string& roots) {
  auto own =
      std::make_shared<Certificates>(*IssueCertificates(signer, "spiffe://test/daemon", Root()));
  own->certificate += chain;
  own->roots = roots;
  return [own] { return own; };
}

// This counts the verifications of a certificate that this process has begun.
std::atomic<int> verifications{0};

void CountVerifications() {
  static const int index = CRYPTO_get_ex_new_index(
      CRYPTO_EX_INDEX_X509_STORE_CTX, 0, nullptr,
      [](void*, void*, CRYPTO_EX_DATA*, int, long, void*) { ++verifications; }, nullptr, nullptr);
  REQUIRE(index >= 0);
}

// A connection whose handshake has ended at both ends.
struct Ends {
  Ends(TlsContexts& dials, TlsContexts& accepts) {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    sockets[0].Reset(fds[0]);
    sockets[1].Reset(fds[1]);
    auto dialling = dials.Dial(fds[0]);
    auto accepting = accepts.Accept(fds[1]);
    REQUIRE((dialling.ok() && accepting.ok()));
    dialler = *std::move(dialling);
    listener = *std::move(accepting);
    bool dialled = false;
    bool accepted = false;
    for (int turn = 0; turn < 10 && !(dialled && accepted); ++turn) {
      dialled = SSL_do_handshake(dialler.get()) == 1;
      accepted = SSL_do_handshake(listener.get()) == 1;
    }
    done = dialled && accepted;
    ERR_clear_error();
  }

  // How many certificates the listener sent, and the dialler.
  std::pair<int, int> Sent() const {
    const auto count = [](SSL* ssl) {
      const STACK_OF(X509)* const chain = SSL_get_peer_cert_chain(ssl);
      return chain == nullptr ? 0 : sk_X509_num(chain);
    };
    // OpenSSL leaves a dialler's own certificate out of the listener's list.
    return {count(dialler.get()), count(listener.get()) + 1};
  }

  UniqueFd sockets[2];
  SslPtr dialler;
  SslPtr listener;
  bool done = false;
};

TEST_CASE("a handshake verifies each end's certificate once, and no root goes along") {
  CountVerifications();
  TlsContexts daemon(Daemon(Root(), "", Root().root()));
  REQUIRE(Ends(daemon, daemon).done);  // makes OpenSSL's context
  const int before = verifications;
  const Ends ends(daemon, daemon);
  REQUIRE(ends.done);
  CHECK(verifications - before == 2);
  CHECK(ends.Sent() == std::pair(1, 1));
}

TEST_CASE("an authority below the root goes along, whether it stands in the file or with roots") {
  TlsContexts in_file(Daemon(Middle(), Middle().root(), Root().root()));
  TlsContexts with_roots(Daemon(Middle(), "", Root().root() + Middle().root()));
  const Ends ends(in_file, with_roots);  // in_file's end trusts the root alone
  REQUIRE(ends.done);
  CHECK(ends.Sent() == std::pair(2, 2));
}

TEST_CASE("a certificate that leads to no root of its holder's goes alone, and may be trusted") {
  const TestAuthority other("other");
  TlsContexts holder(Daemon(other, "", Root().root()));
  TlsContexts friendly(Daemon(Root(), "", other.root()));
  TlsContexts strict(Daemon(Root(), "", Root().root()));
  const Ends ends(holder, friendly);
  REQUIRE(ends.done);
  CHECK(ends.Sent() == std::pair(1, 1));
  CHECK_FALSE(Ends(holder, strict).done);
}

}  // namespace
}  // namespace refitd
