// One connection under TLS: many records go to the kernel in one call, and what OpenSSL makes by
// itself arrives too.
#include "transport/sockets/connection.h"

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>
#include <random>
#include <string>

#include "transport/base/status.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

WireCertificates MakeCertificates() {
  const TestAuthority root("test");
  return [own = IssueCertificates(root, "spiffe://test/daemon", root)] { return own; };
}

std::string RandomText(size_t bytes) {
  std::mt19937 random(20);
  std::string out(bytes, '\0');
  for (char& c : out) c = static_cast<char>(random());
  return out;
}

// Two ends after the handshake, and a road between them that goes by Carry alone.
struct Ends {
  Ends() : contexts(MakeCertificates()) {
    for (const bool accepts : {false, true}) {
      int fds[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
      auto ssl = accepts ? contexts.Accept(fds[0]) : contexts.Dial(fds[0]);
      REQUIRE(ssl.ok());
      (accepts ? listener : dialler) = Connection(UniqueFd(fds[0]), *std::move(ssl));
      (accepts ? from_listener : from_dialler) = UniqueFd(fds[1]);
    }
    bool done = false;
    for (int turns = 0; !done && turns < 10; ++turns) {
      const auto dialled = dialler.Handshake();
      Carry(from_dialler, from_listener);
      const auto accepted = listener.Handshake();
      Carry(from_listener, from_dialler);
      REQUIRE((dialled.ok() && accepted.ok()));
      done = *dialled && *accepted;
    }
    REQUIRE(done);
  }

  // Carries bytes that are there, so few that an empty socket takes them all. `flip`: which of them
  // is changed, -1: none. False: none are there.
  static bool Carry(const UniqueFd& from, const UniqueFd& to, int64_t flip = -1) {
    std::string bytes(32 << 10, '\0');
    const ssize_t n = recv(from.get(), bytes.data(), bytes.size(), 0);
    if (n <= 0) return false;
    if (flip >= 0) bytes[static_cast<size_t>(flip)] ^= 1;
    for (ssize_t done = 0; done < n;) {
      const ssize_t sent =
          send(to.get(), bytes.data() + done, static_cast<size_t>(n - done), MSG_NOSIGNAL);
      REQUIRE(sent > 0);
      done += sent;
    }
    return true;
  }

  // How many bytes wait to be carried.
  static size_t Waiting(const UniqueFd& from) {
    int bytes = 0;
    REQUIRE(ioctl(from.get(), FIONREAD, &bytes) == 0);
    return static_cast<size_t>(bytes);
  }

  TlsContexts contexts;
  UniqueFd from_dialler;
  UniqueFd from_listener;
  Connection dialler;
  Connection listener;
};

// Reads all that is there.
std::string ReadAll(Connection* connection) {
  std::string all;
  for (;;) {
    std::string bytes(1 << 20, '\0');
    const auto n = connection->Read(bytes.data(), static_cast<int64_t>(bytes.size()));
    REQUIRE(n.status() == absl::OkStatus());
    if (*n == 0) return all;
    all += bytes.substr(0, static_cast<size_t>(*n));
  }
}

TEST_CASE("a write under TLS tells its bytes when the kernel has all their records") {
  Ends ends;
  const std::string head = "a head of some bytes";
  const std::string body = RandomText(3 << 20);
  std::string heard;
  size_t told = 0;
  size_t most = 0;
  int waits = 0;
  while (told < head.size() + body.size()) {
    std::span<const char> next_head(head);
    std::span<const char> next_body(body);
    const size_t of_head = std::min(told, head.size());
    const auto n =
        ends.dialler.Write(next_head.subspan(of_head), next_body.subspan(told - of_head));
    REQUIRE(n.status() == absl::OkStatus());
    told += static_cast<size_t>(*n);
    most = std::max(most, static_cast<size_t>(*n));
    if (*n > 0) continue;
    ++waits;
    REQUIRE(waits < 1000);
    while (Ends::Carry(ends.from_dialler, ends.from_listener)) heard += ReadAll(&ends.listener);
  }
  while (Ends::Carry(ends.from_dialler, ends.from_listener)) heard += ReadAll(&ends.listener);
  CHECK((heard == head + body));
  CHECK(waits > 0);         // the socket was full, so writes ended in the middle of a batch
  CHECK(most > 2 * 16384);  // several records in one call
  CHECK(most <= static_cast<size_t>(kTlsBatchBytes) + 16384);
}

TEST_CASE("a key that has encrypted much is replaced, and the other end follows") {
  Ends ends;
  ends.dialler.SetKeyBytesForTest(1000);
  const std::string bytes = RandomText(500);
  for (int i = 0; i < 10; ++i) {
    REQUIRE(*ends.dialler.Write(bytes, {}) == 500);
    const size_t carried = Ends::Waiting(ends.from_dialler);
    // A record that tells of a new key goes before the bytes of every second write but the first.
    CHECK((carried > 500 + 22) == (i > 0 && i % 2 == 0));
    REQUIRE(Ends::Carry(ends.from_dialler, ends.from_listener));
    CHECK((ReadAll(&ends.listener) == bytes));
  }
}

TEST_CASE("the end that got a wrong byte tells the other end so") {
  Ends ends;
  REQUIRE(*ends.dialler.Write(std::string_view("some bytes"), {}) == 10);
  Ends::Carry(ends.from_dialler, ends.from_listener, 12);
  char byte = 0;
  CHECK(ends.listener.Read(&byte, 1).status().code() == StatusCode::kUnauthenticated);
  Ends::Carry(ends.from_listener, ends.from_dialler);
  const auto told = ends.dialler.Read(&byte, 1);
  CHECK(told.status().code() == StatusCode::kUnauthenticated);
  CHECK_THAT(Message(told.status()), Contains("bad record mac"));
}

}  // namespace
}  // namespace refitd
