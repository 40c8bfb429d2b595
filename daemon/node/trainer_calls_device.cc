// A trainer's calls that wait for staging slots on GPUs, or for device memory.
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "daemon/node/trainer_calls.h"
#include "daemon/process/log.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {

// ---- calls that wait ----

absl::Status TrainerCalls::AdmitOpening(CallId call, MemberId member) {
  return state_.calls.AdmitOpening(call, member, state_.options.group.outstanding_buckets);
}

// Whether the call is still wanted. This is checked right before the driver is kept busy, since the
// call may have waited long in line.
absl::Status TrainerCalls::OpeningWanted(CallId call) {
  const Turn turn(state_.turns);
  REFITD_ASSIGN_OR_RETURN(const MemberId id, state_.calls.OpeningOf(call));
  const MemberRecord* const member = state_.leases.Find(id);
  if (member != nullptr && !member->lost) return absl::OkStatus();
  return absl::CancelledError("the lease ended");
}

absl::Status TrainerCalls::EndOpening(CallId call) {
  const Turn turn(state_.turns);
  return state_.calls.EndOpening(call);
}

// ---- leased slots ----

void TrainerCalls::LeaseSlot(CallId call, const Caller& caller, LeaseSlotEvent event,
                             ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<std::optional<DeviceSlots::Missing>> {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                            members_.Authenticate(caller, /*engine=*/false));
    std::optional<DeviceSlots::Missing> missing = device_slots_.MissingOf(*member);
    if (!missing.has_value()) return missing;
    REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
    return missing;
  };
  const absl::StatusOr<std::optional<DeviceSlots::Missing>> missing = check();
  if (!missing.ok()) return reply(missing.status(), EmptyReply{});
  if (!missing->has_value()) return LeaseOpened(call, caller, event, std::move(reply));
  state_.regions_thread->Submit(
      [this, call, caller, event, pool = **missing, reply = std::move(reply)]() mutable {
        absl::Status made = OpeningWanted(call);
        if (made.ok()) made = device_slots_.MakeNow(pool);
        const absl::Status wanted = EndOpening(call);
        if (made.ok()) made = wanted;
        if (!made.ok()) return reply(made, EmptyReply{});
        LeaseOpened(call, caller, event, std::move(reply));
      });
}

void TrainerCalls::LeaseOpened(CallId call, const Caller& caller, LeaseSlotEvent event,
                               ReplyFunction reply) {
  const auto take = [&](const MemberRecord& member)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) -> absl::StatusOr<GroupEvent> {
    if (!member.ordinal.has_value()) {
      REFITD_RETURN_IF_ERROR(state_.groups.Of(member)->EnsureHostPool());
    } else if (device_slots_.MissingOf(member).has_value()) {
      return absl::InternalError("the staging pool went");
    }
    event.call = call;
    event.member = member.id;
    return event;
  };
  Hand(call, caller, std::move(reply), take);
}

// ---- broadcasts through slots ----

absl::Status TrainerCalls::CheckBroadcast(const MemberRecord& trainer,
                                          BroadcastMethod method) const {
  if (method == BroadcastMethod::kAuto || method == BroadcastMethod::kDirect) {
    return absl::OkStatus();
  }
  const GroupRecord& group = *state_.groups.Of(trainer);
  if (device_slots_.Spans(group)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs of one daemon, and group '{}' spans daemons",
                 BroadcastMethodName(method), trainer.group);
  }
  if (!trainer.ordinal.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs, and this trainer rank's memory is the host's",
                 BroadcastMethodName(method));
  }
  if (absl::Status can = data_plane_.transport().CanBroadcast(method); !can.ok()) {
    return Prefixed(can, "broadcast: {}", BroadcastMethodName(method));
  }
  return absl::OkStatus();
}

// One instance alone gains nothing: its ranks hold shards, so no byte goes to two of them.
bool TrainerCalls::CouldGain(const MemberRecord& trainer) const {
  if (!trainer.ordinal.has_value() || device_slots_.Spans(*state_.groups.Of(trainer))) return false;
  if (!BroadcastsThroughSlots(data_plane_.transport())) return false;
  std::set<int> devices;
  std::set<std::string_view> instances;
  for (const auto& [id, member] : state_.leases.all()) {
    if (!member.engine || member.lost || member.group != trainer.group) continue;
    if (member.reads_slots) continue;
    if (!member.ordinal.has_value() || member.ordinal == trainer.ordinal) continue;
    devices.insert(*member.ordinal);
    instances.insert(member.instance);
  }
  return devices.size() > 1 && instances.size() > 1;
}

absl::StatusOr<TrainerCalls::BeginNeeds> TrainerCalls::NeedsOf(CallId call, const Caller& caller,
                                                               const BeginEvent& event) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                          members_.Authenticate(caller, /*engine=*/false));
  BeginNeeds needs;
  if (event.broadcast == BroadcastMethod::kDirect) return needs;
  // A Begin that is refused anyway makes no pools.
  REFITD_RETURN_IF_ERROR(CheckBroadcast(*member, event.broadcast));
  needs.slots = event.broadcast != BroadcastMethod::kAuto || CouldGain(*member);
  if (!needs.slots) return needs;
  needs.missing = device_slots_.MissingFor(*member);
  if (needs.missing.empty()) return needs;
  REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
  GroupRecord* group = state_.groups.Of(*member);
  needs.group = member->group;
  needs.id = group->id;
  ++group->preparing_begins;
  return needs;
}

