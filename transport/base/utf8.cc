#include "transport/base/utf8.h"

#include <algorithm>
#include <cstdint>

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

namespace {

constexpr std::string_view kCut = "...";

// Calls `take(sequence)` for each sequence of the text; `sequence` is empty for a byte that is part
// of none.
template <typename Take>
void EachSequence(std::string_view text, const Take& take) {
  while (!text.empty()) {
    const size_t length = Utf8SequenceBytes(text);
    take(text.substr(0, length), text.front());
    text.remove_prefix(std::max<size_t>(length, 1));
  }
}

uint32_t CodePoint(std::string_view sequence) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(sequence[i]); };
  constexpr uint32_t kFirstBits[] = {0x7f, 0x1f, 0x0f, 0x07};
  uint32_t point = byte(0) & kFirstBits[sequence.size() - 1];
  for (size_t i = 1; i < sequence.size(); ++i) point = point << 6 | (byte(i) & 0x3fU);
  return point;
}

bool IsControl(std::string_view sequence) {
  const uint32_t point = CodePoint(sequence);
  return point < 0x20 || (point >= 0x7f && point < 0xa0);
}

// Marks that reorder or hide what stands around them, and separators of lines.
bool Misleads(uint32_t point) {
  return point == 0x061c || (point >= 0x200b && point <= 0x200f) ||
         (point >= 0x2028 && point <= 0x202e) || (point >= 0x2060 && point <= 0x206f) ||
         point == 0xfeff;
}

std::string Hex(std::string_view prefix, uint32_t value, int digits) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(prefix);
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) text += kDigits[value >> shift & 15U];
  return text;
}

std::string EscapedSequence(std::string_view sequence) {
  const uint32_t point = CodePoint(sequence);
  if (point == '\n') return "\\n";
  if (point == '\t') return "\\t";
  if (point == '\r') return "\\r";
  if (IsControl(sequence) || Misleads(point)) return Hex("\\u", point, 4);
  return std::string(sequence);
}

}  // namespace

std::string CleanText(std::string_view text, size_t max_bytes) {
  std::string clean;
  clean.reserve(text.size());
  EachSequence(text, [&clean](std::string_view sequence, char) {
    clean += sequence.empty() ? std::string_view("?") : sequence;
  });
  if (clean.size() <= max_bytes) return clean;
  if (max_bytes <= kCut.size()) return std::string(kCut.substr(0, max_bytes));
  size_t from = clean.size() - (max_bytes - kCut.size());
  while (from < clean.size() && (static_cast<unsigned char>(clean[from]) & 0xc0U) == 0x80) ++from;
  return std::string(kCut) + clean.substr(from);
}

bool IsHarmless(std::string_view text) {
  bool harmless = true;
  EachSequence(text, [&harmless](std::string_view sequence, char) {
    harmless = harmless && !sequence.empty() && !IsControl(sequence);
  });
  return harmless;
}

std::string Harmless(std::string_view name, size_t max_bytes) {
  std::string clean;
  bool full = false;
  EachSequence(name, [&](std::string_view sequence, char) {
    const bool keeps = !sequence.empty() && !IsControl(sequence);
    const std::string_view piece = keeps ? sequence : std::string_view("?");
    full = full || clean.size() + piece.size() > max_bytes;
    if (!full) clean += piece;
  });
  return clean;
}

std::string Escaped(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  EachSequence(text, [&shown](std::string_view sequence, char byte) {
    shown += sequence.empty() ? Hex("\\x", static_cast<unsigned char>(byte), 2)
                              : EscapedSequence(sequence);
  });
  return shown;
}

}  // namespace refitd
