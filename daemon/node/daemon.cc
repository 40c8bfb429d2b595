#include "daemon/node/daemon.h"

#include <algorithm>
#include <utility>

#include "daemon/node/actions.h"
#include "daemon/node/arrivals.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/group_life.h"
#include "daemon/node/identities.h"
#include "daemon/node/joiners.h"
#include "daemon/node/joining.h"
#include "daemon/node/layouts.h"
#include "daemon/node/members.h"
#include "daemon/node/operators.h"
#include "daemon/node/regions.h"
#include "daemon/node/trainer_calls.h"
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
    : state_(WithoutWire(options), this, this) {
  DaemonState* const state = &state_;
  TurnHost* const host = this;
  device_slots_ = std::make_unique<DeviceSlots>(
      DeviceSlots::Options{.daemon_id = state->options.daemon_id,
                           .memory = state->options.devices.memory,
                           .has_wire = options.devices.wire != nullptr,
                           .no_wire = state->options.devices.no_wire,
                           .thread = state->regions_thread},
      host, &state->mutex,
      DeviceSlots::State{&state->groups, &state->leases, &state->waiters, &state->peers});
  data_plane_ = std::make_unique<DataPlane>(
      DataPlane::Options{.transport = std::move(transport),
                         .wire = std::move(wire),
                         .device_wire = std::move(options.devices.wire),
                         .no_device_wire = state->options.devices.no_wire,
                         .observer = state->options.observer},
      state->turns,
      DataPlane::State{&state->groups, &state->leases, &state->calls, device_slots_.get()});
  DeviceSlots* const slots = device_slots_.get();
  DataPlane* const data = data_plane_.get();
  identities_ = std::make_unique<Identities>(state);
  Identities* const identities = identities_.get();
  life_ = std::make_unique<GroupLife>(state, identities, data);
  members_ = std::make_unique<Members>(state, processes, identities, life_.get(), slots, data);
  joining_ =
      std::make_unique<Joining>(state, std::move(dialer), identities, life_.get(), members_.get());
  joiners_ = std::make_unique<Joiners>(state, identities, life_.get(), members_.get(),
                                       joining_.get(), slots);
  arrivals_ = std::make_unique<Arrivals>(state, identities, life_.get(), members_.get(),
                                         joining_.get(), joiners_.get(), data);
  regions_ = std::make_unique<Regions>(state, identities, members_.get(), slots, data);
  layouts_ = std::make_unique<Layouts>(state, members_.get(), data);
  trainer_calls_ = std::make_unique<TrainerCalls>(state, identities, members_.get(), regions_.get(),
                                                  slots, data);
  operators_ =
      std::make_unique<Operators>(state, life_.get(), members_.get(), joiners_.get(), data);
  actions_ = std::make_unique<Actions>(state, identities, life_.get(), members_.get(), slots, data);
  state->timer.Start();
}

// The order of the end: no try to join begins, links report their ends, jobs that use the state
// end, wires and then the transport report what still runs, and only then the state goes.
Daemon::~Daemon() {
  {
    const Turn turn(state_.turns);
    state_.stopping = true;
  }
  state_.timer.Stop();
  {
    Turn turn(this, &state_.mutex);
    EndLinks();
    joining_->AwaitLinks(&state_.mutex);
  }
  data_plane_->StopThreads();
  state_.regions_thread->Stop();
  data_plane_->StopWires();
  data_plane_.reset();
}

void Daemon::Dispatch(Turn& turn, const std::string& group, MachineEvent& event) {
  actions_->Dispatch(turn, group, event);
}

void Daemon::Drained() {
  state_.timer.Wake();
  if (!state_.groups.any_running()) idle_cond_.NotifyAll();
}

TimePoint Daemon::NextWake() {
  TimePoint wake = DaemonState::Now() + kNoWakeLimit;
  wake = std::min(wake, state_.groups.NextDeadline().value_or(wake));
  wake = std::min(wake, state_.waiters.NextExpiry(Dialler::ExpiryOf(state_.groups)).value_or(wake));
  wake = std::min(wake, state_.peers.NextDeadline().value_or(wake));
  wake = std::min(wake, state_.readiness.NextDue().value_or(wake));
  if (state_.groups.any_running()) {
    wake = std::min(wake, state_.watchers.NextDue().value_or(wake));
  }
  return wake;
}

