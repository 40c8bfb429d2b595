// Watchers of updates: operators' tools that are sent each change of an update's state, and its
// progress at the interval that they asked for.
//
// Invariants
//  1. A watcher is sent each change once: an update's mark is not sent again, except for the
//     progress of a running update.
//  2. A watcher is sent only changes that happen after it came, and updates that run when it comes.
//  3. One view of an update serves all watchers that are told at the same time, and no view is made
//     if no watcher is told: views of large groups are costly.
//
// The class is part of the daemon's state and is used under its mutex (turn.h).
#ifndef REFITD_DAEMON_NODE_WATCHERS_H_
#define REFITD_DAEMON_NODE_WATCHERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/machine.h"
#include "daemon/node/sinks.h"
#include "transport/base/ids.h"

namespace refitd {

class Watchers {
 public:
  static constexpr size_t kMaxWatchers = 64;

  // The machines of the daemon's groups, sorted by name.
  using Machines = std::vector<const GroupMachine*>;

  struct Wish {
    std::string group;    // empty: all
    Duration interval{};  // of progress
    // The sink ends with OK once no update of a watched group runs.
    bool until_idle = false;
    std::string identity{};  // who watches
  };

  // Returns the watcher's id and tells it at once of updates that run. RESOURCE_EXHAUSTED: the
  // places are taken (CheckPlace).
  absl::StatusOr<uint64_t> Add(Wish wish, std::shared_ptr<UpdateSink> sink, const Machines& all,
                               TimePoint now);
  void Remove(uint64_t watcher) { watchers_.erase(watcher); }
  // Called when the group was deleted: a later group of that name is new to every watcher.
  void Forget(const std::string& group);
  void EndAll(const absl::Status& status);

  bool empty() const { return watchers_.empty(); }
  // Called when something in the group changed: tells the group's watchers.
  void Changed(const GroupMachine& group, const Machines& all, TimePoint now);
  // Tells the progress of running updates to watchers whose interval has passed.
  void Progress(const Machines& all, TimePoint now);
  // The time at which the next interval has passed; nullopt: there is no watcher.
  std::optional<TimePoint> NextDue() const;
  // The number of views that were made so far, which is the cost of watching.
  int64_t views() const { return views_; }

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  struct Watcher {
    Wish wish;
    std::shared_ptr<UpdateSink> sink;
    TimePoint due;
    std::map<std::string, UpdateMark> told;  // by group
    bool Watches(const GroupMachine& group) const {
      return wish.group.empty() || wish.group == group.name();
    }
  };

  // `view` is the view of the group's update, which is made for the first watcher that is told. If
  // `due`, progress is told too.
  void Notify(Watcher* watcher, const GroupMachine& group, std::optional<UpdateView>* view,
              bool due, TimePoint now);
  // Ends a watcher if no update that it watches runs any more. False: the watcher goes on.
  static bool EndIfIdle(const Watcher& watcher, const Machines& all);

  std::map<uint64_t, Watcher> watchers_;
  uint64_t next_ = 1;
  int64_t views_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_WATCHERS_H_
