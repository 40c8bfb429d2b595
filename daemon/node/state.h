// The state that the one mutex of the daemon guards, and the objects that the classes of this
// folder share beside that state.
//
// The mutex serialises all state machines. Nothing under it blocks: transports have their own
// threads; plans, and the opening and closing of device memory, have theirs; streams have queues.
// Replies run, and events are written, after the mutex was released (turn.h). Log lines are queued
// in a turn, so that they have the order of their events.
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
#include "daemon/node/group_spec.h"
#include "daemon/node/groups.h"
#include "daemon/node/host_mappings.h"
#include "daemon/node/leases.h"
#include "daemon/node/memory.h"
#include "daemon/node/options.h"
#include "daemon/node/peers.h"
#include "daemon/node/push_turns.h"
#include "daemon/node/readiness.h"
#include "daemon/node/timer.h"
#include "daemon/node/turn.h"
#include "daemon/node/waiters.h"
#include "daemon/node/watchers.h"
#include "daemon/policy/byte_ledger.h"
#include "transport/base/mutex.h"

namespace refitd {

struct DaemonState {
  DaemonState(DaemonOptions given, TurnHost* turn_host, TimerHost* timer_host);

  static TimePoint Now() { return std::chrono::steady_clock::now(); }
  CallId NewCall() { return CallId(next_call.fetch_add(1)); }
  MemberId NewMember() { return MemberId(next_member.fetch_add(1)); }
  UpdateId NewUpdate() { return UpdateId(next_update.fetch_add(1)); }

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // Constant after construction.
  const DaemonOptions options;
  const SpecLimits spec_limits;
  const std::string boot_id;
  const TimePoint started = Now();

  // Thread-safe; used with and without a turn.
  ByteLedger mapped;
  ByteLedger held;
  HostMappings mappings;

  std::atomic<uint64_t> next_call{1};
  std::atomic<uint64_t> next_member{1};
  std::atomic<uint64_t> next_update{1};

  PushTurns pushes;
  Mutex mutex;
  const Turns turns;

  Leases leases ABSL_GUARDED_BY(kInTurn);
  Memory memory ABSL_GUARDED_BY(kInTurn);
  Waiters waiters ABSL_GUARDED_BY(kInTurn);
  Peers peers ABSL_GUARDED_BY(kInTurn);
  Groups groups ABSL_GUARDED_BY(kInTurn);
  WireLock wire_lock ABSL_GUARDED_BY(kInTurn);
  Calls calls ABSL_GUARDED_BY(kInTurn);
  Watchers watchers ABSL_GUARDED_BY(kInTurn);
  InstanceReadiness readiness ABSL_GUARDED_BY(kInTurn);
  std::vector<std::string> listeners ABSL_GUARDED_BY(kInTurn);
  bool draining ABSL_GUARDED_BY(kInTurn) = false;
  // Running updates are aborted from now on; metrics count these as given up by the drain.
  bool aborts ABSL_GUARDED_BY(kInTurn) = false;
  bool stopping ABSL_GUARDED_BY(kInTurn) = false;

  // Opens device memory and closes regions' mappings. Regions of device memory share this object,
  // since they may be destroyed after the daemon.
  const std::shared_ptr<JobThreads> regions_thread = std::make_shared<JobThreads>("refitd-regions");

  // The timer's functions are called in a turn, but for Start and Stop.
  Timer timer;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_STATE_H_
