// One communicator of an update's nodes, as the coordinator brings it up: it tells every rank to
// open its end, gives the addresses of all ends to every rank, and judges which ranks are to blame
// if the communicator does not come up.
//
//   opening ---- all ends are open, Connect ----> connecting ---- all ranks are up ----> up
//
// Both waits have a deadline (P4). The set of ranks never changes: another set has another
// communicator.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_COMMUNICATOR_H_
#define REFITD_DAEMON_GROUP_COMMUNICATOR_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/group/joined_nodes.h"

namespace refitd::coordinator {

// Once a node said that the wire failed, other nodes have this long to say whom they waited for. It
// is less than the second within which survivors must be sent an abort.
inline constexpr Duration kWaitForReports = std::chrono::milliseconds(500);

// Why a communicator did not come up.
struct WhyDown {
  std::string reason;
  GiveUpClass kind = GiveUpClass::kTransfer;
  Failure failure;
};

class Communicator {
 public:
  // `ranks`: at least two, ascending.
  Communicator(CommunicatorId id, std::vector<NodeId> ranks, Duration limit, TimePoint now);

  CommunicatorId id() const { return id_; }
  const std::vector<NodeId>& ranks() const { return ranks_; }
  std::optional<uint32_t> RankOf(NodeId node) const;
  bool has(NodeId node) const { return RankOf(node).has_value(); }
  bool up() const { return up_.size() == ranks_.size(); }
  bool connecting() const { return connecting_; }
  std::string_view state() const { return up() ? "up" : connecting_ ? "connecting" : "opening"; }
  // When the failure is judged, if it is not up by then.
  TimePoint due() const { return judge_at_; }
  // The next `count` sequence numbers of its collectives; returns the first.
  WireSeq Take(uint64_t count);

  NodeCommands Open() const;
  NodeCommands Close() const;
  // The end of a rank is open at that address. Returns whether the ends of all ranks are open.
  bool Opened(NodeId node, const std::string& address);
  NodeCommands Connect(Duration limit, TimePoint now);
  // The rank is up, or why it is not. `connecting` and not yet up. Returns whether all ranks have
  // answered.
  bool Answered(NodeId node, const absl::Status& status, TimePoint now);

  // The nodes whose ranks the wire's failure names.
  std::vector<NodeId> NodesNamed(const absl::Status& status) const;
  // Explains the wire's rank numbers in a message, as in " (rank 2 is daemon c)".
  std::string NamesOfRanks(const absl::Status& status, const JoinedNodes& nodes) const;
  // The nodes to blame, as it is not up. `needed`: no update can do without that node. Empty: no
  // node can be left out for the failure. nullopt: no failure names a node.
  std::optional<std::set<NodeId>> Suspects(const OfNode& needed, TimePoint now) const;
  WhyDown Why(const std::set<NodeId>& suspects, const JoinedNodes& nodes) const;
  // An attempt that had less time than `least` blames no node.
  bool had_time(Duration least) const { return limit_ >= least; }

  void CheckInvariants() const;

 private:
  // A rank for which it did not come up.
  struct Failed {
    std::vector<NodeId> named;  // whom it waited for
    absl::Status status;
  };
  // The ranks that have not answered.
  std::vector<NodeId> Awaited() const;
  bool LooksGuilty(NodeId node, const Failed& failed) const;

  const CommunicatorId id_;
  const std::vector<NodeId> ranks_;
  std::map<NodeId, std::string> addresses_;
  std::set<NodeId> up_;
  std::map<NodeId, Failed> failed_;
  NodeId first_failed_;
  bool connecting_ = false;
  Duration limit_{};    // for opening, and again for connecting
  TimePoint deadline_;  // of the present step: opening, or connecting
  TimePoint judge_at_;  // not after `deadline_`
  uint64_t next_seq_ = 0;
};

// Returns the failure that a node reported, with daemons in place of the wire's ranks. A failure
// that names nobody is the node's own. `communicator`: null: there is none.
Failure FailureOfNode(NodeId node, const absl::Status& status, const JoinedNodes& nodes,
                      const Communicator* communicator);
// The status of a node's failed result, with the node's name.
absl::Status StatusOfNode(NodeId node, const absl::Status& status, bool of_wire,
                          const JoinedNodes& nodes, const Communicator* communicator);

// The failure of a collective, while it is open which node is to blame. In a chain, all nodes
// behind the one that stopped time out at about the same moment, and their reports come in any
// order: so the coordinator waits for more of them for a while.
class FailedWire {
 public:
  // `what` was on the wire. `due`: when the node to blame is named.
  FailedWire(std::string what, TimePoint due) : what_(std::move(what)), due_(due) {}

  const std::string& what() const { return what_; }
  TimePoint due() const { return due_; }
  // The node's share failed with that status, as StatusOfNode says it, while it waited for `named`.
  void Add(NodeId node, std::vector<NodeId> named, absl::Status status);

  // The node whose wire failed, by what the others reported of it; nullopt: nobody was named. Of
  // nodes that look alike, one is chosen that is not `needed`.
  std::optional<NodeId> Suspect(const OfNode& needed) const;
  // The first report that names the node.
  absl::Status ReportOf(NodeId node) const;
  // The status of a node that waited only for nodes that reported nothing themselves, which are
  // named first; else the status that came first.
  absl::Status Cause(const JoinedNodes& nodes) const;

  void CheckInvariants() const;

 private:
  struct Report {
    NodeId node;
    std::vector<NodeId> named;
    absl::Status status;
  };
  bool Reported(NodeId node) const;
  const Report& MostTelling() const;

  std::string what_;
  TimePoint due_;
  std::vector<Report> reports_;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_COMMUNICATOR_H_
