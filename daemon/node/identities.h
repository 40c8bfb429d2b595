// Accounts of the identities at this daemon: the groups that an identity owns, its share of the
// daemon's limits, and the audit log's lines about its actions. (daemon/policy says what an
// identity may do; the services' door asks there.)
//
// P9: the door asks for a group's owner before a trainer attaches, and the group's machine, which
// keeps the owner (daemon/group/ownership.h), asks again when the trainer enters, so that of two
// trainers that come at once only one becomes the owner.
//
// Part of the daemon's state: used in a turn (turn.h), but for OwnerOf, HasLease and Audited.
#ifndef REFITD_DAEMON_NODE_IDENTITIES_H_
#define REFITD_DAEMON_NODE_IDENTITIES_H_

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/node/calls.h"
#include "daemon/node/groups.h"
#include "daemon/node/member.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"
#include "daemon/process/audit_log.h"

namespace refitd {

class Identities {
 public:
  explicit Identities(DaemonState* state) : state_(*state) {}

  // ---- what the door asks, which takes a turn ----
  // The identity that owns the group; empty: nobody does, or there is no such group.
  std::string OwnerOf(const std::string& group);
  // Whether a member of that identity has a lease.
  bool HasLease(const std::string& identity);

  // ---- owners ----
  // Whether the identity may make the group: a rule that names the group's owner lets nobody else.
  bool MayMake(const std::string& group, const std::string& identity) const;

  // ---- limits of each identity ----
  // RESOURCE_EXHAUSTED names identity, limit and value.
  // `creator` empty: another daemon, which has no limits of its own.
  absl::Status AdmitGroup(const std::string& creator, int64_t pool_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::Status AdmitJoinedPool(const GroupRecord& joined, const GroupSpec& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::Status AdmitMember(const Peer& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::Status AdmitRegionOf(const MemberRecord& of) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Also remembers who begins the update.
  absl::Status AdmitUpdate(const MemberRecord& trainer, const std::string& request_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // ---- the audit log ----
  void AuditAttach(const MemberRecord& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void AuditUpdate(const GroupRecord& group, const UpdateEnded& ended) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void AuditEviction(const GroupRecord& group, const LogLine& line) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Returns a function that does what `reply` does, and tells the audit log how a Begin, Commit,
  // Refit or Abort was answered.
  ReplyFunction Audited(const std::string& group, const GroupEvent& event, const Peer& peer,
                        ReplyFunction reply) const;

 private:
  void Audit(const AuditEvent& event) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_IDENTITIES_H_
