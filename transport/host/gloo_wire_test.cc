#include "transport/host/gloo_wire.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "transport/wire_testing.h"

namespace refitd {

const TestedWire& Tested() {
  static const TestedWire gloo{[] { return MakeGlooWire({}); }, true};
  return gloo;
}

namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

constexpr size_t kPortsOffset = 53;  // of the first port in an address
constexpr size_t kEpochOffset = 4;

TEST_CASE("an interface that does not exist is refused with the names of those that do") {
  const auto wire = MakeGlooWire({.interface = "no-such-if0", .address = ""});
  CHECK(wire.status().code() == StatusCode::kNotFound);
  CHECK_THAT(Message(wire.status()), Contains("no-such-if0") && Contains("lo"));
}

TEST_CASE("an address that peers could not reach, or that is not one, is refused") {
  for (const char* address : {"0.0.0.0", "::", "224.0.0.1", "fe80::1", "localhost", "1.2.3", " "}) {
    CAPTURE(address);
    const auto wire = MakeGlooWire({.interface = "lo", .address = address});
    CHECK(wire.status().code() == StatusCode::kInvalidArgument);
    CHECK_THAT(Message(wire.status()), Contains(address));
  }
  // An address of TEST-NET-1, which no host has.
  CHECK(MakeGlooWire({.interface = "", .address = "192.0.2.1"}).status().code() ==
        StatusCode::kUnavailable);
  CHECK(MakeGlooWire({.interface = "", .address = "127.0.0.1"}).ok());
}

TEST_CASE(
    "addresses that are damaged in any way are refused, and the epoch can still be connected") {
  Mesh mesh(2);
  const std::vector<std::string> good = mesh.Open(kEpoch);
  const auto refused = [&](std::vector<std::string> addresses) {
    Result result;
    mesh.wires[0]->Connect(kEpoch, std::move(addresses), kShort, Into(&result));
    return Get(result).code() == StatusCode::kInvalidArgument;
  };
  CHECK(refused({}));
  CHECK(refused({good[0]}));
  CHECK(refused({good[1], good[0]}));
  CHECK(refused({good[0], good[0]}));
  CHECK(refused({good[0], good[1], good[1]}));
  CHECK(refused({good[0], ""}));
  CHECK(refused({good[0], std::string(size_t{1} << 20, 'x')}));
  for (size_t length = 0; length < good[1].size(); ++length) {
    CHECK(refused({good[0], good[1].substr(0, length)}));
  }
  CHECK(refused({good[0], good[1] + "x"}));
  // Every field but the token and the host and port, which only a connection can tell wrong.
  for (size_t at = 0; at < kPortsOffset; ++at) {
    if (at >= 20 && at < 36) continue;
    if (at >= 37) continue;
    std::string bad = good[1];
    bad[at] = static_cast<char>(bad[at] ^ 0x40);
    CAPTURE(at);
    CHECK(refused({good[0], bad}));
  }
  const auto with = [&](size_t at, std::string bytes) {
    std::string bad = good[1];
    bad.replace(at, bytes.size(), bytes);
    return bad;
  };
  CHECK(refused({good[0], with(kPortsOffset, std::string(2, '\0'))}));
  CHECK(refused({good[0], with(kPortsOffset + 2, std::string(2, '\1'))}));
  CHECK(refused({good[0], with(kPortsOffset, good[0].substr(kPortsOffset + 2, 2))}));
  CHECK(refused({good[0], with(37, std::string(4, '\0'))}));
  CHECK(refused({good[0], with(37, std::string(4, '\xff'))}));
  CHECK(refused({good[0], with(36, "\6")}));
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 200; ++i) {
    std::string noise(random() % 100, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    CHECK(refused({good[0], noise}));
  }
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Connect(kEpoch, good, kLong, Into(&results[rank]));
  }
  for (Result& result : results) CHECK(Get(result) == absl::OkStatus());
}

TEST_CASE("a daemon with the other wire is told apart by its address") {
  Mesh mesh(2);
  std::vector<std::string> addresses = mesh.Open(kEpoch);
  addresses[1].replace(0, 4, "RFS1");
  Result result;
  mesh.wires[0]->Connect(kEpoch, addresses, kLong, Into(&result));
  const absl::Status status = Get(result);
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_THAT(Message(status), Contains("rank 1") && Contains("sockets") && Contains("data.wire"));
}

