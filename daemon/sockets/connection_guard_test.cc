#include "daemon/sockets/connection_guard.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cerrno>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "daemon/test_util.h"
#include "tests/e2e/http2_frames.h"

namespace refitd {
namespace {

// A connection: the end that gRPC would read, and the client's.
struct Connection {
  Connection() {
    std::array<int, 2> ends{};
    REFITD_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) ==
                 0);
    server = UniqueFd(ends[0]);
    client = UniqueFd(ends[1]);
  }
  std::string peer() const { return "fd:" + std::to_string(server.get()); }
  // Sends so many bytes and reads them as gRPC does; returns what was read, -1 if reading failed.
  int64_t Pass(int64_t bytes) const { return Send(std::string(static_cast<size_t>(bytes), 'x')); }
  int64_t Send(std::string bytes) const {
    for (size_t at = 0; at < bytes.size(); at += 4096) {
      const size_t size = std::min<size_t>(bytes.size() - at, 4096);
      if (send(client.get(), bytes.data() + at, size, MSG_NOSIGNAL) < 0) return -1;
      std::array<char, 4096> buffer;
      // In two pieces, as gRPC may.
      std::array<iovec, 2> parts{
          {{buffer.data(), 100}, {buffer.data() + 100, buffer.size() - 100}}};
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = parts.size();
      if (recvmsg(server.get(), &message, 0) != static_cast<ssize_t>(size)) return -1;
    }
    return static_cast<int64_t>(bytes.size());
  }
  // Whether the client's end was closed or shut down.
  bool Ended() const {
    char byte = 0;
    return recv(client.get(), &byte, 1, 0) == 0;
  }
  UniqueFd server;
  UniqueFd client;
};

struct Fixture {
  std::vector<std::string> ended;
  ConnectionGuard guard{{.ended = [this](const std::string& source, const std::string& why) {
    ended.push_back(source + ": " + why);
  }}};
  TimePoint now = std::chrono::steady_clock::now();
};

TEST_CASE_METHOD(Fixture, "A connection brought any number of bytes before a rule was asked") {
  const Connection connection;
  REQUIRE(guard.Watch(connection.server.get(), "uid:7"));
  CHECK(connection.Pass(kUnprovenBytes - 1) == kUnprovenBytes - 1);
  CHECK(connection.Pass(2) == -1);
  CHECK(errno == ECONNRESET);
  CHECK(connection.Pass(1) == -1);
  guard.Allowed(connection.peer(), "uid:7");  // too late
  CHECK(connection.Pass(1) == -1);
}

TEST_CASE_METHOD(Fixture, "A connection that is over its budget is shut down and reported") {
  const Connection connection;
  REQUIRE(guard.Watch(connection.server.get(), "uid:7"));
  CHECK(connection.Pass(kUnprovenBytes + 1) == -1);
  CHECK(connection.Ended());
  CHECK(guard.unproven() == 0);
  REQUIRE(ended.size() == 1);
  CHECK_THAT(ended[0], Catch::Contains("uid:7: it brought more"));
}

TEST_CASE_METHOD(Fixture,
                 "A call that a rule allowed lifts the budget, and a refused one does not") {
  const Connection allowed;
  const Connection refused;
  REQUIRE(guard.Watch(allowed.server.get(), "uid:7"));
  REQUIRE(guard.Watch(refused.server.get(), "uid:8"));
  guard.Allowed(allowed.peer(), "uid:7");
  guard.Refused(refused.peer(), false);
  CHECK(allowed.Pass(4 * kUnprovenBytes) == 4 * kUnprovenBytes);
  CHECK(refused.Pass(kUnknownBytes - 1) == kUnknownBytes - 1);
  guard.Refused(refused.peer(), false);
  CHECK(refused.Pass(2) == -1);
  CHECK(guard.unproven() == 0);
}

TEST_CASE_METHOD(Fixture, "A number that is used again has no budget of its last connection") {
  auto first = std::make_unique<Connection>();
  const int number = first->server.get();
  REQUIRE(guard.Watch(number, "uid:7"));
  CHECK(first->Pass(kUnprovenBytes + 1) == -1);
  first.reset();
  const Connection second;
  REQUIRE(second.server.get() == number);
  CHECK(guard.open() == 0);
  CHECK(second.Pass(4 * kUnprovenBytes) == 4 * kUnprovenBytes);  // not watched
  guard.Sweep(now);
  CHECK_FALSE(second.Ended());
  CHECK(guard.Watch(number, "uid:7"));
  CHECK(second.Pass(kUnprovenBytes + 1) == -1);
}

