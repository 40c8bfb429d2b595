// Searches for the daemons with which a communicator does not come up, if no failure names a daemon
// (NCCL names none).
//
// Every daemon was in a communicator that came up since the search began (*proven*), or is in one
// of the lists that wait to be tried, one after another:
//   - An update tries the first list beside the proven daemons, and leaves the others out.
//   - The communicator comes up: the list is proven. If it was half of a list with which the
//   communicator had
//     failed, the other half is at fault.
//   - The communicator fails: the list is halved. If some daemons are proven, the update goes on
//   with
//     these alone, and the next update tries the first half, but before that all daemons that are
//     in no half. Else the update goes on with the first half.
//   - One daemon alone at fault, and a communicator that comes up without it: that daemon is
//   broken. The
//     next update tries all that are left in the lists together.
// So one broken daemon among n is found by about log2(n) tries, and any number of them are found; a
// daemon is called broken only after a communicator failed with it and another came up without it.
//
// Invariants (checked): no list is empty, no daemon is in two lists, none in a list is proven.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_
#define REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_

#include <deque>
#include <functional>
#include <set>

#include "transport/base/ids.h"

namespace refitd {

class CommunicatorSearch {
 public:
  bool active() const { return !lists_.empty(); }

  // An update begins that these daemons take part in. Other daemons are forgotten and not tried.
  void Restrict(const std::set<NodeId>& daemons);
  // The daemons that the update leaves out from its begin.
  std::set<NodeId> LeftOut() const;

  // A communicator with these daemons, all of which an update can do without, failed and named
  // nobody. Begins a search, if none is active. Returns the daemons that the next communicator of
  // the same update has to do without. `daemons` is not empty.
  std::set<NodeId> Failed(const std::set<NodeId>& daemons);
  // A communicator of these daemons, and of no others, came up. Returns the daemons that are
  // broken, which the search then forgets.
  std::set<NodeId> CameUp(const std::set<NodeId>& daemons);
  // The daemon is gone, or known to be broken.
  void Forget(NodeId daemon);

 private:
  struct List {
    std::set<NodeId> daemons;
    bool at_fault = false;  // a communicator failed with the list and the daemons proven then
    bool half = false;      // if the list is proven, the next list is at fault
    bool of_fault = false;  // part of a list that was at fault
    bool aside = false;     // one daemon that failed while none was proven
  };

  void ForgetIf(const std::function<bool(NodeId)>& gone);
  // Removes empty lists. If there are none left, the search is over.
  void Tidy();
  void HalveFirst();
  void JoinLists(bool halves);
  void Check() const;

  std::deque<List> lists_;
  std::set<NodeId> proven_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COMMUNICATOR_SEARCH_H_
