#include "transport/base/identity.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr std::string_view kDomainCharacters = "abcdefghijklmnopqrstuvwxyz0123456789._-";
constexpr std::string_view kPathCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

bool IsPlain(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7F; });
}

bool IsSegment(std::string_view text) {
  return !text.empty() && text != "." && text != ".." &&
         text.find_first_not_of(kPathCharacters) == std::string_view::npos;
}

}  // namespace

bool IsSpiffeId(std::string_view uri) {
  if (uri.size() > kMaxIdentityBytes || !uri.starts_with(kSpiffeScheme)) return false;
  uri.remove_prefix(kSpiffeScheme.size());
  const size_t slash = std::min(uri.find('/'), uri.size());
  const std::string_view domain = uri.substr(0, slash);
  if (domain.empty() || domain.find_first_not_of(kDomainCharacters) != std::string_view::npos) {
    return false;
  }
  uri.remove_prefix(slash);
  if (uri.empty()) return false;
  while (!uri.empty()) {
    uri.remove_prefix(1);  // the slash
    const size_t end = std::min(uri.find('/'), uri.size());
    if (!IsSegment(uri.substr(0, end))) return false;
    uri.remove_prefix(end);
  }
  return true;
}

absl::Status CheckIdentityPattern(std::string_view pattern, std::string_view field) {
  const auto wrong = [&] {
    return InvalidField(field,
                        "{} is \"{}\", must be spiffe://DOMAIN/PATH, spiffe://DOMAIN/PATH/*, "
                        "spiffe://DOMAIN/*, dns:NAME or dns:*.DOMAIN",
                        field, pattern);
  };
  if (pattern.size() > kMaxIdentityBytes || !IsPlain(pattern)) return wrong();
  if (pattern.starts_with(kDnsScheme)) {
    std::string_view name = pattern.substr(kDnsScheme.size());
    if (name.starts_with("*.")) name.remove_prefix(2);
    if (name.empty() || name.find_first_of("*/ABCDEFGHIJKLMNOPQRSTUVWXYZ") != name.npos)
      return wrong();
    return absl::OkStatus();
  }
  // A star stands for the last segment and all below.
  std::string id(pattern);
  if (id.ends_with("/*")) id.back() = 'x';
  return IsSpiffeId(id) ? absl::OkStatus() : wrong();
}

bool MatchesIdentity(std::string_view pattern, std::string_view identity) {
  if (pattern == identity) return !identity.empty();
  if (pattern.starts_with(kSpiffeScheme) && pattern.ends_with("/*")) {
    pattern.remove_suffix(1);
    return identity.size() > pattern.size() && identity.starts_with(pattern);
  }
  constexpr std::string_view kWild = "dns:*.";
  if (!pattern.starts_with(kWild) || !identity.starts_with(kDnsScheme)) return false;
  identity.remove_prefix(kDnsScheme.size());
  const size_t dot = identity.find('.');
  return dot != identity.npos && dot > 0 &&
         identity.substr(dot + 1) == pattern.substr(kWild.size());
}

absl::Status CheckOwnerPattern(std::string_view pattern, std::string_view field) {
  if (pattern.starts_with(kSpiffeScheme) || pattern.starts_with(kDnsScheme)) {
    return CheckIdentityPattern(pattern, field);
  }
  if (NumberAfter(kUidScheme, pattern).has_value()) return absl::OkStatus();
  return Error(kInvalid,
               "{} is \"{}\", must be uid:N, spiffe://DOMAIN/PATH, spiffe://DOMAIN/PATH/*, "
               "spiffe://DOMAIN/*, dns:NAME or dns:*.DOMAIN",
               field, pattern.substr(0, kMaxIdentityBytes));
}

bool MatchesOwner(std::string_view pattern, std::string_view identity) {
  const auto uid = NumberAfter(kUidScheme, pattern);
  if (uid.has_value()) return NumberAfter(kUidScheme, identity) == uid;
  return MatchesIdentity(pattern, identity);
}

std::optional<uint32_t> NumberAfter(std::string_view scheme, std::string_view text) {
  if (!text.starts_with(scheme)) return std::nullopt;
  text.remove_prefix(scheme.size());
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace refitd
