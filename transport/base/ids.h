// Ids as types, so that two ids of different kinds can't be swapped by mistake.
#ifndef REFITD_TRANSPORT_BASE_IDS_H_
#define REFITD_TRANSPORT_BASE_IDS_H_

#include <chrono>
#include <cstdint>

#include "transport/base/strong_int.h"

namespace refitd {

using MemberId =
    StrongInt<struct MemberIdTag, uint64_t>;  // one attached process; never reused by a daemon
using RegionId = StrongInt<struct RegionIdTag, uint64_t>;  // one mapping; never reused by a daemon
using UpdateId = StrongInt<struct UpdateIdTag, uint64_t>;  // one update; never reused by a daemon
using CallId = StrongInt<struct CallIdTag,
                         uint64_t>;  // one RPC waiting for its answer; never reused by a daemon
using Version = StrongInt<struct VersionTag, int64_t>;       // what an instance serves
using SlotIndex = StrongInt<struct SlotIndexTag, uint32_t>;  // 0..slots-1 of one group's pool
using GrantId =
    StrongInt<struct GrantIdTag, uint64_t>;  // one use of a slot; never reused by a group
using NodeId = StrongInt<struct NodeIdTag,
                         uint32_t>;  // a daemon of one group; 0 coordinates; never reused
using PartSeq = StrongInt<struct PartSeqTag,
                          int64_t>;  // 0.. of an update: order of delivery in the whole group
using CommunicatorId = StrongInt<struct CommunicatorIdTag,
                                 uint64_t>;  // one communicator; never reused by a coordinator
using ProgramId = StrongInt<struct ProgramIdTag,
                            uint64_t>;  // one compiled refit; never reused by a coordinator
using WireSeq = StrongInt<struct WireSeqTag,
                          uint64_t>;  // one operation of a communicator, the same on every rank

// Monotonic time, injected everywhere but in main; never a wall time (P4).
using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::nanoseconds;
inline int64_t ToMillis(Duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_IDS_H_
