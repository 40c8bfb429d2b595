// A group's staging slots: who holds which, which trainer ranks wait for one, and which staged
// ranks may still read one. The ledger says which slot may be granted; this class knows members,
// calls and deadlines.
//
// It keeps P4 (every wait for a slot has a deadline, and its error names the holders) and P6 (a
// slot is granted anew only when its last reader is done with it). Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_SLOTS_H_
#define REFITD_DAEMON_GROUP_SLOTS_H_

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/requests.h"
#include "daemon/group/slot_ledger.h"

namespace refitd::group {

class Slots {
 public:
  Slots(const GroupLimits& limits, const Membership* members, Requests* requests, Outbox* out)
      : limits_(limits),
        members_(*members),
        requests_(*requests),
        out_(*out),
        ledger_(members_.spec().slots) {}

  // How many slots a trainer rank may hold unsubmitted.
  int leasable() const { return ledger_.LeasableBy(members_.spec().trainer_ranks); }
  int free() const { return ledger_.free(); }
  std::optional<SlotGrant> Grant() { return ledger_.Grant(); }
  // The rank's bucket is in the slot that it leased.
  absl::Status Submit(MemberId holder, SlotGrant slot) { return ledger_.Submit(holder, slot); }
  // Whether that grant of the slot is the daemon's own, and not published yet.
  bool IsStaging(SlotGrant slot) const {
    const SlotLedger::Slot& known = ledger_.slot(slot.slot);
    return known.state == SlotState::kFilling && known.grant == slot.grant;
  }
  void Release(SlotGrant slot) { (void)ledger_.Release(slot); }

  // ---- trainer ranks that wait for a slot ----

  // A rank that would hold more slots than it may is refused. `early`: how many slots the rank has
  // in buckets that wait for its `next_seq`: it would otherwise wait for slots that it holds
  // itself. `latest`: the end of the update.
  void Wait(const LeaseSlotEvent& e, int64_t early, int64_t next_seq, TimePoint latest);
  // Leases slots to those who wait, in their order.
  void Serve(TimePoint latest);
  void GiveBack(const ReleaseSlotEvent& e);
  bool anyone_waits() const { return !waiters_.empty(); }
  // The caller went away. False: the call does not wait here.
  bool Leave(CallId call, const absl::Status& why);
  void RefuseWaiting(MemberId member, const absl::Status& why);
  void RefuseAll(const absl::Status& why);
  void RefuseOverdue();
  // Leases whose time is up, each returned once; EndLimits: no lease has a time limit any more.
  std::vector<std::pair<MemberId, SlotGrant>> TakeOverdue() {
    return ledger_.TakeOverdue(out_.now());
  }
  void EndLimits() { ledger_.EndLimits(); }
  // When the next wait or lease is over; nullopt: none has a limit.
  std::optional<TimePoint> NextDeadline() const;

  // ---- readers ----

  // Hands the slot of a part to readers; without readers the slot is free at once.
  void Publish(SlotGrant slot, UpdateId update, PartSeq part, const std::set<MemberId>& readers);
  // False: the member reads no such part.
  bool Acknowledge(const AckEvent& e);
  // The member reads no slot any more.
  void EndReads(MemberId member);
  // The member is lost: its leases are released and its reads end.
  void Forget(MemberId member);

  std::vector<SlotView> View() const;
  // Who holds the slots, for messages.
  std::string Holders() const;
  Failure SuspectHolders() const;
  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  // A LeaseSlot call that waits until a slot is free.
  struct Waiter {
    CallId call;
    MemberId member;
    TimePoint deadline;
  };
  int LeasesOf(MemberId member) const;
  bool TryLease(const Waiter& waiter, TimePoint latest);
  std::string HolderOf(SlotIndex index) const;

  const GroupLimits& limits_;
  const Membership& members_;
  Requests& requests_;
  Outbox& out_;
  SlotLedger ledger_;
  std::deque<Waiter> waiters_;
  std::map<MemberId, std::map<std::pair<UpdateId, PartSeq>, SlotGrant>> reads_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_SLOTS_H_