absl::Status TrainerCalls::MakePools(CallId call,
                                     const std::vector<DeviceSlots::Missing>& missing) {
  for (const DeviceSlots::Missing& slots : missing) {
    REFITD_RETURN_IF_ERROR(OpeningWanted(call));
    const absl::Status made = device_slots_.MakeNow(slots);
    // Cancelled: the member that needed the pool has gone.
    if (!made.ok() && !absl::IsCancelled(made)) return made;
  }
  return absl::OkStatus();
}

// Pools are made before the event enters the group, so that no slot is granted that a GPU lacks.
// Engine ranks that attach meanwhile wait for a pool of their own (GroupRecord::wants_pools).
void TrainerCalls::Begin(CallId call, const Caller& caller, BeginEvent event, ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<BeginNeeds> {
    const Turn turn(state_.turns);
    return NeedsOf(call, caller, event);
  };
  absl::StatusOr<BeginNeeds> checked = check();
  if (!checked.ok()) return reply(checked.status(), EmptyReply{});
  if (checked->missing.empty()) {
    return BeginOpened(call, caller, std::move(event), std::move(reply), checked->slots);
  }
  state_.regions_thread->Submit([this, call, caller, event = std::move(event),
                                 needs = *std::move(checked), reply = std::move(reply)]() mutable {
    absl::Status made = MakePools(call, needs.missing);
    const absl::Status wanted = EndOpening(call);
    if (!wanted.ok()) made = wanted;
    const BroadcastMethod broadcast = event.broadcast;
    const bool goes_without = broadcast == BroadcastMethod::kAuto && wanted.ok();
    if (made.ok() || goes_without) {
      if (!made.ok()) {
        LogWarning("group {}: version {} is pushed without broadcasts: {}", needs.group,
                   event.version.value(), Message(made));
      }
      BeginOpened(call, caller, std::move(event), std::move(reply), made.ok());
    } else {
      reply(Prefixed(made, "broadcast: {}", BroadcastMethodName(broadcast)), EmptyReply{});
    }
    const Turn turn(state_.turns);
    GroupRecord* group = state_.groups.Find(needs.group, needs.id);
    if (group != nullptr) --group->preparing_begins;
  });
}

void TrainerCalls::BeginOpened(CallId call, const Caller& caller, BeginEvent event,
                               ReplyFunction reply, bool slots) {
  const auto begin = [&](const MemberRecord& member)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) -> absl::StatusOr<GroupEvent> {
    REFITD_RETURN_IF_ERROR(CheckBroadcast(member, event.broadcast));
    REFITD_RETURN_IF_ERROR(identities_.AdmitUpdate(member, event.request_id));
    event.call = call;
    event.member = member.id;
    event.slots_on_devices = slots && device_slots_.MissingFor(member).empty();
    GroupRecord* group = state_.groups.Of(member);
    const GroupMachine& machine = *group->machine;
    if (!machine.update_running() || machine.catch_up_running()) group->broadcasts = false;
    group->broadcasts = group->broadcasts || event.slots_on_devices;
    return std::move(event);
  };
  Hand(call, caller, std::move(reply), begin);
}

// ---- buckets ----

void TrainerCalls::PushFromDevice(CallId call, const Caller& caller, ReceivedPush push,
                                  ReplyFunction reply) {
  int ordinal = 0;
  const auto check = [&]() -> absl::StatusOr<std::vector<int>> {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                            members_.Authenticate(caller, /*engine=*/false));
    REFITD_ASSIGN_OR_RETURN(std::vector<int> indices, HandlesOn(push.received, member->device));
    if (!member->ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "bucket.cuda_ipc is device memory, the lease's device is '{}'", member->device);
    }
    REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
    ordinal = *member->ordinal;
    return indices;
  };
  absl::StatusOr<std::vector<int>> indices = check();
  if (!indices.ok()) return reply(indices.status(), EmptyReply{});
  state_.regions_thread->Submit([this, call, caller, ordinal, push = std::move(push),
                                 indices = *std::move(indices),
                                 reply = std::move(reply)]() mutable {
    const ReplyFunction closed = [this, reply](absl::Status status, const ReplyPayload& payload) {
      regions_.AnswerClosed(
          [reply, status = std::move(status), payload] { reply(status, payload); });
    };
    const auto open = [&]() -> absl::StatusOr<DeviceSource> {
      REFITD_RETURN_IF_ERROR(OpeningWanted(call));
      return regions_.OpenSource(std::get<std::vector<DeviceRef>>(push.received.source), ordinal,
                                 std::move(indices));
    };
    absl::StatusOr<DeviceSource> source = open();
    const absl::Status wanted = EndOpening(call);
    if (source.ok() && !wanted.ok()) source = wanted;
    if (!source.ok()) return closed(source.status(), EmptyReply{});
    PushOpened(call, caller, std::move(push), closed, *source);
  });
}

}  // namespace refitd
