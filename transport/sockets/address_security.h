// Reads from the encoded address of a wire's rank whether the rank encrypts. The control plane
// passes addresses on without using them; this lets it refuse one. Pure; thread-safe.
#ifndef REFITD_TRANSPORT_SOCKETS_ADDRESS_SECURITY_H_
#define REFITD_TRANSPORT_SOCKETS_ADDRESS_SECURITY_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace refitd {

struct AddressSecurity {
  bool encrypted = false;  // the rank takes and makes connections under TLS alone
  std::string identity;    // of the certificate that the rank will show; empty: not encrypted
};

// An address of another kind of wire is not encrypted. INVALID_ARGUMENT: the address is of the wire
// over sockets, and malformed.
absl::StatusOr<AddressSecurity> SecurityOfAddress(std::string_view encoded);

// OK: a daemon may send this address over a link on which its certificate has the identity `link`
// (empty: the link is in the clear, and proves no identity). PERMISSION_DENIED: the address names
// another identity, so that the daemon would take another's place on the wire (P9); the status
// names both. INVALID_ARGUMENT: as SecurityOfAddress.
absl::Status CheckAddressOwner(std::string_view encoded, const std::string& link);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_ADDRESS_SECURITY_H_
