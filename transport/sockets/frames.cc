#include "transport/sockets/frames.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstring>

#include "transport/base/failure.h"
#include "transport/base/little_endian.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr std::string_view kAddressMagic = "RFS1";
constexpr uint64_t kGreetingMagic = 0x31304f4c4c454852;  // "RHELLO01"
constexpr uint32_t kFrameMagic = 0x31464652;             // "RFF1"

template <size_t N>
void TakeBytes(std::string_view* in, std::array<char, N>* out) {
  std::memcpy(out->data(), in->data(), N);
  in->remove_prefix(N);
}

template <size_t N>
std::array<char, N> Fixed(const std::string& bytes) {
  REFITD_CHECK(bytes.size() == N);
  std::array<char, N> out;
  std::memcpy(out.data(), bytes.data(), N);
  return out;
}

// The reason why the fields behind communicator, rank and size can't be right, or "".
std::string WhyMalformed(const SocketAddress& address) {
  const std::string unusable = WhyUnusable(address.host);
  if (!unusable.empty()) return fmt::format("{} is {}", address.host.Text(), unusable);
  if (address.port == 0) return "port 0";
  if (address.streams < 1 || address.streams > kMaxWireStreams) {
    return fmt::format("{} connections", address.streams);
  }
  if (address.tls == address.identity.empty()) {
    return address.tls ? "TLS without an identity" : "an identity without TLS";
  }
  return "";
}

}  // namespace

