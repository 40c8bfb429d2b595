// What the machines of an update over several nodes have in common: what they see of the group,
// what they ask for, and how the shares of several nodes become one result.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_ON_NODES_H_
#define REFITD_DAEMON_GROUP_ON_NODES_H_

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/group/communicator.h"
#include "daemon/group/joined_nodes.h"
#include "daemon/group/remote_members.h"
#include "daemon/group/slow_nodes.h"

namespace refitd::coordinator {

// The communicator can't be used any more.
struct WireBroken {};
// The set of nodes that a communicator has to connect may be another now.
struct RanksChanged {};
// Drop a node whose wire failed while its link holds.
struct DropSuspect {
  NodeId node;
  std::string reason;
};
// An attempt of the update's program has ended; comes before RefitDone.
struct ProgramEnded {
  bool ok = false;
  std::vector<SlowNodes::Use> uses;
  std::map<NodeId, Duration> took;  // of the nodes that ended their share
};
using Step = std::variant<SendCommand, GroupEvent, LogLine, WireBroken, RanksChanged, DropSuspect,
                          ProgramEnded>;
using Steps = std::vector<Step>;

// What an update sees of its group while it handles one event, and what it asks for.
struct Around {
  TimePoint now;
  const JoinedNodes& nodes;
  const RemoteMembers& members;
  const MemberLayouts& layouts;
  Communicator* communicator = nullptr;  // of the update's nodes; null: there is none
  std::map<NodeId, ProgramId>* plans;    // the program whose plan the node has
  OfNode needed;                         // the update can't do without that node
  const PeerLimits& limits;
  int64_t slot_bytes = 0;
  Steps* steps;  // what is to be done, in order

  bool wire_up() const { return communicator != nullptr && communicator->up(); }
  template <typename Each>
  void Do(Each step) const {
    steps->emplace_back(std::move(step));
  }
  void Send(NodeId node, PeerCommand command) const { Do(SendCommand{node, std::move(command)}); }
  void Send(NodeCommands commands) const {
    for (SendCommand& each : commands) Do(std::move(each));
  }
  void Feed(GroupEvent event) const { Do(std::move(event)); }
  void Log(LogLine::Level level, std::string text) const { Do(LogLine{level, std::move(text)}); }
  // A node's failure, as it is named to others.
  Failure FailureOf(NodeId node, const absl::Status& status) const {
    return FailureOfNode(node, status, nodes, communicator);
  }
  absl::Status StatusOf(NodeId node, const absl::Status& status, bool of_wire) const {
    return StatusOfNode(node, status, of_wire, nodes, communicator);
  }
};

// The shares that several nodes have in one part, or in the program.
class Shares {
 public:
  void Begin(std::set<NodeId> nodes, size_t destinations) {
    running_ = std::move(nodes);
    bytes_written_.resize(destinations);
  }
  const std::set<NodeId>& running() const { return running_; }
  bool ended() const { return running_.empty(); }
  const absl::Status& status() const { return status_; }  // the first failure
  void SetStatus(absl::Status status) { status_ = std::move(status); }
  void FailIfOk(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }
  // What failed is done again.
  void ForgetFailure() {
    status_ = absl::OkStatus();
    failed_destination_ = -1;
  }

  int64_t bytes_written() const {
    return std::accumulate(bytes_written_.begin(), bytes_written_.end(), int64_t{0});
  }

  // The node has ended its share, or is gone. False: it had none.
  bool End(NodeId node) { return running_.erase(node) > 0; }
  template <typename Done>
  void AddBytes(NodeId node, const Done& done, const Destinations& destinations) {
    const std::vector<uint32_t>& index = destinations.On(node);
    for (size_t d = 0; d < std::min(index.size(), done.bytes_written.size()); ++d) {
      bytes_written_[index[d]] += done.bytes_written[d];
    }
  }
  // Adds a node's result to those of the others.
  template <typename Done>
  void Add(NodeId node, const Done& done, const Destinations& destinations, const Around& around) {
    AddBytes(node, done, destinations);
    if (done.status.ok() || !status_.ok()) return;
    const std::vector<uint32_t>& index = destinations.On(node);
    const auto failed = static_cast<size_t>(std::max(done.failed_destination, 0));
    if (done.failed_destination >= 0 && failed < index.size()) {
      failed_destination_ = static_cast<int>(index[failed]);
    }
    status_ = around.StatusOf(node, done.status, done.wire_failed);
  }
  // Gives what the nodes wrote, and how it failed, to the event that goes to the group.
  template <typename Done>
  void MoveTo(Done* done) {
    done->status = status_;
    done->bytes_written = std::move(bytes_written_);
    done->failed_destination = failed_destination_;
  }
  size_t destinations() const { return bytes_written_.size(); }

 private:
  std::set<NodeId> running_;
  absl::Status status_;
  int failed_destination_ = -1;  // the group's number
  std::vector<int64_t> bytes_written_;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_ON_NODES_H_
