// Regions: the memory that members share with this daemon.
//
// Invariants
//  1. At most the limits' regions, of one member and of all.
//  2. No memory is two regions of one engine: two tensors could lie in the same bytes, unseen by
//     ValidateLayout.
//  3. A region that a layout or an unanswered bucket uses is not taken (P6).
//
// Part of the daemon's state: used under its mutex (turn.h).
#ifndef REFITD_DAEMON_NODE_MEMORY_H_
#define REFITD_DAEMON_NODE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/calls.h"
#include "daemon/node/leases.h"
#include "daemon/node/member.h"
#include "transport/base/ids.h"

namespace refitd {

struct RegionLimits {
  int of_member = 4096;
  // Of all members: a process has 65,530 mappings by default (vm.max_map_count).
  int of_daemon = 16'384;
};

class Memory {
 public:
  explicit Memory(const RegionLimits& limits) : limits_(limits) {}

  // Whether the member may have one more region; of this identity, unless that is empty.
  // RESOURCE_EXHAUSTED: a limit; ALREADY_EXISTS: the engine has that memory as a region.
  absl::Status Admit(const MemberRecord& member, const std::string& identity) const;
  RegionId Add(MemberRecord* member, RegionRecord region);
  // Out of the member's regions. Unmapped where the result goes, which must not be under the mutex.
  // NOT_FOUND; FAILED_PRECONDITION: it is in use.
  absl::StatusOr<RegionRecord> Take(MemberRecord* member, RegionId region, const Calls& calls);
  // All regions of a member whose copies have ended.
  std::map<RegionId, RegionRecord> TakeAll(MemberRecord* member);

  // A region is being opened on another thread, until EndOpening. RESOURCE_EXHAUSTED:
  // Calls::kMaxOpening are.
  absl::Status BeginOpening();
  void EndOpening();

  // Aborts the process where an invariant does not hold.
  void CheckInvariants(const Leases& leases) const;

 private:
  const RegionLimits limits_;
  uint64_t next_ = 1;
  int64_t regions_ = 0;  // of all members
  size_t opening_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMORY_H_
