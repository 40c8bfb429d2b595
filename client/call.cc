#include "client/call.h"

namespace refitd::client {
namespace {

// The length of the UTF-8 sequence at the start of `text`; 0 if `text` starts with no valid
// sequence. Overlong forms and surrogates are refused by the first continuation byte's range.
size_t SequenceLength(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  size_t length = 0;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return 0;
  }
  if (text.size() < length || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return length;
}

}  // namespace

absl::Status NameDaemon(std::string_view what, std::string_view socket,
                        const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  return Error(status.code(), "{}: daemon at {}: {}", what, socket, Message(status));
}

std::string CleanText(std::string_view text, size_t max_bytes) {
  std::string clean;
  clean.reserve(std::min(text.size(), max_bytes));
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    const std::string_view piece = length == 0 ? std::string_view("?") : text.substr(0, length);
    if (clean.size() + piece.size() > max_bytes) break;
    clean += piece;
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return clean;
}

}  // namespace refitd::client
