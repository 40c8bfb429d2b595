#include "transport/sockets/socket_wire.h"

#include <sys/socket.h>

#include <mutex>

#include "transport/sockets/listener.h"
#include "transport/sockets/testing.h"
#include "transport/wire_testing.h"

namespace refitd {

const TestedWire& Tested() {
  static const TestedWire sockets{[] { return MakeSocketWire({}); }};
  return sockets;
}

namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

constexpr size_t kIdentityOffset = 57;  // where an address has the identity's length

void CheckBroadcast(Mesh& mesh, CommunicatorId communicator, uint64_t seq) {
  const std::vector<char> expected = RandomBytes(3 << 20, seq);
  std::vector<std::vector<char>> memory(mesh.size(), std::vector<char>(expected.size()));
  memory[0] = expected;
  std::vector<Result> results(mesh.size());
  for (int rank = 0; rank < mesh.size(); ++rank) {
    mesh.wires[rank]->Submit(Broadcast(communicator, seq, 0, Span(memory[rank])),
                             Into(&results[rank]));
  }
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  for (const auto& bytes : memory) CHECK((bytes == expected));
}

TEST_CASE("an interface or address that can't be used, or too many connections, are refused") {
  const auto wire = MakeSocketWire({.interface = "no-such-if0"});
  CHECK(wire.status().code() == StatusCode::kNotFound);
  CHECK_THAT(Message(wire.status()), Contains("no-such-if0") && Contains("lo"));
  for (const char* address : {"0.0.0.0", "::", "224.0.0.1", "fe80::1", "localhost", "1.2.3", " "}) {
    CAPTURE(address);
    CHECK(MakeSocketWire({.address = address}).status().code() == StatusCode::kInvalidArgument);
  }
  CHECK(MakeSocketWire({.address = "192.0.2.1"}).status().code() == StatusCode::kUnavailable);
  CHECK(MakeSocketWire({.streams = 0}).status().code() == StatusCode::kInvalidArgument);
  CHECK(MakeSocketWire({.streams = 9}).status().code() == StatusCode::kInvalidArgument);
}

TEST_CASE(
    "a rank whose successor gave up named the successor only, not the root that sent nothing") {
  Mesh mesh(3);
  mesh.Connect(kCommunicator);
  std::vector<std::vector<char>> memory(3, std::vector<char>(6 << 20, 'a'));
  std::vector<Result> results(2);
  for (const int rank : {0, 1}) {  // the chain is 2, 0, 1
    mesh.wires[rank]->Submit(
        Broadcast(kCommunicator, 1, 2, Span(memory[rank]), rank == 1 ? kShort : kLong),
        Into(&results[rank]));
  }
  CHECK_THAT(Message(Get(results[1])), Contains("rank 0") && !Contains("rank 2"));
  const absl::Status relay = Get(results[0]);
  CHECK(relay.code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(relay), Contains("connection to rank 1") && Contains("waited for rank 2"));
}

TEST_CASE("a wire tells how much it sent to each rank of a communicator") {
  Mesh mesh(3);
  mesh.Connect(kCommunicator);
  CHECK(mesh.wires[0]->Uses(CommunicatorId(99)).empty());
  CheckBroadcast(mesh, kCommunicator, 1);  // 3 MiB from 0 to 1 to 2
  for (uint64_t seq = 2; seq < 4; ++seq) {
    std::vector<char> from(2 << 20);
    std::vector<char> to(from.size());
    std::vector<Result> results(2);
    mesh.wires[1]->Submit(WireExchange{kCommunicator, WireSeq(seq), {{2, Span(from)}}, {}, kLong},
                          Into(&results[0]));
    mesh.wires[2]->Submit(WireExchange{kCommunicator, WireSeq(seq), {}, {{1, Span(to)}}, kLong},
                          Into(&results[1]));
    for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  }
  const auto mib = [&mesh](int rank) {
    std::vector<int64_t> sent;
    for (const WireUse& use : mesh.wires[rank]->Uses(kCommunicator)) {
      CHECK(use.busy >= Duration(0));  // the kernel counts in ticks of some milliseconds
      sent.push_back(use.bytes >> 20);
    }
    return sent;
  };
  CHECK(mib(0) == std::vector<int64_t>{0, 3, 0});
  CHECK(mib(1) == std::vector<int64_t>{0, 0, 7});
  CHECK(mib(2) == std::vector<int64_t>{0, 0, 0});
}

TEST_CASE("ranks reach each other over IPv6") {
  Mesh mesh(0);
  for (int rank = 0; rank < 3; ++rank) {
    auto wire = MakeSocketWire({.address = "::1"});
    REQUIRE(wire.status() == absl::OkStatus());
    mesh.wires.push_back(*std::move(wire));
  }
  mesh.Connect(kCommunicator);
  CheckBroadcast(mesh, kCommunicator, 1);
}

TEST_CASE("stripes cover a payload, each byte once") {
  for (const int streams : {1, 2, 3, 8}) {
    for (const int64_t total : {int64_t{0}, int64_t{1}, kStripeBytes - 1, kStripeBytes,
                                kStripeBytes + 1, 5 * kStripeBytes, 17 * kStripeBytes + 12'345}) {
      CAPTURE(streams, total);
      std::vector<int> seen(static_cast<size_t>(total / 1000 + 1));
      int64_t sum = 0;
      for (int stream = 0; stream < streams; ++stream) {
        const int64_t bytes = BytesOfStream(total, stream, streams);
        for (int64_t moved = 0; moved < bytes;) {
          const Stretch at = StretchAt(moved, total, stream, streams);
          REQUIRE((at.bytes > 0 && at.offset >= 0 && at.offset + at.bytes <= total));
          // Marks every thousandth byte of the payload that lies in the stretch.
          for (int64_t i = (at.offset + 999) / 1000; i * 1000 < at.offset + at.bytes; ++i) {
            ++seen[static_cast<size_t>(i)];
          }
          moved += at.bytes;
        }
        sum += bytes;
      }
      CHECK(sum == total);
      for (int64_t i = 0; i * 1000 < total; ++i) REQUIRE(seen[static_cast<size_t>(i)] == 1);
    }
  }
}

TEST_CASE(
    "addresses that are damaged in any way are refused, and the communicator can be connected") {
  Mesh mesh(2);
  const std::vector<std::string> good = mesh.Open(kCommunicator);
  const auto refused = [&](std::vector<std::string> addresses) {
    Result result;
    mesh.wires[0]->Connect(kCommunicator, std::move(addresses), kShort, Into(&result));
    return Get(result).code() == StatusCode::kInvalidArgument;
  };
  CHECK(refused({}));
  CHECK(refused({good[0]}));
  CHECK(refused({good[1], good[0]}));
  CHECK(refused({good[0], good[0]}));
  CHECK(refused({good[0], good[1], good[1]}));
  CHECK(refused({good[0], std::string(size_t{1} << 20, 'x')}));
  for (size_t length = 0; length < good[1].size(); ++length) {
    CHECK(refused({good[0], good[1].substr(0, length)}));
  }
  CHECK(refused({good[0], good[1] + "x"}));
  // Changes every field but token, host and port: only a connection shows whether these are wrong.
  for (size_t at = 0; at < good[1].size(); ++at) {
    if ((at >= 20 && at < 36) || (at >= 37 && at < 41) || at == 53 || at == 54) continue;
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
  CHECK(refused({good[0], with(53, std::string(2, '\0'))}));                  // port
  CHECK(refused({good[0], with(37, std::string(4, '\0'))}));                  // 0.0.0.0
  CHECK(refused({good[0], with(37, std::string(4, '\xff'))}));                // broadcast
  CHECK(refused({good[0], with(55, "\1")}));                                  // TLS, no identity
  CHECK(refused({good[0], with(56, std::string(1, '\0'))}));                  // no connection
  CHECK(refused({good[0], with(kIdentityOffset, std::string("\1\0x", 3))}));  // without TLS
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Connect(kCommunicator, good, kLong, Into(&results[rank]));
  }
  for (Result& result : results) CHECK(Get(result) == absl::OkStatus());
}

TEST_CASE("an address with another token or of another communicator connects nobody") {
  Mesh mesh(2);
  const CommunicatorId other(8);
  const std::vector<std::string> good = mesh.Open(kCommunicator);
  std::string bad = good[1];
  if (GENERATE(false, true)) {
    bad[25] = static_cast<char>(bad[25] ^ 1);
  } else {
    // The address was right in another communicator, as if a port were used again.
    bad = *mesh.wires[1]->Open(other, 1, 2);
    bad.replace(4, 8, good[1].substr(4, 8));
    mesh.wires[1]->Close(kCommunicator);
  }
  Result result;
  mesh.wires[0]->Connect(kCommunicator, {good[0], bad}, kLong, Into(&result));
  const absl::Status status = Get(result);
  CHECK(status.code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(status), Contains("rank 1") && Contains("of another communicator"));
}

// Does to the address of rank 1 what a process without the token may do; `kind` chooses what.
void Attack(int kind, const SocketAddress& address, std::vector<UniqueFd>* kept) {
  UniqueFd fd = DialByHand(address);
  Greeting hello = HelloTo(address, 0);
  switch (kind) {
    case 0:
      REQUIRE(Say(fd.get(), "GET / HTTP/1.1\r\nHost: refitd\r\nUser-Agent: a scanner\r\n\r\n"));
      break;
    case 1:
      REQUIRE(Say(fd.get(), View(EncodeGreeting(hello)).substr(0, 20)));
      break;
    case 2: {
      hello.token[15] = static_cast<char>(hello.token[15] ^ 1);
      REQUIRE(Say(fd.get(), View(EncodeGreeting(hello))));
      GreetingBytes answer;
      const std::string heard = Listen(fd.get(), kGreetingBytes + 1);
      REQUIRE(heard.size() == kGreetingBytes);
      std::copy(heard.begin(), heard.end(), answer.begin());
      CHECK(DecodeGreeting(answer)->kind == GreetingKind::kUnknown);
      CHECK(DecodeGreeting(answer)->token == WireToken{});
      break;
    }
    case 3: {
      const linger reset{.l_onoff = 1, .l_linger = 0};
      REQUIRE(setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) == 0);
      return;
    }
    case 4:  // says nothing
      break;
    case 5:  // the right token, from a rank that does not dial
      hello.from = 1;
      REQUIRE(Say(fd.get(), View(EncodeGreeting(hello))));
      break;
    default:
      return;
  }
  kept->push_back(std::move(fd));
}

TEST_CASE("a stranger who says nothing right costs a communicator nothing, whatever its state") {
  std::mutex mutex;
  std::string lines;
  std::vector<std::unique_ptr<Wire>> wires;
  for (int i = 0; i < 2; ++i) {
    auto wire = MakeSocketWire({.log = [&](const std::string& line) {
      const std::lock_guard lock(mutex);
      lines += line + "\n";
    }});
    REQUIRE(wire.ok());
    wires.push_back(*std::move(wire));
  }
  Mesh mesh(0);
  mesh.wires = std::move(wires);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  const SocketAddress address = Decode(addresses[1], kCommunicator, 1, 2);
  std::vector<UniqueFd> kept;
  for (int kind = 0; kind < 6; ++kind) Attack(kind, address, &kept);
  std::vector<Result> results(2);
  mesh.wires[1]->Connect(kCommunicator, addresses, kLong, Into(&results[1]));
  for (int kind = 0; kind < 6; ++kind) Attack(kind, address, &kept);
  mesh.wires[0]->Connect(kCommunicator, addresses, kLong, Into(&results[0]));
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  for (uint64_t seq = 0; seq < 6; ++seq) {
    Attack(static_cast<int>(seq), address, &kept);
    CheckBroadcast(mesh, kCommunicator, seq);
  }
  REQUIRE(Until([&] {
    const std::lock_guard lock(mutex);
    return lines.find("127.0.0.1 is dropped: it speaks another protocol") != std::string::npos &&
           lines.find("a wrong token") != std::string::npos;
  }));
  mesh.wires.clear();
}

TEST_CASE("a flood of strangers keeps no peer out, and takes bounded room for a bounded time") {
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  const SocketAddress address = Decode(addresses[1], kCommunicator, 1, 2);
  const int before = CountEntries("/proc/self/fd");
  std::vector<UniqueFd> flood;
  for (size_t i = 0; i < 3 * kMaxUnproved; ++i) flood.push_back(DialByHand(address));
  std::vector<Result> results(2);
  for (int rank = 0; rank < 2; ++rank) {
    mesh.wires[rank]->Connect(kCommunicator, addresses, kLong, Into(&results[rank]));
  }
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  CheckBroadcast(mesh, kCommunicator, 1);
  constexpr int kOther = 8;  // the communicator's own connection, its ends
  CHECK(CountEntries("/proc/self/fd") <=
        before + static_cast<int>(flood.size() + kMaxUnproved) + kOther);
  CHECK(Listen(flood.back().get(), 1).empty());  // ends within kUnprovedLimit
  CHECK(Until([&] {
    return CountEntries("/proc/self/fd") <= before + static_cast<int>(flood.size()) + kOther;
  }));
}

// Plays rank 0 of 2 by hand, connected to rank 1, which is a wire.
struct ByHand {
  explicit ByHand(Wire* wire) {
    const auto theirs = wire->Open(kCommunicator, 1, 2);
    REQUIRE(theirs.ok());
    const SocketAddress peer = Decode(*theirs, kCommunicator, 1, 2);
    SocketAddress mine = peer;
    mine.rank = 0;
    mine.token.fill('t');
    Result connected;
    wire->Connect(kCommunicator, {EncodeSocketAddress(mine), *theirs}, kLong, Into(&connected));
    fd = DialByHand(peer);
    REQUIRE(Say(fd.get(), View(EncodeGreeting(HelloTo(peer, 0)))));
    const std::string heard = Listen(fd.get(), kGreetingBytes);
    REQUIRE(heard.size() == kGreetingBytes);
    GreetingBytes bytes;
    std::copy(heard.begin(), heard.end(), bytes.begin());
    const auto welcome = DecodeGreeting(bytes);
    REQUIRE(welcome.has_value());
    CHECK(welcome->kind == GreetingKind::kWelcome);
    CHECK(welcome->token == mine.token);
    REQUIRE(Get(connected) == absl::OkStatus());
  }
  UniqueFd fd;
};

TEST_CASE("a peer that breaks the protocol is named, and no byte of memory changes") {
  const Frame right{FrameKind::kBroadcast, 1, 0, 1000};
  struct Case {
    std::string says;
    const char* message;
  };
  const Case c = GENERATE_COPY(
      Case{std::string(kFrameBytes, 'x'), "no frame"},
      Case{std::string(View(EncodeFrame({FrameKind::kAck, 1, 0, 0}))), "acknowledges"},
      Case{std::string(View(EncodeFrame({FrameKind::kExchange, 1, 0, 1000}))), "exchange seq 1"},
      Case{std::string(View(EncodeFrame({FrameKind::kBroadcast, 2, 0, 1000}))), "seq 2"},
      Case{std::string(View(EncodeFrame({FrameKind::kBroadcast, 1, 1, 1000}))), "from root 1"},
      Case{std::string(View(EncodeFrame({FrameKind::kBroadcast, 1, 0, 999}))), "999 bytes"},
      Case{std::string(View(EncodeFrame(right))).substr(0, 10), "closed"},
      Case{std::string(View(EncodeFrame(right))), "closed"});
  CAPTURE(c.message);
  const auto wire = MakeWire();
  ByHand peer(wire.get());
  std::vector<char> memory(1000, '\xcd');
  Result result;
  wire->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), Into(&result));
  REQUIRE(Say(peer.fd.get(), c.says));
  shutdown(peer.fd.get(), SHUT_WR);
  const absl::Status status = Get(result);
  CHECK((status.code() == StatusCode::kUnavailable ||
         status.code() == StatusCode::kFailedPrecondition));
  CHECK_THAT(Message(status), Contains("rank 0") && Contains(c.message));
  CHECK((memory == std::vector<char>(1000, '\xcd')));
}

TEST_CASE("a second connection for a peer that is connected does not take its place") {
  const auto wire = MakeWire();
  const auto theirs = wire->Open(kCommunicator, 1, 2);
  REQUIRE(theirs.ok());
  wire->Close(kCommunicator);
  ByHand peer(wire.get());
  std::vector<char> memory(4, '\0');
  const auto receive = [&](uint64_t seq) {
    Result result;
    wire->Submit(Broadcast(kCommunicator, seq, 0, Span(memory)), Into(&result));
    REQUIRE(Say(peer.fd.get(), View(EncodeFrame({FrameKind::kBroadcast, seq, 0, 4}))));
    REQUIRE(Say(peer.fd.get(), "abcd"));
    CHECK(Listen(peer.fd.get(), kFrameBytes) == View(EncodeFrame({FrameKind::kAck, seq, 0, 0})));
    CHECK(Get(result) == absl::OkStatus());
    CHECK((memory == std::vector<char>{'a', 'b', 'c', 'd'}));
  };
  receive(1);
  // A connection that shows the token is a peer's, but a connection that is in use stays.
  const auto again = wire->Stats(kCommunicator);
  CHECK(again.bytes_received == 4);
  receive(2);
}

}  // namespace
}  // namespace refitd
