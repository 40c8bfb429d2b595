// The members of this daemon and the tokens of their leases.
//
// Invariants
//  1. Every member that is not lost has one live token, and every live token is one member's (P9).
//  2. A token dies with Lose, at once; the record stays until Remove, for copies that still touch
//     the member's memory (P6, P8).
//  3. Ids and tokens are never used twice.
//
// Part of the daemon's state: used under its mutex (turn.h).
#ifndef REFITD_DAEMON_NODE_LEASES_H_
#define REFITD_DAEMON_NODE_LEASES_H_

#include <cstddef>
#include <map>
#include <string>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "daemon/node/member.h"
#include "transport/base/ids.h"

namespace refitd {

class Leases {
 public:
  // Gives the member a token. Its id is not known yet.
  MemberRecord* Add(MemberRecord record);
  // The lease ends: its token works no more. False: it had ended before.
  bool Lose(MemberRecord* member);
  // Takes the record out. The member exists.
  MemberRecord Remove(MemberId member);

  // Null: there is no such member.
  MemberRecord* Find(MemberId member);
  const MemberRecord* Find(MemberId member) const;
  bool Contains(MemberId member) const { return members_.contains(member); }
  size_t size() const { return members_.size(); }
  const std::map<MemberId, MemberRecord>& all() const { return members_; }

  // Whose lease it is. UNAUTHENTICATED: nobody's. PERMISSION_DENIED: a lease that was taken over a
  // unix socket works for the same user only (P9).
  absl::StatusOr<MemberRecord*> Authenticate(const std::string& token, const Peer& peer);

  // Whether the group has a member on a GPU; on that one.
  bool HasDevices(const std::string& group) const;
  bool OnDevice(const std::string& group, int ordinal) const;

  // Aborts the process where an invariant does not hold.
  void CheckInvariants() const;

 private:
  std::map<MemberId, MemberRecord> members_;
  std::unordered_map<std::string, MemberId> tokens_;  // live ones
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_LEASES_H_
