// Defaults of the limits that all daemons of a group share. They equal the defaults of the settings
// in config.proto (peers.*_ms); a test compares the two.
//
// Pure; thread-safe.
#ifndef REFITD_PROTO_PEER_DEFAULTS_H_
#define REFITD_PROTO_PEER_DEFAULTS_H_

#include <chrono>

#include "transport/base/ids.h"

namespace refitd {

inline constexpr Duration kDefaultSilence = std::chrono::seconds(5);
inline constexpr Duration kDefaultWireLimit = std::chrono::seconds(30);
inline constexpr Duration kDefaultReadiness = std::chrono::minutes(10);

}  // namespace refitd

#endif  // REFITD_PROTO_PEER_DEFAULTS_H_
