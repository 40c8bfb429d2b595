// The life of a member: it enters its group, with slots on its GPU where it needs them; holds a
// lease; is lost; and its record goes with its last copy.
//
// P6: a member's mappings are dropped only on ReleaseMember, and every copy holds its own
// reference. P8: a lost member's token dies at once. P9: a lease is bound to the credentials that
// attached.
//
// The class is part of the daemon's state and is used in a turn (turn.h), but for Happened.
#ifndef REFITD_DAEMON_NODE_MEMBERS_H_
#define REFITD_DAEMON_NODE_MEMBERS_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/group_life.h"
#include "daemon/node/identities.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"
#include "daemon/sockets/process_watch.h"

namespace refitd {

// The status that ends the stream of a member that did not ask to leave.
absl::Status LeaseEnded(const std::string& reason);

class Members {
 public:
  // All must outlive it.
  Members(DaemonState* state, ProcessWatch* processes, const Identities* identities,
          GroupLife* life, DeviceSlots* slots, DataPlane* data_plane)
      : state_(*state),
        processes_(*processes),
        identities_(*identities),
        life_(*life),
        device_slots_(*slots),
        data_plane_(*data_plane) {}

  // Lets the member enter the group, at once or when its GPU has the pool that it needs; or refuses
  // it.
  void Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Tells the member that the group's machine has taken it in.
  void Welcome(GroupRecord* group, MemberRecord* member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Makes slots for a rank whose group another daemon coordinates. The event SlotsMade is the
  // answer.
  void MakeSlotsFor(MemberId member, const GroupRecord& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // The member whose lease the caller presents. Errors name the lease's field.
  absl::StatusOr<MemberRecord*> Authenticate(const Caller& caller, bool engine)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // An engine rank says that something has happened (ReadyEvent, AckEvent, EngineFailed). Takes a
  // turn. Nothing happens if the member is lost.
  void Happened(MemberId member, GroupEvent event);

  // Ends the member's lease. `end`: the status that the member's stream ends with. The record stays
  // until its copies ended.
  void Lose(MemberRecord* member, const std::string& reason, absl::Status end, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Removes the record of a member whose last copy has ended.
  void Erase(MemberId member, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Ends the stream of a rank that was taken out of the waiters and is not admitted.
  void EndWithoutPool(MemberRecord record, absl::Status status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

 private:
  void Admit(MemberRecord record, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Lets the rank enter once the pool is there, or refuses it.
  void AwaitPool(MemberRecord record, const GroupRecord& group, GroupEvent attached)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void EndPooling(MemberId member, absl::Status made);
  // Called when the process of an admitted member has ended.
  void Died(MemberId member);
  // Called when a member on that GPU has gone.
  void DropUnused(GroupRecord* group, int ordinal, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
  ProcessWatch& processes_;
  const Identities& identities_;
  GroupLife& life_;
  DeviceSlots& device_slots_;
  DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBERS_H_
