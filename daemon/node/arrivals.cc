#include "daemon/node/arrivals.h"

#include <utility>

#include "daemon/group/tensor_table.h"
#include "daemon/node/group_spec.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {

MemberId Arrivals::Attach(absl::StatusOr<Arrival> arrival, std::shared_ptr<MemberSink> sink) {
  if (arrival.ok()) {
    arrival->record.sink = std::move(sink);
    return Attach(*std::move(arrival));
  }
  sink->End(arrival.status());
  return state_.NewMember();
}

MemberId Arrivals::Attach(Arrival arrival) {
  MemberRecord& record = arrival.record;
  const absl::StatusOr<std::optional<int>> ordinal = DeviceOf(record);
  const MemberId member = state_.NewMember();
  const absl::Status counted = CountManifest(&arrival);
  Turn turn(state_.turns);
  if (!ordinal.ok()) {
    record.End(ordinal.status());
  } else if (!counted.ok()) {
    record.End(counted);
  } else if (state_.draining) {
    record.End(absl::UnavailableError("the daemon is draining"));
  } else if (absl::Status room = life_.CheckMembers(); !room.ok()) {
    record.End(std::move(room));
  } else if (absl::Status quota = identities_.AdmitMember(record.peer); !quota.ok()) {
    record.End(std::move(quota));
  } else {
    record.id = member;
    record.ordinal = *ordinal;
    if (auto* engine = std::get_if<EngineIdentity>(&arrival.identity)) {
      engine->on_device = ordinal->has_value();
      engine->catch_up = engine->catch_up && state_.options.group.catch_ups;
    }
    Attach(std::move(arrival), turn);
  }
  return member;
}

absl::Status Arrivals::CountManifest(Arrival* arrival) const {
  auto* const engine = std::get_if<EngineIdentity>(&arrival->identity);
  if (engine == nullptr || !engine->manifest.has_value()) return absl::OkStatus();
  const std::string identity = IdentityOf(arrival->record.peer);
  REFITD_ASSIGN_OR_RETURN(ByteLedger::Hold hold,
                          state_.held.Take(identity, group::MemoryOf(*engine->manifest)));
  engine->counted = std::make_shared<const ByteLedger::Hold>(std::move(hold));
  return absl::OkStatus();
}

void Arrivals::Attach(Arrival arrival, Turn& turn) {
  const std::string name = arrival.record.group;
  const std::string coordinator = joining_.CoordinatorOf(arrival.coordinator);
  if (const auto* engine = std::get_if<EngineIdentity>(&arrival.identity)) {
    state_.readiness.Arrived(name, *engine, DaemonState::Now());
  }
  bool created = false;
  const absl::StatusOr<GroupRecord*> found = GroupFor(arrival, coordinator, &created, turn);
  GroupRecord* const group = found.ok() ? *found : nullptr;
  if (!found.ok()) {
    arrival.record.End(found.status());
  } else if (group != nullptr && !group->join.joining) {
    GroupEvent attached = AttachedEvent(&arrival);
    members_.Enter(std::move(arrival.record), group, std::move(attached), turn);
  } else if (group == nullptr && arrival.wait == Duration(0)) {
    arrival.record.End(NoGroup(name));
  } else {
    const bool engine = arrival.record.engine;
    const bool brings = group != nullptr && arrival.spec.has_value() &&
                        (!group->join.dialled_spec || (!engine && !group->join.dialled_trainer));
    GroupEvent attached = AttachedEvent(&arrival);
    state_.waiters.Wait(Waiters::OfGroup{
        std::move(arrival.record), std::move(attached), DaemonState::Now() + arrival.wait,
        arrival.wait > Duration(0), coordinator, std::move(arrival.spec)});
    // A spec lets the coordinator make the group, for which other members may wait there already.
    // So a member that brings the first spec, or the first one of a trainer, begins a new try at
    // once.
    if (group != nullptr && !group->join.redial.has_value() &&
        (group->join.link == nullptr || brings)) {
      joining_.Dial(group);
    }
    state_.timer.Wake();
  }
  if (created) joiners_.AdmitWaiting(name, turn);
}

