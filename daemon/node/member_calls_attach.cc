#include <utility>

#include "daemon/group/tensor_table.h"
#include "daemon/node/identities.h"
#include "daemon/node/life.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/restore.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// Takes the identity out of the arrival.
GroupEvent AttachedEvent(Arrival* arrival) {
  const MemberId member = arrival->record.id;
  if (auto* engine = std::get_if<EngineIdentity>(&arrival->identity)) {
    return EngineAttached{member, std::move(*engine)};
  }
  TrainerIdentity& trainer = std::get<TrainerIdentity>(arrival->identity);
  trainer.identity = IdentityOf(arrival->record.peer);
  trainer.any_owner = arrival->record.peer.any_owner;
  return TrainerAttached{member, std::move(trainer)};
}

// Counts the manifest of an engine among its identity's bytes (limits.held_bytes), as long as the
// group has it.
absl::Status CountManifest(DaemonState& state, Arrival* arrival) {
  auto* const engine = std::get_if<EngineIdentity>(&arrival->identity);
  if (engine == nullptr || !engine->manifest.has_value()) return absl::OkStatus();
  const std::string identity = IdentityOf(arrival->record.peer);
  REFITD_ASSIGN_OR_RETURN(ByteLedger::Hold hold,
                          state.held.Take(identity, group::MemoryOf(*engine->manifest)));
  engine->counted = std::make_shared<const ByteLedger::Hold>(std::move(hold));
  return absl::OkStatus();
}

// OK: the member's memory can be reached from another daemon.
absl::Status CheckSpans(const DaemonState& state, const Arrival& arrival) {
  const MemberRecord& record = arrival.record;
  if (!record.ordinal.has_value() || state.data_plane->device_wire() != nullptr)
    return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "device.name: '{}' with coordinator '{}': device memory moves within this daemon "
               "only: {}",
               record.device, arrival.coordinator, state.options.devices.no_wire);
}

// The GPU that the member's hello names, by ordinal; none: host.
absl::StatusOr<std::optional<int>> DeviceOf(const DaemonState& state, const MemberRecord& record) {
  if (record.device == "host") return std::nullopt;
  if (state.options.devices.memory == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "device.name: '{}': this daemon has no transport for it ({})", record.device,
                 state.options.devices.detail);
  }
  const absl::StatusOr<int> ordinal = state.options.devices.memory->DeviceOf(record.device);
  if (!ordinal.ok()) {
    return Prefixed(ordinal.status(), "device.name");
  }
  // P9: this daemon opens handles with its own rights, so it must know whose they are.
  if (record.peer.credentials.has_value()) return *ordinal;
  return Error(absl::StatusCode::kPermissionDenied,
               "device.name: '{}': members on a GPU attach over the unix socket", record.device);
}

}  // namespace

MemberId MemberCalls::Attach(absl::StatusOr<Arrival> arrival, std::shared_ptr<MemberSink> sink) {
  if (arrival.ok()) {
    arrival->record.sink = std::move(sink);
    return Attach(*std::move(arrival));
  }
  sink->End(arrival.status());
  return state_.NewMember();
}

MemberId MemberCalls::Attach(Arrival arrival) {
  MemberRecord& record = arrival.record;
  const absl::StatusOr<std::optional<int>> ordinal = DeviceOf(state_, record);
  const MemberId member = state_.NewMember();
  const absl::Status counted = CountManifest(state_, &arrival);
  StateLock lock(&state_.mutex);
  if (!ordinal.ok()) {
    record.End(ordinal.status());
  } else if (!counted.ok()) {
    record.End(counted);
  } else if (state_.draining) {
    record.End(absl::UnavailableError("the daemon is draining"));
  } else if (absl::Status room = CheckMemberCount(state_); !room.ok()) {
    record.End(std::move(room));
  } else if (absl::Status quota = AdmitMember(state_, record.peer); !quota.ok()) {
    record.End(std::move(quota));
  } else {
    record.id = member;
    record.ordinal = *ordinal;
    if (auto* engine = std::get_if<EngineIdentity>(&arrival.identity)) {
      engine->on_device = ordinal->has_value();
      engine->catch_up = engine->catch_up && state_.options.group.catch_ups;
    }
    Attach(std::move(arrival), lock);
  }
  return member;
}

