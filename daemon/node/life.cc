#include "daemon/node/life.h"

#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/node/group_spec.h"
#include "daemon/node/identities.h"
#include "daemon/node/restore.h"
#include "daemon/process/log.h"
#include "proto/protocol.h"
#include "transport/base/status.h"

namespace refitd {

// ---- groups ----

uint64_t NewIncarnation() {
  uint64_t bits = 0;
  REFITD_CHECK(getrandom(&bits, sizeof(bits), 0) == sizeof(bits));
  // 0 means "the current incarnation" in messages, so the lowest bit is set.
  return bits | 1;
}

absl::Status NoGroup(const std::string& name) {
  return Error(absl::StatusCode::kNotFound, "group '{}' does not exist", name);
}

absl::Status NotCoordinatedHere(const GroupRecord& group) {
  return Error(absl::StatusCode::kFailedPrecondition,
               "group '{}' is coordinated by {}: name it as coordinator", group.name(),
               group.join.address);
}

absl::StatusOr<GroupRecord*> MakeGroup(DaemonState& state, const std::string& name,
                                       const GroupSpec& wanted, std::optional<int> trainers,
                                       const std::string& creator, bool* created, StateLock& lock) {
  *created = false;
  REFITD_ASSIGN_OR_RETURN(GroupSpec spec, CheckSpec(wanted, state.spec_limits));
  if (trainers.value_or(spec.trainer_ranks) != spec.trainer_ranks) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} is not the spec's trainer_ranks {}", *trainers,
                 spec.trainer_ranks);
  }
  if (GroupRecord* found = state.groups.Find(name); found != nullptr) {
    if (found->follower != nullptr) return NotCoordinatedHere(*found);
    REFITD_RETURN_IF_ERROR(CheckEqualSpec(name, found->machine->spec(), spec));
    return found;
  }
  if (state.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(AdmitGroup(state, creator, spec.slots * spec.slot_bytes));
  REFITD_RETURN_IF_ERROR(MakeRoom(state, name, &spec, lock));
  CoordinatorOptions coordinator;
  coordinator.name = name;
  coordinator.daemon_id = state.options.daemon_id;
  coordinator.incarnation = NewIncarnation();
  coordinator.spec = std::move(spec);
  coordinator.limits = state.options.group;
  coordinator.peer_limits = state.options.peers;
  coordinator.next_update = [&state] { return state.NewUpdate(); };
  coordinator.next_member = [&state] { return state.NewMember(); };
  coordinator.next_call = [&state] { return state.NewCall(); };
  // The machine asks while it handles an event, so the mutex is held.
  coordinator.admit_remote = [&state] {
    kStateLocked.AssertHeld();
    return CheckMemberCount(state);
  };
  if (state.options.owner_rule != nullptr) {
    coordinator.owner_rule = [rule = state.options.owner_rule, name](const std::string& identity) {
      return rule(name, identity);
    };
  }
  GroupRecord* const group = state.groups.Coordinate(std::move(coordinator), DaemonState::Now());
  group->creator = creator;
  LogInfo("group {}: created", name);
  lock.DeadlineMoved();
  *created = true;
  return group;
}

absl::Status MakeRoom(DaemonState& state, const std::string& name, const GroupSpec* spec,
                      StateLock& lock) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<std::string> dropped, state.groups.RoomFor(name, spec));
  for (const std::string& other : dropped) {
    DropGroup(state, other,
              fmt::format("given up, for it has no member and group {} needs its place", name),
              lock);
  }
  return absl::OkStatus();
}

absl::Status CheckMemberCount(const DaemonState& state) {
  size_t members = state.members.size() + state.pending.size();
  for (const auto& [name, group] : state.groups.all()) {
    if (group->coordinator != nullptr) members += group->coordinator->remote_members();
  }
  if (members < static_cast<size_t>(state.options.max_members)) return absl::OkStatus();
  return Error(
      absl::StatusCode::kResourceExhausted,
      "limits.max_members: daemon {} has {} members, with those of daemons that joined its "
      "groups, and takes {}",
      state.options.daemon_id, members, state.options.max_members);
}

