// The state that the one mutex of the daemon guards, and the objects that the classes of this
// folder share beside that state.
//
// The mutex serialises all state machines. Nothing under it blocks: transports have their own
// threads; plans, and the opening and closing of device memory, have theirs; streams have queues.
// Replies run, and events are written, after the mutex was released (state_lock.h). Log lines are
// queued under it, so that they have the order of their events.
#ifndef REFITD_DAEMON_NODE_STATE_H_
#define REFITD_DAEMON_NODE_STATE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/execute/job_threads.h"
#include "daemon/group/group.h"
#include "daemon/group/machine.h"
#include "daemon/group/wire_lock.h"
#include "daemon/node/calls.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/group_spec.h"
#include "daemon/node/groups.h"
#include "daemon/node/kept_ranks.h"
#include "daemon/node/members.h"
#include "daemon/node/options.h"
#include "daemon/node/peer_sessions.h"
#include "daemon/node/pending_attaches.h"
#include "daemon/node/staging_pools.h"
#include "daemon/node/state_lock.h"
#include "daemon/node/watchers.h"
#include "daemon/policy/byte_ledger.h"
#include "daemon/sockets/process_watch.h"
#include "transport/base/mutex.h"

namespace refitd {

struct DaemonState {
  // `watch` must outlive the state.
  DaemonState(DaemonOptions given, DataPlane::Options moves, ProcessWatch* watch,
              StateMutex::Handlers handlers);

  static TimePoint Now() { return std::chrono::steady_clock::now(); }
  CallId NewCall() { return CallId(next_call.fetch_add(1)); }
  MemberId NewMember() { return MemberId(next_member.fetch_add(1)); }
  UpdateId NewUpdate() { return UpdateId(next_update.fetch_add(1)); }

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  // Constant after construction.
  const DaemonOptions options;
  const SpecLimits spec_limits;
  const std::string boot_id;
  const TimePoint started = Now();

  // Bytes of members' mapped memory, and of what callers have sent and the daemon holds in its own
  // memory (inline bytes, layouts, manifests). Thread-safe; used with and without the state lock.
  ByteLedger mapped;
  ByteLedger held;

  ProcessWatch& processes;

  // Opens device memory and closes regions' mappings. Regions of device memory share this object,
  // since they may be destroyed after the daemon.
  const std::shared_ptr<JobThreads> regions_thread = std::make_shared<JobThreads>("refitd-regions");

  std::atomic<uint64_t> next_call{1};
  std::atomic<uint64_t> next_member{1};
  std::atomic<uint64_t> next_update{1};

  StateMutex mutex;

  Members members ABSL_GUARDED_BY(kStateLocked);
  KeptRanks kept ABSL_GUARDED_BY(kStateLocked);
  PendingAttaches pending ABSL_GUARDED_BY(kStateLocked);
  PeerSessions sessions ABSL_GUARDED_BY(kStateLocked);
  Groups groups ABSL_GUARDED_BY(kStateLocked);
  WireLock wire_lock ABSL_GUARDED_BY(kStateLocked);
  Calls calls ABSL_GUARDED_BY(kStateLocked);
  Watchers watchers ABSL_GUARDED_BY(kStateLocked);
  std::vector<std::string> listeners ABSL_GUARDED_BY(kStateLocked);
  bool draining ABSL_GUARDED_BY(kStateLocked) = false;
  // The daemon aborts running updates now; metrics count these as given up by the drain.
  bool aborts ABSL_GUARDED_BY(kStateLocked) = false;
  bool stopping ABSL_GUARDED_BY(kStateLocked) = false;

  // Some of their functions are called under the state lock. The data plane is destroyed before all
  // of the above, which its last callbacks find.
  StagingPools pools;
  std::unique_ptr<DataPlane> data_plane;
};

// Hands the event to the machine of the group `name` and performs the machine's actions
// (actions.cc): replies and events of members are queued, and actions that touch memory go to the
// data plane. Does nothing if there is no such group.
void DispatchEvent(DaemonState& state, const std::string& name, MachineEvent& event,
                   StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_STATE_H_
