#include "daemon/node/members.h"

#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "daemon/process/log.h"
#include "proto/protocol.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr char kDied[] = "its process died";

}  // namespace

absl::Status LeaseEnded(const std::string& reason) {
  return Error(absl::StatusCode::kAborted, "the lease ended: {}", reason);
}

// ---- entering ----

void Members::Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Turn& turn) {
  REFITD_CHECK(group != nullptr && group->name() == record.group);
  if (absl::Status devices = device_slots_.CheckEntering(*group, record); !devices.ok()) {
    return record.End(std::move(devices));
  }
  if (record.reads_slots && record.ordinal.has_value() && group->follower != nullptr) {
    // The coordinator tells how many slots are needed, and how large. The link may not be up yet.
    std::get<EngineAttached>(attached).awaits_slots = true;
    return Admit(std::move(record), std::move(attached), turn);
  }
  const bool wants_pool = record.reads_slots || (record.engine && group->wants_pools());
  if (wants_pool && device_slots_.MissingOf(record).has_value()) {
    return AwaitPool(std::move(record), *group, std::move(attached));
  }
  Admit(std::move(record), std::move(attached), turn);
}

void Members::Admit(MemberRecord record, GroupEvent attached, Turn& turn) {
  const MemberId member = record.id;
  record.incarnation = state_.groups.Of(record)->machine->incarnation();
  MemberRecord& m = *state_.leases.Add(std::move(record));
  if (!m.peer.identity.empty()) {
    LogInfo("group {}: member {} attaches as {}", m.group, member.value(), m.peer.identity);
  }
  // P8: if a killed process has a forked child that keeps the socket, no end of stream comes.
  if (m.peer.credentials.has_value() && m.peer.credentials->pid != 0) {
    absl::StatusOr<WatchHandle> watch =
        processes_.Watch(*m.peer.credentials, [this, member] { Died(member); });
    if (watch.ok()) {
      m.watch = *watch;
    } else {
      LogWarning("member {}: process can't be watched: {}", member.value(),
                 Message(watch.status()));
    }
  }
  turn.Handle(m.group, std::move(attached));
}

void Members::AwaitPool(MemberRecord record, const GroupRecord& group, GroupEvent attached) {
  REFITD_CHECK(record.engine && record.ordinal.has_value());
  const MemberId member = record.id;
  const int ordinal = *record.ordinal;
  state_.regions_thread->Submit(
      [this, member, missing = DeviceSlots::Missing{record.group, group.id, ordinal}] {
        EndPooling(member, device_slots_.MakeNow(missing));
      });
  state_.waiters.Wait(Waiters::OfSlots{std::move(record), std::move(attached)});
}

void Members::EndPooling(MemberId member, absl::Status made) {
  Turn turn(state_.turns);
  std::optional<Waiters::OfSlots> taken = state_.waiters.TakeOfSlots(member);
  if (!taken.has_value()) return;  // the rank went away, or the daemon drains
  Waiters::OfSlots waited = *std::move(taken);
  GroupRecord* group = state_.groups.Find(waited.record.group);
  if (made.ok() && group == nullptr) made = NoGroup(waited.record.group);
  const bool there = group != nullptr && !absl::IsCancelled(made) && !absl::IsNotFound(made);
  if (!made.ok() && there && !waited.record.reads_slots) {
    // This rank can take part without slots.
    LogWarning("group {}: what is being opened goes without broadcasts: {}", waited.record.group,
               Message(made));
    std::get<EngineAttached>(waited.attached).lacks_slots = true;
    made = absl::OkStatus();
  }
  if (made.ok()) made = device_slots_.CheckEntering(*group, waited.record);
  if (made.ok()) {
    Admit(std::move(waited.record), std::move(waited.attached), turn);
  } else {
    EndWithoutPool(std::move(waited.record), std::move(made), turn);
  }
}

// The pool may have been made for the rank already, and is then given back.
void Members::EndWithoutPool(MemberRecord record, absl::Status status, Turn& turn) {
  record.End(std::move(status));
  GroupRecord* group = state_.groups.Find(record.group);
  if (group == nullptr) return;
  DropUnused(group, *record.ordinal, turn);
  turn.Drain();
  group = state_.groups.Find(record.group);
  if (group != nullptr && group->coordinator != nullptr) life_.NoteEmpty(group, turn);
}

