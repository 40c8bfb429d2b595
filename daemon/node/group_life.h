// Makes and drops groups: checks what is asked for, makes room, and ends what belongs to a group
// that goes (P8).
//
// The class is part of the daemon's state and is used in a turn (turn.h).
#ifndef REFITD_DAEMON_NODE_GROUP_LIFE_H_
#define REFITD_DAEMON_NODE_GROUP_LIFE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/groups.h"
#include "daemon/node/identities.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"

namespace refitd {

// NOT_FOUND: there is no group of that name.
absl::Status NoGroup(const std::string& name);
// FAILED_PRECONDITION: the call is for the daemon that coordinates the group.
absl::Status Followed(const GroupRecord& group);

class GroupLife {
 public:
  GroupLife(DaemonState* state, const Identities* identities, DataPlane* data_plane)
      : state_(*state), identities_(*identities), data_plane_(*data_plane) {}

  // The group that the wish for a spec asks for, found or made. `trainers`: the world size of the
  // trainer rank that asks for the group. If that rank could not join, no group is made. `creator`:
  // the identity that asks; empty: another daemon, which has no limits of its own.
  absl::StatusOr<GroupRecord*> Make(const std::string& name, const GroupSpec& wish,
                                    std::optional<int> trainers, const std::string& creator,
                                    bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Drops the groups that must give way (Groups::RoomFor). RESOURCE_EXHAUSTED: there is not enough
  // room.
  absl::Status MakeRoom(const std::string& name, const GroupSpec* spec, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // RESOURCE_EXHAUSTED: the daemon has max_members members already.
  absl::Status CheckMembers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Called after every event of a group that this daemon coordinates. When the group becomes empty,
  // records the time and gives the group's host pool back.
  void NoteEmpty(GroupRecord* group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Deletes a group without members. `why` is for the log.
  void Drop(const std::string& name, std::string_view why, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void DropExpired(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // This daemon has left the group, which another daemon coordinates.
  void DropFollower(const std::string& name, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

 private:
  DaemonState& state_;
  const Identities& identities_;
  DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_GROUP_LIFE_H_
