#include "transport/base/utf8.h"

#include <algorithm>

namespace refitd {

size_t Utf8SequenceBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
  }
  if (first == 0xe0 && byte(1) < 0xa0) return 0;  // overlong
  if (first == 0xed && byte(1) > 0x9f) return 0;  // surrogates
  if (first == 0xf0 && byte(1) < 0x90) return 0;  // overlong
  if (first == 0xf4 && byte(1) > 0x8f) return 0;  // beyond Unicode
  return length;
}

std::string CleanText(std::string_view text, size_t max_bytes) {
  std::string clean;
  clean.reserve(std::min(text.size(), max_bytes));
  while (!text.empty()) {
    const size_t length = Utf8SequenceBytes(text);
    const std::string_view piece = length == 0 ? std::string_view("?") : text.substr(0, length);
    if (clean.size() + piece.size() > max_bytes) break;
    clean += piece;
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return clean;
}

}  // namespace refitd
