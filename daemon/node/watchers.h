// Watchers of updates, which get each change of an update's state, and its progress at the interval
// that they asked for; and watchers of the readiness of instances.
//
// The machine of a group knows the readiness of all instances while this daemon coordinates the
// group, or is joined to its coordinator. When the coordinator is lost, this class keeps the
// last known readiness: no version is committed without the coordinator, so the loss alone
// makes no instance older. The kept readiness counts for `keep` at most, since the coordinator may
// live behind a broken link and commit versions with other daemons. An instance that had ranks on
// this daemon must also show that it lives: one of its ranks waits here to attach again, or came
// within kReattachLimit. A rank that comes with other weights than were known ends the kept
// readiness of its instance (P2).
//
// Invariants
//  1. A watcher is sent each change once: an update's mark is not sent again, except for the
//     progress of a running update.
//  2. A watcher of updates is sent only changes that happen after it came, and updates that run
//     when it comes; a watcher of an instance gets its state when it comes.
//  3. One view of an update serves all watchers that are sent it at the same time, and no view is
//     made for nobody: views of large groups are costly.
//  4. Readiness is kept only for groups whose coordinator is lost and which the daemon has not
//     joined again.
//  5. At most kMaxWatchers watch updates and kMaxInstanceWatchers watch instances, and at most
//     kMaxKept groups are kept (P10).
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h).
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
#include "daemon/group/follower.h"
#include "daemon/group/machine.h"
#include "daemon/node/groups.h"
#include "daemon/node/pending_attaches.h"
#include "daemon/node/sinks.h"
#include "transport/base/ids.h"

namespace refitd {

// A member that lost its coordinator comes again within its longest pause and the time of one try
// (client/reattach.h), or waits.
inline constexpr Duration kReattachLimit = std::chrono::seconds(15);

// The updates that a watcher wants, and how often.
struct WatchFilter {
  std::string group;    // empty: all
  Duration interval{};  // of progress
  // The sink ends with OK once no update of a watched group runs.
  bool until_idle = false;
  std::string identity{};  // who watches
};

class Watchers {
 public:
  static constexpr size_t kMaxWatchers = 64;
  static constexpr size_t kMaxInstanceWatchers = 1024;
  static constexpr size_t kMaxKept = 256;
  // How often the kept readiness of groups without a coordinator is looked at.
  static constexpr Duration kLookInterval = std::chrono::seconds(1);

  // `groups` and `pending` must outlive this object. `keep`: how long the last known readiness
  // counts after the coordinator was lost.
  Watchers(Duration keep, const Groups* groups, const PendingAttaches* pending)
      : keep_(keep), groups_(*groups), pending_(*pending) {}

  // ---- of updates ----
  // The machines of the daemon's groups, sorted by name.
  using Machines = std::vector<const GroupMachine*>;

  // Returns the watcher's id and sends it at once the updates that run. RESOURCE_EXHAUSTED: the
  // places are taken (CheckPlace).
  absl::StatusOr<uint64_t> Add(WatchFilter filter, std::shared_ptr<UpdateSink> sink,
                               const Machines& all, TimePoint now);
  void Remove(uint64_t watcher) { updates_.erase(watcher); }
  // Call it when the group was deleted: a later group of that name is new to every watcher.
  void Forget(const std::string& group);
  void EndAll(const absl::Status& status);

  bool empty() const { return updates_.empty(); }
  // Sends a change in the group to the group's watchers.
  void Changed(const GroupMachine& group, const Machines& all, TimePoint now);
  // Sends the progress of running updates to watchers whose interval has passed.
  void Progress(const Machines& all, TimePoint now);
  // The time at which the next interval has passed; nullopt: there is no watcher.
  std::optional<TimePoint> NextProgress() const;
  // The number of views that were made so far, which is the cost of watching.
  int64_t views() const { return views_; }

  // ---- of instances ----
  // nullopt: the instance is not known.
  std::optional<Readiness> ReadinessOf(const std::string& group, const std::string& instance,
                                       TimePoint now) const;
  // Returns the watcher's id, and sends at once whether the instance is ready. `identity`: who
  // watches. RESOURCE_EXHAUSTED: the places are taken (CheckPlace).
  absl::StatusOr<uint64_t> AddInstance(std::string identity, std::string group,
                                       std::string instance, std::shared_ptr<ReadinessSink> sink,
                                       TimePoint now);
  void RemoveInstance(uint64_t watcher) { instances_.erase(watcher); }
  void EndInstances(const absl::Status& status);

  // Reports to the watchers of the group's instances whether these are ready. If the coordinator is
  // lost, keeps the last known readiness first. Call it when anything in the group changed, and
  // when its record is gone.
  void ReadinessChanged(const std::string& group, TimePoint now);
  // Called when a member attaches to the group, before it waits or enters.
  void Arrived(const std::string& group, const EngineIdentity& engine, TimePoint now);
  // Called when time has passed.
  void Look(TimePoint now);
  // The time at which Look is due; nullopt: nothing waits.
  std::optional<TimePoint> NextLook() const;

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  struct Watcher {
    WatchFilter filter;
    std::shared_ptr<UpdateSink> sink;
    TimePoint due;
    std::map<std::string, UpdateMark> sent;  // by group
    bool Watches(const GroupMachine& group) const {
      return filter.group.empty() || filter.group == group.name();
    }
  };
  struct InstanceWatcher {
    std::string identity;
    std::string group;
    std::string instance;
    std::shared_ptr<ReadinessSink> sink;
    std::optional<InstanceHealth> sent;
  };
  struct Kept {
    ReadinessBook book;
    int64_t max_lag = 0;
    uint64_t incarnation = 0;
    TimePoint until;
    std::map<std::string, TimePoint> here;  // instances of this daemon: when a rank was seen last
  };

  // `view` is the view of the group's update, which is made for the first watcher that is sent it.
  // If `due`, progress is sent too.
  void Notify(Watcher* watcher, const GroupMachine& group, std::optional<UpdateView>* view,
              bool due, TimePoint now);
  // Ends a watcher if no update that it watches runs any more. False: the watcher goes on.
  static bool EndIfIdle(const Watcher& watcher, const Machines& all);
  void Notify(InstanceWatcher* watcher, TimePoint now);
  void Keep(const std::string& group, const Follower& follower, TimePoint now);

  const Duration keep_;
  const Groups& groups_;
  const PendingAttaches& pending_;
  std::map<uint64_t, Watcher> updates_;
  std::map<uint64_t, InstanceWatcher> instances_;
  uint64_t next_ = 1;
  int64_t views_ = 0;
  std::map<std::string, Kept> kept_;  // by group
  TimePoint looked_{};
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_WATCHERS_H_
