// Versions of the protocol, and how two sides agree on the version that they speak.
//
// A hello names the lowest and the highest version that its sender speaks; the answer (Welcome's
// lease, PeerAccepted) names the agreed version: the highest that both speak. Releases before the
// second version write and read `protocol` only, which is why that field holds the lowest. What a
// later version added is used only if that version, or a later one, was agreed.
//
// Pure; thread-safe.
#ifndef REFITD_PROTO_PROTOCOL_H_
#define REFITD_PROTO_PROTOCOL_H_

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/status.h"

namespace refitd {

// The numbers are those of v1::ProtocolVersion.
// V3 brought compiled refits along chains (PeerPlan.relay_lag).
// V4 tells joined daemons the readiness of all instances (PeerReadiness), and brought
// GroupSpec.encrypted_data.
// V5 lets a program go on from a round after the loss of a daemon (PeerRun.resume,
// PeerRunDone.lacks).
// V6 lets a part of a bucket be sent again after the loss of a daemon (PeerHeader.again).
enum class Protocol : uint8_t { kV1 = 1, kV2 = 2, kV3 = 3, kV4 = 4, kV5 = 5, kV6 = 6 };

inline constexpr Protocol kMinProtocol = Protocol::kV1;  // spoken by the release before this
inline constexpr Protocol kProtocol = Protocol::kV6;

struct AgreedProtocol {
  Protocol protocol = kProtocol;
  bool newer = false;  // the other side speaks versions that this build does not know
};

// Returns the version to speak with a sender whose hello has these numbers. `highest` 0: the hello
// had no such field, and the sender speaks `lowest` only. FAILED_PRECONDITION, naming both sides'
// versions, if they have none in common.
inline absl::StatusOr<AgreedProtocol> AgreeProtocol(int lowest, int highest,
                                                    std::string_view field) {
  if (highest == 0) highest = lowest;
  constexpr int kOwnLowest = static_cast<int>(kMinProtocol);
  constexpr int kOwnHighest = static_cast<int>(kProtocol);
  if (lowest < 1 || highest < lowest || highest < kOwnLowest || lowest > kOwnHighest) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}: the sender speaks versions {} to {}, this daemon speaks {} to {}", field,
                 lowest, highest, kOwnLowest, kOwnHighest);
  }
  return AgreedProtocol{static_cast<Protocol>(std::min(highest, kOwnHighest)),
                        highest > kOwnHighest};
}

// Returns the protocol version of that number. FAILED_PRECONDITION if this build does not speak it.
inline absl::StatusOr<Protocol> ProtocolOf(int number, std::string_view field) {
  constexpr int kOwnLowest = static_cast<int>(kMinProtocol);
  constexpr int kOwnHighest = static_cast<int>(kProtocol);
  if (number >= kOwnLowest && number <= kOwnHighest) return static_cast<Protocol>(number);
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}: version {} is not spoken here: this build speaks {} to {}", field, number,
               kOwnLowest, kOwnHighest);
}

// Fills in the versions that this build speaks.
template <typename Hello>
void SayProtocol(Hello* hello) {
  using Version = std::decay_t<decltype(hello->protocol())>;
  hello->set_protocol(static_cast<Version>(kMinProtocol));
  hello->set_highest_protocol(static_cast<Version>(kProtocol));
}

}  // namespace refitd

#endif  // REFITD_PROTO_PROTOCOL_H_
