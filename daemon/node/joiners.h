// Daemons that join groups of this one, at the daemon's end of their links.
//
// Thread-safe, but for AdmitWaiting, which is used in a turn (turn.h).
#ifndef REFITD_DAEMON_NODE_JOINERS_H_
#define REFITD_DAEMON_NODE_JOINERS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/group_life.h"
#include "daemon/node/joining.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"

namespace refitd {

class Joiners : public PeerAcceptor {
 public:
  Joiners(DaemonState* state, const Identities* identities, GroupLife* life, Members* members,
          Joining* joining, const DeviceSlots* slots)
      : state_(*state),
        identities_(*identities),
        life_(*life),
        members_(*members),
        joining_(*joining),
        device_slots_(*slots) {}

  void Hello(PeerGreeting hello, std::string peer_address,
             std::shared_ptr<PeerSession> session) override;
  Room RoomFor(const std::string& identity) override;
  void Report(uint64_t session, PeerReport report) override;
  void Gone(uint64_t session, std::string reason) override;

  // The group was given up here for the daemon that its coordinator's name now leads to: until then
  // links that ask for it are refused, and may try again.
  void RefuseUntil(const std::string& group, TimePoint until)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // Called when the group was made: lets in the members and daemons that waited for the group.
  void AdmitWaiting(const std::string& group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

 private:
  // Checks the hello of a daemon that joins, and makes the group that its spec asks for.
  absl::Status TakeHello(Peers::Waiting* peer, bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // OK: this daemon does not follow another one in the group. UNAVAILABLE: it will not, or may come
  // to coordinate the group itself, as when the coordinator's name was pointed here.
  absl::Status CheckNotFollowing(const PeerGreeting& hello) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Makes the group that the hello's spec asks for, unless whoever brings it may not: a trainer is
  // refused then, and an engine waits for the group.
  absl::Status TakeSpec(PeerGreeting* hello, bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // This daemon reached itself: it is the one that answers to the coordinator's name, so the group
  // lives here, and the members that waited for that name enter it.
  void CoordinateOwn(const PeerGreeting& hello, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Whether this daemon and the joining one can keep the group's bytes encrypted, if the group's
  // spec demands that.
  absl::Status CheckEncrypted(const GroupRecord& group) const;
  void Admit(Peers::Waiting peer, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // If the group knows a layout that equals the reported layout, makes the report share the known
  // object. The two are compared without the mutex, since the time for that grows with the number
  // of tensors.
  void ShareLayout(uint64_t session, PeerLayout* report);

  // UNAVAILABLE: the group was drained here a moment ago.
  absl::Status CheckNotDrained(const std::string& group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
  const Identities& identities_;
  GroupLife& life_;
  Members& members_;
  Joining& joining_;
  const DeviceSlots& device_slots_;
  // Groups that were drained here, and until when no link is taken for them.
  std::map<std::string, TimePoint> drained_ ABSL_GUARDED_BY(kInTurn);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_JOINERS_H_