TEST_CASE("a peer of another epoch is told apart after it connected") {
  Mesh mesh(2);
  const EpochId other(8);
  const auto mine = mesh.wires[0]->Open(kEpoch, 0, 2);
  const auto theirs = mesh.wires[1]->Open(other, 1, 2);
  REQUIRE((mine.ok() && theirs.ok()));
  // As if a port were used again: each rank holds an address that was right in an epoch of its own.
  std::string mine_in_other = *mine;
  std::string theirs_in_mine = *theirs;
  mine_in_other.replace(kEpochOffset, 8, theirs->substr(kEpochOffset, 8));
  theirs_in_mine.replace(kEpochOffset, 8, mine->substr(kEpochOffset, 8));
  std::vector<Result> results(2);
  mesh.wires[0]->Connect(kEpoch, {*mine, theirs_in_mine}, kLong, Into(&results[0]));
  mesh.wires[1]->Connect(other, {mine_in_other, *theirs}, kLong, Into(&results[1]));
  std::string messages;
  for (Result& result : results) {
    const absl::Status status = Get(result);
    CHECK(status.code() == StatusCode::kUnavailable);
    messages += Message(status) + "\n";
  }
  CHECK_THAT(messages, Contains("of another epoch"));
}

TEST_CASE("an address with another token does not connect") {
  Mesh mesh(2);
  const std::vector<std::string> good = mesh.Open(kEpoch);
  std::string bad = good[1];
  bad[25] = static_cast<char>(bad[25] ^ 1);
  std::vector<Result> results(2);
  mesh.wires[0]->Connect(kEpoch, {good[0], bad}, kLong, Into(&results[0]));
  mesh.wires[1]->Connect(kEpoch, good, kLong, Into(&results[1]));
  CHECK(Get(results[1]).code() == StatusCode::kUnavailable);
  // This rank greeted with the right token, and finds the connection lost now or at its first
  // operation.
  const absl::Status status = Get(results[0]);
  CHECK((status.ok() || status.code() == StatusCode::kUnavailable));
}

// The socket address at which the rank with that address waits for rank `peer`.
sockaddr_in ListenerFor(const std::string& address, int peer) {
  const size_t at = kPortsOffset + 2 * static_cast<size_t>(peer);
  sockaddr_in in{};
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  in.sin_port = htons(static_cast<uint16_t>(static_cast<uint8_t>(address[at]) |
                                            static_cast<uint8_t>(address[at + 1]) << 8));
  return in;
}

TEST_CASE("a stranger that takes a peer's connection makes Connect fail, and nothing else") {
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kEpoch);
  mesh.Connect(EpochId(8));
  std::vector<UniqueFd> strangers;
  for (int rank = 0; rank < 2; ++rank) {
    const sockaddr_in in = ListenerFor(addresses[rank], 1 - rank);
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(connect(fd.get(), reinterpret_cast<const sockaddr*>(&in), sizeof(in)) == 0);
    const std::string text = "GET / HTTP/1.1\r\nHost: refitd\r\nUser-Agent: scanner\r\n\r\n";
    REQUIRE(send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(text.size()));
    strangers.push_back(std::move(fd));
  }
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Connect(kEpoch, addresses, kShort, Into(&results[rank]));
  }
  for (int rank = 0; rank < 2; ++rank) {
    const absl::Status status = Get(results[rank]);
    CHECK((status.code() == StatusCode::kUnavailable ||
           status.code() == StatusCode::kDeadlineExceeded));
    CHECK_THAT(Message(status), Contains("rank " + std::to_string(1 - rank)));
  }
  std::vector<char> memory(100, 'm');
  std::vector<char> in(100);
  mesh.wires[0]->Submit(Broadcast(EpochId(8), 1, 0, Span(memory)), Into(&results[0]));
  mesh.wires[1]->Submit(Broadcast(EpochId(8), 1, 0, Span(in)), Into(&results[1]));
  for (Result& result : results) CHECK(Get(result) == absl::OkStatus());
}

TEST_CASE("a peer that resets its connection at once is an error of its epoch alone") {
  Mesh mesh(2);
  mesh.Connect(EpochId(8));
  // Whether Gloo's thread accepts before the reset is random, so try many times.
  for (uint64_t epoch = 100; epoch < 164; ++epoch) {
    const std::vector<std::string> addresses = mesh.Open(EpochId(epoch));
    const sockaddr_in in = ListenerFor(addresses[0], 1);
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const linger reset{.l_onoff = 1, .l_linger = 0};
    REQUIRE(setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) == 0);
    REQUIRE(connect(fd.get(), reinterpret_cast<const sockaddr*>(&in), sizeof(in)) == 0);
    fd = UniqueFd();
    Result result;
    mesh.wires[0]->Connect(EpochId(epoch), addresses, kShort, Into(&result));
    const absl::Status status = Get(result);
    CHECK((status.code() == StatusCode::kUnavailable ||
           status.code() == StatusCode::kDeadlineExceeded));
    for (const auto& wire : mesh.wires) wire->Close(EpochId(epoch));
  }
  std::vector<Result> results(2);
  std::vector<char> memory(100, 'm');
  std::vector<char> in(100);
  mesh.wires[0]->Submit(Broadcast(EpochId(8), 1, 0, Span(memory)), Into(&results[0]));
  mesh.wires[1]->Submit(Broadcast(EpochId(8), 1, 0, Span(in)), Into(&results[1]));
  for (Result& result : results) CHECK(Get(result) == absl::OkStatus());
}

}  // namespace
}  // namespace refitd
