// Versions of the protocol, and how two sides agree on the version that they speak.
//
// Who speaks a version also speaks the version before it. A hello has its sender's version; the
// answer (the lease in Welcome, PeerAccepted) has the agreed version, the lower of both sides'.
// What a version adds is sent only where that version, or a later one, was agreed; PeerReadiness
// (JoinedNodes::SendReadiness) is the example.
//
// Pure; thread-safe.
#ifndef REFITD_PROTO_PROTOCOL_H_
#define REFITD_PROTO_PROTOCOL_H_

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/status.h"

namespace refitd {

// The numbers are those of v1::ProtocolVersion. No release speaks kV0: tests use it as the version
// before the first.
enum class Protocol : uint8_t { kV0 = 0, kV1 = 1 };

inline constexpr Protocol kProtocol = Protocol::kV1;

// Returns the version to speak with a sender whose hello has version `theirs`. FAILED_PRECONDITION,
// naming both sides' versions, if they have none in common.
inline absl::StatusOr<Protocol> AgreeProtocol(int theirs, std::string_view field,
                                              int own = static_cast<int>(kProtocol)) {
  if (theirs >= 1 && theirs >= own - 1 && theirs <= own + 1) {
    return static_cast<Protocol>(std::min(theirs, own));
  }
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}: the sender speaks version {}, this side version {}, each also the one before",
               field, theirs, own);
}

// Returns the agreed version that an answer or a lease has. FAILED_PRECONDITION if this build does
// not speak it.
inline absl::StatusOr<Protocol> AgreedProtocol(int agreed, std::string_view field,
                                               int own = static_cast<int>(kProtocol)) {
  if (agreed >= 1 && (agreed == own || agreed == own - 1)) return static_cast<Protocol>(agreed);
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}: version {} is not spoken here: this build speaks {} and the one before", field,
               agreed, own);
}

}  // namespace refitd

#endif  // REFITD_PROTO_PROTOCOL_H_
