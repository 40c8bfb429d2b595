// Limits of what daemons tell each other. Every number, text and list of a peer message is checked
// against them (P10).
#ifndef REFITD_DAEMON_LINK_LIMITS_H_
#define REFITD_DAEMON_LINK_LIMITS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "daemon/group/group.h"
#include "daemon/group/slot_ledger.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"

namespace refitd {

inline constexpr size_t kMaxPeerTextBytes = 1024;  // of a reason or a status message
inline constexpr size_t kBootIdBytes = 16;
// The longest wait that a daemon's configuration can have.
inline constexpr Duration kMaxPeerDuration = std::chrono::hours(24);
inline constexpr int64_t kMinPeerMessageBytes = 64 << 10;
// A layout travels in chunks of at most this size, so that a ping does not wait long behind it.
inline constexpr int64_t kPeerLayoutChunkBytes = 256 << 10;
// How many incarnations the coordinator may announce before the joined daemon takes up the first.
inline constexpr size_t kMaxIncarnationsAhead = 64;

// Bounds that a group's spec sets for numbers in messages.
struct PeerBounds {
  int slots = kMaxSlots;
  int64_t slot_bytes = kMaxTensorBytes;
};
inline PeerBounds BoundsOf(const GroupSpec& spec) { return {spec.slots, spec.slot_bytes}; }

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_LIMITS_H_