void MemberCalls::Attach(Arrival arrival, StateLock& lock) {
  const std::string name = arrival.record.group;
  if (absl::Status claimed = ClaimKept(state_, &arrival); !claimed.ok()) {
    return arrival.record.End(std::move(claimed));
  }
  const std::string coordinator = peer_client_.CoordinatorOf(arrival.coordinator);
  if (const auto* engine = std::get_if<EngineIdentity>(&arrival.identity)) {
    state_.watchers.Arrived(name, *engine, DaemonState::Now());
  }
  bool created = false;
  const absl::StatusOr<GroupRecord*> found = GroupFor(arrival, coordinator, &created, lock);
  GroupRecord* const group = found.ok() ? *found : nullptr;
  if (!found.ok()) {
    arrival.record.End(found.status());
  } else if (group != nullptr && !group->join.joining) {
    GroupEvent attached = AttachedEvent(&arrival);
    EnterGroup(state_, std::move(arrival.record), group, std::move(attached), lock);
  } else if (group == nullptr && arrival.wait == Duration(0)) {
    arrival.record.End(NoGroup(name));
  } else {
    const bool engine = arrival.record.engine;
    const bool brings = group != nullptr && arrival.spec.has_value() &&
                        (!group->join.dialled_spec || (!engine && !group->join.dialled_trainer));
    GroupEvent attached = AttachedEvent(&arrival);
    state_.pending.Wait(PendingAttaches::OfGroup{
        std::move(arrival.record), std::move(attached), DaemonState::Now() + arrival.wait,
        arrival.wait > Duration(0), coordinator, std::move(arrival.spec)});
    // A spec lets the coordinator make the group, for which other members may wait there already.
    // So a member that brings the first spec, or the first one of a trainer, begins a new try at
    // once.
    if (group != nullptr && !group->join.redial.has_value() &&
        (group->join.link == nullptr || brings)) {
      peer_client_.Dial(group);
    }
    lock.DeadlineMoved();
  }
  if (created) peer_server_.AdmitWaiting(name, lock);
}

absl::StatusOr<GroupRecord*> MemberCalls::GroupFor(const Arrival& arrival,
                                                   const std::string& coordinator, bool* created,
                                                   StateLock& lock) {
  const MemberRecord& record = arrival.record;
  if (!coordinator.empty()) {
    REFITD_RETURN_IF_ERROR(CheckSpans(state_, arrival));
    return peer_client_.Follow(record.group, coordinator, arrival.spec, IdentityOf(record.peer),
                               lock);
  }
  GroupRecord* const group = state_.groups.Find(record.group);
  const std::string identity = IdentityOf(record.peer);
  if (arrival.spec.has_value() &&
      (group != nullptr || MayMakeGroup(state_, record.group, identity))) {
    const auto* trainer = std::get_if<TrainerIdentity>(&arrival.identity);
    const auto trainers = trainer == nullptr ? std::nullopt : std::optional(trainer->world_size);
    return MakeGroup(state_, record.group, *arrival.spec, trainers, identity, created, lock);
  }
  if (group != nullptr && group->follower != nullptr) return NotCoordinatedHere(*group);
  return group;
}

void MemberCalls::Gone(MemberId member, const std::string& reason) {
  EndAttach(member, reason, LeaseEnded(reason));
}

void MemberCalls::Detached(MemberId member) { EndAttach(member, "it detached", absl::OkStatus()); }

void MemberCalls::EndAttach(MemberId member, const std::string& reason, const absl::Status& end) {
  StateLock lock(&state_.mutex, StateLock::Order::kAhead);
  if (std::optional<PendingAttaches::OfGroup> waited = state_.pending.TakeOfGroup(member)) {
    waited->record.End(end);
    peer_client_.StopIfUnwanted(waited->record.group, lock);
  }
  if (std::optional<PendingAttaches::OfSlots> waited = state_.pending.TakeOfSlots(member)) {
    EndWithoutPool(state_, std::move(waited->record), end, lock);
  }
  if (MemberRecord* found = state_.members.Find(member); found != nullptr) {
    LoseMember(state_, found, reason, end, lock);
  }
}

}  // namespace refitd
