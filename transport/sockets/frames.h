// The messages that cross the host wire over sockets, and the addresses by which its ends find each
// other. Pure; everything here may come from a stranger (P10). All integers are little-endian.
//
// A connection joins two ranks of a communicator; the lower rank dials. After TLS, if there is any:
//
//   dialler  -> Greeting kHello    with the token of the listener's address
//   listener -> Greeting kWelcome  with the token of the dialler's address;
//               or kUnknown         and the connection ends
//   then, in both directions, any number of
//     Frame kBroadcast or kExchange, followed by this connection's part of the payload
//     Frame kAck, when all bytes of a payload have come
//
// With several connections between two ranks, the payload's stripes of kStripeBytes go to them in
// turn, each connection with frames of its own.
#ifndef REFITD_TRANSPORT_SOCKETS_FRAMES_H_
#define REFITD_TRANSPORT_SOCKETS_FRAMES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/sockets/host_address.h"

namespace refitd {

using WireToken = std::array<char, 16>;

// True if both are equal. The comparison takes the same time wherever they differ, so that its time
// tells nothing of the token.
bool SameToken(const WireToken& a, const WireToken& b);

// ---- addresses ----

inline constexpr int kMaxWireStreams = 8;  // connections between two ranks
inline constexpr size_t kMaxWireIdentityBytes = 2048;

// The address at which a rank listens: Open returns the encoded address, and Connect gets those of
// all ranks from the control plane. The encoding is
//   4 magic "RFS1" | 8 communicator | 4 rank | 4 size | 16 token | 1 family (4 or 6) | 16 ip | 2
//   port | 1 TLS (0 or 1) | 1 streams | 2 length of identity | identity
struct SocketAddress {
  uint64_t communicator = 0;
  uint32_t rank = 0;
  uint32_t size = 0;
  WireToken token{};
  HostAddress host;
  uint16_t port = 0;
  bool tls = false;
  uint8_t streams = 1;   // 1 to kMaxWireStreams
  std::string identity;  // of the daemon's certificate; empty without TLS
  bool operator==(const SocketAddress&) const = default;
};
inline constexpr size_t kSocketAddressFixedBytes = 4 + 8 + 4 + 4 + 16 + 1 + 16 + 2 + 1 + 1 + 2;

std::string EncodeSocketAddress(const SocketAddress& address);
// Decodes the address that another daemon sent for rank `rank` of a communicator of `size` ranks.
// INVALID_ARGUMENT: malformed, or not of that communicator, rank and size, or not of this wire. The
// caller vouches for the three numbers.
absl::StatusOr<SocketAddress> DecodeSocketAddress(std::string_view in, CommunicatorId communicator,
                                                  int rank, int size);
// Decodes an address of any communicator, rank and size. INVALID_ARGUMENT: malformed.
absl::StatusOr<SocketAddress> DecodeSocketAddress(std::string_view in);
// Whether the encoded address, which may be malformed, is of this wire.
bool IsSocketAddress(std::string_view in);

// ---- greetings ----

enum class GreetingKind : uint32_t { kHello = 1, kWelcome = 2, kUnknown = 3 };

struct Greeting {
  GreetingKind kind{};
  uint64_t communicator = 0;
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t stream = 0;
  WireToken token{};  // zeros in kUnknown
  bool operator==(const Greeting&) const = default;
};
inline constexpr size_t kGreetingBytes = 8 + 4 + 8 + 4 + 4 + 4 + 16;
using GreetingBytes = std::array<char, kGreetingBytes>;

GreetingBytes EncodeGreeting(const Greeting& greeting);
// nullopt: the bytes are no greeting.
std::optional<Greeting> DecodeGreeting(const GreetingBytes& bytes);

// ---- frames ----

inline constexpr int64_t kStripeBytes = int64_t{1} << 20;

enum class FrameKind : uint32_t { kBroadcast = 1, kExchange = 2, kAck = 3 };

// A frame precedes each payload; the receiver compares the frame before it accepts a byte (P5). An
// acknowledgement has the sequence number of its operation.
struct Frame {
  FrameKind kind{};
  uint64_t seq = 0;
  uint64_t root = 0;   // of a broadcast, else 0
  uint64_t bytes = 0;  // of the whole payload; 0 in an acknowledgement
  bool operator==(const Frame&) const = default;
};
inline constexpr size_t kFrameBytes = 4 + 4 + 8 + 8 + 8;
using FrameBytes = std::array<char, kFrameBytes>;

FrameBytes EncodeFrame(const Frame& frame);
// nullopt: the bytes are no frame.
std::optional<Frame> DecodeFrame(const FrameBytes& bytes);
// "broadcast seq 4 of 100 bytes from rank 0"
std::string Describe(const Frame& frame);

// ---- stripes ----

// A stretch of a payload that is contiguous in memory.
struct Stretch {
  int64_t offset = 0;
  int64_t bytes = 0;
};
// How many of `total` bytes go over connection `stream` of `streams`.
int64_t BytesOfStream(int64_t total, int stream, int streams);
// The place in the payload of the bytes that one connection moves next, after it has moved `moved`
// bytes.
Stretch StretchAt(int64_t moved, int64_t total, int stream, int streams);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_FRAMES_H_
