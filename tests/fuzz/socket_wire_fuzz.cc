// Any bytes to the host wire over sockets: as an address, a greeting and a frame; from a stranger
// to its listening socket; and from a peer that showed the token, in the middle of an operation.
// The first byte chooses. Accepted values encode to the bytes that they came from; a stranger costs
// an open communicator nothing; memory changes only behind the right frame (P4, P5, P10).
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "tests/fuzz/one_in.h"
#include "tests/fuzz/stranger.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/frames.h"
#include "transport/sockets/socket_wire.h"

namespace refitd {
namespace {

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

void FuzzStranger(WirePair& pair, std::string_view in) {
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
  // A communicator that a stranger harmed would stay so.
  if (OneIn(16, in)) pair.CheckBroadcast();
}

void FuzzPeer(WirePair& pair, std::string_view in) {
  static uint64_t next = 100;
  const CommunicatorId communicator(next++);
  Wire& wire = *pair.wires[1];
  const std::string theirs = *wire.Open(communicator, 1, 2);
  SocketAddress mine = *DecodeSocketAddress(theirs, communicator, 1, 2);
  const UniqueFd fd = Dial(mine);
  Say(fd.get(),
      {EncodeGreeting({GreetingKind::kHello, communicator.value(), 0, 1, 0, mine.token}).data(),
       kGreetingBytes});
  mine.rank = 0;
  auto up = Ask([&](auto done) {
    wire.Connect(communicator, {EncodeSocketAddress(mine), theirs}, kTimeout, done);
  });
  REFITD_CHECK(Get(up).ok());
  std::array<char, kPayload> memory;
  memory.fill('\xcd');
  auto ended = Ask([&](auto done) {
    wire.Submit(
        WireBroadcast{communicator, WireSeq(1), 0, {memory.data(), kPayload, nullptr}, kTimeout},
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
  wire.Close(communicator);
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const pair = new refitd::WirePair({});
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
