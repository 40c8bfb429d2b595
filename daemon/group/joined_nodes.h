// The daemons that joined a group: who they are, when each was heard last, and what each was sent
// of the group's owner and readiness.
//
// A node that is silent for too long is lost (P4). The coordinator's own daemon has a name here and
// is none of them.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_JOINED_NODES_H_
#define REFITD_DAEMON_GROUP_JOINED_NODES_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/group/machine.h"
#include "transport/base/failure.h"

namespace refitd::coordinator {

// Commands to nodes, in order; the coordinator's own node gets some, too.
using NodeCommands = std::vector<SendCommand>;
// Whether something holds of a node.
using OfNode = std::function<bool(NodeId)>;

std::string InSeconds(Duration duration);  // "0.5 s"

class JoinedNodes {
 public:
  // `own_id`: of the coordinator's daemon. `silence`: a node that is silent for longer is lost.
  JoinedNodes(std::string own_id, Duration silence)
      : own_id_(std::move(own_id)), silence_(silence) {}

  bool empty() const { return nodes_.empty(); }
  bool contains(NodeId node) const { return nodes_.contains(node); }
  // Whether the node is one of these, or the coordinator's own.
  bool exists(NodeId node) const { return node == kCoordinatorNode || contains(node); }
  std::optional<NodeId> Find(const std::string& daemon_id) const;

  std::string DaemonId(NodeId node) const;  // a number for a node that is gone
  std::string Name(NodeId node) const { return "daemon " + DaemonId(node); }
  template <typename Nodes>
  std::string Names(const Nodes& nodes) const {
    std::string names;
    for (const NodeId node : nodes) names += (names.empty() ? "" : ", ") + Name(node);
    return names;
  }
  // The node as failures name it.
  Suspect SuspectOf(NodeId node) const;
  template <typename Nodes>
  Failure Suspecting(const Nodes& suspects) const {
    Failure failure;
    for (const NodeId node : suspects) failure.Add(SuspectOf(node));
    return failure;
  }

  // Whether that daemon may join now, with the errors of Coordinator::CanJoin. `group`: the group's
  // name, for the message.
  absl::Status CanJoin(const std::string& group, const std::string& daemon_id,
                       const std::string& boot_id, const std::string& address) const;
  void Join(const NodeJoined& joined, TimePoint now);
  bool Leave(NodeId node) { return nodes_.erase(node) > 0; }
  // The node sent something, so it is not silent. False: it is no node of the group any more.
  bool Heard(NodeId node, TimePoint now);
  // Pings the nodes that are due. Returns those that were silent for too long.
  std::vector<NodeId> Ping(TimePoint now, NodeCommands* commands);
  // When a node has to be pinged, or counts as silent; a time that is too early does no harm.
  std::optional<TimePoint> due() const { return empty() ? std::nullopt : due_; }

  NodeCommands SendIncarnation(uint64_t incarnation) const;
  // Sends the owner to the nodes that do not have it.
  NodeCommands SendOwner(const std::string& owner);
  // Sends `news` to the nodes that have the book as it was before, and all of it to the others.
  NodeCommands SendReadiness(const std::vector<PeerReadiness>& news, const ReadinessBook& book);

  std::vector<NodeView> View(TimePoint now) const;
  void CheckInvariants() const;

 private:
  struct Node {
    std::string daemon_id;
    std::string boot_id;  // names its process
    std::string address;
    Protocol protocol = kProtocol;
    TimePoint heard;
    TimePoint next_ping;
    uint64_t pings = 0;
    bool has_readiness = false;
    std::string owner;  // as it was sent last
  };

  const std::string own_id_;
  const Duration silence_;
  std::map<NodeId, Node> nodes_;
  // Found anew at each Ping, not at each report, since every event asks for the next deadline.
  std::optional<TimePoint> due_;
  std::string owner_;         // as all nodes have it that did not join anew
  bool joined_anew_ = false;  // a node joined that was not sent the readiness yet
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_JOINED_NODES_H_
