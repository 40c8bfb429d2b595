#include "daemon/group/slots.h"

#include <algorithm>

#include "transport/base/errors.h"

namespace refitd::group {

// ---- trainer ranks that wait for a slot ----

int Slots::LeasesOf(MemberId member) const {
  int leases = 0;
  for (int i = 0; i < ledger_.slots(); ++i) {
    const SlotLedger::Slot& slot = ledger_.slot(SlotIndex(static_cast<uint32_t>(i)));
    if (slot.state == SlotState::kLeased && slot.holder == member) ++leases;
  }
  return leases;
}

void Slots::Wait(const LeaseSlotEvent& e, int64_t early, int64_t next_seq, TimePoint latest) {
  const int held = LeasesOf(e.member);
  const auto waiting = std::count_if(waiters_.begin(), waiters_.end(),
                                     [&e](const Waiter& w) { return w.member == e.member; });
  if (held + waiting + early >= leasable()) {
    out_.Refuse(
        e.call,
        Error(absl::StatusCode::kResourceExhausted,
              "{} holds {} leased slots, waits for {}, and has {} in buckets that wait for its "
              "seq {}; each of {} trainer ranks may hold {} of the group's {} slots",
              members_.Label(e.member), held, waiting, early, next_seq,
              members_.spec().trainer_ranks, leasable(), ledger_.slots()));
    return;
  }
  const TimePoint deadline = e.wait == Duration(0) ? latest : std::min(out_.now() + e.wait, latest);
  waiters_.push_back({e.call, e.member, deadline});
}

bool Slots::TryLease(const Waiter& waiter, TimePoint latest) {
  const TimePoint expires = std::min(out_.now() + limits_.grant_limit, latest);
  const absl::StatusOr<SlotGrant> grant = ledger_.Lease(waiter.member, leasable(), expires);
  if (!grant.ok() && grant.status().code() == absl::StatusCode::kUnavailable) return false;
  requests_.NoteCall();
  if (!grant.ok()) {
    out_.Refuse(waiter.call, grant.status());
    return true;
  }
  out_.Do(Reply{waiter.call, absl::OkStatus(),
                LeaseSlotReply{*grant, expires - out_.now(), members_.spec().slot_bytes}});
  out_.Changed();
  return true;
}

void Slots::Serve(TimePoint latest) {
  std::erase_if(waiters_, [this, latest](const Waiter& w) { return TryLease(w, latest); });
}

void Slots::GiveBack(const ReleaseSlotEvent& e) {
  out_.Do(Reply{e.call, ledger_.ReleaseLease(e.member, e.grant), EmptyReply{}});
  out_.Changed();
}

bool Slots::Leave(CallId call, const absl::Status& why) {
  if (std::erase_if(waiters_, [call](const Waiter& w) { return w.call == call; }) == 0) {
    return false;
  }
  out_.Refuse(call, why);
  requests_.NoteCall();
  return true;
}

void Slots::RefuseWaiting(MemberId member, const absl::Status& why) {
  std::erase_if(waiters_, [&](const Waiter& waiter) {
    if (waiter.member != member) return false;
    out_.Refuse(waiter.call, why);
    return true;
  });
}

void Slots::RefuseAll(const absl::Status& why) {
  for (const Waiter& waiter : std::exchange(waiters_, {})) out_.Refuse(waiter.call, why);
}

void Slots::RefuseOverdue() {
  std::erase_if(waiters_, [this](const Waiter& waiter) {
    if (waiter.deadline > out_.now()) return false;
    out_.Refuse(waiter.call, WithFailure(Error(absl::StatusCode::kDeadlineExceeded,
                                               "no slot came free: {}", Holders()),
                                         SuspectHolders()));
    requests_.NoteCall();
    return true;
  });
}

std::optional<TimePoint> Slots::NextDeadline() const {
  std::optional<TimePoint> next = ledger_.NextExpiry();
  for (const Waiter& waiter : waiters_) {
    if (!next.has_value() || waiter.deadline < *next) next = waiter.deadline;
  }
  return next;
}

// ---- readers ----

void Slots::Publish(SlotGrant slot, UpdateId update, PartSeq part,
                    const std::set<MemberId>& readers) {
  for (const MemberId reader : readers) reads_[reader][{update, part}] = slot;
  ledger_.Publish(slot, readers);
}

bool Slots::Acknowledge(const AckEvent& e) {
  const auto reads = reads_.find(e.member);
  if (reads == reads_.end()) return false;
  const auto read = reads->second.find({e.update, e.part});
  if (read == reads->second.end()) return false;
  ledger_.ReaderDone(read->second, e.member);
  reads->second.erase(read);
  return true;
}

void Slots::EndReads(MemberId member) {
  const auto reads = reads_.find(member);
  if (reads == reads_.end()) return;
  for (const auto& [part, slot] : reads->second) ledger_.ReaderDone(slot, member);
  reads_.erase(reads);
}

void Slots::Forget(MemberId member) {
  ledger_.Forget(member);
  reads_.erase(member);
}

// ---- what status shows ----

std::vector<SlotView> Slots::View() const {
  std::vector<SlotView> view;
  for (int i = 0; i < ledger_.slots(); ++i) {
    const SlotIndex index(static_cast<uint32_t>(i));
    view.push_back({index, ledger_.slot(index).state, HolderOf(index)});
  }
  return view;
}

std::string Slots::HolderOf(SlotIndex index) const {
  const SlotLedger::Slot& slot = ledger_.slot(index);
  switch (slot.state) {
    case SlotState::kFree:
      return "";
    case SlotState::kLeased:
      return members_.Label(slot.holder);
    case SlotState::kFilling:
      return "the update";
    case SlotState::kReading:
      break;
  }
  std::vector<std::string> readers;
  for (const MemberId reader : slot.readers) readers.push_back(members_.Label(reader));
  return Few(readers);
}

std::string Slots::Holders() const {
  std::vector<std::string> holders;
  for (const SlotView& slot : View()) {
    holders.push_back(fmt::format("slot {} {}{}", slot.slot, SlotStateName(slot.state),
                                  slot.state == SlotState::kFree ? "" : " by " + slot.holder));
  }
  return Few(holders);
}

// The members that Holders names.
Failure Slots::SuspectHolders() const {
  Failure failure;
  failure.may_be_retried = true;
  const auto suspect = [&](MemberId id) {
    if (const Member* member = members_.Find(id); member != nullptr) {
      failure.Add(SuspectOf(*member));
    }
  };
  for (int i = 0; i < ledger_.slots(); ++i) {
    const SlotLedger::Slot& slot = ledger_.slot(SlotIndex(static_cast<uint32_t>(i)));
    if (slot.state == SlotState::kLeased) suspect(slot.holder);
    for (const MemberId reader : slot.readers) suspect(reader);
  }
  return failure;
}

// P6: the ledger's readers are the members that may still read, each under the ledger's grant.
void Slots::CheckInvariants() const {
  ledger_.CheckInvariants();
  size_t readers = 0;
  for (int i = 0; i < ledger_.slots(); ++i) {
    const SlotLedger::Slot& slot = ledger_.slot(SlotIndex(static_cast<uint32_t>(i)));
    readers += slot.readers.size();
    if (slot.state != SlotState::kLeased) continue;
    const Member* const holder = members_.Find(slot.holder);
    REFITD_CHECK(holder != nullptr && !holder->engine);
  }
  size_t reads = 0;
  for (const auto& [id, parts] : reads_) {
    const Member* const reader = members_.Find(id);
    REFITD_CHECK(reader != nullptr && reader->engine && reader->state != MemberState::kLeaving);
    for (const auto& [part, grant] : parts) {
      const SlotLedger::Slot& slot = ledger_.slot(grant.slot);
      REFITD_CHECK(slot.state == SlotState::kReading && slot.grant == grant.grant);
      REFITD_CHECK(slot.readers.contains(id));
    }
    reads += parts.size();
  }
  REFITD_CHECK(reads == readers);
  for (const Waiter& waiter : waiters_) {
    REFITD_CHECK(!requests_.waiting().contains(waiter.call));
    const Member* const member = members_.Find(waiter.member);
    REFITD_CHECK(member == nullptr || !member->engine);
  }
}

}  // namespace refitd::group
