// Operators' calls, which create and delete groups, look at the daemon's state, and watch updates.
//
// Thread-safe; called without the mutex.
#ifndef REFITD_DAEMON_NODE_OPERATORS_H_
#define REFITD_DAEMON_NODE_OPERATORS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/peer_server.h"
#include "daemon/node/state.h"
#include "transport/device_wire.h"

namespace refitd {

// The state of a group that operators see.
struct GroupDetails {
  MachineView machine;
  std::optional<WireStats> moved;  // by the current communicator, if it is open here
};

// The state of a member that operators see.
struct MemberDetails {
  std::string group;
  MemberView view;
  // The fields from here on are known only of this daemon's members.
  std::optional<uid_t> uid;
  std::string identity;
  std::string client;
  std::string device;
  int64_t regions = 0;
  int64_t region_bytes = 0;
};

// The arenas of an engine rank that operators see.
struct ArenaDetails {
  std::string group;
  std::string instance;
  int rank = 0;
  std::string device;
  int64_t front_bytes = 0;
  int64_t back_bytes = 0;
  bool copies = false;  // a flip copies from host memory to the device
  struct Kept {
    Version version;
    Duration left{};
  };
  std::optional<Kept> kept;  // nullopt: the rank is attached
};

// The state of the daemon that operators see, except values that never change.
struct DaemonDetails {
  Duration uptime{};
  bool serving = false;
  std::vector<std::string> listeners;
  WireStats moved;  // by all communicators
  int64_t members = 0;
  int64_t regions = 0;
  int64_t region_bytes = 0;
  int64_t pool_bytes = 0;
  std::vector<GroupDetails> groups;
  std::vector<ArenaDetails> arenas;
  // Communicators over GPU memory: those of this daemon's GPUs, and those of the wire.
  std::vector<CommunicatorStatus> communicators;
  struct WireCommunicator {
    std::string group;                 // empty: the communicator is being closed
    std::optional<CommunicatorId> id;  // the group's number of the communicator
    DeviceCommunicatorStatus status;
  };
  std::vector<WireCommunicator> wire_communicators;
  int64_t abandoned_communicators = 0;
};

class Operators {
 public:
  Operators(DaemonState* state, PeerServer* peer_server)
      : state_(*state), peer_server_(*peer_server) {}

  struct Created {
    uint64_t incarnation = 0;
    bool created = false;  // or replaced
  };
  // `replace`: an existing group begins a new incarnation, once for each request id. `identity`:
  // who asks (IdentityOf).
  absl::StatusOr<Created> CreateGroup(const std::string& name, const GroupSpec& spec, bool replace,
                                      const std::string& request_id, const std::string& identity);
  absl::Status DeleteGroup(const std::string& name);
  // Hands the event to the group, whose answer is the reply. The event names the same call.
  // NOT_FOUND: no such group.
  void Ask(CallId call, const std::string& group, GroupEvent event, ReplyFunction reply);

  struct DrainedGroups {
    std::vector<std::string> drained;
    std::vector<std::string> running;
  };
  // Gives up this daemon's part in the group (empty: in all groups whose coordinator is a name), so
  // that members attach anew, at the daemon to which the name leads then. Groups in which an update
  // runs are left to a later call.
  absl::StatusOr<DrainedGroups> Drain(const std::string& group);

  // A group whose members call its coordinator by a name.
  struct NamedCoordinator {
    std::string group;
    std::string name;    // HOST:PORT
    std::string linked;  // where the link of this daemon leads; empty: the group lives here
  };
  std::vector<NamedCoordinator> NamedCoordinators();
  std::vector<std::string> Listeners();

  // ---- for the services' authorizer ----
  // The identity that owns the group; empty: nobody does, or there is no such group.
  std::string OwnerOf(const std::string& group);
  // Whether a member of that identity has a lease.
  bool HasLease(const std::string& identity);

  DaemonDetails Describe();
  std::vector<GroupDetails> Groups();
  absl::StatusOr<GroupDetails> Group(const std::string& name);
  // The members of the group, or of all groups if `group` is empty.
  absl::StatusOr<std::vector<MemberDetails>> MembersOf(const std::string& group);
  struct Statistics {
    UpdateStatistics statistics;
    std::optional<UpdateView> update;
  };
  absl::StatusOr<Statistics> StatisticsOf(const std::string& group);
  struct Past {
    uint64_t incarnation = 0;  // the group's
    PastUpdate update;
  };
  // `incarnation` 0: the current incarnation.
  absl::StatusOr<Past> PastOf(const std::string& group, uint64_t incarnation, Version version);

  // Watches until StopWatching. The daemon itself ends the sink only with until_idle.
  absl::StatusOr<uint64_t> Watch(WatchFilter filter, std::shared_ptr<UpdateSink> sink);
  void StopWatching(uint64_t watch);

  // NOT_FOUND: the instance, or the group, is not known here.
  absl::StatusOr<Readiness> ReadinessOf(const std::string& group, const std::string& instance);
  // Watches an instance, which need not exist, until StopWatchingInstance.
  absl::StatusOr<uint64_t> WatchInstance(const std::string& identity, const std::string& group,
                                         const std::string& instance,
                                         std::shared_ptr<ReadinessSink> sink);
  void StopWatchingInstance(uint64_t watch);

 private:
  // False: an update runs.
  bool DrainOne(const std::string& name, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  absl::StatusOr<uint64_t> Replace(GroupRecord* group, const std::string& request_id,
                                   const std::string& identity, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  std::vector<ArenaDetails> AllArenas() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  void DescribeWireCommunicators(DaemonDetails* details) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  GroupDetails DetailsOf(const GroupRecord& group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  std::vector<GroupDetails> AllGroups() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  DaemonState& state_;
  PeerServer& peer_server_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_OPERATORS_H_
