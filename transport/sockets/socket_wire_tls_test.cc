// The common cases under TLS; who is let in; and a proxy that tampers.
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "transport/sockets/listener.h"
#include "transport/sockets/socket_wire.h"
#include "transport/sockets/testing.h"
#include "transport/tls/test_certificates.h"
#include "transport/wire_testing.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

const TestAuthority& Root() {
  static const TestAuthority root("root");
  return root;
}

WireCertificates CertificatesOf(const TestAuthority& signer, const std::string& identity) {
  return [own = IssueCertificates(signer, identity, Root())] { return own; };
}

WireCertificates Daemon() {
  static const WireCertificates daemon = CertificatesOf(Root(), "spiffe://test/daemon");
  return daemon;
}

std::unique_ptr<Wire> WireWith(SocketWireOptions options) {
  auto wire = MakeSocketWire(std::move(options));
  REQUIRE(wire.status() == absl::OkStatus());
  return *std::move(wire);
}

}  // namespace

const TestedWire& Tested() {
  static const TestedWire sockets{[] { return MakeSocketWire({.certificates = Daemon()}); }};
  return sockets;
}

namespace {

// Runs Connect of two wires; returns their statuses by rank.
std::vector<absl::Status> ConnectPair(Mesh& mesh, Duration timeout) {
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  std::vector<Result> results(2);
  std::vector<absl::Status> statuses(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Connect(kCommunicator, addresses, timeout, Into(&results[rank]));
  }
  for (int rank = 0; rank < 2; ++rank) statuses[rank] = Get(results[rank]);
  return statuses;
}

TEST_CASE("a rank whose certificate another root signed is refused, and told why") {
  const TestAuthority other("other");
  const int stranger = GENERATE(0, 1);
  Mesh mesh(0);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires.push_back(WireWith(
        {.certificates = CertificatesOf(rank == stranger ? other : Root(), "spiffe://test/a")}));
  }
  // The lower rank dials and learns the reason; the other waits in vain.
  const std::vector<absl::Status> statuses = ConnectPair(mesh, kMedium);
  CHECK(statuses[0].code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(statuses[0]), Contains("rank 1") && Contains("TLS"));
  CHECK_THAT(Message(statuses[1]), Contains("rank 0"));
}

// A certificate of `identity` that was valid until ten seconds ago, and that its holder did not
// look at.
WireCertificates Expired(const std::string& identity) {
  const IssuedCertificate issued =
      Root().Issue({.uris = {identity}, .from_seconds = -100, .until_seconds = -10});
  auto own = std::make_shared<Certificates>();
  own->certificate = issued.certificate;
  own->key = issued.key;
  own->roots = Root().root();
  own->identity = identity;
  return [own] { return own; };
}

TEST_CASE("a rank whose certificate has expired is refused, and told why") {
  const int late = GENERATE(0, 1);
  Mesh mesh(0);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires.push_back(
        WireWith({.certificates = rank == late ? Expired("spiffe://test/a") : Daemon()}));
  }
  const std::vector<absl::Status> statuses = ConnectPair(mesh, kMedium);
  CHECK(statuses[0].code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(statuses[0]), Contains("rank 1") && Contains("expired"));
  CHECK_THAT(Message(statuses[1]), Contains("rank 0"));
}

TEST_CASE("a root that is removed lets nobody connect a communicator any more") {
  const TestAuthority leaving("leaving");
  struct Trusted {
    std::mutex mutex;
    std::shared_ptr<const Certificates> now;
  };
  const auto trusted = std::make_shared<Trusted>();
  const std::shared_ptr<const Certificates> own =
      IssueCertificates(Root(), "spiffe://test/a", Root());
  auto both = std::make_shared<Certificates>(*own);
  both->roots += leaving.root();
  trusted->now = both;
  Mesh mesh(0);
  mesh.wires.push_back(WireWith({.certificates = CertificatesOf(leaving, "spiffe://test/b")}));
  mesh.wires.push_back(WireWith({.certificates = [trusted] {
    const std::lock_guard<std::mutex> lock(trusted->mutex);
    return trusted->now;
  }}));
  for (const absl::Status& status : ConnectPair(mesh, kLong)) REQUIRE(status == absl::OkStatus());
  for (const auto& wire : mesh.wires) wire->Close(kCommunicator);
  {
    const std::lock_guard<std::mutex> lock(trusted->mutex);
    trusted->now = own;
  }
  const std::vector<absl::Status> statuses = ConnectPair(mesh, kMedium);
  CHECK(statuses[0].code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(statuses[0]), Contains("rank 1") && Contains("TLS"));
  CHECK_THAT(Message(statuses[1]), Contains("rank 0"));
}

