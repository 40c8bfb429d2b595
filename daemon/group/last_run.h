// The bytes that each node moved in the last refit that succeeded on several nodes; status shows
// them.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_LAST_RUN_H_
#define REFITD_DAEMON_GROUP_LAST_RUN_H_

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/group/joined_nodes.h"

namespace refitd::coordinator {

class LastRun {
 public:
  // The program ran. Reads the plan's matrix only once for each program, since it has a number for
  // each pair of nodes. `took`: of the nodes that ended their share.
  void Set(const ProgramUse& use, const std::map<NodeId, Duration>& took);
  void Show(NodeId node, const JoinedNodes& nodes, NodeView* view) const;

 private:
  struct Share {
    std::vector<std::pair<NodeId, int64_t>> sends;  // the most bytes first, at most kMaxShownSends
    int64_t sent = 0;
    int64_t forwarded = 0;
    int64_t received = 0;
    Duration took{};
  };
  void ReadPlan(const ProgramUse& use);

  std::optional<ProgramId> program_;
  std::map<NodeId, Share> shares_;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_LAST_RUN_H_
