// Attackers that write HTTP/2 by hand: what reaches a listener before any handler runs. A
// connection that can't be made ends the process. Not thread-safe.
#ifndef REFITD_TESTS_E2E_HTTP2_FLOOD_H_
#define REFITD_TESTS_E2E_HTTP2_FLOOD_H_

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "tests/e2e/http2_frames.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd::e2e {

inline constexpr int64_t kTried = int64_t{8} << 20;  // what a connection tries to send
// A connection to the daemon, by an attacker.
class Attacker {
 public:
  explicit Attacker(const std::string& socket_path) {
    fd_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket_path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    REFITD_CHECK(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    Begin();
  }
  explicit Attacker(uint16_t port) {
    fd_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REFITD_CHECK(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    Begin();
  }

  // False: the daemon has ended the connection.
  bool Send(const std::string& bytes) {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = send(fd_.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (n <= 0) return false;
      done += static_cast<size_t>(n);
    }
    sent_ += static_cast<int64_t>(bytes.size());
    return true;
  }
  // Sends what `next` makes until the daemon ends the connection (true), or kTried is sent.
  bool IsEnded(const std::function<std::string()>& next) {
    while (sent_ < kTried) {
      if (!Send(next())) return true;
    }
    return false;
  }
  // Makes a call that the policy allows to whoever runs a test, and waits for its end. False: the
  // daemon has ended the connection.
  bool BeAllowed() {
    const uint32_t stream = NextStream();
    const std::string call =
        Frame(kSettings, kAck, 0, "") +
        Frame(kHeaders, kEndHeaders, stream, Request("/refitd.v1.Operator/GetStatus")) +
        Frame(kData, kEndStream, stream, MessageHead(0));
    if (!Send(call)) return false;
    while (answered_ < stream) {
      if (!ReadFrames()) return false;
    }
    return true;
  }
  // Whether the daemon has ended the connection.
  bool Closed() const {
    pollfd look{.fd = fd_.get(), .events = POLLRDHUP, .revents = 0};
    return poll(&look, 1, 0) == 1 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  }
  uint32_t NextStream() { return std::exchange(next_, next_ + 2); }
  // Sends the first part of a message on each of 300 streams, as fast as flow control lets it.
  bool LeavesMessagesUnfinished() {
    for (int i = 0; i < 300; ++i) {
      const uint32_t stream = NextStream();
      if (!Send(Frame(kHeaders, kEndHeaders, stream, Request()))) return true;
      if (!SendData(stream, MessageHead(8 << 20) + std::string(65'000, 'x'))) return ended_;
    }
    return false;
  }

 private:
  void Begin() {
    const timeval patience{.tv_sec = 5, .tv_usec = 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    Send(std::string(kPreface) + Frame(kSettings, 0, 0, ""));
  }
  // False: the connection has ended, or the daemon's windows stay closed.
  bool SendData(uint32_t stream, const std::string& data) {
    for (size_t at = 0; at < data.size(); at += 16'000) {
      const std::string piece = data.substr(at, 16'000);
      while (window_ < static_cast<int64_t>(piece.size())) {
        if (!ReadFrames()) return false;
      }
      window_ -= static_cast<int64_t>(piece.size());
      if (!Send(Frame(kData, 0, stream, piece))) {
        ended_ = true;
        return false;
      }
    }
    return true;
  }
  // Waits for the daemon's frames: adds what windows of the connection they open, and notes which
  // stream has ended.
  bool ReadFrames() {
    pollfd look{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    if (poll(&look, 1, 5'000) != 1) return false;
    char buffer[4096];
    const ssize_t n = recv(fd_.get(), buffer, sizeof(buffer), 0);
    if (n <= 0) {
      ended_ = true;
      return false;
    }
    read_.append(buffer, static_cast<size_t>(n));
    while (read_.size() >= 9) {
      const auto byte = [&](size_t i) {
        return static_cast<uint32_t>(static_cast<uint8_t>(read_[i]));
      };
      const size_t length = byte(0) << 16 | byte(1) << 8 | byte(2);
      if (read_.size() < 9 + length) break;
      const bool of_connection = (byte(5) | byte(6) | byte(7) | byte(8)) == 0;
      if (byte(3) == kWindowUpdate && of_connection) {
        window_ += byte(9) << 24 | byte(10) << 16 | byte(11) << 8 | byte(12);
      }
      const bool has_end = byte(3) == kHeaders || byte(3) == kData;
      if (has_end && (byte(4) & kEndStream) != 0) answered_ = byte(7) << 8 | byte(8);
      read_.erase(0, 9 + length);
    }
    return true;
  }

  UniqueFd fd_;
  int64_t sent_ = 0;
  int64_t window_ = 65'535;
  bool ended_ = false;
  uint32_t next_ = 1;      // stream
  uint32_t answered_ = 0;  // the last stream that the daemon ended
  std::string read_;
};

// The attacks; each returns whether the daemon has ended the connection.

inline bool EndlessHeaders(Attacker* attacker) {
  const uint32_t stream = attacker->NextStream();
  if (!attacker->Send(Frame(kHeaders, 0, stream, Request()))) return true;
  std::string fields;
  for (int i = 0; i < 120; ++i) fields += Field(fmt::format("x-{}", i), std::string(110, 'v'));
  return attacker->IsEnded([&] { return Frame(kContinuation, 0, stream, fields); });
}

// A header's value of 2^28 bytes, of which each frame brings eight.
inline bool GrowingHeader(Attacker* attacker) {
  // The length: the 7 bits of the first byte, then groups of 7.
  const std::string start = std::string(1, '\0') + "\x01x" + "\x7f" + "\x80\xff\xff\x7f";
  const uint32_t stream = attacker->NextStream();
  if (!attacker->Send(Frame(kHeaders, 0, stream, Request() + start))) return true;
  std::string pieces;
  for (int i = 0; i < 500; ++i) pieces += Frame(kContinuation, 0, stream, "growing!");
  return attacker->IsEnded([&] { return pieces; });
}

inline bool UnfinishedMessages(Attacker* attacker) { return attacker->LeavesMessagesUnfinished(); }

// Streams that are opened, with this header block, and reset at once.
inline std::string Resets(Attacker* attacker, const std::string& request) {
  std::string frames;
  for (int i = 0; i < 100; ++i) {
    const uint32_t stream = attacker->NextStream();
    frames += Frame(kHeaders, kEndHeaders, stream, request);
    frames += Frame(kResetStream, 0, stream, Number(8, 4));
  }
  return frames;
}

inline bool RapidResets(Attacker* attacker) {
  return attacker->IsEnded([&] { return Resets(attacker, Request()); });
}

// A stream takes 28 bytes.
inline bool IndexedResets(Attacker* attacker) {
  const uint32_t stream = attacker->NextStream();
  if (!attacker->Send(Frame(kHeaders, kEndHeaders, stream, IndexingRequest()))) return true;
  return attacker->IsEnded([&] { return Resets(attacker, IndexedRequest()); });
}

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_HTTP2_FLOOD_H_
