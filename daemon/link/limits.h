// Limits of what daemons tell each other: every number, text and list of a peer message is held
// against them (P10).
#ifndef REFITD_DAEMON_LINK_LIMITS_H_
#define REFITD_DAEMON_LINK_LIMITS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "daemon/group/group.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/pool.h"

namespace refitd {

inline constexpr size_t kMaxPeerTextBytes = 1024;  // of a reason or a status message
inline constexpr size_t kBootIdBytes = 16;
// As the longest wait that a daemon's configuration can have.
inline constexpr Duration kMaxPeerDuration = std::chrono::hours(24);
inline constexpr int64_t kMinPeerMessageBytes = 64 << 10;
// A layout travels in pieces of this size at most, so that a ping does not wait long behind one.
inline constexpr int64_t kPeerLayoutChunkBytes = 256 << 10;
// Incarnations that the coordinator may announce before the joined daemon took up the first.
inline constexpr size_t kMaxIncarnationsAhead = 64;

// What a group's spec says about numbers in messages.
struct PeerBounds {
  int slots = kMaxSlots;
  int64_t slot_bytes = kMaxTensorBytes;
};
inline PeerBounds BoundsOf(const GroupSpec& spec) { return {spec.slots, spec.slot_bytes}; }

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_LIMITS_H_
