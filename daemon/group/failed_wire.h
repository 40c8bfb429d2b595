// The failure of a collective, while it is open which node is to blame. In a chain, all nodes
// behind the one that stopped time out at about the same moment, and their reports come in any
// order: so the coordinator waits for more of them for a while.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_FAILED_WIRE_H_
#define REFITD_DAEMON_GROUP_FAILED_WIRE_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/joined_nodes.h"

namespace refitd::coordinator {

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

#endif  // REFITD_DAEMON_GROUP_FAILED_WIRE_H_
