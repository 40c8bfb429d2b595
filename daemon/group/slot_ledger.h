// The ledger of a group's staging slots: who holds which slot. Pure; the memory itself belongs to
// the transport.
//
// Grants are made in the order of the requests (bucket order); a slot is busy until its last reader
// released it. A pusher may hold at most (slots-1)/pushers leased slots, so that at least one slot
// can always serve the bucket whose turn it is: no order of pushes, slow readers and deaths leads
// to a deadlock (property test).
//
//   state     Free --Grant--> Filling --Publish(n>0 readers)--> Reading --last ReaderDone--> Free
//                                     --Publish(0) / Release --> Free
//             Free --Lease--> Leased --Submit--> Filling;  Leased --Release (given back, holder
//             died)--> Free
//
// Not thread-safe: lives inside its group's state machine.
#ifndef REFITD_DAEMON_GROUP_SLOT_LEDGER_H_
#define REFITD_DAEMON_GROUP_SLOT_LEDGER_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"

namespace refitd {

enum class SlotState : uint8_t { kFree, kLeased, kFilling, kReading };
std::string_view SlotStateName(SlotState state);

struct SlotGrant {
  SlotIndex slot;
  GrantId grant;
  bool operator==(const SlotGrant&) const = default;
};

class SlotLedger {
 public:
  explicit SlotLedger(int slots);

  // How many slots one of `pushers` may lease at a time; may be 0.
  int LeasableBy(int pushers) const;

  // Grants a slot for the daemon's own staging. nullopt: no slot is free now.
  std::optional<SlotGrant> Grant();
  // Leases a slot to a pusher. RESOURCE_EXHAUSTED: the pusher holds `limit` leases already, or
  // limit is 0. UNAVAILABLE: no slot may be leased now, wait. The reason is that the last free slot
  // is kept for staging, or that the pusher's leases and its submitted, unpublished slots together
  // are `limit`: without that rule, buckets submitted ahead of their turn could take every slot
  // from the pusher whose turn it is.
  absl::StatusOr<SlotGrant> Lease(MemberId holder, int limit, TimePoint expires);
  // Notes that the bucket in the leased slot came. NOT_FOUND: this holder has no such lease.
  absl::Status Submit(MemberId holder, SlotGrant grant);
  // Gives a leased or filling slot back. NOT_FOUND: no such grant (holder is checked for leased
  // ones).
  absl::Status Release(SlotGrant grant);
  absl::Status ReleaseLease(MemberId holder, SlotGrant grant);
  // Hands a filled slot to readers; without readers the slot is free at once. The grant must be
  // Filling.
  void Publish(SlotGrant grant, const std::set<MemberId>& readers);
  // Notes that a reader is done; true if that freed the slot. Unknown grants and readers are
  // ignored (late acknowledgements).
  bool ReaderDone(SlotGrant grant, MemberId reader);

  // Forgets a member that died: its leases are released and its readings end; a slot that it
  // submitted stays with the bucket. Returns whether any slot came free.
  bool Forget(MemberId member);
  // Leases whose time is up, each returned once. The holder keeps the lease, because a late packer
  // must not write into a slot that was granted to another.
  std::vector<std::pair<MemberId, SlotGrant>> TakeOverdue(TimePoint now);
  // Removes the time limit of all current leases: they stay, and are never overdue.
  void EndLimits();
  // The time at which the next lease is overdue; nullopt: no lease has a time limit.
  std::optional<TimePoint> NextExpiry() const;

  int slots() const { return static_cast<int>(slots_.size()); }
  int free() const;
  struct Slot {
    SlotState state = SlotState::kFree;
    GrantId grant;
    MemberId holder;  // who leased the slot, until it is published
    TimePoint expires;
    std::set<MemberId> readers;
  };
  const Slot& slot(SlotIndex index) const { return slots_[index.value()]; }

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  // Takes the first free slot into `state`, under a new grant.
  std::optional<SlotGrant> Take(SlotState state);
  // Finds the granted slot; null if that grant of the slot has ended or never existed.
  Slot* Find(SlotGrant grant);
  // Ends a reader's reading; returns whether that freed the slot.
  static bool EndReading(Slot* slot, MemberId reader);

  std::vector<Slot> slots_;
  uint64_t next_grant_ = 1;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_SLOT_LEDGER_H_
