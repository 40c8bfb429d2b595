// Text that Protocol Buffers can carry, UTF-8; and how texts of others are cut and shown. Pure.
#ifndef REFITD_TRANSPORT_BASE_UTF8_H_
#define REFITD_TRANSPORT_BASE_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace refitd {

// The length in bytes of the UTF-8 sequence at the start of `text`, which is not empty; 0 if there
// is no valid sequence. Overlong forms, surrogates and values beyond Unicode are not valid.
size_t Utf8SequenceBytes(std::string_view text);

// Returns the end of the text, of at most `max_bytes`: what is longer is cut at its head, between
// sequences, since the end of a message says the outcome; "..." then stands for what is missing.
// Each byte that is not part of a valid sequence becomes a "?".
std::string CleanText(std::string_view text, size_t max_bytes);

// Whether the text is UTF-8 without control characters: below U+0020, U+007F to U+009F.
bool IsHarmless(std::string_view text);

// Returns the start of a name, of at most `max_bytes`, for which IsHarmless is true: each control
// character, and each byte that is not part of a valid sequence, becomes a "?".
std::string Harmless(std::string_view name, size_t max_bytes);

// Returns the text as a terminal, a log or a page may show it, whoever wrote it: control
// characters, marks that change the direction of writing and separators of lines are written out,
// as in "\u001b", "\n" and "\u202e", and bytes that are not UTF-8 as in "\xff". JSON of one line
// stays the same JSON.
std::string Escaped(std::string_view text);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_UTF8_H_
