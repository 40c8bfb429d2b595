// Groups that other daemons coordinate and this daemon joins: dials, tries again, and decides which
// members a failed try refuses.
//
// Invariants
//  1. A group that is being joined has a try under way or a time for the next one (JoinRecord), so
//     that no member waits without an end (P4).
//  2. A callback of a link names the group's record and the number of its try: what an earlier try
//     reports is ignored.
//  3. Every link that was dialled reports its end once; AwaitLinks returns after the last report.
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h), but for
// what links call.
#ifndef REFITD_DAEMON_NODE_PEER_CLIENT_H_
#define REFITD_DAEMON_NODE_PEER_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"
#include "transport/base/mutex.h"

namespace refitd {

// Dials a coordinator (PeerLink::Dial with the daemon's credentials).
using PeerDialer = std::function<std::unique_ptr<PeerLink>(PeerDial, PeerLinkCallbacks)>;

class PeerClient {
 public:
  // `dial` null: this daemon joins no others.
  PeerClient(DaemonState* state, PeerDialer dial) : state_(*state), dial_(std::move(dial)) {}

  // The coordinator that a member names; empty: this daemon.
  std::string CoordinatorOf(const std::string& address) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // The group that the daemon at `address` coordinates, joined or being joined; or a group of this
  // daemon, which has found that it answers to `address` itself. Such a group without a member is
  // given up, so that the name is resolved anew. `creator`: the identity that asks.
  // FAILED_PRECONDITION: this daemon joins no others.
  absl::StatusOr<GroupRecord*> Follow(const std::string& name, const std::string& address,
                                      const std::optional<GroupSpec>& spec,
                                      const std::string& creator, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Begins a try to join, for the members that wait. Ends the try before it. The coordinator's name
  // is resolved anew.
  void Dial(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Stops joining the group, for which no member waits any more.
  void Leave(GroupRecord* group, StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Stops joining the group if no member waits for that any more.
  void StopIfUnwanted(const std::string& name, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  // The next time at which a member that waits for its group is refused, unless an event decides
  // before (P4); nullopt: none waits.
  std::optional<TimePoint> NextExpiry() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Call both when a deadline has come: the first refuses members that have waited for too long,
  // the second begins the tries whose pause is over.
  void RefuseLateMembers(TimePoint now, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  void RedialIfDue(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Waits until every link has reported its end. `mutex` is the daemon's.
  void AwaitLinks(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

 private:
  // One try to join one group.
  struct Try {
    std::string group;
    uint64_t id = 0;  // of the group's record
    uint64_t number = 0;
  };

  // What links report, without the mutex. Calls for one try come one at a time, in order.
  void LinkIsUp(const Try& attempt, const LinkUp& up);
  void TakeCommand(const Try& attempt, PeerCommand command);
  void LinkIsLost(const Try& attempt, absl::Status status);
  GroupRecord* Current(const Try& attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  absl::Status CheckCanJoin(const std::string& named) const;
  void TakeJoined(GroupRecord* group, const LinkUp& up, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Makes the index of a Prepare's destinations without the mutex, since the time for that grows
  // with the number of tensors in their layouts.
  void IndexDestinations(const Try& attempt, PeerPrepare* prepare);
  // Handles a failed try: refuses the members whose wait ends with this failure, and tries again
  // for the others, at once or after a pause.
  void Failed(GroupRecord* group, const absl::Status& status, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Returns whether a member still waits.
  bool TakeFailure(GroupRecord* group, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  // Constant after construction.
  DaemonState& state_;
  const PeerDialer dial_;

  // Guarded by the mutex.
  int links_ = 0;         // links that were dialled and whose on_lost has not returned
  uint64_t dialled_ = 0;  // links since the start of this process
  CondVar links_cond_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PEER_CLIENT_H_