TEST_CASE_METHOD(Fixture, "A connection without an allowed call ends after a while") {
  const Connection idle;
  const Connection proven;
  REQUIRE(guard.Watch(idle.server.get(), "uid:7"));
  REQUIRE(guard.Watch(proven.server.get(), "uid:7"));
  guard.Allowed(proven.peer(), "uid:7");
  guard.Sweep(now + kUnprovenLimit / 2);
  CHECK(guard.unproven() == 1);
  guard.Sweep(now + 2 * kUnprovenLimit);
  CHECK(idle.Ended());
  CHECK_FALSE(proven.Ended());
  REQUIRE(ended.size() == 1);
}

TEST_CASE_METHOD(Fixture,
                 "A source that opens connections without an end loses its own oldest one") {
  std::deque<Connection> flood(kMaxUnproven);
  const Connection other;
  REQUIRE(guard.Watch(other.server.get(), "uid:8"));
  for (const Connection& each : flood) REQUIRE(guard.Watch(each.server.get(), "uid:7"));
  CHECK(guard.unproven() == kMaxUnproven);
  CHECK(flood.front().Ended());
  CHECK_FALSE(flood.back().Ended());
  CHECK_FALSE(other.Ended());
  CHECK(other.Pass(1) == 1);
}

TEST_CASE_METHOD(Fixture, "A connection that an allowed call proved is read along all the same") {
  const Connection connection;
  REQUIRE(guard.Watch(connection.server.get(), "uid:7"));
  guard.Allowed(connection.peer(), "uid:7");
  const std::string bytes = std::string(e2e::kPreface) + Frame(e2e::kHeaders, 0, 1, "") +
                            Frame(e2e::kContinuation, 0, 1, std::string(kMaxHeaderBlock, 'h'));
  CHECK(connection.Send(bytes) == -1);
  CHECK(connection.Ended());
  REQUIRE(ended.size() == 1);
  CHECK_THAT(ended[0], Catch::Contains("uid:7: headers of more than"));
}

TEST_CASE("Closed connections are forgotten, and numbers of a guard that is gone are nobody's") {
  const Connection kept;
  {
    Fixture first;
    REQUIRE(first.guard.Watch(kept.server.get(), "uid:7"));
    {
      const Connection connection;
      REQUIRE(first.guard.Watch(connection.server.get(), "uid:7"));
      CHECK(first.guard.open() == 2);
    }
    CHECK(first.guard.open() == 1);
    CHECK(first.ended.empty());
  }
  CHECK(kept.Pass(4 * kUnprovenBytes) == 4 * kUnprovenBytes);
}

TEST_CASE("A peer has one name, as the kernel and as gRPC say it") {
  CHECK(ConnectionGuard::NormalPeer("ipv4:127.0.0.1:50051") == "ipv4:127.0.0.1:50051");
  CHECK(ConnectionGuard::NormalPeer("ipv6:%5B::1%5D:50051") == "ipv6:[::1]:50051");
  CHECK(ConnectionGuard::NormalPeer("ipv6:[::1]:50051") == "ipv6:[::1]:50051");
  CHECK(ConnectionGuard::NormalPeer("ipv6:%5Bfe80::1%252%5D:7") == "ipv6:[fe80::1]:7");
  CHECK(ConnectionGuard::NormalPeer("ipv6:") == "ipv6:");
  CHECK(ConnectionGuard::NormalPeer("fd:7") == "fd:7");
  CHECK(ConnectionGuard::NormalPeer("") == "");

  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(bind(listener.get(), generic, size) == 0);
  REQUIRE(listen(listener.get(), 1) == 0);
  REQUIRE(getsockname(listener.get(), generic, &size) == 0);
  const UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(connect(client.get(), generic, size) == 0);
  CHECK(ConnectionGuard::PeerOfSocket(client.get()) ==
        "ipv4:127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
}

}  // namespace
}  // namespace refitd
