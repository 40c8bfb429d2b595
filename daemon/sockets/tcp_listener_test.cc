#include "daemon/sockets/tcp_listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>

#include "daemon/sockets/accept_loop.h"
#include "daemon/test_util.h"
#include "transport/base/mutex.h"

namespace refitd {
namespace {

UniqueFd Dial(const std::string& address) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) fd.Reset();
  return fd;
}

TEST_CASE(
    "Port 0 becomes a free port, which the address then names, on every "
    "address of a host") {
  const auto loopback = ListenTcp("127.0.0.1:0");
  REQUIRE(loopback.ok());
  REQUIRE(loopback->size() == 1);
  CHECK((*loopback)[0].address != "127.0.0.1:0");
  CHECK(Dial((*loopback)[0].address).valid());
  const auto local = ListenTcp("localhost:0");
  REQUIRE(local.ok());
  for (const TcpListener& listener : *local) {
    CHECK(listener.address == (*local)[0].address);
    CHECK_THAT(listener.address, Catch::StartsWith("localhost:"));
  }
}

TEST_CASE("What can't be listened on is refused with its address and why") {
  const auto first = ListenTcp("127.0.0.1:0");
  REQUIRE(first.ok());
  const std::string taken = (*first)[0].address;
  const absl::Status in_use = ListenTcp(taken).status();
  CHECK(absl::IsAlreadyExists(in_use));
  CHECK_THAT(std::string(in_use.message()), Catch::Contains(taken));
  // An address of the range for documentation, which no machine has.
  CHECK(absl::IsUnavailable(ListenTcp("192.0.2.1:0").status()));
  CHECK(absl::IsInvalidArgument(ListenTcp("nothing").status()));
}

// The connections that an accept loop has served.
struct Served {
  void Take(UniqueFd fd) {
    MutexLock lock(&mutex);
    taken.push_back(std::move(fd));
  }
  size_t count() {
    MutexLock lock(&mutex);
    return taken.size();
  }
  Mutex mutex;
  std::vector<UniqueFd> taken;
};

TEST_CASE(
    "A TCP listener that was out of descriptors accepts again once there "
    "are some") {
  auto listeners = ListenTcp("127.0.0.1:0");
  REQUIRE(listeners.ok());
  const std::string address = (*listeners)[0].address;
  Served served;
  auto loop = AcceptLoop::CreateTcp(std::move((*listeners)[0]),
                                    [&](UniqueFd fd) { served.Take(std::move(fd)); });
  REQUIRE(loop.ok());
  (*loop)->Start();
  const UniqueFd first = Dial(address);
  CHECK(Eventually([&] { return served.count() == 1; }));

  // Sockets that the test needs later are opened first; then no number is left.
  UniqueFd shed(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int next = dup(first.get());
  REQUIRE(next >= 0);
  close(next);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(next);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  const int connected = connect(shed.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to));
  const bool ended = Readable(shed);  // closed unserved
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(connected == 0);
  CHECK(ended);
  CHECK(served.count() == 1);

  const UniqueFd again = Dial(address);
  CHECK(again.valid());
  CHECK(Eventually([&] { return served.count() == 2; }));
}

}  // namespace
}  // namespace refitd
