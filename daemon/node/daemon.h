// The daemon's heart: constructs the classes that keep groups, members and memory, drains them and
// ends them. docs/architecture.md (The daemon's state) says what each class keeps.
//
//   services (gRPC) --calls--> a class of this folder, in a Turn --events--> GroupMachine (pure)
//   data plane, links, member streams, replies <--effects-- Actions <--actions-- GroupMachine
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_DAEMON_H_
#define REFITD_DAEMON_NODE_DAEMON_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/node/dialler.h"
#include "daemon/node/options.h"
#include "daemon/node/state.h"
#include "daemon/node/timer.h"
#include "daemon/node/turn.h"
#include "daemon/sockets/process_watch.h"
#include "transport/base/mutex.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace refitd {

class Actions;
class Arrivals;
class DataPlane;
class DeviceSlots;
class GroupLife;
class Identities;
class Joiners;
class Joining;
class Layouts;
class Members;
class Operators;
class Regions;
class TrainerCalls;

class Daemon : private TurnHost, private TimerHost {
 public:
  // `processes` must outlive the daemon. Without `wire` and `dialer` the daemon serves only groups
  // whose members are all its own.
  Daemon(DaemonOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
         std::unique_ptr<Wire> wire = nullptr, PeerDialer dialer = nullptr);
  // Ends the links and waits for their last callbacks.
  ~Daemon() override;
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // ---- the classes that callers use ----
  const DaemonOptions& options() const { return state_.options; }
  CallId NewCall() { return state_.NewCall(); }
  Arrivals& arrivals() { return *arrivals_; }  // members come and go
  Members& members() { return *members_; }     // what engines say
  Layouts& layouts() { return *layouts_; }     // members' layouts
  Regions& regions() { return *regions_; }     // members' memory, the descriptor socket
  TrainerCalls& trainer_calls() { return *trainer_calls_; }
  Operators& operators() { return *operators_; }
  Joiners& joiners() { return *joiners_; }           // daemons that join
  Identities& identities() { return *identities_; }  // owners of groups

  // ---- life ----
  // The GPUs can't be used any more: running updates of groups with members on GPUs are given up
  // (bytes written count as dirty, P2). The caller then ends the daemon.
  void DevicesLost(const absl::Status& why);
  // Opens no new update and tells members. Running updates go on.
  void Drain();
  // Waits until no update runs, at most until `deadline`. Then aborts updates that still run,
  // answers their calls, and ends every stream with UNAVAILABLE.
  void Finish(TimePoint deadline);
  // Makes Finish wait no longer for running updates.
  void Hurry();
  // Sets the listeners that status shows, as "unix:PATH", "tcp:HOST:PORT" or
  // "peers:HOST:PORT".
  void SetListeners(std::vector<std::string> listeners);
  // Waits for the daemon's mutex, so that the watchdog sees a daemon that hangs. False: the daemon
  // stops.
  bool Alive();
  // Aborts the process if an invariant of the state does not hold; for tests.
  void CheckInvariants();
  // The number of views of updates that were made for watchers so far, which is the cost of
  // watching.
  int64_t watched_views();

 private:
  friend class DaemonParts;  // for tests of the classes below

  void Dispatch(Turn& turn, const std::string& group, MachineEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) override;
  void Drained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) override;
  TimePoint NextWake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) override;
  void Ring(Turn& turn, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) override;
  // Ends the links to and from other daemons; their callbacks follow.
  void EndLinks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState state_;
  CondVar idle_cond_;
  bool hurrying_ ABSL_GUARDED_BY(kInTurn) = false;

  // Each class uses some of those before it. The destructor ends what runs, then destroys the data
  // plane, whose last callbacks find all the others, and then the others from the last to the
  // first.
  std::unique_ptr<DeviceSlots> device_slots_;
  std::unique_ptr<DataPlane> data_plane_;
  std::unique_ptr<Identities> identities_;
  std::unique_ptr<GroupLife> life_;
  std::unique_ptr<Members> members_;
  std::unique_ptr<Joining> joining_;
  std::unique_ptr<Joiners> joiners_;
  std::unique_ptr<Arrivals> arrivals_;
  std::unique_ptr<Regions> regions_;
  std::unique_ptr<Layouts> layouts_;
  std::unique_ptr<TrainerCalls> trainer_calls_;
  std::unique_ptr<Operators> operators_;
  std::unique_ptr<Actions> actions_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_DAEMON_H_
