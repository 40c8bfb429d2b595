// Joins this daemon to groups that other daemons coordinate: dials, tries again, and knows for whom
// a failed try was the last.
//
// Invariants
//  1. A group that is being joined has a try under way or a time for the next one (JoinRecord), so
//     that no member waits without an end (P4).
//  2. A callback of a link names the group's record and the number of its try: what an earlier try
//     says is told apart and ignored.
//  3. Every link that was dialled reports its end once; AwaitLinks returns after the last report.
//
// The class is part of the daemon's state and is used under its mutex (turn.h), which links'
// callbacks take.
#ifndef REFITD_DAEMON_NODE_DIALLER_H_
#define REFITD_DAEMON_NODE_DIALLER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/groups.h"
#include "daemon/node/waiters.h"
#include "proto/peer_defaults.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"

namespace refitd {

// Dials a coordinator (PeerLink::Dial with the daemon's credentials).
using PeerDialer = std::function<std::unique_ptr<PeerLink>(PeerDial, PeerLinkCallbacks)>;

// One try to join one group.
struct DialTry {
  std::string group;
  uint64_t id = 0;  // of the group's record
  uint64_t number = 0;
};

// A host hears what links report. Its functions are called without the mutex. Calls for one try
// come one at a time, in order.
class DialHost {
 public:
  virtual ~DialHost() = default;
  virtual void LinkIsUp(const DialTry& of, const LinkUp& up) = 0;
  virtual void LinkSays(const DialTry& of, PeerCommand command) = 0;
  virtual void LinkIsLost(const DialTry& of, absl::Status status) = 0;
};

class Dialler {
 public:
  struct Options {
    std::string daemon_id;
    std::string boot_id;
    int64_t message_bytes = int64_t{8} << 20;
  };
  // `dial` null: this daemon joins no others.
  Dialler(Options options, PeerDialer dial, DialHost* host, Mutex* mutex)
      : options_(std::move(options)), dial_(std::move(dial)), host_(host), mutex_(mutex) {}

  bool can_join() const { return dial_ != nullptr; }

  // Begins a try to join, for the members that wait. Ends the try before it. The
  // coordinator's name is resolved anew.
  void Dial(GroupRecord* group, const Waiters& waiters, TimePoint now);
  // The group's record if this is the group's newest try, else null.
  static GroupRecord* Current(const DialTry& of, Groups* groups);
  // Handles a failed try: refuses the members whose wait ends with this failure, and tries again
  // for the others, at once or after a pause. Returns whether a member still waits. With `goes_on`
  // false, every member's wait ends.
  bool TakeFailure(GroupRecord* group, const absl::Status& status, bool goes_on, TimePoint now,
                   Waiters* waiters);
  // Begins the tries whose pause is over.
  void RedialIfDue(const Groups& groups, const Waiters& waiters, TimePoint now);

  // The time at which a member that waits for its group is refused, unless an event decides before
  // (P4). `groups` must outlive the result.
  static Waiters::Expiry ExpiryOf(const Groups& groups);
  // The reason for which a member is refused that has waited for as long as it may.
  static absl::Status LateStatus(const Waiters::OfGroup& member, const Groups& groups);

  // Waits until every link has reported its end. `mutex` is the daemon's.
  void AwaitLinks(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

 private:
  // Constant after construction.
  const Options options_;
  const PeerDialer dial_;
  DialHost* const host_;
  Mutex* const mutex_;

  // Guarded by the mutex.
  int links_ = 0;         // links that were dialled and whose on_lost has not returned
  uint64_t dialled_ = 0;  // in the life of this process
  CondVar links_cond_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_DIALLER_H_
