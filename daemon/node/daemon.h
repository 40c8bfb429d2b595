// Constructs the classes that keep groups, members and memory, drains them and ends them.
// docs/architecture.md (The daemon's state) lists what each class keeps.
//
//   services (gRPC) --calls--> a class of this folder --events--> GroupMachine (pure)
//   data plane, links, member streams, replies <--effects-- actions.cc <--actions-- GroupMachine
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_DAEMON_H_
#define REFITD_DAEMON_NODE_DAEMON_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/node/options.h"
#include "daemon/node/peer_client.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"
#include "daemon/sockets/process_watch.h"
#include "transport/base/mutex.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace refitd {

class MemberCalls;
class MemberMemory;
class Operators;
class PeerServer;

class Daemon {
 public:
  // `processes` must outlive the daemon. Without `wire` and `dialer` the daemon serves only groups
  // whose members are all its own.
  Daemon(DaemonOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
         std::unique_ptr<Wire> wire = nullptr, PeerDialer dialer = nullptr);
  // Ends the links and waits for their last callbacks.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // ---- the classes that callers use ----
  const DaemonOptions& options() const { return state_.options; }
  CallId NewCall() { return state_.NewCall(); }
  MemberCalls& calls() { return *calls_; }     // members' Attach streams and calls
  MemberMemory& memory() { return *memory_; }  // members' memory, the descriptor socket
  Operators& operators() { return *operators_; }
  PeerServer& peer_server() { return *peer_server_; }  // daemons that join

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

 private:
  friend class DaemonParts;  // for tests of the classes below

  // Wakes the threads that wait for deadlines, or for ends of updates.
  void Changed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // The time of the next deadline. It may be far off but is never missing, so that the timer looks
  // again now and then.
  TimePoint NextWake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Lets the objects of the state do what is due at `now`.
  void TickDue(StateLock& lock, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Takes the state lock whenever the next deadline has come (P4), until the daemon stops. The
  // thread sleeps until the deadline that it found, or until an earlier one that Changed found.
  void RunTimer();
  // Ends the links to and from other daemons; their callbacks follow.
  void EndLinks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  DaemonState state_;
  CondVar idle_cond_;
  CondVar timer_cond_;
  TimePoint wakes_ ABSL_GUARDED_BY(kStateLocked) = TimePoint::max();  // until when the timer sleeps
  bool hurrying_ ABSL_GUARDED_BY(kStateLocked) = false;

  // Each class uses some of those before it. The destructor ends links, jobs and transfers,
  // destroys the data plane, whose last callbacks still find all other classes, and then these from
  // the last to the first.
  PeerClient peer_client_;
  std::unique_ptr<PeerServer> peer_server_;
  std::unique_ptr<MemberMemory> memory_;
  std::unique_ptr<MemberCalls> calls_;
  std::unique_ptr<Operators> operators_;

  std::thread timer_;  // runs RunTimer; ends before all of the above
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_DAEMON_H_
