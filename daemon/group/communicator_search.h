// Searches for the daemons with which a communicator does not come up, if no failure names a daemon
// (NCCL names none).
//
// An update takes or leaves whole instances, so instances are tried. An instance is known by the
// daemons of its ranks, without those that every update needs; instances on the same daemons are
// one. A daemon that was in a communicator that came up since the search began is *proven*, and no
// longer counts as one of an instance's. Every instance with other daemons is in one of the lists
// that wait to be tried, one after another:
//   - An update tries the first list beside the proven daemons, and leaves the others out.
//   - The communicator comes up: the daemons of the list are proven. If it was half of a list with
//     which the communicator had failed, the other half is at fault.
//   - The communicator fails: the list is halved. If some daemons are proven, the update goes on
//     with these alone, and the next update tries the first half, but before that all instances
//     that are in no half. Else the update goes on with the first half. The first half has every
//     instance that its daemons suffice for, and never all of them.
//   - One instance alone at fault, and a communicator that comes up without it: its daemons are
//     broken. If it has several, and some are those of instances that are not tried yet, it waits
//     for these, which may prove its other daemons; until then no list is tried that has all its
//     daemons. The next update tries all instances that are left in the lists together.
//   - One instance alone failed, and no daemon is proven: the daemons that every update needs may
//     be at fault, so the instance is set aside, and tried again after the others.
// So one broken daemon of n instances is found by about log2(n) tries, and any number of them are
// found; a daemon is called broken only after a communicator failed with it and another came up
// without it. An update that begins with a list begins with an instance that it can bring the
// version to.
//
// Invariants (checked): no list is empty, no instance in a list is without daemons or has a proven
// daemon.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_
#define REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_

#include <deque>
#include <functional>
#include <set>
#include <utility>

#include "transport/base/ids.h"

namespace refitd {

class CommunicatorSearch {
 public:
  using Instance = std::set<NodeId>;
  using Instances = std::set<Instance>;

  bool active() const { return !lists_.empty(); }

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
  struct List {
    Instances instances;
    bool at_fault = false;  // a communicator failed with the list and the daemons proven then
    bool half = false;      // if the list is proven, the next list is at fault
    bool of_fault = false;  // part of a list that was at fault
    // Tried after the others: instances that failed while no daemon was proven, or one instance at
    // fault that waits until others are tried.
    bool aside = false;
    bool cornered() const { return at_fault && instances.size() == 1; }
  };

  Instances Unproven(const Instances& instances) const;
  std::set<NodeId> Daemons() const;  // of all lists
  // Whether the instance needs all daemons of one that failed alone.
  bool Doubted(const Instance& instance) const;
  // Takes these instances off all lists.
  void Drop(const std::function<bool(const Instance&)>& gone);
  void ForgetIf(const std::function<bool(const Instance&)>& gone);
  // Removes empty lists. If there are none left, the search is over.
  void Tidy();
  void RemoveEmpty();
  bool MustWait(const Instance& at_fault) const;
  std::set<NodeId> Broken() const;
  void LetWait();
  // Whether the daemons are all that an instance alone at fault needs.
  bool HasCornered(const std::set<NodeId>& daemons) const;
  void SplitFirst();
  std::pair<Instances, Instances> Halves(const Instances& whole) const;
  void HalveFirst();
  void SetFirstAside();
  void JoinLists(bool halves);
  void Check() const;

  std::deque<List> lists_;
  std::set<NodeId> proven_;
  // Instances that failed alone while no daemon was proven: the others are tried before these.
  Instances doubted_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_
