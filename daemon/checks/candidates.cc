#include "daemon/checks/candidates.h"

#include <algorithm>

#include "daemon/checks/fields.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

absl::Status CheckAddress(std::string_view address, std::string_view field) {
  REFITD_RETURN_IF_ERROR(CheckText(address, kMaxAddressBytes, field));
  const size_t colon = address.rfind(':');
  const std::string_view port = colon == std::string_view::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string_view::npos;
  const bool plain = address.find_first_of("/, \t\n") == std::string_view::npos;
  if (colon != std::string_view::npos && colon > 0 && digits && plain) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{}: '{}' is not HOST:PORT", field, address);
}

}  // namespace

std::vector<std::string> SplitCandidates(std::string_view text) {
  std::vector<std::string> addresses;
  if (text.empty()) return addresses;
  while (true) {
    const size_t comma = text.find(',');
    addresses.emplace_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return addresses;
    text.remove_prefix(comma + 1);
  }
}

absl::Status CheckCandidates(std::string_view text, std::string_view field) {
  REFITD_RETURN_IF_ERROR(CheckText(text, kMaxCandidates * (kMaxAddressBytes + 1), field));
  const std::vector<std::string> addresses = SplitCandidates(text);
  if (addresses.size() > kMaxCandidates) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: {} addresses are more than {}", field,
                 addresses.size(), kMaxCandidates);
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    REFITD_RETURN_IF_ERROR(CheckAddress(addresses[i], field));
    const auto before = addresses.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(addresses.begin(), before, addresses[i]) == before) continue;
    return Error(absl::StatusCode::kInvalidArgument, "{}: '{}' is there twice", field,
                 addresses[i]);
  }
  return absl::OkStatus();
}

}  // namespace refitd
