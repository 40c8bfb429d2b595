// The daemons that members of a group name as its coordinator: one address, or several in order,
// separated by commas. Several are the group's *candidates* (docs/protocol.md, Candidates).
//
// Pure.
#ifndef REFITD_DAEMON_CHECKS_CANDIDATES_H_
#define REFITD_DAEMON_CHECKS_CANDIDATES_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace refitd {

inline constexpr size_t kMaxCandidates = 8;
inline constexpr size_t kMaxAddressBytes = 255;  // of one address

// The addresses in their order; empty for an empty text. Does not check them.
std::vector<std::string> SplitCandidates(std::string_view text);

// Whether the text names several addresses.
inline bool HasSeveral(std::string_view text) { return text.find(',') != std::string_view::npos; }

// OK: the text is empty, or 1 to kMaxCandidates different addresses "HOST:PORT". INVALID_ARGUMENT
// names `field` and the value (P10).
absl::Status CheckCandidates(std::string_view text, std::string_view field);

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_CANDIDATES_H_
