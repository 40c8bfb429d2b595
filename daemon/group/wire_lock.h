// Decides which group's collectives a daemon runs: one group at a time, first come, first served.
//
// A coordinator takes the locks of an update's daemons in daemon-id order, so that two groups never
// wait for each other. A holder that gets WireWanted issues one part, unless it has issued one
// since it asked, then gives all its locks back once none of its collectives runs, and asks again.
// Guarded by the daemon's mutex. Pure.
#ifndef REFITD_DAEMON_GROUP_WIRE_LOCK_H_
#define REFITD_DAEMON_GROUP_WIRE_LOCK_H_

#include <deque>
#include <string>
#include <vector>

#include "daemon/group/machine.h"

namespace refitd {

class WireLock {
 public:
  // Events that the caller must hand to groups: pairs of group name and event, in order.
  using Events = std::vector<std::pair<std::string, PeerEvent>>;

  // Does nothing if the group holds the lock or waits for it already.
  void Acquire(const std::string& group, Events* events);
  // Gives the lock back, or stops waiting for it.
  void Release(const std::string& group, Events* events);

  const std::string& holder() const { return holder_; }  // empty: free
  size_t waiting() const { return waiting_.size(); }

 private:
  std::string holder_;
  std::deque<std::string> waiting_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_WIRE_LOCK_H_
