// The common cases under TLS with several connections between two ranks, each with a thread of its
// own; and lanes that fail.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "transport/sockets/socket_wire.h"
#include "transport/sockets/testing.h"
#include "transport/tls/test_certificates.h"
#include "transport/wire_testing.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

constexpr int kStreams = 3;

WireCertificates Daemon() {
  static const WireCertificates daemon = [] {
    const TestAuthority root("root");
    const auto own = IssueCertificates(root, "spiffe://test/daemon", root);
    return WireCertificates([own] { return own; });
  }();
  return daemon;
}

absl::StatusOr<std::unique_ptr<Wire>> WireOf(int streams) {
  return MakeSocketWire({.streams = streams, .certificates = Daemon()});
}

}  // namespace

const TestedWire& Tested() {
  static const TestedWire sockets{[] { return WireOf(kStreams); }};
  return sockets;
}

namespace {

// Passes bytes between each connection to the proxy and `target`. Of one connection it passes only
// `limit` bytes, and then cuts it, or passes no more until an end closes it.
class Proxy {
 public:
  enum class End { kCut, kStall };
  Proxy(const SocketAddress& target, End end, int64_t limit)
      : target_(target), end_(end), limit_(limit) {
    listener_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socklen_t length = 0;
    sockaddr_storage local = target_.host.Sockaddr(0, &length);
    REQUIRE(bind(listener_.get(), reinterpret_cast<sockaddr*>(&local), length) == 0);
    REQUIRE(listen(listener_.get(), 8) == 0);
    REQUIRE(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0);
    port_ = ntohs(reinterpret_cast<sockaddr_in&>(local).sin_port);
    accepting_ = std::thread([this] { Run(); });
  }
  ~Proxy() {
    stop_ = true;
    accepting_.join();
    for (std::thread& thread : passing_) thread.join();
  }
  uint16_t port() const { return port_; }
  // Whether the one connection has reached its limit.
  bool ended() const { return ended_; }