void NoteEmptyGroup(DaemonState& state, GroupRecord* group, StateLock& lock) {
  if (!state.groups.NoteEmpty(group, DaemonState::Now()) || !state.pools.HasHost(*group)) return;
  // P8: the pool is given back, and made again for the next member that needs it. It is unmapped
  // after the mutex was released.
  lock.Last(
      [host = std::make_shared<StagingPools::Host>(state.pools.TakeHost(*group))] { *host = {}; });
}

namespace {

// The group's pool is unmapped, and its link destroyed, after the mutex was released.
void DropRecord(DaemonState& state, const std::string& name, std::string_view why, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  std::shared_ptr<GroupRecord> record = state.groups.Remove(name);
  state.data_plane->CloseAll(record->id);
  LogInfo("group {}: {}", name, why);
  state.watchers.ReadinessChanged(name, DaemonState::Now());
  if (state.options.observer != nullptr) state.options.observer->GroupGone(name);
  auto pools = std::make_shared<StagingPools::Places>(state.pools.Take(record->id));
  lock.Last([record = std::move(record), pools = std::move(pools)]() mutable {
    record.reset();
    pools.reset();
  });
}

}  // namespace

void DropGroup(DaemonState& state, const std::string& name, std::string_view why, StateLock& lock) {
  DropRecord(state, name, why, lock);
  GiveUpKept(
      state, [&name](const KeptRank& kept) { return kept.group == name; },
      "their group was deleted", lock);
  state.sessions.EndGroup(name, absl::AbortedError("the group was deleted"));
  state.watchers.Forget(name);
}

void DropExpiredGroups(DaemonState& state, TimePoint now, StateLock& lock) {
  for (const std::string& name : state.groups.Expired(now)) {
    DropGroup(state, name,
              fmt::format("given up: it has had no member for {:g} s (limits.group_idle_ms)",
                          std::chrono::duration<double>(state.options.group_idle).count()),
              lock);
  }
}

void DropFollower(DaemonState& state, const std::string& name, StateLock& lock) {
  const std::string& address = state.groups.Find(name)->join.address;
  DropRecord(state, name, fmt::format("left its coordinator at {}", address), lock);
  WireLock::Events events;
  state.wire_lock.Release(name, &events);
  for (auto& [other, event] : events) lock.Post(other, std::move(event));
}

// ---- members ----

namespace {

constexpr char kDied[] = "its process died";

// Loses an admitted member whose process has ended.
void LoseDead(DaemonState& state, MemberId member) {
  StateLock lock(&state.mutex, StateLock::Order::kAhead);
  MemberRecord* const found = state.members.Find(member);
  if (found != nullptr) LoseMember(state, found, kDied, LeaseEnded(kDied), lock);
}

void Admit(DaemonState& state, MemberRecord record, GroupEvent attached, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  const MemberId member = record.id;
  record.incarnation = state.groups.Of(record)->machine->incarnation();
  MemberRecord& m = *state.members.Add(std::move(record));
  if (!m.peer.identity.empty()) {
    LogInfo("group {}: member {} attaches as {}", m.group, member.value(), m.peer.identity);
  }
  // P8: if a killed process has a forked child that keeps the socket, no end of stream comes.
  if (m.peer.credentials.has_value() && m.peer.credentials->pid != 0) {
    absl::StatusOr<WatchHandle> watch =
        state.processes.Watch(*m.peer.credentials, [&state, member] { LoseDead(state, member); });
    if (watch.ok()) {
      m.watch = *watch;
    } else {
      LogWarning("member {}: process can't be watched: {}", member.value(),
                 Message(watch.status()));
    }
  }
  lock.Handle(m.group, std::move(attached));
}

// Called when a member on that GPU has left.
void DropUnused(DaemonState& state, GroupRecord* group, int ordinal, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  state.pools.DropUnused(*group, ordinal);
  state.data_plane->GiveUpCommunicators(*group, lock);
}

void EndPooling(DaemonState& state, MemberId member, absl::Status made) {
  StateLock lock(&state.mutex);
  std::optional<PendingAttaches::OfSlots> taken = state.pending.TakeOfSlots(member);
  if (!taken.has_value()) return;  // the rank left, or the daemon drains
  PendingAttaches::OfSlots waited = *std::move(taken);
  GroupRecord* group = state.groups.Find(waited.record.group);
  if (made.ok() && group == nullptr) made = NoGroup(waited.record.group);
  const bool there = group != nullptr && !absl::IsCancelled(made) && !absl::IsNotFound(made);
  if (!made.ok() && there && !waited.record.reads_slots) {
    // This rank can take part without slots.
    LogWarning("group {}: what is being opened goes without broadcasts: {}", waited.record.group,
               Message(made));
    std::get<EngineAttached>(waited.attached).lacks_slots = true;
    made = absl::OkStatus();
  }
  if (made.ok()) made = state.pools.CheckEntering(*group, waited.record);
  if (made.ok()) {
    Admit(state, std::move(waited.record), std::move(waited.attached), lock);
  } else {
    EndWithoutPool(state, std::move(waited.record), std::move(made), lock);
  }
}

// Lets the rank enter once the pool is there, or refuses it.
void AwaitPool(DaemonState& state, MemberRecord record, const GroupRecord& group,
               GroupEvent attached) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  REFITD_CHECK(record.engine && record.ordinal.has_value());
  const MemberId member = record.id;
  const int ordinal = *record.ordinal;
  state.regions_thread->Submit(
      [&state, member, missing = StagingPools::Missing{record.group, group.id, ordinal}] {
        EndPooling(state, member, state.pools.MakeNow(missing));
      });
  state.pending.Wait(PendingAttaches::OfSlots{std::move(record), std::move(attached)});
}

}  // namespace

