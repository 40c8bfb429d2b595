#include "transport/sockets/address_security.h"

#include <utility>

#include "transport/base/status.h"
#include "transport/sockets/frames.h"

namespace refitd {

absl::StatusOr<AddressSecurity> SecurityOfAddress(std::string_view encoded) {
  if (!IsSocketAddress(encoded)) return AddressSecurity{};
  REFITD_ASSIGN_OR_RETURN(SocketAddress address, DecodeSocketAddress(encoded));
  return AddressSecurity{address.tls, std::move(address.identity)};
}

absl::Status CheckAddressOwner(std::string_view encoded, const std::string& link) {
  REFITD_ASSIGN_OR_RETURN(const AddressSecurity security, SecurityOfAddress(encoded));
  if (security.identity.empty() || security.identity == link) return absl::OkStatus();
  return Error(
      absl::StatusCode::kPermissionDenied,
      "the data plane's address names the identity '{}', but {}", security.identity,
      link.empty()
          ? "its link proves none: it is in the clear, or its certificate gives no identity"
          : "the certificate of its link is of '" + link + "'");
}

}  // namespace refitd