 private:
  void Run() {
    while (!stop_) {
      pollfd entry{listener_.get(), POLLIN, 0};
      if (poll(&entry, 1, 10) <= 0) continue;
      auto near =
          std::make_shared<UniqueFd>(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      auto far = std::make_shared<UniqueFd>(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      socklen_t length = 0;
      const sockaddr_storage to = target_.host.Sockaddr(target_.port, &length);
      if (connect(far->get(), reinterpret_cast<const sockaddr*>(&to), length) != 0) continue;
      // The second connection is the one that ends.
      const bool chosen = passing_.size() == 1;
      passing_.emplace_back([this, near, far, chosen] {
        Pass(near->get(), far->get(), chosen);
        near->Reset();
        far->Reset();
      });
    }
  }

  void Pass(int near, int far, bool chosen) {
    int64_t passed = 0;
    std::string bytes(65536, '\0');
    while (!stop_) {
      if (chosen && passed >= limit_) {
        ended_ = true;
        pollfd closed[2] = {{near, POLLRDHUP, 0}, {far, POLLRDHUP, 0}};
        if (end_ == End::kCut || poll(closed, 2, 10) > 0) return;
        continue;
      }
      pollfd entries[2] = {{near, POLLIN, 0}, {far, POLLIN, 0}};
      if (poll(entries, 2, 10) <= 0) continue;
      for (int from = 0; from < 2; ++from) {
        if (entries[from].revents == 0) continue;
        const ssize_t n = recv(entries[from].fd, bytes.data(), bytes.size(), 0);
        if (n <= 0) return;
        passed += n;
        if (!Forward(entries[1 - from].fd, std::string_view(bytes).substr(0, n))) return;
      }
    }
  }

  // Gives up when the test ends.
  bool Forward(int to, std::string_view bytes) const {
    while (!bytes.empty() && !stop_) {
      const ssize_t n = send(to, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        bytes.remove_prefix(n);
      } else if (errno != EAGAIN) {
        return false;
      } else {
        pollfd entry{to, POLLOUT, 0};
        poll(&entry, 1, 10);
      }
    }
    return bytes.empty();
  }

  const SocketAddress target_;
  const End end_;
  const int64_t limit_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<bool> ended_{false};
  std::vector<std::thread> passing_;  // used by accepting_ until that has ended
  std::thread accepting_;
};

constexpr size_t kBytes = size_t{24} << 20;
constexpr int64_t kCutAfter = int64_t{2} << 20;  // of the 8 MiB of one of three streams

// Connects both ranks; rank 0 reaches rank 1 through the proxy.
std::unique_ptr<Proxy> ConnectThrough(Mesh& mesh, Proxy::End end) {
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  SocketAddress detour = Decode(addresses[1], kCommunicator, 1, 2);
  auto proxy = std::make_unique<Proxy>(detour, end, kCutAfter);
  detour.port = proxy->port();
  std::vector<Result> results(2);
  mesh.wires[0]->Connect(kCommunicator, {addresses[0], EncodeSocketAddress(detour)}, kLong,
                         Into(&results[0]));
  mesh.wires[1]->Connect(kCommunicator, addresses, kLong, Into(&results[1]));
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  return proxy;
}

TEST_CASE("a cut connection of one stream fails all lanes of both ranks, and names the peer") {
  const int root = GENERATE(0, 1);
  Mesh mesh(2);
  const auto proxy = ConnectThrough(mesh, Proxy::End::kCut);
  std::vector<std::vector<char>> memory(2, std::vector<char>(kBytes, 'a'));
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Submit(Broadcast(kCommunicator, 1, root, Span(memory[rank])),
                             Into(&results[rank]));
  }
  for (int rank = 0; rank < 2; ++rank) {
    const absl::Status status = Get(results[rank]);
    CHECK(status.code() == StatusCode::kUnavailable);
    CHECK_THAT(Message(status), Contains("connection to rank " + std::to_string(1 - rank)));
  }
  CHECK(proxy->ended());
}

TEST_CASE("a stream that stalls ends by the deadline, and the peer is named") {
  Mesh mesh(2);
  const auto proxy = ConnectThrough(mesh, Proxy::End::kStall);
  std::vector<std::vector<char>> memory(2, std::vector<char>(kBytes, 'a'));
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Submit(
        Broadcast(kCommunicator, 1, 0, Span(memory[rank]), rank == 0 ? kLong : kMedium),
        Into(&results[rank]));
  }
  const absl::Status overdue = Get(results[1]);
  CHECK(overdue.code() == StatusCode::kDeadlineExceeded);
  CHECK_THAT(Message(overdue), Contains("rank 0"));
  const absl::Status victim = Get(results[0]);
  CHECK(victim.code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(victim), Contains("rank 1"));
}

TEST_CASE("Close while one stream stalls ends every lane and lets go of the memory") {
  Mesh mesh(2);
  const auto proxy = ConnectThrough(mesh, Proxy::End::kStall);
  std::vector<std::vector<char>> memory(2, std::vector<char>(kBytes, 'a'));
  std::vector<std::shared_ptr<int>> alive;
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    alive.push_back(std::make_shared<int>(0));
    MemorySpan span = Span(memory[rank]);
    span.keep_alive = alive.back();
    mesh.wires[rank]->Submit(Broadcast(kCommunicator, 1, 0, std::move(span)), Into(&results[rank]));
  }
  REQUIRE(Until([&] { return proxy->ended(); }));
  mesh.wires[1]->Close(kCommunicator);
  CHECK(Get(results[1]).code() == StatusCode::kCancelled);
  CHECK(alive[1].use_count() == 1);
  const absl::Status victim = Get(results[0]);
  CHECK(victim.code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(victim), Contains("rank 1"));
  CHECK(alive[0].use_count() == 1);
}

TEST_CASE("a peer that wants one connection gets one") {
  Mesh mesh(0);
  for (const int streams : {kStreams, 1, 8}) {
    auto wire = WireOf(streams);
    REQUIRE(wire.status() == absl::OkStatus());
    mesh.wires.push_back(*std::move(wire));
  }
  mesh.Connect(kCommunicator);
  const std::vector<char> expected = RandomBytes(5 << 20, kSeed);
  std::vector<std::vector<char>> memory(3, std::vector<char>(expected.size()));
  memory[1] = expected;
  std::vector<Result> results(3);
  for (int rank = 0; rank < 3; ++rank) {
    mesh.wires[rank]->Submit(Broadcast(kCommunicator, 1, 1, Span(memory[rank])),
                             Into(&results[rank]));
  }
  for (Result& result : results) CHECK(Get(result) == absl::OkStatus());
  for (const auto& bytes : memory) CHECK((bytes == expected));
}

}  // namespace
}  // namespace refitd