absl::Status LeaseEnded(const std::string& reason) {
  return Error(absl::StatusCode::kAborted, "the lease ended: {}", reason);
}

// ---- entering ----

void EnterGroup(DaemonState& state, MemberRecord record, GroupRecord* group, GroupEvent attached,
                StateLock& lock) {
  REFITD_CHECK(group != nullptr && group->name() == record.group);
  if (absl::Status devices = state.pools.CheckEntering(*group, record); !devices.ok()) {
    return record.End(std::move(devices));
  }
  if (record.reads_slots && record.ordinal.has_value() && group->follower != nullptr) {
    // The coordinator sends how many slots are needed, and how large. The link may not be up yet.
    std::get<EngineAttached>(attached).awaits_slots = true;
    return Admit(state, std::move(record), std::move(attached), lock);
  }
  const bool wants_pool = record.reads_slots || (record.engine && group->wants_pools());
  if (wants_pool && state.pools.MissingOf(record).has_value()) {
    return AwaitPool(state, std::move(record), *group, std::move(attached));
  }
  Admit(state, std::move(record), std::move(attached), lock);
}

void EnterWaiting(DaemonState& state, PendingAttaches::OfGroup waited, StateLock& lock) {
  const std::string& name = waited.record.group;
  GroupRecord* const group = state.groups.Find(name);
  absl::Status status = group == nullptr
                            ? absl::UnavailableError("the coordinator is lost: attach again")
                            : absl::OkStatus();
  if (status.ok() && waited.spec.has_value()) {
    status = CheckSameSpec(name, *waited.spec, group->machine->spec(), state.spec_limits);
  }
  if (!status.ok()) return waited.record.End(std::move(status));
  EnterGroup(state, std::move(waited.record), group, std::move(waited.attached), lock);
}

// The pool may have been made for the rank already, and is then given back.
void EndWithoutPool(DaemonState& state, MemberRecord record, absl::Status status, StateLock& lock) {
  record.End(std::move(status));
  GroupRecord* group = state.groups.Find(record.group);
  if (group == nullptr) return;
  DropUnused(state, group, *record.ordinal, lock);
  lock.Drain();
  group = state.groups.Find(record.group);
  if (group != nullptr && group->coordinator != nullptr) NoteEmptyGroup(state, group, lock);
}

void MakeSlotsFor(DaemonState& state, MemberId id, const GroupRecord& group) {
  const MemberRecord* const member = state.members.Find(id);
  if (member == nullptr || !member->ordinal.has_value()) return;
  state.regions_thread->Submit(
      [&state, id, missing = StagingPools::Missing{group.name(), group.id, *member->ordinal}] {
        SlotsMade made{id, state.pools.MakeNow(missing)};
        StateLock lock(&state.mutex, StateLock::Order::kAhead);
        if (state.groups.Find(missing.group, missing.id) == nullptr) return;
        lock.Handle(missing.group, std::move(made));
      });
}

