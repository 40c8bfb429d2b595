// A trainer's calls that wait for staging slots on GPUs, or for device memory.
#include <set>
#include <string_view>
#include <utility>

#include "daemon/node/identities.h"
#include "daemon/node/life.h"
#include "daemon/node/member_calls.h"
#include "daemon/process/log.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// Counts a call that waits on the thread for regions: at most outstanding_buckets a member.
absl::Status BeginOpening(DaemonState& state, CallId call, MemberId member)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  return state.calls.BeginOpening(call, member, state.options.group.outstanding_buckets);
}

// OK: the caller still waits. Checked right before the driver is kept busy, since the call may have
// waited long in line.
absl::Status OpeningWanted(DaemonState& state, CallId call) {
  const StateLock lock(&state.mutex);
  REFITD_ASSIGN_OR_RETURN(const MemberId id, state.calls.OpeningOf(call));
  const MemberRecord* const member = state.members.Find(id);
  if (member != nullptr && !member->lost) return absl::OkStatus();
  return absl::CancelledError("the lease ended");
}

absl::Status EndOpening(DaemonState& state, CallId call) {
  const StateLock lock(&state.mutex);
  return state.calls.EndOpening(call);
}

// Checks a method that broadcasts through slots. OK: the method can serve updates that this rank
// begins.
absl::Status CheckBroadcast(DaemonState& state, const MemberRecord& trainer, BroadcastMethod method)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (method == BroadcastMethod::kAuto || method == BroadcastMethod::kDirect) {
    return absl::OkStatus();
  }
  const GroupRecord& group = *state.groups.Of(trainer);
  if (state.pools.Spans(group)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs of one daemon, and group '{}' spans daemons",
                 BroadcastMethodName(method), trainer.group);
  }
  if (!trainer.ordinal.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs, and this trainer rank's memory is the host's",
                 BroadcastMethodName(method));
  }
  if (absl::Status can = state.data_plane->transport().CanBroadcast(method); !can.ok()) {
    return Prefixed(can, "broadcast: {}", BroadcastMethodName(method));
  }
  return absl::OkStatus();
}

// Whether broadcasting through slots could gain anything, so that kAuto needs the slots: some byte
// goes to two GPUs. The ranks of an instance in place hold shards; each loader rank gets all bytes.
bool CouldGain(DaemonState& state, const MemberRecord& trainer)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (!trainer.ordinal.has_value() || state.pools.Spans(*state.groups.Of(trainer))) return false;
  if (!BroadcastsThroughSlots(state.data_plane->transport())) return false;
  std::set<int> devices;
  std::set<std::pair<std::string_view, int>> replicas;
  for (const auto& [id, member] : state.members.all()) {
    if (!member.engine || member.lost || member.group != trainer.group) continue;
    if (!member.ordinal.has_value() || member.ordinal == trainer.ordinal) continue;
    devices.insert(*member.ordinal);
    replicas.emplace(member.instance, member.reads_slots ? member.rank : 0);
  }
  return devices.size() > 1 && replicas.size() > 1;
}

// Runs on the thread for regions. Not OK: the caller has left, or a pool could not be made.
absl::Status MakePools(DaemonState& state, CallId call,
                       const std::vector<StagingPools::Missing>& missing) {
  for (const StagingPools::Missing& slots : missing) {
    REFITD_RETURN_IF_ERROR(OpeningWanted(state, call));
    const absl::Status made = state.pools.MakeNow(slots);
    // Cancelled: the member that needed the pool has left.
    if (!made.ok() && !absl::IsCancelled(made)) return made;
  }
  return absl::OkStatus();
}

}  // namespace

// ---- leased slots ----

void MemberCalls::LeaseSlot(CallId call, const Caller& caller, LeaseSlotEvent event,
                            ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<std::optional<StagingPools::Missing>> {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                            Authenticate(state_, caller, /*engine=*/false));
    std::optional<StagingPools::Missing> missing = state_.pools.MissingOf(*member);
    if (!missing.has_value()) return missing;
    REFITD_RETURN_IF_ERROR(BeginOpening(state_, call, member->id));
    return missing;
  };
  const absl::StatusOr<std::optional<StagingPools::Missing>> missing = check();
  if (!missing.ok()) return reply(missing.status(), EmptyReply{});
  if (!missing->has_value()) return LeaseOpened(call, caller, event, std::move(reply));
  state_.regions_thread->Submit(
      [this, call, caller, event, pool = **missing, reply = std::move(reply)]() mutable {
        absl::Status made = OpeningWanted(state_, call);
        if (made.ok()) made = state_.pools.MakeNow(pool);
        const absl::Status wanted = EndOpening(state_, call);
        if (made.ok()) made = wanted;
        if (!made.ok()) return reply(made, EmptyReply{});
        LeaseOpened(call, caller, event, std::move(reply));
      });
}

void MemberCalls::LeaseOpened(CallId call, const Caller& caller, LeaseSlotEvent event,
                              ReplyFunction reply) {
  const auto take = [&](const MemberRecord& member)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) -> absl::StatusOr<GroupEvent> {
    if (!member.ordinal.has_value()) {
      REFITD_RETURN_IF_ERROR(state_.pools.EnsureHost(*state_.groups.Of(member)));
    } else if (state_.pools.MissingOf(member).has_value()) {
      return absl::InternalError("the staging pool was freed");
    }
    event.call = call;
    event.member = member.id;
    return event;
  };
  Hand(call, caller, std::move(reply), take);
}

