// The read-back of an update's destinations by their nodes: the nodes' results become one (P1).
//
// If the program runs again because a node was lost, all is read back again.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_READBACK_ON_NODES_H_
#define REFITD_DAEMON_GROUP_READBACK_ON_NODES_H_

#include <optional>
#include <set>
#include <vector>

#include "daemon/group/on_nodes.h"

namespace refitd::coordinator {

class ReadbackOnNodes {
 public:
  explicit ReadbackOnNodes(const UpdateRecord& update) : update_(update) {}

  // The group asks for it. The nodes are sent the request (SendIfAsked) once they were sent all
  // that they have to write.
  void Ask(const VerifyUpdate& request) { request_ = request; }
  void AskAgain() { sent_ = false; }
  void SendIfAsked(const Around& around);
  // `writes`: whether the node still writes to its destinations. False: nobody waited for it.
  bool Ended(NodeId node, const VerifyDone& done, bool writes, const Around& around);
  // No answer of the node comes any more; its destinations were evicted.
  void LoseNode(NodeId node) { running_.erase(node); }
  bool ended() const { return running_.empty(); }
  const std::set<NodeId>& running() const { return running_; }
  // Answers the group, if it waits for the answer and all nodes have ended.
  void CompleteIfEnded(const Around& around);

  void CheckInvariants() const;

 private:
  const UpdateRecord& update_;
  std::optional<VerifyUpdate> request_;
  bool sent_ = false;  // to the nodes
  bool owed_ = false;  // the group waits for the answer
  std::set<NodeId> running_;
  absl::Status status_;
  std::vector<uint32_t> failed_;   // destinations
  std::vector<uint64_t> content_;  // VerifyDone::content
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_READBACK_ON_NODES_H_