bool SameToken(const WireToken& a, const WireToken& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string EncodeSocketAddress(const SocketAddress& address) {
  REFITD_CHECK(address.identity.size() <= kMaxWireIdentityBytes);
  std::string out(kAddressMagic);
  AppendInt(address.communicator, &out);
  AppendInt(address.rank, &out);
  AppendInt(address.size, &out);
  out.append(address.token.data(), address.token.size());
  out.push_back(address.host.family == AF_INET ? 4 : 6);
  out.append(reinterpret_cast<const char*>(address.host.ip.data()), address.host.ip.size());
  AppendInt(address.port, &out);
  out.push_back(address.tls ? 1 : 0);
  AppendInt(address.streams, &out);
  AppendInt(static_cast<uint16_t>(address.identity.size()), &out);
  return out + address.identity;
}

absl::StatusOr<SocketAddress> DecodeSocketAddress(std::string_view in, CommunicatorId communicator,
                                                  int rank, int size) {
  const auto bad = [&](const std::string& why) {
    return AboutRanks(Error(absl::StatusCode::kInvalidArgument,
                            "communicator {}: address of rank {}: {}", communicator, rank, why),
                      {rank});
  };
  if (in.substr(0, kAddressMagic.size()) != kAddressMagic) {
    return bad("not a wire address of this version");
  }
  if (in.size() < kSocketAddressFixedBytes ||
      in.size() > kSocketAddressFixedBytes + kMaxWireIdentityBytes) {
    return bad(fmt::format("{} bytes", in.size()));
  }
  in.remove_prefix(kAddressMagic.size());
  SocketAddress address;
  address.communicator = TakeInt<uint64_t>(&in);
  if (address.communicator != communicator.value())
    return bad(fmt::format("is of communicator {}", address.communicator));
  address.rank = TakeInt<uint32_t>(&in);
  if (address.rank != static_cast<uint32_t>(rank)) {
    return bad(fmt::format("is of rank {}", address.rank));
  }
  address.size = TakeInt<uint32_t>(&in);
  if (address.size != static_cast<uint32_t>(size)) {
    return bad(fmt::format("is for {} ranks, expected {}", address.size, size));
  }
  TakeBytes(&in, &address.token);
  const auto family = TakeInt<uint8_t>(&in);
  if (family != 4 && family != 6) return bad(fmt::format("address family {}", family));
  address.host.family = family == 4 ? AF_INET : AF_INET6;
  std::memcpy(address.host.ip.data(), in.data(), address.host.ip.size());
  in.remove_prefix(address.host.ip.size());
  // Only four bytes of an IPv4 address mean anything, and each address has one encoding.
  if (family == 4 && std::any_of(address.host.ip.begin() + 4, address.host.ip.end(),
                                 [](uint8_t byte) { return byte != 0; })) {
    return bad("bytes behind an IPv4 address");
  }
  address.port = TakeInt<uint16_t>(&in);
  const auto tls = TakeInt<uint8_t>(&in);
  if (tls > 1) return bad(fmt::format("TLS {}", tls));
  address.tls = tls == 1;
  address.streams = TakeInt<uint8_t>(&in);
  if (TakeInt<uint16_t>(&in) != in.size()) return bad("its identity has another length");
  address.identity = std::string(in);
  const std::string malformed = WhyMalformed(address);
  if (!malformed.empty()) return bad(malformed);
  return address;
}

absl::StatusOr<SocketAddress> DecodeSocketAddress(std::string_view in) {
  if (!IsSocketAddress(in) || in.size() < kSocketAddressFixedBytes) {
    return Error(absl::StatusCode::kInvalidArgument, "no wire address of this version: {} bytes",
                 in.size());
  }
  std::string_view numbers = in.substr(kAddressMagic.size());
  const auto communicator = TakeInt<uint64_t>(&numbers);
  const auto rank = TakeInt<uint32_t>(&numbers);
  const auto size = TakeInt<uint32_t>(&numbers);
  return DecodeSocketAddress(in, CommunicatorId(communicator), static_cast<int>(rank),
                             static_cast<int>(size));
}

bool IsSocketAddress(std::string_view in) { return in.starts_with(kAddressMagic); }

GreetingBytes EncodeGreeting(const Greeting& greeting) {
  std::string out;
  AppendInt(kGreetingMagic, &out);
  AppendInt(static_cast<uint32_t>(greeting.kind), &out);
  AppendInt(greeting.communicator, &out);
  AppendInt(greeting.from, &out);
  AppendInt(greeting.to, &out);
  AppendInt(greeting.stream, &out);
  out.append(greeting.token.data(), greeting.token.size());
  return Fixed<kGreetingBytes>(out);
}

std::optional<Greeting> DecodeGreeting(const GreetingBytes& bytes) {
  std::string_view in(bytes.data(), bytes.size());
  if (TakeInt<uint64_t>(&in) != kGreetingMagic) return std::nullopt;
  Greeting greeting;
  const auto kind = TakeInt<uint32_t>(&in);
  if (kind < 1 || kind > static_cast<uint32_t>(GreetingKind::kUnknown)) return std::nullopt;
  greeting.kind = static_cast<GreetingKind>(kind);
  greeting.communicator = TakeInt<uint64_t>(&in);
  greeting.from = TakeInt<uint32_t>(&in);
  greeting.to = TakeInt<uint32_t>(&in);
  greeting.stream = TakeInt<uint32_t>(&in);
  if (greeting.stream >= static_cast<uint32_t>(kMaxWireStreams)) return std::nullopt;
  TakeBytes(&in, &greeting.token);
  return greeting;
}

FrameBytes EncodeFrame(const Frame& frame) {
  std::string out;
  AppendInt(kFrameMagic, &out);
  AppendInt(static_cast<uint32_t>(frame.kind), &out);
  AppendInt(frame.seq, &out);
  AppendInt(frame.root, &out);
  AppendInt(frame.bytes, &out);
  return Fixed<kFrameBytes>(out);
}

std::optional<Frame> DecodeFrame(const FrameBytes& bytes) {
  std::string_view in(bytes.data(), bytes.size());
  if (TakeInt<uint32_t>(&in) != kFrameMagic) return std::nullopt;
  Frame frame;
  const auto kind = TakeInt<uint32_t>(&in);
  if (kind < 1 || kind > static_cast<uint32_t>(FrameKind::kAck)) return std::nullopt;
  frame.kind = static_cast<FrameKind>(kind);
  frame.seq = TakeInt<uint64_t>(&in);
  frame.root = TakeInt<uint64_t>(&in);
  frame.bytes = TakeInt<uint64_t>(&in);
  return frame;
}

std::string Describe(const Frame& frame) {
  if (frame.kind == FrameKind::kAck) return fmt::format("the end of seq {}", frame.seq);
  const bool broadcast = frame.kind == FrameKind::kBroadcast;
  return fmt::format("{} seq {} of {} bytes{}", broadcast ? "broadcast" : "exchange", frame.seq,
                     frame.bytes, broadcast ? fmt::format(" from root {}", frame.root) : "");
}

int64_t BytesOfStream(int64_t total, int stream, int streams) {
  const int64_t turn = kStripeBytes * streams;
  const int64_t rest = total % turn - kStripeBytes * stream;
  return total / turn * kStripeBytes + std::clamp<int64_t>(rest, 0, kStripeBytes);
}

Stretch StretchAt(int64_t moved, int64_t total, int stream, int streams) {
  if (streams == 1) return {moved, total - moved};
  const int64_t within = moved % kStripeBytes;
  const int64_t offset = (moved / kStripeBytes * streams + stream) * kStripeBytes + within;
  return {offset, std::clamp<int64_t>(total - offset, 0, kStripeBytes - within)};
}

}  // namespace refitd
