// The readiness of instances as this daemon tells it, and its watchers.
//
// The machine of a group knows the readiness of all instances while this daemon coordinates the
// group, or is joined to its coordinator. When the coordinator is lost, this class keeps the
// readiness that was known last: no version is committed without the coordinator, so the loss alone
// makes no instance older. The kept readiness counts for Options::keep at most, since the
// coordinator may live behind a broken link and commit versions with other daemons. An instance
// that had ranks on this daemon must also show that it lives: one of its ranks waits here to attach
// again, or came within kReattachLimit. A rank that comes with other weights than were known ends
// what is kept of its instance (P2).
//
// Invariants
//  1. A watcher is told a state when it comes, and then each change once.
//  2. Readiness is kept only for groups whose coordinator is lost and which the daemon has not
//     joined again.
//  3. At most kMaxWatchers watch, and at most kMaxKept groups are kept (P10).
//
// The class is part of the daemon's state and is used under its mutex (turn.h).
#ifndef REFITD_DAEMON_NODE_READINESS_H_
#define REFITD_DAEMON_NODE_READINESS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/group/follower.h"
#include "daemon/node/groups.h"
#include "daemon/node/sinks.h"
#include "daemon/node/waiters.h"
#include "transport/base/ids.h"

namespace refitd {

// A member that lost its coordinator comes again within its longest pause and the time of one try
// (client/reattach.h), or waits.
inline constexpr Duration kReattachLimit = std::chrono::seconds(15);

class InstanceReadiness {
 public:
  static constexpr size_t kMaxWatchers = 1024;
  static constexpr size_t kMaxKept = 256;
  // How often watchers of groups without a coordinator are looked after.
  static constexpr Duration kLookInterval = std::chrono::seconds(1);

  // `groups` and `waiters` must outlive this object. `keep`: how long the readiness that was known
  // last counts without the coordinator.
  InstanceReadiness(Duration keep, const Groups* groups, const Waiters* waiters)
      : keep_(keep), groups_(*groups), waiters_(*waiters) {}

  // nullopt: the instance is not known.
  std::optional<Readiness> Of(const std::string& group, const std::string& instance,
                              TimePoint now) const;

  // Returns the watcher's id, and tells the watcher at once whether the instance is ready.
  // `identity`: who watches. RESOURCE_EXHAUSTED: the places are taken (CheckPlace).
  absl::StatusOr<uint64_t> Watch(std::string identity, std::string group, std::string instance,
                                 std::shared_ptr<ReadinessSink> sink, TimePoint now);
  void StopWatching(uint64_t watcher) { watchers_.erase(watcher); }
  void EndAll(const absl::Status& status);

  // Called when something in the group changed, and when its record is gone.
  void Changed(const std::string& group, TimePoint now);
  // Called when a member attaches to the group, before it waits or enters.
  void Arrived(const std::string& group, const EngineIdentity& engine, TimePoint now);
  // Called when time has passed.
  void Look(TimePoint now);
  // The time at which Look is due; nullopt: nothing waits.
  std::optional<TimePoint> NextDue() const;

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  struct Kept {
    ReadinessBook book;
    int64_t max_lag = 0;
    uint64_t incarnation = 0;
    TimePoint until;
    std::map<std::string, TimePoint> here;  // instances of this daemon: when a rank was seen last
  };
  struct Watcher {
    std::string identity;
    std::string group;
    std::string instance;
    std::shared_ptr<ReadinessSink> sink;
    std::optional<InstanceHealth> told;
  };

  void Keep(const std::string& group, const Follower& follower, TimePoint now);
  void Notify(Watcher* watcher, TimePoint now);

  const Duration keep_;
  const Groups& groups_;
  const Waiters& waiters_;
  std::map<std::string, Kept> kept_;  // by group
  std::map<uint64_t, Watcher> watchers_;
  uint64_t next_ = 1;
  TimePoint looked_{};
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_READINESS_H_
