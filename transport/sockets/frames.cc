#include "transport/sockets/frames.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstring>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr std::string_view kAddressMagic = "RFS1";
constexpr std::string_view kGlooMagic = "RFW1";
constexpr uint64_t kGreetingMagic = 0x31304f4c4c454852;  // "RHELLO01"
constexpr uint32_t kFrameMagic = 0x31464652;             // "RFF1"

template <typename T>
void Append(T value, std::string* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out->push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

template <typename T>
T Take(std::string_view* in) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(
        value | static_cast<T>(static_cast<T>(static_cast<uint8_t>((*in)[i])) << (8 * i)));
  }
  in->remove_prefix(sizeof(T));
  return value;
}

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

// The reason why the fields behind epoch, rank and size can't be right, or "".
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
  Append(address.epoch, &out);
  Append(address.rank, &out);
  Append(address.size, &out);
  out.append(address.token.data(), address.token.size());
  out.push_back(address.host.family == AF_INET ? 4 : 6);
  out.append(reinterpret_cast<const char*>(address.host.ip.data()), address.host.ip.size());
  Append(address.port, &out);
  out.push_back(address.tls ? 1 : 0);
  Append(address.streams, &out);
  Append(static_cast<uint16_t>(address.identity.size()), &out);
  return out + address.identity;
}

absl::StatusOr<SocketAddress> DecodeSocketAddress(std::string_view in, EpochId epoch, int rank,
                                                  int size) {
  const auto bad = [&](const std::string& why) {
    return Error(absl::StatusCode::kInvalidArgument, "epoch {}: address of rank {}: {}", epoch,
                 rank, why);
  };
  if (in.substr(0, kGlooMagic.size()) == kGlooMagic) {
    return bad("its daemon uses Gloo for the data plane, this one sockets (data.wire)");
  }
  if (in.substr(0, kAddressMagic.size()) != kAddressMagic) {
    return bad("not a wire address of this version");
  }
  if (in.size() < kSocketAddressFixedBytes ||
      in.size() > kSocketAddressFixedBytes + kMaxWireIdentityBytes) {
    return bad(fmt::format("{} bytes", in.size()));
  }
  in.remove_prefix(kAddressMagic.size());
  SocketAddress address;
  address.epoch = Take<uint64_t>(&in);
  if (address.epoch != epoch.value()) return bad(fmt::format("is of epoch {}", address.epoch));
  address.rank = Take<uint32_t>(&in);
  if (address.rank != static_cast<uint32_t>(rank)) {
    return bad(fmt::format("is of rank {}", address.rank));
  }
  address.size = Take<uint32_t>(&in);
  if (address.size != static_cast<uint32_t>(size)) {
    return bad(fmt::format("is for {} ranks, expected {}", address.size, size));
  }
  TakeBytes(&in, &address.token);
  const auto family = Take<uint8_t>(&in);
  if (family != 4 && family != 6) return bad(fmt::format("address family {}", family));
  address.host.family = family == 4 ? AF_INET : AF_INET6;
  std::memcpy(address.host.ip.data(), in.data(), address.host.ip.size());
  in.remove_prefix(address.host.ip.size());
  // Only four bytes of an IPv4 address mean anything, and each address has one encoding.
  if (family == 4 && std::any_of(address.host.ip.begin() + 4, address.host.ip.end(),
                                 [](uint8_t byte) { return byte != 0; })) {
    return bad("bytes behind an IPv4 address");
  }
  address.port = Take<uint16_t>(&in);
  const auto tls = Take<uint8_t>(&in);
  if (tls > 1) return bad(fmt::format("TLS {}", tls));
  address.tls = tls == 1;
  address.streams = Take<uint8_t>(&in);
  if (Take<uint16_t>(&in) != in.size()) return bad("its identity has another length");
  address.identity = std::string(in);
  const std::string malformed = WhyMalformed(address);
  if (!malformed.empty()) return bad(malformed);
  return address;
}

GreetingBytes EncodeGreeting(const Greeting& greeting) {
  std::string out;
  Append(kGreetingMagic, &out);
  Append(static_cast<uint32_t>(greeting.kind), &out);
  Append(greeting.epoch, &out);
  Append(greeting.from, &out);
  Append(greeting.to, &out);
  Append(greeting.stream, &out);
  out.append(greeting.token.data(), greeting.token.size());
  return Fixed<kGreetingBytes>(out);
}

std::optional<Greeting> DecodeGreeting(const GreetingBytes& bytes) {
  std::string_view in(bytes.data(), bytes.size());
  if (Take<uint64_t>(&in) != kGreetingMagic) return std::nullopt;
  Greeting greeting;
  const auto kind = Take<uint32_t>(&in);
  if (kind < 1 || kind > static_cast<uint32_t>(GreetingKind::kUnknown)) return std::nullopt;
  greeting.kind = static_cast<GreetingKind>(kind);
  greeting.epoch = Take<uint64_t>(&in);
  greeting.from = Take<uint32_t>(&in);
  greeting.to = Take<uint32_t>(&in);
  greeting.stream = Take<uint32_t>(&in);
  if (greeting.stream >= static_cast<uint32_t>(kMaxWireStreams)) return std::nullopt;
  TakeBytes(&in, &greeting.token);
  return greeting;
}

FrameBytes EncodeFrame(const Frame& frame) {
  std::string out;
  Append(kFrameMagic, &out);
  Append(static_cast<uint32_t>(frame.kind), &out);
  Append(frame.seq, &out);
  Append(frame.root, &out);
  Append(frame.bytes, &out);
  return Fixed<kFrameBytes>(out);
}

std::optional<Frame> DecodeFrame(const FrameBytes& bytes) {
  std::string_view in(bytes.data(), bytes.size());
  if (Take<uint32_t>(&in) != kFrameMagic) return std::nullopt;
  Frame frame;
  const auto kind = Take<uint32_t>(&in);
  if (kind < 1 || kind > static_cast<uint32_t>(FrameKind::kAck)) return std::nullopt;
  frame.kind = static_cast<FrameKind>(kind);
  frame.seq = Take<uint64_t>(&in);
  frame.root = Take<uint64_t>(&in);
  frame.bytes = Take<uint64_t>(&in);
  return frame;
}

std::string Describe(const Frame& frame) {
  if (frame.kind == FrameKind::kAck) return fmt::format("the end of seq {}", frame.seq);
  const bool broadcast = frame.kind == FrameKind::kBroadcast;
  return fmt::format("{} seq {} of {} bytes{}", broadcast ? "broadcast" : "exchange", frame.seq,
                     frame.bytes, broadcast ? fmt::format(" from rank {}", frame.root) : "");
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
