// Members that have come and are not admitted yet: those that wait for their group, and engine
// ranks that wait for staging slots on their GPU.
//
// Invariants
//  1. A member waits once, and has no token of a lease yet (P9).
//  2. Each member that waits for its group has a deadline (P4). A member that waits for slots hears
//     of them when the driver has made them, or could not.
//  3. Code that takes a member out of here admits the member or ends its stream.
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h).
#ifndef REFITD_DAEMON_NODE_PENDING_ATTACHES_H_
#define REFITD_DAEMON_NODE_PENDING_ATTACHES_H_

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/machine.h"
#include "daemon/node/member.h"
#include "transport/base/ids.h"

namespace refitd {

class PendingAttaches {
 public:
  // A member that waits for its group: until the group is created here, or until this daemon has
  // joined the coordinator.
  struct OfGroup {
    MemberRecord record;
    GroupEvent attached;
    TimePoint deadline;       // until when the member waits
    bool waits = true;        // false: the group must exist, or the member's spec makes it
    std::string coordinator;  // empty: this daemon
    // The spec with which the coordinator would make the group, or with which the member may not
    // make it here.
    std::optional<GroupSpec> spec;
    std::string named{};  // the name that led this daemon to itself (GroupRecord::named)
  };
  // An engine rank that waits until its group has slots on its GPU: to read parts there, or because
  // an update that is being opened broadcasts.
  struct OfSlots {
    MemberRecord record;
    GroupEvent attached;
  };

  // The number of waiting members for which `counts` holds.
  template <typename Counts>
  int64_t CountOf(const Counts& counts) const {
    int64_t count = 0;
    for (const OfGroup& each : of_group_) count += counts(each.record) ? 1 : 0;
    for (const auto& [id, each] : of_slots_) count += counts(each.record) ? 1 : 0;
    return count;
  }

  // All members that wait.
  size_t size() const { return of_group_.size() + of_slots_.size(); }

  // ---- for their group ----
  void Wait(OfGroup member) { of_group_.push_back(std::move(member)); }
  // nullopt: the member does not wait for its group.
  std::optional<OfGroup> TakeOfGroup(MemberId member);
  // Members that wait for a group of this daemon (empty `coordinator`), or for joining the
  // coordinator, in the order in which they came.
  std::vector<OfGroup> TakeAll(const std::string& group, const std::string& coordinator);
  bool Any(const std::string& group, const std::string& coordinator) const;
  // A try to join sends this to the coordinator: the spec of a member that brings one (a trainer's
  // before an engine's), with that member's identity and role, and the longest wait of a member.
  struct Request {
    std::optional<GroupSpec> spec;
    std::string identity;
    bool trainer = false;
    Duration wait{};
  };
  Request RequestOf(const std::string& group, const std::string& coordinator, TimePoint now) const;
  // Ends, with `refusal`, the members of that group and coordinator for which `stays` does not
  // hold. Returns whether a member stays.
  bool Refuse(const std::string& group, const std::string& coordinator,
              const std::function<bool(const OfGroup&)>& stays, const absl::Status& refusal);
  // The time at which a member is refused.
  using Expiry = std::function<TimePoint(const OfGroup&)>;
  std::optional<TimePoint> NextExpiry(const Expiry& expiry) const;
  std::vector<OfGroup> TakeLate(TimePoint now, const Expiry& expiry);
  const std::vector<OfGroup>& of_group() const { return of_group_; }

  // ---- for slots ----
  void Wait(OfSlots member);
  // nullopt: the rank does not wait for slots.
  std::optional<OfSlots> TakeOfSlots(MemberId member);
  // Whether a rank of the group waits for slots: on any GPU, or on the given GPU.
  bool AnyOfSlots(const std::string& group) const;
  bool AnyOfSlots(const std::string& group, int ordinal) const;

  // Ends the streams of all members that wait.
  void RefuseAll(const absl::Status& status);

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  static bool Awaits(const OfGroup& member, const std::string& group,
                     const std::string& coordinator) {
    return member.record.group == group && member.coordinator == coordinator;
  }

  std::vector<OfGroup> of_group_;
  std::map<MemberId, OfSlots> of_slots_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PENDING_ATTACHES_H_
