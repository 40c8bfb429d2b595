// The members of this daemon, the tokens of their leases, and the memory regions that they share.
//
// Invariants
//  1. Every member that is not lost has one live token, and every live token belongs to one member
//     (P9).
//  2. Lose kills a token at once. The record stays until Remove, for copies that still touch the
//     member's memory (P6, P8).
//  3. Ids of members and regions, and tokens, are never used twice.
//  4. No member has more regions than its limit, and all members together have no more than the
//     daemon's limit (P10).
//  5. An engine registers the same memory once only: otherwise two tensors could lie in the same
//     bytes, which ValidateLayout would not see.
//  6. A region that a layout or an unanswered bucket uses can't be taken away (P6).
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h).
#ifndef REFITD_DAEMON_NODE_MEMBERS_H_
#define REFITD_DAEMON_NODE_MEMBERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/calls.h"
#include "daemon/node/member.h"
#include "transport/base/ids.h"

namespace refitd {

struct RegionLimits {
  int of_member = 4096;
  // The limit of all members together: a process may have 65,530 mappings by default
  // (vm.max_map_count).
  int of_daemon = 16'384;
};

class Members {
 public:
  explicit Members(const RegionLimits& limits = {}) : limits_(limits) {}

  // Adds a member and gives it a token. The member's id must be new.
  MemberRecord* Add(MemberRecord record);
  // Ends the lease: its token no longer works. False: it had ended before.
  bool Lose(MemberRecord* member);
  // Removes and returns the record, with its regions, which are unmapped when the result is
  // destroyed, which must not happen under the mutex. The member must exist.
  MemberRecord Remove(MemberId member);

  // Null: there is no such member.
  MemberRecord* Find(MemberId member);
  const MemberRecord* Find(MemberId member) const;
  bool Contains(MemberId member) const { return members_.contains(member); }
  size_t size() const { return members_.size(); }
  const std::map<MemberId, MemberRecord>& all() const { return members_; }

  // The member whose lease the token is. Callers of the descriptor socket present no more of a
  // lease; for other calls see Authenticate (life.h). UNAUTHENTICATED: no lease has the token.
  // PERMISSION_DENIED (P9): the lease was taken over a unix socket, and another user presents it;
  // or it was taken with a certificate, and somebody of another identity, or of none, presents it.
  absl::StatusOr<MemberRecord*> OfToken(const std::string& token, const Peer& peer);

  // No member of the group holds a version any more.
  void ForgetHeld(const std::string& group);

  // Whether the group has a member on any GPU, or on the given GPU.
  bool HasDevices(const std::string& group) const;
  // The ordinals of the GPUs that the group's members are on; each once, ascending.
  std::vector<int> DevicesOf(const std::string& group) const;
  bool OnDevice(const std::string& group, int ordinal) const;

  // ---- regions ----
  // Whether the member may have one more region, with this identity (empty: none is known).
  // RESOURCE_EXHAUSTED: a limit is reached. ALREADY_EXISTS: the engine has a region of that memory.
  absl::Status AdmitRegion(const MemberRecord& member, const std::string& identity) const;
  RegionId AddRegion(MemberRecord* member, RegionRecord region);
  // Takes a region away from the member. The region is unmapped when the result is destroyed, which
  // must not happen under the mutex. NOT_FOUND: no such region. FAILED_PRECONDITION: it is in use.
  absl::StatusOr<RegionRecord> TakeRegion(MemberRecord* member, RegionId region,
                                          const Calls& calls);
  // Counts a region that is being opened on another thread, until EndOpening. RESOURCE_EXHAUSTED:
  // Calls::kMaxOpening regions are being opened.
  absl::Status BeginOpening();
  void EndOpening();

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  void CheckRegions() const;

  const RegionLimits limits_;
  std::map<MemberId, MemberRecord> members_;
  std::unordered_map<std::string, MemberId> tokens_;  // live ones
  uint64_t next_region_ = 1;
  int64_t regions_ = 0;  // of all members
  size_t opening_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBERS_H_