// ---- broadcasts through slots ----

absl::StatusOr<MemberCalls::BeginNeeds> MemberCalls::NeedsOf(CallId call, const Caller& caller,
                                                             const BeginEvent& event) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                          Authenticate(state_, caller, /*engine=*/false));
  BeginNeeds needs;
  if (event.broadcast == BroadcastMethod::kDirect) return needs;
  // A Begin that is refused anyway makes no pools.
  REFITD_RETURN_IF_ERROR(CheckBroadcast(state_, *member, event.broadcast));
  needs.slots = event.broadcast != BroadcastMethod::kAuto || CouldGain(state_, *member);
  if (!needs.slots) return needs;
  needs.missing = state_.pools.MissingFor(member->group);
  if (needs.missing.empty()) return needs;
  REFITD_RETURN_IF_ERROR(BeginOpening(state_, call, member->id));
  GroupRecord* group = state_.groups.Of(*member);
  needs.group = member->group;
  needs.id = group->id;
  ++group->preparing_begins;
  return needs;
}

// Pools are made before the event enters the group, so that no slot is granted that a GPU lacks.
// Engine ranks that attach meanwhile wait for a pool of their own (GroupRecord::wants_pools).
void MemberCalls::Begin(CallId call, const Caller& caller, BeginEvent event, ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<BeginNeeds> {
    const StateLock lock(&state_.mutex);
    return NeedsOf(call, caller, event);
  };
  absl::StatusOr<BeginNeeds> checked = check();
  if (!checked.ok()) return reply(checked.status(), EmptyReply{});
  if (checked->missing.empty()) {
    return BeginOpened(call, caller, std::move(event), std::move(reply), checked->slots);
  }
  state_.regions_thread->Submit([this, call, caller, event = std::move(event),
                                 needs = *std::move(checked), reply = std::move(reply)]() mutable {
    absl::Status made = MakePools(state_, call, needs.missing);
    const absl::Status wanted = EndOpening(state_, call);
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
    const StateLock lock(&state_.mutex);
    GroupRecord* group = state_.groups.Find(needs.group, needs.id);
    if (group != nullptr) --group->preparing_begins;
  });
}

void MemberCalls::BeginOpened(CallId call, const Caller& caller, BeginEvent event,
                              ReplyFunction reply, bool slots) {
  const auto begin = [&](const MemberRecord& member)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) -> absl::StatusOr<GroupEvent> {
    REFITD_RETURN_IF_ERROR(CheckBroadcast(state_, member, event.broadcast));
    REFITD_RETURN_IF_ERROR(AdmitUpdate(state_, member, event.request_id));
    event.call = call;
    event.member = member.id;
    event.slots_on_devices = slots && state_.pools.MissingFor(member.group).empty();
    GroupRecord* group = state_.groups.Of(member);
    const GroupMachine& machine = *group->machine;
    if (!machine.update_running() || machine.catch_up_running()) group->broadcasts = false;
    group->broadcasts = group->broadcasts || event.slots_on_devices;
    return std::move(event);
  };
  Hand(call, caller, std::move(reply), begin);
}

// ---- buckets ----

void MemberCalls::PushFromDevice(CallId call, const Caller& caller, ReceivedPush push,
                                 ReplyFunction reply) {
  int ordinal = 0;
  const auto check = [&]() -> absl::StatusOr<std::vector<int>> {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                            Authenticate(state_, caller, /*engine=*/false));
    REFITD_ASSIGN_OR_RETURN(std::vector<int> indices, HandlesOn(push.received, member->device));
    if (!member->ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "bucket.cuda_ipc is device memory, the lease's device is '{}'", member->device);
    }
    REFITD_RETURN_IF_ERROR(BeginOpening(state_, call, member->id));
    ordinal = *member->ordinal;
    return indices;
  };
  absl::StatusOr<std::vector<int>> indices = check();
  if (!indices.ok()) return reply(indices.status(), EmptyReply{});
  state_.regions_thread->Submit([this, call, caller, ordinal, push = std::move(push),
                                 indices = *std::move(indices),
                                 reply = std::move(reply)]() mutable {
    const ReplyFunction closed = [this, reply](absl::Status status, const ReplyPayload& payload) {
      memory_.AnswerClosed(
          [reply, status = std::move(status), payload] { reply(status, payload); });
    };
    const auto open = [&]() -> absl::StatusOr<DeviceSource> {
      REFITD_RETURN_IF_ERROR(OpeningWanted(state_, call));
      return memory_.OpenSource(std::get<std::vector<DeviceRef>>(push.received.source), ordinal,
                                std::move(indices));
    };
    absl::StatusOr<DeviceSource> source = open();
    const absl::Status wanted = EndOpening(state_, call);
    if (source.ok() && !wanted.ok()) source = wanted;
    if (!source.ok()) return closed(source.status(), EmptyReply{});
    PushOpened(call, caller, std::move(push), closed, *source);
  });
}

}  // namespace refitd
