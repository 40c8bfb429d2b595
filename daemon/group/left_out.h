// The nodes that updates leave out because of how they did before: those that may be why no
// communicator comes up (CommunicatorSearch), and those that hold the others back (SlowNodes).
//
// An instance that is left out was sent Prepare, and resumes with the version that it holds. If no
// instance would be left, the update takes all of them.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_LEFT_OUT_H_
#define REFITD_DAEMON_GROUP_LEFT_OUT_H_

#include <set>
#include <string>

#include "daemon/group/communicator_search.h"
#include "daemon/group/slow_nodes.h"
#include "daemon/group/update_on_nodes.h"

namespace refitd::coordinator {

// Those of the nodes that the update can do without.
template <typename Nodes>
std::set<NodeId> Dispensable(const Nodes& nodes, const Around& around) {
  std::set<NodeId> dispensable;
  for (const NodeId node : nodes) {
    if (!around.needed(node)) dispensable.insert(node);
  }
  return dispensable;
}

// By instance that takes part in the update that is assembled (`all`: in the next one), the nodes
// of its ranks that an update can do without. Such nodes alone keep an instance out of an update.
CommunicatorSearch::Instances DispensableOfInstances(const GroupView& view, const Around& around,
                                                     bool all = false);
// Whether any of the instances has no rank on these nodes.
bool AnyWithout(const std::set<NodeId>& out, const CommunicatorSearch::Instances& instances);

class LeftOut {
 public:
  explicit LeftOut(Duration slow_limit) : slow_limit_(slow_limit), slow_(slow_limit) {}

  bool searching() const { return search_.active(); }
  bool any_slow() const { return !slow_.slow().empty(); }
  // Why updates leave the node to catch-ups; empty: they do not.
  std::string WhySlow(NodeId node) const;
  // Forgets a node that is gone.
  void Forget(NodeId node);

  // An update of the trainers begins: leaves out the nodes that the search does not try, or those
  // that are slow.
  void LeaveOutUntried(const GroupView& view, UpdateOnNodes* update, const Around& around);
  void LeaveOutSlow(const GroupView& view, UpdateOnNodes* update, const Around& around);
  // The communicator failed for that reason, and no node is named: leaves out some of the
  // candidates, for a try.
  void SearchOn(const std::set<NodeId>& candidates, const WhyDown& why, const GroupView& view,
                UpdateOnNodes* update, const Around& around);
  // The communicator of an update of the trainers is up. If the search has found by now which nodes
  // are broken, keeps them out until they attach anew.
  void CameUp(const UpdateOnNodes& update, const Around& around);
  void KeepOut(const std::set<NodeId>& suspects, const WhyDown& why, const UpdateOnNodes& update,
               const Around& around);
  // A program has ended. Every run, even a catch-up that gave way to an update, shows whether a
  // slow node is usual again. A catch-up makes no node slow, since there are no other receivers to
  // compare its late instances with.
  void Judge(const ProgramEnded& ended, const UpdateOnNodes& update, const Around& around);

 private:
  void LeaveOutForTry(const std::set<NodeId>& out, UpdateOnNodes* update, const Around& around);

  const Duration slow_limit_;
  CommunicatorSearch search_;
  WhyDown search_failure_;  // the last failure that named nobody
  SlowNodes slow_;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_LEFT_OUT_H_
