// Daemons that join groups of this daemon: those that wait until their group exists, and those that
// have joined. Each has one session.
//
// Invariants
//  1. A session waits, or belongs to one node of one group, or has ended.
//  2. A node number is given once in the daemon's life.
//  3. At most kMaxWaiting daemons wait, each until its deadline (P4).
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h).
#ifndef REFITD_DAEMON_NODE_PEER_SESSIONS_H_
#define REFITD_DAEMON_NODE_PEER_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/link/peer_link.h"
#include "transport/base/ids.h"

namespace refitd {

class PeerSessions {
 public:
  static constexpr size_t kMaxWaiting = 1024;

  // A daemon that waits until its group exists.
  struct Waiting {
    PeerGreeting hello;
    std::string address;
    std::shared_ptr<PeerSession> session;
    TimePoint deadline;
  };
  // The group and node that a session belongs to.
  struct Joined {
    std::string group;
    NodeId node;
    std::string boot_id;  // of its daemon's process
    uint64_t dial = 0;    // PeerGreeting::dial
  };

  // OK: no later link of the same process to the group is known. ABORTED: the hello came late,
  // after the daemon gave this link up.
  absl::Status CheckLatest(const PeerGreeting& hello) const;

  // ---- daemons that wait for their group ----
  // RESOURCE_EXHAUSTED: kMaxWaiting daemons wait already.
  absl::Status AdmitWaiting() const;
  void Wait(Waiting peer) { waiting_.push_back(std::move(peer)); }
  // Removes the waiting session of the daemon's earlier link for the same group: the daemon gave
  // that link up when it dialled again, even if the end of the link has not come here yet.
  void ForgetEarlier(const Waiting& peer);
  // Daemons that wait for the group, in the order in which they came.
  std::vector<Waiting> TakeWaiting(const std::string& group);
  const std::vector<Waiting>& waiting() const { return waiting_; }
  void RefuseLate(TimePoint now);
  void RefuseAllWaiting(const absl::Status& status);
  // The first deadline of a waiting daemon; nullopt: none waits.
  std::optional<TimePoint> NextDeadline() const;

  // ---- daemons that have joined ----
  // Gives the session a new node of the hello's group, with a number that no other session had.
  NodeId Join(const PeerGreeting& hello, std::shared_ptr<PeerSession> session);
  // nullopt: the session has not joined, or has ended.
  std::optional<Joined> Find(uint64_t session) const;
  // Null: that node of the group has left.
  std::shared_ptr<PeerSession> SessionOf(const std::string& group, NodeId node) const;
  // Whether a daemon has joined the group.
  bool Any(const std::string& group) const;
  // Ends the node's session. Does nothing if the node has left.
  void End(const std::string& group, NodeId node, const absl::Status& status);
  // Ends the sessions of a deleted group.
  void EndGroup(const std::string& group, const absl::Status& status);
  // Removes a session that is over, whether it waited or had joined. Returns its group and node, if
  // it had joined.
  std::optional<Joined> Remove(uint64_t session);
  // Ends all sessions.
  void EndAll(const absl::Status& status);

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  using Sessions = std::map<NodeId, std::shared_ptr<PeerSession>>;

  std::vector<Waiting> waiting_;
  std::map<uint64_t, Joined> joined_;         // by session
  std::map<std::string, Sessions> sessions_;  // by group; no empty entries
  uint32_t next_ = 1;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PEER_SESSIONS_H_
