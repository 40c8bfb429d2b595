// Hands events to the groups' machines and performs the machines' actions. Replies and stream
// events are sent from here; actions that touch memory go to the data plane.
//
// The class is part of the daemon's state and is used in a turn (turn.h).
#ifndef REFITD_DAEMON_NODE_ACTIONS_H_
#define REFITD_DAEMON_NODE_ACTIONS_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "daemon/group/machine.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/group_life.h"
#include "daemon/node/identities.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"

namespace refitd {

class Actions {
 public:
  Actions(DaemonState* state, const Identities* identities, GroupLife* life, Members* members,
          DeviceSlots* slots, DataPlane* data_plane)
      : state_(*state),
        identities_(*identities),
        life_(*life),
        members_(*members),
        device_slots_(*slots),
        data_plane_(*data_plane) {}

  // Feeds one event to the group's machine and performs the machine's actions. Does nothing if the
  // group is gone.
  void Dispatch(Turn& turn, const std::string& group, MachineEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

 private:
  struct Performer;

  void Perform(GroupRecord* group, MachineAction action, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void PerformSend(GroupRecord* group, SendCommand a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void PerformSend(GroupRecord* group, SendReport a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Answers a report that the link could not send with the refusal that the coordinator would send.
  void ReportRefused(const std::string& name, const PeerLink* link, PeerLink::Refused refused);
  void CountCatchUp(const GroupRecord& group, const UpdateEnded& ended) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void Count(const GroupRecord& group, const UpdateEnded& ended) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
  const Identities& identities_;
  GroupLife& life_;
  Members& members_;
  DeviceSlots& device_slots_;
  DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_ACTIONS_H_
