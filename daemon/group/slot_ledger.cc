#include "daemon/group/slot_ledger.h"

#include <algorithm>
#include <set>

#include "transport/base/status.h"

namespace refitd {
namespace {

absl::Status NoSuchGrant(SlotGrant grant) {
  return Error(absl::StatusCode::kNotFound, "no grant {} of slot {}", grant.grant, grant.slot);
}

}  // namespace

std::string_view SlotStateName(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kLeased:
      return "leased";
    case SlotState::kFilling:
      return "filling";
    case SlotState::kReading:
      return "reading";
  }
  return "unknown";
}

SlotLedger::SlotLedger(int slots) : slots_(std::max(slots, 0)) {}

int SlotLedger::LeasableBy(int pushers) const {
  return slots_.empty() ? 0 : (slots() - 1) / std::max(pushers, 1);
}

std::optional<SlotGrant> SlotLedger::Grant() { return Take(SlotState::kFilling); }

absl::StatusOr<SlotGrant> SlotLedger::Lease(MemberId holder, int limit, TimePoint expires) {
  int leased = 0;
  int unpublished = 0;
  for (const Slot& slot : slots_) {
    if (slot.holder != holder) continue;
    if (slot.state == SlotState::kLeased) ++leased;
    if (slot.state == SlotState::kLeased || slot.state == SlotState::kFilling) ++unpublished;
  }
  if (leased >= limit) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "member {} holds {} leased slots; at most {} of {} slots may be leased by one "
                 "pusher",
                 holder, leased, limit, slots());
  }
  if (unpublished >= limit) {
    return Error(absl::StatusCode::kUnavailable,
                 "{} submitted slots of member {} are not delivered yet", unpublished - leased,
                 holder);
  }
  if (free() <= 1) {
    return Error(absl::StatusCode::kUnavailable,
                 "{} of {} slots are free; the last one is kept for staging", free(), slots());
  }
  const SlotGrant grant = *Take(SlotState::kLeased);
  Slot& slot = slots_[grant.slot.value()];
  slot.holder = holder;
  slot.expires = expires;
  return grant;
}

absl::Status SlotLedger::Submit(MemberId holder, SlotGrant grant) {
  Slot* slot = Find(grant);
  if (slot == nullptr || slot->state != SlotState::kLeased || slot->holder != holder) {
    return Error(absl::StatusCode::kNotFound, "member {} holds no lease {} of slot {}", holder,
                 grant.grant, grant.slot);
  }
  slot->state = SlotState::kFilling;
  return absl::OkStatus();
}

absl::Status SlotLedger::Release(SlotGrant grant) {
  Slot* slot = Find(grant);
  if (slot == nullptr) return NoSuchGrant(grant);
  if (slot->state == SlotState::kReading) {
    return Error(absl::StatusCode::kNotFound,
                 "grant {} of slot {} is being read: it ends with its last reader", grant.grant,
                 grant.slot);
  }
  *slot = Slot();
  return absl::OkStatus();
}

absl::Status SlotLedger::ReleaseLease(MemberId holder, SlotGrant grant) {
  Slot* slot = Find(grant);
  if (slot == nullptr || slot->state != SlotState::kLeased || slot->holder != holder) {
    return Error(absl::StatusCode::kNotFound, "member {} holds no lease {} of slot {}", holder,
                 grant.grant, grant.slot);
  }
  *slot = Slot();
  return absl::OkStatus();
}

void SlotLedger::Publish(SlotGrant grant, const std::set<MemberId>& readers) {
  Slot* slot = Find(grant);
  REFITD_CHECK(slot != nullptr && slot->state == SlotState::kFilling);
  if (readers.empty()) {
    *slot = Slot();
    return;
  }
  slot->state = SlotState::kReading;
  slot->holder = MemberId();
  slot->readers = readers;
}

bool SlotLedger::ReaderDone(SlotGrant grant, MemberId reader) {
  Slot* slot = Find(grant);
  if (slot == nullptr) return false;
  return EndReading(slot, reader);
}

bool SlotLedger::Forget(MemberId member) {
  bool freed = false;
  for (Slot& slot : slots_) {
    if (slot.state == SlotState::kLeased && slot.holder == member) {
      slot = Slot();
      freed = true;
    } else if (EndReading(&slot, member)) {
      freed = true;
    }
  }
  return freed;
}

std::vector<std::pair<MemberId, SlotGrant>> SlotLedger::TakeOverdue(TimePoint now) {
  std::vector<std::pair<MemberId, SlotGrant>> overdue;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.state != SlotState::kLeased || slot.expires > now) continue;
    overdue.emplace_back(slot.holder, SlotGrant{SlotIndex(static_cast<uint32_t>(i)), slot.grant});
    slot.expires = TimePoint::max();
  }
  return overdue;
}

void SlotLedger::EndLimits() {
  for (Slot& slot : slots_) {
    if (slot.state == SlotState::kLeased) slot.expires = TimePoint::max();
  }
}

std::optional<TimePoint> SlotLedger::NextExpiry() const {
  std::optional<TimePoint> next;
  for (const Slot& slot : slots_) {
    if (slot.state != SlotState::kLeased || slot.expires == TimePoint::max()) continue;
    if (!next.has_value() || slot.expires < *next) next = slot.expires;
  }
  return next;
}

int SlotLedger::free() const {
  return static_cast<int>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state == SlotState::kFree;
  }));
}

std::optional<SlotGrant> SlotLedger::Take(SlotState state) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state != SlotState::kFree) continue;
    slots_[i].state = state;
    slots_[i].grant = GrantId(next_grant_++);
    return SlotGrant{SlotIndex(static_cast<uint32_t>(i)), slots_[i].grant};
  }
  return std::nullopt;
}

SlotLedger::Slot* SlotLedger::Find(SlotGrant grant) {
  if (grant.slot.value() >= slots_.size()) return nullptr;
  Slot& slot = slots_[grant.slot.value()];
  return slot.state != SlotState::kFree && slot.grant == grant.grant ? &slot : nullptr;
}

void SlotLedger::CheckInvariants() const {
  std::set<GrantId> grants;
  for (const Slot& slot : slots_) {
    if (slot.state == SlotState::kFree) {
      REFITD_CHECK(slot.grant == GrantId() && slot.holder == MemberId() && slot.readers.empty());
      continue;
    }
    REFITD_CHECK(slot.grant.value() > 0 && slot.grant.value() < next_grant_);
    REFITD_CHECK(grants.insert(slot.grant).second);
    REFITD_CHECK((slot.state == SlotState::kReading) == !slot.readers.empty());
    if (slot.state == SlotState::kLeased) REFITD_CHECK(slot.holder != MemberId());
    if (slot.state == SlotState::kReading) REFITD_CHECK(slot.holder == MemberId());
  }
}

bool SlotLedger::EndReading(Slot* slot, MemberId reader) {
  if (slot->state != SlotState::kReading || slot->readers.erase(reader) == 0) return false;
  if (!slot->readers.empty()) return false;
  *slot = Slot();
  return true;
}

}  // namespace refitd
