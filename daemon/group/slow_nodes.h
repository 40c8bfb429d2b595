// Finds the nodes of a group that receive so slowly that they hold the others back.
//
// In a compiled refit every node moves its rounds in step with the others, and an update commits
// when the last of them has everything. So a node whose link takes four times as long makes the
// update take four times as long. Such a node is *slow*: the coordinator leaves it out of updates,
// and a catch-up brings it the version after the others have it.
//
// A node is judged by what nodes tell: what they sent to each other node, and how long the network
// between the two took for it (PeerWireUse). That time has no waits in it, neither for bytes to
// send nor for room at the receiver, so it is the same wherever a node stands in a chain. The rate
// of a node is that of the fastest link into it: if only one of its senders is slow, the others
// show that the node is not. The node is slow if
//   - its rate is at most half of the usual rate, the median of all other receivers, and
//   - it held the others back for longer than the limit: by the time of its slowest link, less what
//     that link would have taken at the usual rate, and
//   - not all that it receives comes from slow nodes. A node that is slow both ways makes the node
//     after it in a chain look slow as well: the one with more slow links is judged first.
// A slow node is usual again when a run, which may be a catch-up, shows more than half of the rate
// that was usual when it became slow.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_SLOW_NODES_H_
#define REFITD_DAEMON_GROUP_SLOW_NODES_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "transport/base/ids.h"

namespace refitd {

class SlowNodes {
 public:
  // `limit` 0: no node is ever slow.
  explicit SlowNodes(Duration limit) : limit_(limit) {}

  // The link from `from` to `to`, in one run of a program.
  struct Use {
    NodeId from;
    NodeId to;
    int64_t bytes = 0;
    Duration busy{};
  };
  struct Slow {
    Duration held{};        // how long it held the others back
    double rate = 0;        // bytes a second
    double usual_rate = 0;  // of the others, at that time
  };

  // Judges a run that moved all its bytes, of an update of trainers. Nodes of `candidates` may
  // become slow. Returns those that did.
  std::set<NodeId> Judge(const std::vector<Use>& uses, const std::set<NodeId>& candidates);
  // Judges whether slow nodes are usual again, by any run. Returns those that are.
  std::set<NodeId> Review(const std::vector<Use>& uses);
  // The node is gone.
  void Forget(NodeId node) { slow_.erase(node); }

  const std::map<NodeId, Slow>& slow() const { return slow_; }
  // "it received 10.0 MB/s, the others 40.0 MB/s"
  static std::string Describe(const Slow& slow);

 private:
  const Duration limit_;
  std::map<NodeId, Slow> slow_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_SLOW_NODES_H_
