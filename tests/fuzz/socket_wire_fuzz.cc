// Any bytes to the host wire over sockets: as an address, a greeting and a frame; from a stranger
// to its listening socket; and from a peer that showed the token, in the middle of an operation.
// The first byte chooses. Accepted values encode to the bytes that they came from; a stranger costs
// an open epoch nothing; memory changes only behind the right frame (P4, P5, P10).
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/one_in.h"
#include "tests/fuzz/stranger.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"
#include "transport/sockets/socket_wire.h"

namespace refitd {
namespace {

constexpr EpochId kOpen{1};
constexpr size_t kPayload = 64;
constexpr Duration kTimeout = std::chrono::seconds(5);

void FuzzDecoders(std::string_view in) {
  const auto address = DecodeSocketAddress(in, kOpen, 1, 2);
  if (address.ok()) REFITD_CHECK(EncodeSocketAddress(*address) == in);
  GreetingBytes greeting{};
  std::memcpy(greeting.data(), in.data(), std::min(in.size(), greeting.size()));
  const auto hello = DecodeGreeting(greeting);
  if (hello.has_value()) REFITD_CHECK(EncodeGreeting(*hello) == greeting);
  FrameBytes bytes{};
  std::memcpy(bytes.data(), in.data(), std::min(in.size(), bytes.size()));
  const auto frame = DecodeFrame(bytes);
  if (frame.has_value()) REFITD_CHECK(EncodeFrame(*frame) == bytes && !Describe(*frame).empty());
}

// The status of what `submit` is given a callback for.
template <typename F>
std::future<absl::Status> Ask(const F& submit) {
  auto promise = std::make_shared<std::promise<absl::Status>>();
  auto future = promise->get_future();
  submit([promise](absl::Status status) { promise->set_value(std::move(status)); });
  return future;
}

absl::Status Get(std::future<absl::Status>& future) {
  REFITD_CHECK(future.wait_for(2 * kTimeout) == std::future_status::ready);
  return future.get();
}

// Two ranks that stay connected for the whole run.
struct Pair {
  Pair() {
    for (auto& wire : wires) {
      auto made = MakeSocketWire({});
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

void FuzzStranger(Pair& pair, std::string_view in) {
  const UniqueFd fd = Dial(pair.address);
  Say(fd.get(), in);
  shutdown(fd.get(), SHUT_WR);
  std::array<char, 256> heard;
  size_t total = 0;
  ssize_t n = 0;
  do {
    n = recv(fd.get(), heard.data(), heard.size(), 0);
    if (n > 0) total += static_cast<size_t>(n);
  } while (n > 0 || (n < 0 && errno == EINTR));  // libFuzzer's alarm
  REFITD_CHECK(n == 0 || errno == ECONNRESET);   // it ends, and not by the time limit
  REFITD_CHECK(total <= kGreetingBytes);
  // An epoch that a stranger harmed would stay so.
  if (OneIn(16, in)) pair.CheckBroadcast();
}

void FuzzPeer(Pair& pair, std::string_view in) {
  static uint64_t next = 100;
  const EpochId epoch(next++);
  Wire& wire = *pair.wires[1];
  const std::string theirs = *wire.Open(epoch, 1, 2);
  SocketAddress mine = *DecodeSocketAddress(theirs, epoch, 1, 2);
  const UniqueFd fd = Dial(mine);
  Say(fd.get(), {EncodeGreeting({GreetingKind::kHello, epoch.value(), 0, 1, 0, mine.token}).data(),
                 kGreetingBytes});
  mine.rank = 0;
  auto up = Ask([&](auto done) {
    wire.Connect(epoch, {EncodeSocketAddress(mine), theirs}, kTimeout, done);
  });
  REFITD_CHECK(Get(up).ok());
  std::array<char, kPayload> memory;
  memory.fill('\xcd');
  auto ended = Ask([&](auto done) {
    wire.Submit(WireBroadcast{epoch, WireSeq(1), 0, {memory.data(), kPayload, nullptr}, kTimeout},
                done);
  });
  Say(fd.get(), in);
  shutdown(fd.get(), SHUT_WR);
  const absl::Status status = Get(ended);
  const FrameBytes right = EncodeFrame({FrameKind::kBroadcast, 1, 0, kPayload});
  std::string_view payload;
  if (in.starts_with(std::string_view(right.data(), right.size()))) {
    payload = in.substr(kFrameBytes, kPayload);
  }
  REFITD_CHECK(status.ok() == (payload.size() == kPayload));
  for (size_t i = 0; i < kPayload; ++i) {
    REFITD_CHECK(memory[i] == (i < payload.size() ? payload[i] : '\xcd'));
  }
  wire.Close(epoch);
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const pair = new refitd::Pair;
  if (size == 0) return 0;
  const std::string_view in(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      refitd::FuzzDecoders(in);
      break;
    case 1:
      refitd::FuzzStranger(*pair, in);
      break;
    default:
      refitd::FuzzPeer(*pair, in);
      break;
  }
  return 0;
}
