// Reads along what a client sends on an HTTP/2 connection, and says what of it gRPC keeps that no
// handler has seen: header blocks and messages that are not complete, and streams that were opened.
//
// It judges nothing that gRPC refuses itself (an unknown frame, a stream's wrong number): it only
// has to find where frames begin and end, and messages in them. Each message of gRPC follows a byte
// of flags and four of its length (docs of gRPC, PROTOCOL-HTTP2.md); frames are of RFC 9113.
//
// Pure; values; not thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_FRAME_SCANNER_H_
#define REFITD_DAEMON_SOCKETS_FRAME_SCANNER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

#include "transport/base/ids.h"

namespace refitd {

// What an unfinished message costs beside its bytes: gRPC's stream.
inline constexpr int64_t kMessageOverhead = 16 << 10;

class FrameScanner {
 public:
  // Takes the next bytes of the connection. `now`: only compared with other such times.
  void Read(std::string_view bytes, TimePoint now);

  // Of headers that have not ended, with the heads of their frames.
  int64_t header_bytes() const { return header_bytes_; }
  // Of messages that have begun and not ended, and kMessageOverhead for each.
  int64_t message_bytes() const { return message_bytes_; }
  // How many times headers have begun.
  int64_t opened() const { return opened_; }
  // Whether the client has confirmed the server's settings, without which gRPC bounds nothing.
  bool confirmed() const { return confirmed_; }
  // When the oldest began of what has not ended; nullopt: all has.
  std::optional<TimePoint> oldest() const;

 private:
  struct Message {
    size_t head = 0;      // bytes of its flags and length that are there
    uint32_t left = 0;    // of its bytes, once the head is there
    int64_t counted = 0;  // in message_bytes_
    TimePoint since{};
  };
  using Messages = std::map<uint32_t, Message>;

  void BeginFrame();
  void EndFrame();
  size_t TakePayload(std::string_view bytes);
  void TakeData(std::string_view data);
  void Drop(Messages::iterator message);

  size_t preface_ = 24;  // bytes of it that are still to come
  std::array<uint8_t, 9> head_{};
  size_t head_bytes_ = 0;
  uint32_t payload_ = 0;  // bytes of it that are still to come
  bool in_frame_ = false;
  int64_t header_bytes_ = 0;
  int64_t message_bytes_ = 0;
  int64_t opened_ = 0;
  bool confirmed_ = false;
  TimePoint now_{};
  TimePoint headers_since_{};
  Messages messages_;  // by stream: those that have begun and not ended
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_FRAME_SCANNER_H_
