// Text that Protocol Buffers can carry: UTF-8.
#ifndef REFITD_TRANSPORT_BASE_UTF8_H_
#define REFITD_TRANSPORT_BASE_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace refitd {

// The length in bytes of the UTF-8 sequence at the start of `text`, which is not empty; 0 if there
// is no valid sequence. Overlong forms, surrogates and values beyond Unicode are not valid.
size_t Utf8SequenceBytes(std::string_view text);

// Returns the start of the text, of at most `max_bytes`, cut between sequences. Each byte that is
// not part of a valid sequence becomes a "?".
std::string CleanText(std::string_view text, size_t max_bytes);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_UTF8_H_