TEST_CASE("a rank must have the identity that its address names, and match the pattern") {
  Mesh mesh(0);
  mesh.wires.push_back(WireWith({.certificates = CertificatesOf(Root(), "spiffe://test/a")}));
  mesh.wires.push_back(WireWith({.certificates = CertificatesOf(Root(), "spiffe://test/b")}));
  SECTION("the pattern matches neither") {
    mesh.wires[0] = WireWith({.certificates = CertificatesOf(Root(), "spiffe://test/a"),
                              .identities = "spiffe://test/c"});
    const std::vector<absl::Status> statuses = ConnectPair(mesh, kMedium);
    CHECK(statuses[0].code() == StatusCode::kUnavailable);
    CHECK_THAT(Message(statuses[0]), Contains("\"spiffe://test/b\", which does not match"));
  }
  SECTION("the address names another") {
    std::vector<std::string> addresses = mesh.Open(kCommunicator);
    SocketAddress other = Decode(addresses[1], kCommunicator, 1, 2);
    CHECK(other.identity == "spiffe://test/b");
    other.identity = "spiffe://test/c";
    Result result;
    mesh.wires[0]->Connect(kCommunicator, {addresses[0], EncodeSocketAddress(other)}, kLong,
                           Into(&result));
    const absl::Status status = Get(result);
    CHECK(status.code() == StatusCode::kUnavailable);
    CHECK_THAT(Message(status), Contains("rank 1") && Contains("it is \"spiffe://test/b\""));
  }
  SECTION("the listening rank expects another") {
    std::vector<std::string> addresses = mesh.Open(kCommunicator);
    SocketAddress other = Decode(addresses[0], kCommunicator, 0, 2);
    other.identity = "spiffe://test/c";
    std::vector<Result> results(2);
    mesh.wires[0]->Connect(kCommunicator, addresses, kMedium, Into(&results[0]));
    mesh.wires[1]->Connect(kCommunicator, {EncodeSocketAddress(other), addresses[1]}, kMedium,
                           Into(&results[1]));
    for (Result& result : results) CHECK(Get(result).code() == StatusCode::kDeadlineExceeded);
  }
}

TEST_CASE("a rank that encrypts and one that does not refuse each other") {
  Mesh mesh(0);
  mesh.wires.push_back(WireWith({.certificates = Daemon()}));
  mesh.wires.push_back(WireWith({}));
  for (const absl::Status& status : ConnectPair(mesh, kLong)) {
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK_THAT(Message(status), Contains("encrypt"));
  }
}

TEST_CASE(
    "half a handshake, a hello in the clear, and a token without a certificate get nobody in") {
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  const SocketAddress address = Decode(addresses[1], kCommunicator, 1, 2);
  std::vector<UniqueFd> kept;
  kept.push_back(DialByHand(address));
  REQUIRE(Say(kept.back().get(), std::string("\x16\x03\x01\x02\x00\x01", 6)));
  kept.push_back(DialByHand(address));
  REQUIRE(Say(kept.back().get(), View(EncodeGreeting(HelloTo(address, 0)))));
  const std::string answer = Listen(kept.back().get(), 100);  // an alert at most, then the end
  CHECK(answer.size() < kGreetingBytes);
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Connect(kCommunicator, addresses, kLong, Into(&results[rank]));
  }
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
}

// ---- a proxy that tampers ----

enum class Tamper { kNothing, kFlip, kDrop, kReplay, kTruncate, kReorder };

// The TLS records of the direction in which a proxy truncates or reorders.
struct Records {
  std::string partial;  // the start of a record whose end has not arrived
  std::string held;     // the record that goes after the next one
  int64_t start = 0;    // bytes of the records before `partial`
  bool ended = false;
};