GroupEvent Arrivals::AttachedEvent(Arrival* arrival) {
  const MemberId member = arrival->record.id;
  if (auto* engine = std::get_if<EngineIdentity>(&arrival->identity)) {
    return EngineAttached{member, std::move(*engine)};
  }
  TrainerIdentity& trainer = std::get<TrainerIdentity>(arrival->identity);
  trainer.identity = IdentityOf(arrival->record.peer);
  trainer.any_owner = arrival->record.peer.any_owner;
  return TrainerAttached{member, std::move(trainer)};
}

absl::StatusOr<GroupRecord*> Arrivals::GroupFor(const Arrival& arrival,
                                                const std::string& coordinator, bool* created,
                                                Turn& turn) {
  const MemberRecord& record = arrival.record;
  if (!coordinator.empty()) {
    REFITD_RETURN_IF_ERROR(CheckSpans(arrival));
    return joining_.Follow(record.group, coordinator, arrival.spec, IdentityOf(record.peer), turn);
  }
  GroupRecord* const group = state_.groups.Find(record.group);
  const std::string identity = IdentityOf(record.peer);
  if (arrival.spec.has_value() &&
      (group != nullptr || identities_.MayMake(record.group, identity))) {
    const auto* trainer = std::get_if<TrainerIdentity>(&arrival.identity);
    const auto trainers = trainer == nullptr ? std::nullopt : std::optional(trainer->world_size);
    return life_.Make(record.group, *arrival.spec, trainers, identity, created, turn);
  }
  if (group != nullptr && group->follower != nullptr) return Followed(*group);
  return group;
}

absl::Status Arrivals::CheckSpans(const Arrival& arrival) const {
  const MemberRecord& record = arrival.record;
  if (!record.ordinal.has_value() || data_plane_.device_wire() != nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "device.name: '{}' with coordinator '{}': device memory moves within this daemon "
               "only: {}",
               record.device, arrival.coordinator, state_.options.devices.no_wire);
}

absl::StatusOr<std::optional<int>> Arrivals::DeviceOf(const MemberRecord& record) const {
  if (record.device == "host") return std::nullopt;
  if (state_.options.devices.memory == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "device.name: '{}': this daemon has no transport for it ({})", record.device,
                 state_.options.devices.detail);
  }
  const absl::StatusOr<int> ordinal = state_.options.devices.memory->DeviceOf(record.device);
  if (!ordinal.ok()) {
    return Prefixed(ordinal.status(), "device.name");
  }
  // P9: this daemon opens handles with its own rights, so it must know whose they are.
  if (record.peer.credentials.has_value()) return *ordinal;
  return Error(absl::StatusCode::kPermissionDenied,
               "device.name: '{}': members on a GPU attach over the unix socket", record.device);
}

void Arrivals::Gone(MemberId member, const std::string& reason) {
  End(member, reason, LeaseEnded(reason));
}

void Arrivals::Detached(MemberId member) { End(member, "it detached", absl::OkStatus()); }

void Arrivals::End(MemberId member, const std::string& reason, const absl::Status& end) {
  Turn turn(state_.turns, Turn::Order::kAhead);
  if (std::optional<Waiters::OfGroup> waited = state_.waiters.TakeOfGroup(member)) {
    waited->record.End(end);
    joining_.StopIfUnwanted(waited->record.group, turn);
  }
  if (std::optional<Waiters::OfSlots> waited = state_.waiters.TakeOfSlots(member)) {
    members_.EndWithoutPool(std::move(waited->record), end, turn);
  }
  if (MemberRecord* found = state_.leases.Find(member); found != nullptr) {
    members_.Lose(found, reason, end, turn);
  }
}

}  // namespace refitd