void Daemon::Ring(Turn& turn, TimePoint now) {
  for (const std::string& name : state_.groups.Due(now)) turn.Handle(name, Tick{});
  state_.peers.RefuseLate(now);
  joining_->RefuseLateMembers(now, turn);
  joining_->RedialIfDue(now);
  life_->DropExpired(now, turn);
  if (state_.readiness.NextDue().value_or(TimePoint::max()) <= now) state_.readiness.Look(now);
  if (!state_.watchers.empty()) state_.watchers.Progress(state_.groups.machines(), now);
}

void Daemon::DevicesLost(const absl::Status& why) {
  LogError("the GPUs are lost to this process: {}", Message(why));
  Turn turn(state_.turns);
  for (const std::string& name : state_.groups.running()) {
    if (!state_.leases.HasDevices(name)) continue;
    turn.Handle(name, OperatorAbort{state_.NewCall(),
                                    fmt::format("the daemon lost its GPUs: {}", Message(why))});
  }
}

void Daemon::Drain() {
  Turn turn(state_.turns);
  if (state_.draining) return;
  state_.draining = true;
  state_.waiters.RefuseAll(absl::UnavailableError("the daemon is draining"));
  state_.peers.RefuseAllWaiting(absl::UnavailableError("the daemon is draining"));
  const std::vector<std::string> names = state_.groups.names();
  for (const std::string& name : names) joining_->StopIfUnwanted(name, turn);
  for (const std::string& name : names) turn.Handle(name, DrainEvent{});
}

void Daemon::Finish(TimePoint deadline) {
  {
    Turn turn(this, &state_.mutex);
    while (state_.groups.any_running() && !hurrying_ && DaemonState::Now() < deadline) {
      idle_cond_.WaitUntil(&state_.mutex, deadline);
    }
    state_.aborts = true;
    for (const std::string& name : state_.groups.running()) {
      turn.Handle(name, OperatorAbort{state_.NewCall(), "the daemon stops"});
    }
  }
  Turn turn(this, &state_.mutex);
  // Clean-up waits for running copies, which end by themselves (P6).
  const TimePoint cleanup = DaemonState::Now() + state_.options.group.cleanup_limit;
  while (state_.groups.any_running() && DaemonState::Now() < cleanup)
    idle_cond_.WaitUntil(&state_.mutex, cleanup);
  // Watchers are not told that the instances are gone, since these may attach to the next process.
  state_.readiness.EndAll(absl::UnavailableError("the daemon stops"));
  std::vector<MemberId> all;
  for (const auto& [id, member] : state_.leases.all()) all.push_back(id);
  for (const MemberId id : all) {
    MemberRecord* const member = state_.leases.Find(id);
    if (member == nullptr) continue;
    members_->Lose(member, "the daemon stops", absl::UnavailableError("the daemon stops"), turn);
  }
  EndLinks();
  state_.watchers.EndAll(absl::UnavailableError("the daemon stops"));
}

void Daemon::Hurry() {
  const Turn turn(state_.turns);
  hurrying_ = true;
  idle_cond_.NotifyAll();
}

void Daemon::SetListeners(std::vector<std::string> listeners) {
  const Turn turn(state_.turns);
  state_.listeners = std::move(listeners);
}

void Daemon::CheckInvariants() {
  const Turn turn(state_.turns);
  state_.CheckInvariants();
  data_plane_->CheckInvariants();
}

int64_t Daemon::watched_views() {
  const Turn turn(state_.turns);
  return state_.watchers.views();
}

bool Daemon::Alive() {
  const Turn turn(state_.turns);
  return !state_.stopping;
}

void Daemon::EndLinks() {
  state_.peers.EndAll(absl::UnavailableError("the daemon stops"));
  for (const auto& [name, group] : state_.groups.all()) {
    if (group->join.link != nullptr) group->join.link->Close();
  }
}

}  // namespace refitd
