// The lives of groups and of members.
//
// A group is made, found by an equal spec, makes room for others, and is dropped with all that
// belongs to it (P8). A member enters its group, with slots on its GPU where it needs them; has a
// session; is lost; and its record is erased after its last copy.
//
// P6: a member's mappings are dropped only on ReleaseMember, and every copy holds its own
// reference. P8: a lost member's token dies at once. P9: a token is bound to the credentials that
// attached.
#ifndef REFITD_DAEMON_NODE_LIFE_H_
#define REFITD_DAEMON_NODE_LIFE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/groups.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"

namespace refitd {

// ---- groups ----

// A new incarnation of a group: random, never 0.
uint64_t NewIncarnation();

// NOT_FOUND: there is no group of that name.
absl::Status NoGroup(const std::string& name);
// FAILED_PRECONDITION: the call is for the daemon that coordinates the group.
absl::Status NotCoordinatedHere(const GroupRecord& group);

// Finds or makes the group of this spec. `trainers`: the world size of the trainer rank that asks
// for the group. If that rank could not join, no group is made. `creator`: the identity that asks;
// empty: another daemon, which has no limits of its own.
absl::StatusOr<GroupRecord*> MakeGroup(DaemonState& state, const std::string& name,
                                       const GroupSpec& wanted, std::optional<int> trainers,
                                       const std::string& creator, bool* created, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Drops the groups that must give way (Groups::RoomFor). RESOURCE_EXHAUSTED: there is not enough
// room.
absl::Status MakeRoom(DaemonState& state, const std::string& name, const GroupSpec* spec,
                      StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// RESOURCE_EXHAUSTED: the daemon has max_members members already.
absl::Status CheckMemberCount(const DaemonState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Called after every event of a group that this daemon coordinates. When the group becomes empty,
// records the time and gives the group's host pool back.
void NoteEmptyGroup(DaemonState& state, GroupRecord* group, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Deletes a group without members. `why` is for the log.
void DropGroup(DaemonState& state, const std::string& name, std::string_view why, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
void DropExpiredGroups(DaemonState& state, TimePoint now, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Removes the record of a group that another daemon coordinates and this daemon has left.
void DropFollower(DaemonState& state, const std::string& name, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

// ---- members ----

// The status that ends the stream of a member that did not ask to leave.
absl::Status LeaseEnded(const std::string& reason);

// Lets the member enter the group, at once or when its GPU has the pool that it needs; or refuses
// it.
void EnterGroup(DaemonState& state, MemberRecord record, GroupRecord* group, GroupEvent attached,
                StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Takes a member that has left the pending attaches: lets it enter, if the group exists and has the
// spec that the member brought; else refuses it.
void EnterWaiting(DaemonState& state, PendingAttaches::OfGroup waited, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Makes slots for a rank whose group another daemon coordinates. The event SlotsMade is the answer.
void MakeSlotsFor(DaemonState& state, MemberId member, const GroupRecord& group)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Sends the member its token, once the group's machine has taken the member in.
void SendWelcome(DaemonState& state, GroupRecord* group, MemberRecord* member, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

// The member whose lease the caller presents: its token (Members::OfToken), protocol and
// incarnation, and whether it is of a rank of this role. Errors name the lease's field.
absl::StatusOr<MemberRecord*> Authenticate(DaemonState& state, const Caller& caller, bool engine)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

// Ends the member's lease. `end`: the status that the member's stream ends with. The record stays
// until its copies ended.
void LoseMember(DaemonState& state, MemberRecord* member, const std::string& reason,
                absl::Status end, StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Ends the leases of the members for which `wanted` holds, with that status.
void LoseMembers(DaemonState& state, const std::function<bool(const MemberRecord&)>& wanted,
                 const absl::Status& end, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Removes the record of a member whose last copy has ended.
void EraseMember(DaemonState& state, MemberId member, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Ends the stream of a rank that was taken out of the pending attaches and is not admitted.
void EndWithoutPool(DaemonState& state, MemberRecord record, absl::Status status, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_LIFE_H_
