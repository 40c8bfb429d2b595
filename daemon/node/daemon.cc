#include "daemon/node/daemon.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "daemon/node/life.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/operators.h"
#include "daemon/node/peer_client.h"
#include "daemon/node/peer_server.h"
#include "daemon/node/restore.h"
#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr Duration kNoWakeLimit = std::chrono::hours(1);

// The wire belongs to the data plane, so the options that the daemon keeps have none.
DaemonOptions WithoutWire(DaemonOptions options) {
  options.devices.wire.reset();
  return options;
}

}  // namespace

Daemon::Daemon(DaemonOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
               std::unique_ptr<Wire> wire, PeerDialer dialer)
    : state_(WithoutWire(options),
             {.transport = std::move(transport),
              .wire = std::move(wire),
              .device_wire = options.devices.wire,
              .no_device_wire = options.devices.no_wire,
              .max_rails = options.devices.max_rails,
              .observer = options.observer,
              .compare_sides = options.compare_sides},
             processes,
             {.dispatch =
                  [this](StateLock& lock, const std::string& group, MachineEvent& event) {
                    kStateLocked.AssertHeld();
                    DispatchEvent(state_, group, event, lock);
                  },
              .changed =
                  [this] {
                    kStateLocked.AssertHeld();
                    Changed();
                  }}),
      peer_client_(&state_, std::move(dialer)),
      peer_server_(std::make_unique<PeerServer>(&state_, &peer_client_)),
      memory_(std::make_unique<MemberMemory>(&state_)),
      calls_(
          std::make_unique<MemberCalls>(&state_, &peer_client_, peer_server_.get(), memory_.get())),
      operators_(std::make_unique<Operators>(&state_, peer_server_.get())) {
  timer_ = std::thread([this] { RunTimer(); });
}

// The order of the end: no try to join begins, links report their ends, jobs that use the state
// end, wires and then the transport report what still runs, and only then the state is destroyed.
Daemon::~Daemon() {
  {
    const StateLock lock(&state_.mutex);
    state_.stopping = true;
    timer_cond_.NotifyAll();
  }
  timer_.join();
  {
    StateLock lock(&state_.mutex);
    EndLinks();
    peer_client_.AwaitLinks(state_.mutex.raw());
  }
  // Every member has left, so every watch was cancelled. A member's process may have died just
  // then.
  state_.processes.AwaitCallback();
  state_.data_plane->StopThreads();
  state_.regions_thread->Stop();
  state_.data_plane->StopWires();
  state_.data_plane.reset();
}

void Daemon::Changed() {
  if (NextWake() < wakes_) timer_cond_.NotifyAll();
  if (!state_.groups.any_running()) idle_cond_.NotifyAll();
}

TimePoint Daemon::NextWake() {
  TimePoint wake = DaemonState::Now() + kNoWakeLimit;
  wake = std::min(wake, state_.groups.NextDeadline().value_or(wake));
  wake = std::min(wake, peer_client_.NextExpiry().value_or(wake));
  wake = std::min(wake, state_.sessions.NextDeadline().value_or(wake));
  wake = std::min(wake, state_.kept.NextEnd().value_or(wake));
  wake = std::min(wake, state_.watchers.NextLook().value_or(wake));
  if (state_.groups.any_running()) {
    wake = std::min(wake, state_.watchers.NextProgress().value_or(wake));
  }
  return wake;
}

void Daemon::RunTimer() {
  pthread_setname_np(pthread_self(), "refitd-timer");
  while (true) {
    StateLock lock(&state_.mutex);
    wakes_ = NextWake();
    while (!state_.stopping && DaemonState::Now() < wakes_) {
      timer_cond_.WaitUntil(state_.mutex.raw(), wakes_);
      wakes_ = NextWake();
    }
    if (state_.stopping) return;
    TickDue(lock, DaemonState::Now());
  }
}

void Daemon::TickDue(StateLock& lock, TimePoint now) {
  for (const std::string& name : state_.groups.Due(now)) lock.Handle(name, Tick{});
  state_.sessions.RefuseLate(now);
  peer_client_.RefuseLateMembers(now, lock);
  peer_client_.RedialIfDue(now);
  DropExpiredGroups(state_, now, lock);
  GiveUpKept(
      state_, [now](const KeptRank& kept) { return kept.until <= now; }, "keep_seconds have passed",
      lock);
  if (state_.watchers.NextLook().value_or(TimePoint::max()) <= now) state_.watchers.Look(now);
  if (!state_.watchers.empty()) state_.watchers.Progress(state_.groups.machines(), now);
}

void Daemon::DevicesLost(const absl::Status& why) {
  LogError("the GPUs are lost to this process: {}", Message(why));
  StateLock lock(&state_.mutex);
  for (const std::string& name : state_.groups.running()) {
    if (!state_.members.HasDevices(name)) continue;
    lock.Handle(name, OperatorAbort{state_.NewCall(),
                                    fmt::format("the daemon lost its GPUs: {}", Message(why))});
  }
}

void Daemon::Drain() {
  StateLock lock(&state_.mutex);
  if (state_.draining) return;
  state_.draining = true;
  state_.pending.RefuseAll(absl::UnavailableError("the daemon is draining"));
  state_.sessions.RefuseAllWaiting(absl::UnavailableError("the daemon is draining"));
  const std::vector<std::string> names = state_.groups.names();
  for (const std::string& name : names) peer_client_.StopIfUnwanted(name, lock);
  for (const std::string& name : names) lock.Handle(name, DrainEvent{});
}

void Daemon::Finish(TimePoint deadline) {
  {
    StateLock lock(&state_.mutex);
    while (state_.groups.any_running() && !hurrying_ && DaemonState::Now() < deadline) {
      idle_cond_.WaitUntil(state_.mutex.raw(), deadline);
    }
    state_.aborts = true;
    for (const std::string& name : state_.groups.running()) {
      lock.Handle(name, OperatorAbort{state_.NewCall(), "the daemon stops"});
    }
  }
  StateLock lock(&state_.mutex);
  // Clean-up waits for running copies, which end by themselves (P6).
  const TimePoint cleanup = DaemonState::Now() + state_.options.group.cleanup_limit;
  while (state_.groups.any_running() && DaemonState::Now() < cleanup)
    idle_cond_.WaitUntil(state_.mutex.raw(), cleanup);
  // Watchers get no event that the instances are gone, since these may attach to the next process.
  state_.watchers.EndInstances(absl::UnavailableError("the daemon stops"));
  LoseMembers(
      state_, [](const MemberRecord&) { return true; }, absl::UnavailableError("the daemon stops"),
      lock);
  GiveUpKept(
      state_, [](const KeptRank& /*any*/) { return true; }, "the daemon stops", lock);
  EndLinks();
  state_.watchers.EndAll(absl::UnavailableError("the daemon stops"));
}

void Daemon::Hurry() {
  const StateLock lock(&state_.mutex);
  hurrying_ = true;
  idle_cond_.NotifyAll();
}

void Daemon::SetListeners(std::vector<std::string> listeners) {
  const StateLock lock(&state_.mutex);
  state_.listeners = std::move(listeners);
}

void Daemon::CheckInvariants() {
  const StateLock lock(&state_.mutex);
  state_.CheckInvariants();
}

bool Daemon::Alive() {
  const StateLock lock(&state_.mutex);
  return !state_.stopping;
}

void Daemon::EndLinks() {
  state_.sessions.EndAll(absl::UnavailableError("the daemon stops"));
  for (const auto& [name, group] : state_.groups.all()) {
    if (group->join.link != nullptr) group->join.link->Close();
  }
}

}  // namespace refitd
