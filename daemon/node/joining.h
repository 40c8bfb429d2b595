// Groups that other daemons coordinate and this daemon joins.
//
// The class is part of the daemon's state and is used in a turn (turn.h), but for what links call.
#ifndef REFITD_DAEMON_NODE_JOINING_H_
#define REFITD_DAEMON_NODE_JOINING_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/dialler.h"
#include "daemon/node/group_life.h"
#include "daemon/node/identities.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"

namespace refitd {

class Joining : private DialHost {
 public:
  // `dial` null: this daemon joins no others.
  Joining(DaemonState* state, PeerDialer dial, const Identities* identities, GroupLife* life,
          Members* members);

  // The coordinator that a member names; empty: this daemon.
  std::string CoordinatorOf(const std::string& address) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // The group that the daemon at `address` coordinates, joined or being joined; or a group of this
  // daemon, which has found that it answers to `address` itself. Such a group without a member is
  // given up, so that the name is resolved anew. `creator`: the identity that asks.
  absl::StatusOr<GroupRecord*> Follow(const std::string& name, const std::string& address,
                                      const std::optional<GroupSpec>& spec,
                                      const std::string& creator, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // FAILED_PRECONDITION: this daemon joins no others.
  absl::Status CheckCanJoin(const std::string& named) const;
  // Begins a try to join, for the members that wait.
  void Dial(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Stops joining the group, for which no member waits any more.
  void Leave(GroupRecord* group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Stops joining the group if no member waits for that any more.
  void StopIfUnwanted(const std::string& name, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // Both are called when a deadline has come. The first refuses members that have waited for too
  // long; the second tries to join again.
  void RefuseLateMembers(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void RedialIfDue(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Waits until every link has reported its end. `mutex` is the daemon's.
  void AwaitLinks(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { dialler_.AwaitLinks(mutex); }

 private:
  void LinkIsUp(const DialTry& of, const LinkUp& up) override;
  void LinkSays(const DialTry& of, PeerCommand command) override;
  void LinkIsLost(const DialTry& of, absl::Status status) override;

  // OK: the group, which this daemon has joined, takes a member that names the coordinator as
  // `named`.
  absl::Status CheckJoined(const GroupRecord& group, const std::string& named,
                           const std::optional<GroupSpec>& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Makes the record of a group that this daemon begins to join.
  absl::StatusOr<GroupRecord*> Make(const std::string& name, const std::string& address,
                                    const std::string& creator, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void TakeJoined(GroupRecord* group, const LinkUp& up, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Makes the index of a Prepare's destinations without the mutex, since the time for that grows
  // with the number of tensors in their layouts.
  void IndexDestinations(const DialTry& of, PeerPrepare* prepare);
  // Handles a failed try: refuses the members whose wait ends with this failure, and tries again
  // for the others.
  void Failed(GroupRecord* group, const absl::Status& status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  static void Stop(GroupRecord* group, const absl::Status& status, Turn& turn);

  DaemonState& state_;
  const Identities& identities_;
  GroupLife& life_;
  Members& members_;
  Dialler dialler_;  // used in a turn
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_JOINING_H_
