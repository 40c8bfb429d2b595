// A stranger's connection to the host wire's listener, for fuzz targets that make millions of them,
// and two ranks of a communicator that strangers must not harm.
#ifndef REFITD_TESTS_FUZZ_STRANGER_H_
#define REFITD_TESTS_FUZZ_STRANGER_H_

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"
#include "transport/sockets/socket_wire.h"

namespace refitd {

// The error of one try to connect; 0: it is connected. libFuzzer's alarm may interrupt the call,
// which then goes on by itself.
inline int ConnectError(const UniqueFd& fd, const sockaddr_storage& to, socklen_t length) {
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) == 0) return 0;
  if (errno != EINTR) return errno;
  pollfd ready{fd.get(), POLLOUT, 0};
  while (poll(&ready, 1, -1) < 0) REFITD_CHECK(errno == EINTR);
  int error = 0;
  socklen_t size = sizeof(error);
  REFITD_CHECK(getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0);
  return error;
}

// Binds the socket to another address of the loopback network, with all its ports. False: the
// machine lets it not.
inline bool BindToNextAddress(const UniqueFd& fd) {
  static uint32_t next = INADDR_LOOPBACK;
  next = next < INADDR_LOOPBACK + 0xFFFF ? next + 1 : INADDR_LOOPBACK + 1;
  const int on = 1;
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(next);
  return setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on)) == 0 &&
         bind(fd.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0;
}

// A connection to that address. Reads from it end after 10 s. The machine remembers the ports of
// connections that ended for a minute: when none is left, other addresses of its own have more.
inline UniqueFd Dial(const SocketAddress& address) {
  socklen_t length = 0;
  const sockaddr_storage to = address.host.Sockaddr(address.port, &length);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  for (bool again = false;; again = true) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REFITD_CHECK(fd.valid());
    if (again && !BindToNextAddress(fd)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const int error = ConnectError(fd, to, length);
    if (error == 0) {
      const timeval limit{10, 0};
      REFITD_CHECK(setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
      return fd;
    }
    REFITD_CHECK(error == EADDRNOTAVAIL && std::chrono::steady_clock::now() < deadline);
  }
}

inline void Say(int fd, std::string_view bytes) {
  // The other end may have closed the connection at an earlier byte.
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// ---- the two ranks ----

inline constexpr CommunicatorId kOpen{1};
inline constexpr size_t kPayload = 64;
inline constexpr Duration kTimeout = std::chrono::seconds(5);

// Calls `submit` with a callback, and returns the status that the callback will get.
template <typename F>
std::future<absl::Status> Ask(const F& submit) {
  auto promise = std::make_shared<std::promise<absl::Status>>();
  auto future = promise->get_future();
  submit([promise](absl::Status status) { promise->set_value(std::move(status)); });
  return future;
}

inline absl::Status Get(std::future<absl::Status>& future) {
  REFITD_CHECK(future.wait_for(2 * kTimeout) == std::future_status::ready);
  return future.get();
}

// Two ranks that stay connected for the whole run.
struct WirePair {
  explicit WirePair(const SocketWireOptions& options) {
    for (auto& wire : wires) {
      auto made = MakeSocketWire(options);
      REFITD_CHECK(made.ok());
      wire = *std::move(made);
    }
    std::vector<std::string> addresses;
    for (int rank = 0; rank < 2; ++rank) addresses.push_back(*wires[rank]->Open(kOpen, rank, 2));
    std::array<std::future<absl::Status>, 2> up;
    for (int rank = 0; rank < 2; ++rank) {
      up[rank] = Ask([&](auto done) { wires[rank]->Connect(kOpen, addresses, kTimeout, done); });
    }
    for (auto& each : up) REFITD_CHECK(Get(each).ok());
    address = *DecodeSocketAddress(addresses[1], kOpen, 1, 2);
  }

  void CheckBroadcast() {
    std::array<std::array<char, kPayload>, 2> memory{};
    memory[0].fill(static_cast<char>(seq));
    std::array<std::future<absl::Status>, 2> ended;
    ++seq;
    for (int rank = 0; rank < 2; ++rank) {
      ended[rank] = Ask([&](auto done) {
        wires[rank]->Submit(
            WireBroadcast{
                kOpen, WireSeq(seq), 0, {memory[rank].data(), kPayload, nullptr}, kTimeout},
            done);
      });
    }
    for (auto& each : ended) REFITD_CHECK(Get(each).ok());
    REFITD_CHECK(memory[0] == memory[1]);
  }

  std::array<std::unique_ptr<Wire>, 2> wires;
  SocketAddress address;  // of rank 1
  uint64_t seq = 0;
};

}  // namespace refitd

#endif  // REFITD_TESTS_FUZZ_STRANGER_H_
