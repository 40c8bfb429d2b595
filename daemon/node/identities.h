// Accounts of the identities at this daemon: which groups an identity may make, its share of the
// daemon's limits, and the audit log's lines about its actions. (What an identity
// may do is decided in daemon/policy, for the services' authorizer.)
//
// P9: the authorizer asks for a group's owner before a trainer attaches, and the group's machine,
// which keeps the owner (daemon/group/ownership.h), asks again when the trainer enters, so that of
// two trainers that come at once only one becomes the owner.
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
#include "daemon/node/state_lock.h"

namespace refitd {

// Whether the identity may make the group: a rule that names the group's owner lets nobody else
// make it.
bool MayMakeGroup(const DaemonState& state, const std::string& group, const std::string& identity);

// ---- limits of each identity ----
// RESOURCE_EXHAUSTED names identity, limit and value.
// `creator` empty: another daemon, which has no limits of its own.
// `joined`: the group that another daemon coordinates, whose pool's size is known now; null: a
// group that is about to be made.
absl::Status AdmitGroup(const DaemonState& state, const std::string& creator, int64_t pool_bytes,
                        const GroupRecord* joined = nullptr)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
absl::Status AdmitMember(const DaemonState& state, const Peer& peer)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
absl::Status AdmitRegionOf(const DaemonState& state, const MemberRecord& owner)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Also remembers who begins the update.
absl::Status AdmitUpdate(DaemonState& state, const MemberRecord& trainer,
                         const std::string& request_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

// ---- the audit log ----
void AuditAttach(const DaemonState& state, const MemberRecord& member);
void AuditUpdate(const DaemonState& state, const GroupRecord& group, const UpdateEnded& ended);
void AuditEviction(const DaemonState& state, const GroupRecord& group, const LogLine& line);
// Returns a function that does what `reply` does, and writes to the audit log how a Begin, Commit,
// Refit or Abort was answered.
ReplyFunction Audited(const DaemonState& state, const std::string& group, const GroupEvent& event,
                      const Peer& peer, ReplyFunction reply);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_IDENTITIES_H_
