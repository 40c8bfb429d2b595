// Identities, by which rules and owners name who calls: "spiffe://DOMAIN/PATH" and "dns:NAME" of
// certificates, "uid:N" of unix sockets, "anonymous" of TCP without TLS; and patterns of them.
//
// Pure; thread-safe.
#ifndef REFITD_TRANSPORT_BASE_IDENTITY_H_
#define REFITD_TRANSPORT_BASE_IDENTITY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"

namespace refitd {

inline constexpr size_t kMaxIdentityBytes = 2048;  // as the SPIFFE standard limits its IDs
inline constexpr std::string_view kSpiffeScheme = "spiffe://";
inline constexpr std::string_view kDnsScheme = "dns:";
inline constexpr std::string_view kUidScheme = "uid:";
// The identity of callers over TCP without TLS.
inline constexpr std::string_view kAnonymous = "anonymous";

// Whether the text is a SPIFFE ID as the standard writes it: a domain of [a-z0-9._-] and a path of
// one or more segments of [A-Za-z0-9._-], none of which is "." or "..". So a path has no '?', '#',
// '%' or empty segment, and can't be read in two ways.
bool IsSpiffeId(std::string_view uri);

// Checks a pattern of certificates' identities: a SPIFFE ID, "spiffe://DOMAIN/PATH/*" (all below),
// "spiffe://DOMAIN/*" (all of that domain), "dns:NAME" or "dns:*.DOMAIN" (one more label).
// INVALID_ARGUMENT names `field`.
absl::Status CheckIdentityPattern(std::string_view pattern, std::string_view field);
bool MatchesIdentity(std::string_view pattern, std::string_view identity);

// The same for a pattern of owners of groups, which may also be "uid:N".
absl::Status CheckOwnerPattern(std::string_view pattern, std::string_view field);
bool MatchesOwner(std::string_view pattern, std::string_view identity);

// The number after `scheme`; nullopt: the text is something else.
std::optional<uint32_t> NumberAfter(std::string_view scheme, std::string_view text);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_IDENTITY_H_