void SendWelcome(DaemonState& state, GroupRecord* group, MemberRecord* member, StateLock& lock) {
  AuditAttach(state, *member);
  HandOverKept(state, member, lock);
  std::optional<KeptNews> kept;
  if (member->kept.has_value()) {
    kept = KeptNews{member->kept->content, {}};
    for (const KeptRank::Arena& arena : member->kept->arenas) {
      kept->region_bytes.push_back(arena.front.memory.bytes);
    }
  }
  // A follower knows the incarnation once it has joined.
  member->incarnation = group->machine->incarnation();
  const GroupLimits& limits = state.options.group;
  member->sink->Send(WelcomeNews{.member = member->id,
                                 .token = member->token,
                                 .incarnation = member->incarnation,
                                 .protocol = member->protocol,
                                 .descriptor_socket = state.options.descriptor_socket,
                                 .inline_bytes = state.options.inline_bytes,
                                 .outstanding_buckets = limits.outstanding_buckets,
                                 .default_duration = limits.default_duration,
                                 .max_duration = limits.max_duration,
                                 .message_bytes = state.options.message_bytes,
                                 .slot_bytes = group->machine->spec().slot_bytes,
                                 .slots = group->machine->spec().slots,
                                 .version = group->machine->version(),
                                 .content = group->machine->content(),
                                 .kept = std::move(kept)});
}

// ---- leases ----

absl::StatusOr<MemberRecord*> Authenticate(DaemonState& state, const Caller& caller, bool engine) {
  REFITD_RETURN_IF_ERROR(AgreedProtocol(caller.protocol, "lease.protocol").status());
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, state.members.OfToken(caller.token, caller.peer));
  if (member->engine != engine) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease: this call is for {}, the lease is of {}",
                 engine ? "an engine rank" : "a trainer rank",
                 member->engine ? "an engine rank" : "a trainer rank");
  }
  // An engine's memory does not belong to an incarnation: its lease outlives a replacement.
  const uint64_t incarnation =
      engine ? member->incarnation : state.groups.Of(*member)->machine->incarnation();
  if (caller.incarnation != incarnation) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease.incarnation: {:x} is not group '{}''s incarnation {:x}", caller.incarnation,
                 member->group, incarnation);
  }
  return member;
}

// ---- going ----

void LoseMember(DaemonState& state, MemberRecord* member, const std::string& reason,
                absl::Status end, StateLock& lock) {
  if (!state.members.Lose(member)) return;
  if (member->engine) KeepArenas(state, member, lock);
  member->End(std::move(end));
  if (member->watch != WatchHandle()) state.processes.Cancel(member->watch);
  // The record may be erased while the event is handled.
  const std::string group = member->group;
  const MemberId id = member->id;
  lock.Handle(group, MemberLost{id, reason});
}

void LoseMembers(DaemonState& state, const std::function<bool(const MemberRecord&)>& wanted,
                 const absl::Status& end, StateLock& lock) {
  std::vector<MemberId> ids;
  for (const auto& [id, member] : state.members.all()) {
    if (wanted(member)) ids.push_back(id);
  }
  for (const MemberId id : ids) {
    MemberRecord* const member = state.members.Find(id);
    if (member != nullptr) LoseMember(state, member, Message(end), end, lock);
  }
}

void EraseMember(DaemonState& state, MemberId member, StateLock& lock) {
  if (!state.members.Contains(member)) return;
  MemberRecord record = state.members.Remove(member);
  if (record.watch != WatchHandle()) state.processes.Cancel(record.watch);
  state.data_plane->Release(member);
  // Unmapping large regions takes long, so it is done after the mutex was released.
  auto regions = std::make_shared<std::map<RegionId, RegionRecord>>(std::move(record.regions));
  auto kept = std::make_shared<std::optional<KeptRank>>(std::move(record.kept));
  lock.Last([regions, kept, on_erased = std::move(record.on_erased)] {
    regions->clear();
    kept->reset();
    for (const std::function<void()>& call : on_erased) call();
  });
  if (GroupRecord* group = state.groups.Find(record.group);
      group != nullptr && record.ordinal.has_value()) {
    DropUnused(state, group, *record.ordinal, lock);
  }
}

}  // namespace refitd
