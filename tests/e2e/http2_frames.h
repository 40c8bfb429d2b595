// HTTP/2 by hand (RFC 9113), for attackers. Header blocks are literal fields, so that nothing needs
// a table, but where a test says otherwise.
#ifndef REFITD_TESTS_E2E_HTTP2_FRAMES_H_
#define REFITD_TESTS_E2E_HTTP2_FRAMES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace refitd::e2e {

inline constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kResetStream = 3,
  kSettings = 4,
  kWindowUpdate = 8,
  kContinuation = 9,
};
inline constexpr uint8_t kEndStream = 1;
inline constexpr uint8_t kAck = 1;
inline constexpr uint8_t kEndHeaders = 4;

inline std::string Number(uint32_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text += static_cast<char>(value >> (8 * i));
  return text;
}

inline std::string Frame(FrameType type, uint8_t flags, uint32_t stream,
                         const std::string& payload) {
  return Number(static_cast<uint32_t>(payload.size()), 3) + static_cast<char>(type) +
         static_cast<char>(flags) + Number(stream, 4) + payload;
}

// A header field, literal, without indexing; both texts have less than 127 bytes.
inline std::string Field(const std::string& name, const std::string& value) {
  return std::string(1, '\0') + static_cast<char>(name.size()) + name +
         static_cast<char>(value.size()) + value;
}

inline std::string Request(const std::string& path = "/refitd.v1.Trainer/PushBucket") {
  return Field(":method", "POST") + Field(":scheme", "http") + Field(":path", path) +
         Field(":authority", "localhost") + Field("content-type", "application/grpc") +
         Field("te", "trailers");
}

// The same request twice (RFC 7541): its fields put into the connection's table, and from there.
inline std::string IndexingRequest() {
  const auto value = [](const std::string& text) { return static_cast<char>(text.size()) + text; };
  return "\x83\x86\x44" + value("/refitd.v1.Trainer/PushBucket") + "\x41" + value("localhost") +
         "\x5f" + value("application/grpc") + "\x40" + value("te") + value("trailers");
}
inline std::string IndexedRequest() { return "\x83\x86\xc1\xc0\xbf\xbe"; }

// The start of a message of gRPC: no flags, and its length.
inline std::string MessageHead(uint32_t bytes) { return std::string(1, '\0') + Number(bytes, 4); }

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_HTTP2_FRAMES_H_
