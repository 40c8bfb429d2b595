// Regions: the memory that members share with this daemon.
//
// Invariants
//  1. No member has more regions than its limit, and all members together have no more than the
//     daemon's limit.
//  2. An engine registers the same memory once only: otherwise two tensors could lie in the same
//     bytes, which ValidateLayout would not see.
//  3. A region that a layout or an unanswered bucket uses can't be taken away (P6).
//
// The class is part of the daemon's state and is used under its mutex (turn.h).
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
  // The limit of all members together: a process may have 65,530 mappings by default
  // (vm.max_map_count).
  int of_daemon = 16'384;
};

class Memory {
 public:
  explicit Memory(const RegionLimits& limits) : limits_(limits) {}

  // Whether the member may have one more region, with this identity (empty: none is known).
  // RESOURCE_EXHAUSTED: a limit is reached. ALREADY_EXISTS: the engine has a region of that memory.
  absl::Status Admit(const MemberRecord& member, const std::string& identity) const;
  RegionId Add(MemberRecord* member, RegionRecord region);
  // Takes a region away from the member. The region is unmapped when the result is destroyed, which
  // must not happen under the mutex. NOT_FOUND: no such region. FAILED_PRECONDITION: it is in use.
  absl::StatusOr<RegionRecord> Take(MemberRecord* member, RegionId region, const Calls& calls);
  // Takes all regions of a member whose copies have ended.
  std::map<RegionId, RegionRecord> TakeAll(MemberRecord* member);

  // Counts a region that is being opened on another thread, until EndOpening. RESOURCE_EXHAUSTED:
  // Calls::kMaxOpening regions are being opened.
  absl::Status BeginOpening();
  void EndOpening();

  // Aborts the process if an invariant does not hold.
  void CheckInvariants(const Leases& leases) const;

 private:
  const RegionLimits limits_;
  uint64_t next_ = 1;
  int64_t regions_ = 0;  // of all members
  size_t opening_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMORY_H_