void Members::MakeSlotsFor(MemberId id, const GroupRecord& group) {
  const MemberRecord* const member = state_.leases.Find(id);
  if (member == nullptr || !member->ordinal.has_value()) return;
  state_.regions_thread->Submit(
      [this, id, missing = DeviceSlots::Missing{group.name(), group.id, *member->ordinal}] {
        SlotsMade made{id, device_slots_.MakeNow(missing)};
        Turn turn(state_.turns, Turn::Order::kAhead);
        if (state_.groups.Find(missing.group, missing.id) == nullptr) return;
        turn.Handle(missing.group, std::move(made));
      });
}

void Members::Welcome(GroupRecord* group, MemberRecord* member) {
  identities_.AuditAttach(*member);
  // A follower knows the incarnation once it has joined.
  member->incarnation = group->machine->incarnation();
  const GroupLimits& limits = state_.options.group;
  member->sink->Send(WelcomeNews{.member = member->id,
                                 .token = member->token,
                                 .incarnation = member->incarnation,
                                 .protocol = member->protocol,
                                 .descriptor_socket = state_.options.descriptor_socket,
                                 .inline_bytes = state_.options.inline_bytes,
                                 .outstanding_buckets = limits.outstanding_buckets,
                                 .default_duration = limits.default_duration,
                                 .max_duration = limits.max_duration,
                                 .message_bytes = state_.options.message_bytes,
                                 .slot_bytes = group->machine->spec().slot_bytes,
                                 .slots = group->machine->spec().slots,
                                 .version = group->machine->version()});
}

// ---- leases ----

absl::StatusOr<MemberRecord*> Members::Authenticate(const Caller& caller, bool engine) {
  REFITD_RETURN_IF_ERROR(AgreedProtocol(caller.protocol, "lease.protocol").status());
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                          state_.leases.Authenticate(caller.token, caller.peer));
  if (member->engine != engine) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease: this call is for {}, the lease is of {}",
                 engine ? "an engine rank" : "a trainer rank",
                 member->engine ? "an engine rank" : "a trainer rank");
  }
  // An engine's memory does not belong to an incarnation: its lease outlives a replacement.
  const uint64_t incarnation =
      engine ? member->incarnation : state_.groups.Of(*member)->machine->incarnation();
  if (caller.incarnation != incarnation) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease.incarnation: {:x} is not group '{}''s incarnation {:x}", caller.incarnation,
                 member->group, incarnation);
  }
  return member;
}

void Members::Happened(MemberId member, GroupEvent event) {
  Turn turn(state_.turns, Turn::Order::kAhead);
  const MemberRecord* const found = state_.leases.Find(member);
  if (found != nullptr && !found->lost) turn.Handle(found->group, std::move(event));
}

// ---- going ----

void Members::Died(MemberId member) {
  Turn turn(state_.turns, Turn::Order::kAhead);
  MemberRecord* const found = state_.leases.Find(member);
  if (found != nullptr) Lose(found, kDied, LeaseEnded(kDied), turn);
}

void Members::Lose(MemberRecord* member, const std::string& reason, absl::Status end, Turn& turn) {
  if (!state_.leases.Lose(member)) return;
  member->End(std::move(end));
  if (member->watch != WatchHandle()) processes_.Cancel(member->watch);
  // The record may be erased while the event is handled.
  const std::string group = member->group;
  const MemberId id = member->id;
  turn.Handle(group, MemberLost{id, reason});
}

void Members::Erase(MemberId member, Turn& turn) {
  if (!state_.leases.Contains(member)) return;
  MemberRecord record = state_.leases.Remove(member);
  if (record.watch != WatchHandle()) processes_.Cancel(record.watch);
  data_plane_.Release(member);
  // Unmapping large regions takes long, so it is done after the mutex was released.
  auto regions = std::make_shared<std::map<RegionId, RegionRecord>>(state_.memory.TakeAll(&record));
  turn.Last([regions] { regions->clear(); });
  if (GroupRecord* group = state_.groups.Find(record.group);
      group != nullptr && record.ordinal.has_value()) {
    DropUnused(group, *record.ordinal, turn);
  }
}

void Members::DropUnused(GroupRecord* group, int ordinal, Turn& turn) {
  device_slots_.DropUnused(group, ordinal);
  data_plane_.GiveUpCommunicators(*group, turn);
}

}  // namespace refitd
