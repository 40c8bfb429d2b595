// The invariants of a group, after every event. CheckState is always on; CheckInvariants costs as
// much as the group has members, calls and parts, and is for tests, simulation and fuzzing.
#include <algorithm>

#include "daemon/group/group_impl.h"

namespace refitd {
namespace {

// Whether the state lies between Prepare and the outcome.
bool InUpdate(MemberState state) {
  return state == MemberState::kPreparing || state == MemberState::kReady;
}

bool InUpdate(InstanceState state) {
  return state == InstanceState::kCleanPreparing || state == InstanceState::kDirtyPreparing ||
         state == InstanceState::kCleanReady || state == InstanceState::kDirtyReady;
}

// Whether every rank has answered Ready and the outcome is not decided yet.
bool HasData(UpdateState state) {
  return state == UpdateState::kData || state == UpdateState::kSettling ||
         state == UpdateState::kVerifying;
}

}  // namespace

void Group::Impl::CheckState() const {
  // P3: one update at a time.
  const bool updating = state == GroupState::kUpdating || state == GroupState::kDraining;
  REFITD_CHECK(updating == (update != nullptr));
  REFITD_CHECK(past.size() <= kRememberedUpdates);
  if (update == nullptr) return;
  REFITD_CHECK(update->state != UpdateState::kCommitted && update->state != UpdateState::kAborted);
  // P3: versions grow; a fill installs the group's own.
  REFITD_CHECK(!version.has_value() || *version < update->version ||
               (CatchUpRuns() && *version == update->version));
  REFITD_CHECK(update->in_flight >= 0 && update->first_part >= 0);
  REFITD_CHECK(update->first_part <= update->next_start);
  REFITD_CHECK(update->next_start <= update->end_part());
  REFITD_CHECK(update->evicted.size() == update->participants.size() ||
               update->participants.empty());
}

void Group::Impl::CheckInvariants() const {
  CheckState();
  ledger.CheckInvariants();
  CheckMembers();
  CheckInstances();
  CheckRequests();
  CheckSlots();
  CheckCatchUp();
  if (update == nullptr) return;
  CheckParticipants();
  CheckParts();
  CheckPushed();
}

void Group::Impl::CheckMembers() const {
  size_t trainer_ranks = 0;
  for (const auto& [id, member] : members) {
    REFITD_CHECK(member.id == id && id != MemberId());
    REFITD_CHECK(member.rank >= 0 && member.rank < member.world_size);
    REFITD_CHECK(member.touching >= 0);
    REFITD_CHECK(!InUpdate(member.state) || update != nullptr);
    REFITD_CHECK(member.state != MemberState::kGone);
    if (member.state == MemberState::kLeaving) {
      // P6: a record outlives its lease only while copies touch the member's memory.
      REFITD_CHECK(member.touching > 0 && member.reads.empty());
    } else if (member.engine) {
      const auto instance = instances.find(member.instance);
      REFITD_CHECK(instance != instances.end());
      const auto rank = instance->second.ranks.find(member.rank);
      REFITD_CHECK(rank != instance->second.ranks.end() && rank->second == id);
    } else {
      const auto rank = trainers.find(member.rank);
      REFITD_CHECK(rank != trainers.end() && rank->second == id);
      REFITD_CHECK(member.world_size == spec.trainer_ranks && member.reads.empty());
      ++trainer_ranks;
    }
  }
  REFITD_CHECK(trainer_ranks == trainers.size());
}

void Group::Impl::CheckInstances() const {
  for (const auto& [instance_name, instance] : instances) {
    REFITD_CHECK(instance.name == instance_name && instance.state != InstanceState::kGone);
    REFITD_CHECK(!instance.ranks.empty());
    REFITD_CHECK(static_cast<int>(instance.ranks.size()) <= instance.world_size);
    for (const auto& [rank, id] : instance.ranks) {
      const Member* const member = Find(id);
      REFITD_CHECK(member != nullptr && member->state != MemberState::kLeaving);
      REFITD_CHECK(member->engine && member->instance == instance_name && member->rank == rank);
    }
    const bool forming =
        instance.state == InstanceState::kForming || instance.state == InstanceState::kFormingDirty;
    REFITD_CHECK(forming != Complete(instance));
    REFITD_CHECK(!InUpdate(instance.state) || update != nullptr);
    // P2: a dirty instance has no version, and says why.
    if (group::IsDirty(instance.state)) {
      REFITD_CHECK(!VersionOf(instance).has_value() && !instance.reason.empty());
    }
  }
}

// P3, P4: every call waits with one unanswered request, and every request's record is the one that
// its id finds.
void Group::Impl::CheckRequests() const {
  size_t calls = 0;
  for (const auto& [first, request] : unfinished) {
    REFITD_CHECK(request->first_call == first && !request->finished);
    for (const CallId call : request->calls) {
      const auto waits = pending.find(call);
      REFITD_CHECK(waits != pending.end() && waits->second == request);
    }
    calls += request->calls.size();
  }
  REFITD_CHECK(calls == pending.size());
  for (const SlotWaiter& waiter : slot_waiters) {
    REFITD_CHECK(update != nullptr && !pending.contains(waiter.call));
    // The loss of a trainer rank gives the update up, whose end answers the call.
    const Member* const member = Find(waiter.member);
    REFITD_CHECK(member != nullptr ? !member->engine : update->state == UpdateState::kEnding);
  }
}

// P6: the ledger's readers are the members that may still read, each under the ledger's grant.
void Group::Impl::CheckSlots() const {
  size_t readers = 0;
  for (int i = 0; i < ledger.slots(); ++i) {
    const SlotLedger::Slot& slot = ledger.slot(SlotIndex(static_cast<uint32_t>(i)));
    readers += slot.readers.size();
    if (slot.state != SlotState::kLeased) continue;
    const Member* const holder = Find(slot.holder);
    REFITD_CHECK(holder != nullptr && !holder->engine);
  }
  size_t reads = 0;
  for (const auto& [id, member] : members) {
    for (const auto& [part, grant] : member.reads) {
      const SlotLedger::Slot& slot = ledger.slot(grant.slot);
      REFITD_CHECK(slot.state == SlotState::kReading && slot.grant == grant.grant);
      REFITD_CHECK(slot.readers.contains(id));
    }
    reads += member.reads.size();
  }
  REFITD_CHECK(reads == readers);
}

void Group::Impl::CheckParticipants() const {
  const Update& u = *update;
  REFITD_CHECK(std::is_sorted(u.nodes.begin(), u.nodes.end()));
  if (!u.participants.empty()) REFITD_CHECK(u.catalog != nullptr);
  for (size_t i = 0; i < u.participants.size(); ++i) {
    const Participant& participant = u.participants[i];
    REFITD_CHECK(u.evicted[i] == participant.evicted);
    REFITD_CHECK(participant.touching >= 0 && participant.unready <= participant.members.size());
    REFITD_CHECK(!participant.ready || participant.unready == 0);
    for (const MemberId member : participant.members) {
      const auto of = u.participant_of.find(member);
      REFITD_CHECK(of != u.participant_of.end() && of->second == i);
    }
    if (participant.evicted || !HasData(u.state)) continue;
    // P1: only ranks that are ready, and attached, are still in.
    REFITD_CHECK(participant.ready);
    const auto instance = instances.find(participant.instance);
    REFITD_CHECK(instance != instances.end() && InUpdate(instance->second.state));
    // P2: dirty from the first byte on.
    if (participant.written) REFITD_CHECK(group::IsDirty(instance->second.state));
  }
  for (const auto& [id, reader] : u.readers) {
    REFITD_CHECK(reader.participant < u.participants.size());
    REFITD_CHECK(!u.participants[reader.participant].evicted);
    REFITD_CHECK(std::is_sorted(reader.outstanding.begin(), reader.outstanding.end(),
                                [](const auto& a, const auto& b) { return a.part < b.part; }));
  }
  for (const auto& [rank, progress] : u.trainers) {
    REFITD_CHECK(rank >= 0 && progress.pending_buckets >= 0);
    REFITD_CHECK(progress.early.empty() || progress.early.begin()->first > progress.next_seq);
  }
  // P1: nothing is settled before every trainer rank has committed.
  if (!CatchUpRuns() && (u.state == UpdateState::kSettling || u.state == UpdateState::kVerifying)) {
    REFITD_CHECK(static_cast<int>(u.trainers.size()) == spec.trainer_ranks);
    for (const auto& [rank, progress] : u.trainers) REFITD_CHECK(progress.committed);
  }
}

void Group::Impl::CheckParts() const {
  const Update& u = *update;
  int64_t running = 0;
  for (size_t i = 0; i < u.parts.size(); ++i) {
    const Part& part = u.parts[i];
    REFITD_CHECK(part.seq.value() == u.first_part + static_cast<int64_t>(i));
    REFITD_CHECK(part.bucket != nullptr && part.content != nullptr);
    // P7: parts are started in their order.
    if (part.started) REFITD_CHECK(part.seq.value() < u.next_start);
    REFITD_CHECK(part.started || !part.done);
    if (part.started && !part.done) ++running;
  }
  REFITD_CHECK(running <= u.in_flight);
  for (const SlotGrant& grant : u.program_slots) {
    const SlotLedger::Slot& slot = ledger.slot(grant.slot);
    REFITD_CHECK(slot.state == SlotState::kFilling && slot.grant == grant.grant);
  }
}

void Group::Impl::CheckPushed() const {
  int64_t incomplete = 0;
  int64_t wanted = 0;
  for (const auto& [tensor_name, tensor] : update->pushed) {
    REFITD_CHECK(tensor.covered.total() <= tensor.elements);
    if (!tensor.complete()) ++incomplete;
    if (tensor.wanted) ++wanted;
  }
  REFITD_CHECK(incomplete == update->pushed_incomplete && wanted == update->pushed_wanted);
}

// ---- Group ----

void Group::CheckInvariants() const { impl_->CheckInvariants(); }

}  // namespace refitd
