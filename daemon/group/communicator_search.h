// Searches for the daemons with which a communicator does not come up, if no failure names a daemon
// (NCCL names none).
//
// An update takes or leaves whole instances, so instances are tried. An instance is known by the
// daemons of its ranks, without those that every update needs; instances on the same daemons are
// one. A daemon that was in a communicator that came up since the search began is *proven*, and no
// longer counts as one of an instance's. Of every communicator that failed, the search keeps the
// daemons that are not proven: one of them is broken. An instance that has all daemons of such a
// set would fail.
//   - An update tries, beside the proven daemons, all instances that are in no failed set; else all
//     that together have no whole failed set; else those of about half of the smallest failed set.
//   - If its communicator fails and some daemons are proven, the update goes on with these alone.
//     Else it goes on with half of what it tried.
//   - The daemons of a failed set are broken once a communicator came up and every instance with
//     one of them would fail: no instance could prove one of them any more.
//   - If every instance would fail and no daemon is proven, the daemons that every update needs may
//     be at fault, so all instances are tried again.
// So one broken daemon of n instances is found by about log2(n) tries, and any number of them are
// found; a daemon is called broken only after a communicator failed with it and another came up
// without it.
//
// Invariants (checked): no instance and no failed set is empty or has a proven daemon; no failed
// set contains another.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_
#define REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_

#include <set>
#include <vector>

#include "transport/base/ids.h"

namespace refitd {

class CommunicatorSearch {
 public:
  using Instance = std::set<NodeId>;
  using Instances = std::set<Instance>;

  bool active() const { return !instances_.empty(); }

  // An update begins that these instances take part in. Other instances are forgotten and not
  // tried.
  void Restrict(const Instances& instances);
  // The daemons that the update leaves out from its begin.
  std::set<NodeId> LeftOut() const;
  // No instance could do without the daemons left out: the search is given up.
  void GiveUp();

  // A communicator with the daemons of these instances failed and named nobody. Begins a search, if
  // none is active. Returns the daemons that the next communicator of the same update has to do
  // without. Neither `instances` nor any of them is empty.
  std::set<NodeId> Failed(const Instances& instances);
  // A communicator of these daemons, and of no others, came up. Returns the daemons that are
  // broken, which the search then forgets.
  std::set<NodeId> CameUp(const std::set<NodeId>& daemons);
  // The daemon is gone, or known to be broken.
  void Forget(NodeId daemon);

 private:
  Instances Unproven(const Instances& instances) const;
  bool WouldFail(const std::set<NodeId>& daemons) const;  // some failed set is among them
  // Those of the instances that the next communicator tries.
  Instances Tried(const Instances& instances) const;
  Instances Half(const Instances& instances, const std::set<NodeId>& failed) const;
  // The daemons of all instances but these.
  std::set<NodeId> Without(const Instances& tried) const;
  // If no instance is left, the search is over.
  void Tidy();

  Instances instances_;                   // not proven
  std::vector<std::set<NodeId>> failed_;  // each has a broken daemon
  std::set<NodeId> proven_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_
