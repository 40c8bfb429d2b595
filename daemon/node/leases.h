// The members of this daemon and the tokens of their leases.
//
// Invariants
//  1. Every member that is not lost has one live token, and every live token belongs to one member
//     (P9).
//  2. Lose kills a token at once. The record stays until Remove, for copies that still touch the
//     member's memory (P6, P8).
//  3. Ids and tokens are never used twice.
//
// The class is part of the daemon's state and is used under its mutex (turn.h).
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
  // Adds a member and gives it a token. The member's id must be new.
  MemberRecord* Add(MemberRecord record);
  // Ends the lease: its token no longer works. False: it had ended before.
  bool Lose(MemberRecord* member);
  // Removes and returns the record. The member must exist.
  MemberRecord Remove(MemberId member);

  // Null: there is no such member.
  MemberRecord* Find(MemberId member);
  const MemberRecord* Find(MemberId member) const;
  bool Contains(MemberId member) const { return members_.contains(member); }
  size_t size() const { return members_.size(); }
  const std::map<MemberId, MemberRecord>& all() const { return members_; }

  // The member whose lease the token is. UNAUTHENTICATED: no lease has it. PERMISSION_DENIED (P9):
  // the lease was taken over a unix socket, and another user presents it; or it was taken with a
  // certificate, and somebody of another identity, or of none, presents it.
  absl::StatusOr<MemberRecord*> Authenticate(const std::string& token, const Peer& peer);

  // Whether the group has a member on any GPU, or on the given GPU.
  bool HasDevices(const std::string& group) const;
  bool OnDevice(const std::string& group, int ordinal) const;

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  std::map<MemberId, MemberRecord> members_;
  std::unordered_map<std::string, MemberId> tokens_;  // live ones
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_LEASES_H_