// Passes bytes between each connection to the proxy and `target`, and tampers with the bytes from
// `offset` on in one direction. kTruncate ends the direction before the TLS record that holds
// `offset`, kReorder passes that record after the next: both keep every record whole, so that only
// what TLS says about their order and end can tell. Handles one connection at a time.
class Proxy {
 public:
  Proxy(SocketAddress target, Tamper tamper, bool answers, int64_t offset)
      : target_(std::move(target)), tamper_(tamper), answers_(answers), offset_(offset) {
    listener_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socklen_t length = 0;
    sockaddr_storage local = target_.host.Sockaddr(0, &length);
    REQUIRE(bind(listener_.get(), reinterpret_cast<sockaddr*>(&local), length) == 0);
    REQUIRE(listen(listener_.get(), 8) == 0);
    REQUIRE(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0);
    port_ = ntohs(reinterpret_cast<sockaddr_in&>(local).sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Proxy() {
    stop_ = true;
    thread_.join();
  }
  uint16_t port() const { return port_; }

 private:
  void Run() {
    while (!stop_) {
      pollfd entry{listener_.get(), POLLIN, 0};
      if (poll(&entry, 1, 10) <= 0) continue;
      UniqueFd near(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      UniqueFd far(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      socklen_t length = 0;
      const sockaddr_storage to = target_.host.Sockaddr(target_.port, &length);
      if (connect(far.get(), reinterpret_cast<const sockaddr*>(&to), length) != 0) continue;
      Pass(near.get(), far.get());
    }
  }

  void Pass(int near, int far) {
    int64_t passed[2] = {0, 0};
    Records records;
    while (!stop_) {
      pollfd entries[2] = {{near, POLLIN, 0}, {far, POLLIN, 0}};
      if (poll(entries, 2, 10) <= 0) continue;
      for (int from = 0; from < 2; ++from) {
        if (entries[from].revents == 0) continue;
        std::string bytes(16384, '\0');
        const ssize_t n = recv(from == 0 ? near : far, bytes.data(), bytes.size(), 0);
        if (n <= 0) return;
        bytes.resize(static_cast<size_t>(n));
        const int64_t start = passed[from];
        passed[from] += n;
        const int to = from == 0 ? far : near;
        if ((from == 1) == answers_) {
          if (tamper_ == Tamper::kTruncate || tamper_ == Tamper::kReorder) {
            bytes = ByRecord(bytes, &records);
          } else {
            Change(start, &bytes);
          }
        }
        if (!bytes.empty() && !Say(to, bytes)) return;
        if ((from == 1) == answers_ && records.ended) shutdown(to, SHUT_WR);
      }
    }
  }

  void Change(int64_t start, std::string* bytes) const {
    const int64_t at = offset_ - start;
    if (at < 0 || at >= static_cast<int64_t>(bytes->size())) return;
    const auto index = static_cast<size_t>(at);
    if (tamper_ == Tamper::kFlip) (*bytes)[index] = static_cast<char>((*bytes)[index] ^ 0x10);
    if (tamper_ == Tamper::kDrop) bytes->erase(index, 1);
    if (tamper_ == Tamper::kReplay) bytes->insert(index, bytes->substr(index));
  }

  // Returns the bytes to pass on now that `bytes` have arrived.
  std::string ByRecord(const std::string& bytes, Records* records) const {
    constexpr size_t kHeader = 5;  // type, version (2), length of the rest (2, big endian)
    std::string out;
    std::string& partial = records->partial;
    partial += bytes;
    while (partial.size() >= kHeader) {
      const size_t size =
          kHeader + static_cast<uint8_t>(partial[3]) * 256U + static_cast<uint8_t>(partial[4]);
      if (partial.size() < size) break;
      const std::string record = partial.substr(0, size);
      partial.erase(0, size);
      const int64_t start = records->start;
      records->start += static_cast<int64_t>(size);
      const bool hit = start <= offset_ && offset_ < records->start;
      if (hit && tamper_ == Tamper::kTruncate) records->ended = true;
      if (records->ended) continue;
      if (hit) {
        records->held = record;
        continue;
      }
      out += record + records->held;
      records->held.clear();
    }
    return out;
  }

  const SocketAddress target_;
  const Tamper tamper_;
  const bool answers_;
  const int64_t offset_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST_CASE(
    "bytes that are flipped, dropped, replayed, cut off or reordered on the way are errors, never "
    "wrong bytes") {
  const Tamper tamper = GENERATE(Tamper::kNothing, Tamper::kFlip, Tamper::kDrop, Tamper::kReplay,
                                 Tamper::kTruncate, Tamper::kReorder);
  const bool answers = GENERATE(false, true);
  const int root = GENERATE(0, 1);
  const int64_t offset = GENERATE(5, 700, 2'100, 2'500, 70'000, 1'000'000);
  CAPTURE(static_cast<int>(tamper), answers, root, offset);
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  SocketAddress detour = Decode(addresses[1], kCommunicator, 1, 2);
  Proxy proxy(detour, tamper, answers, offset);
  detour.port = proxy.port();
  constexpr Duration kLimit = std::chrono::milliseconds(400);
  const Duration limit = tamper == Tamper::kNothing ? kLong : kLimit;
  std::vector<Result> results(2);
  mesh.wires[0]->Connect(kCommunicator, {addresses[0], EncodeSocketAddress(detour)}, limit,
                         Into(&results[0]));
  mesh.wires[1]->Connect(kCommunicator, addresses, limit, Into(&results[1]));
  bool connected = true;
  for (int rank = 0; rank < 2; ++rank) {
    const absl::Status status = Get(results[rank]);
    connected = connected && status.ok();
    if (!status.ok()) {
      CHECK_THAT(Message(status), Contains("rank " + std::to_string(1 - rank)));
    }
  }
  if (!connected) {
    CHECK(tamper != Tamper::kNothing);
    return;
  }
  const std::vector<char> expected = RandomBytes(2 << 20, kSeed);
  std::vector<std::vector<char>> memory(2, std::vector<char>(expected.size(), '\xcd'));
  memory[root] = expected;
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Submit(Broadcast(kCommunicator, 1, root, Span(memory[rank]), limit),
                             Into(&results[rank]));
  }
  for (int rank = 0; rank < 2; ++rank) {
    const absl::Status status = Get(results[rank]);
    if (!status.ok()) {
      CHECK(tamper != Tamper::kNothing);
      CHECK_THAT(Message(status), Contains("rank " + std::to_string(1 - rank)));
    } else if (rank != root) {
      CHECK((memory[rank] == expected));
    }
  }
  const std::vector<char>& got = memory[1 - root];
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != expected[i]) REQUIRE(got[i] == '\xcd');
  }
  // The payload goes in one direction, and the tampered byte lies within it.
  if (tamper != Tamper::kNothing && answers == (root == 1) && offset >= 70'000) {
    CHECK((got != expected));
  }
}

}  // namespace
}  // namespace refitd
