// The wire locks of the nodes of one update (wire_lock.h), as its coordinator takes them: one after
// another, in the order of daemon ids, so that two groups never wait for each other.
//
// They are asked for only when there is something to send, since a group that holds them without
// need keeps other groups waiting. Each wait has a limit (P4).
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_WIRE_LOCKS_H_
#define REFITD_DAEMON_GROUP_WIRE_LOCKS_H_

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/joined_nodes.h"

namespace refitd::coordinator {

// Functions return the commands that are to be sent.
class WireLocks {
 public:
  WireLocks(UpdateId update, Duration limit) : update_(update), limit_(limit) {}

  bool asked() const { return !order_.empty(); }
  bool asks(NodeId node) const {
    return std::find(order_.begin(), order_.end(), node) != order_.end();
  }
  // The node whose lock was asked for and is not granted.
  std::optional<NodeId> awaited() const;
  // Until when that lock is waited for.
  std::optional<TimePoint> due() const;
  // Whether the next part may be issued: all locks are held, and it is not another group's turn.
  bool may_issue() const { return !awaited().has_value() && !(wanted_ && turn_taken_); }

  // Asks for the locks of these nodes, which are in the order of their daemon ids.
  NodeCommands Ask(std::vector<NodeId> order, TimePoint now);
  NodeCommands Granted(NodeId node, TimePoint now);
  void Waits(std::string holder) { holder_ = std::move(holder); }
  void Wanted() { wanted_ = true; }
  void Issued() { turn_taken_ = true; }
  // Stops waiting for the node's lock.
  NodeCommands Forget(NodeId node, TimePoint now);
  NodeCommands GiveBack();
  // Gives the locks back if another group wants them; the caller ensures that no collective runs.
  // The group keeps the locks until it has issued a part, because otherwise two groups would hand
  // them to each other and never use them. `idle`: it has nothing to issue now, and asks again
  // later. A group that holds only some of its locks keeps them: all coordinators take locks in one
  // order, so waiting for the other locks is no deadlock.
  NodeCommands GiveBackIfWanted(bool idle);

  // "the wire of daemon b was not free within 30 s: group g has it"
  std::string WhyLate(const JoinedNodes& nodes) const;
  void CheckInvariants() const;

 private:
  NodeCommands AskNext(TimePoint now);

  const UpdateId update_;
  const Duration limit_;
  std::vector<NodeId> order_;
  size_t held_ = 0;     // so many of `order_`
  std::string holder_;  // which group has the lock that is waited for
  TimePoint deadline_;
  bool wanted_ = false;      // another group wants a wire lock
  bool turn_taken_ = false;  // a part was issued since the locks were asked for
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_WIRE_LOCKS_H_
