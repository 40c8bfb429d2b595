// The groups of this daemon: each group's machine, which decides, and what the daemon keeps beside
// it. This class makes and drops them, makes room for new ones, and knows when each is due.
//
// Invariants
//  1. A group's name and number name one record; numbers are never used again, so that an event
//     that comes late for a removed group is recognised.
//  2. A record has one machine: the daemon coordinates the group or follows another daemon.
//  3. At most Limits::groups groups exist, and their pools together fit into Limits::pool_bytes;
//     whoever adds a group has called RoomFor (P10).
//  4. A group that has been empty for Limits::idle is dropped (P8), never while an update runs.
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h).
#ifndef REFITD_DAEMON_NODE_GROUPS_H_
#define REFITD_DAEMON_NODE_GROUPS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/follower.h"
#include "daemon/group/machine.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/peer_sessions.h"
#include "daemon/node/pending_attaches.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/plan/overlap.h"

namespace refitd {

// A follower's way to its coordinator.
struct JoinRecord {
  std::string address;             // the coordinator's, as members name it
  std::shared_ptr<PeerLink> link;  // null: lost, or waiting to redial
  // The coordinator has not accepted this daemon yet. At least one member waits until it does, and
  // tries to join follow each other as long as a member waits.
  bool joining = false;
  uint64_t dial = 0;          // the number of the last try; callbacks of earlier tries are ignored
  bool dialled_spec = false;  // the try carries a spec, with which the coordinator makes the group
  // The member that brings that spec, and whether it is a trainer.
  std::string dialled_identity;
  bool dialled_trainer = false;
  TimePoint dialled_until;          // without a spec: how long the try waits for the group
  std::optional<TimePoint> redial;  // set between tries: when the next try begins
  absl::Status refusal;             // why the last try failed
};

struct GroupRecord {
  uint64_t id = 0;
  std::unique_ptr<GroupMachine> machine;
  // One of the two is set; both are owned by `machine`.
  Coordinator* coordinator = nullptr;
  Follower* follower = nullptr;
  JoinRecord join;  // followers
  // On the coordinator: the time since which the group has had no member. nullopt: the group has
  // members, or an update runs.
  std::optional<TimePoint> empty_since;
  // Engine ranks that attach must have a pool on their GPU while Begin calls are making pools, and
  // while the running update's buckets may be broadcast.
  int preparing_begins = 0;
  bool broadcasts = false;
  std::string creator;  // the identity whose call made the group, for its limits
  // The identity that began the running update, or the last update, at this daemon.
  struct Opener {
    std::string identity;
    int pid = 0;
    std::string request_id;
  };
  Opener opener;
  // The places of the memory of this daemon's engines, which PushBucket compares with those of a
  // bucket's bytes. They are made anew when engines come, go or flip, or when their layouts change.
  struct EnginePlaces {
    std::vector<std::tuple<MemberId, std::shared_ptr<const Layout>, bool>> engines;  // and flipped
    std::shared_ptr<const DestinationPlaces> places;
  };
  EnginePlaces engine_places;
  // The name that this daemon's members give for their coordinator, and that led this daemon to
  // itself; empty: they name this daemon directly.
  std::string named;
  // The last CreateGroup(replace) with a request id, and the incarnation it made (P3).
  std::string replace_request;
  uint64_t replace_incarnation = 0;

  const std::string& name() const { return machine->name(); }
  bool wants_pools() const {
    return preparing_begins > 0 || (broadcasts && machine->update_running());
  }
  int64_t pool_bytes() const { return machine->spec().slot_bytes * machine->spec().slots; }
};

class Groups {
 public:
  struct Limits {
    int groups = 64;
    int64_t pool_bytes = int64_t{16} << 30;  // staging slots of all groups, in one place
    Duration idle = std::chrono::minutes(10);
  };
  // `sessions` and `pending` must outlive the groups. A group for which somebody in them waits is
  // not empty.
  Groups(const Limits& limits, const PeerSessions* sessions, const PendingAttaches* pending)
      : limits_(limits), sessions_(sessions), pending_(pending) {}

  // ---- finding ----
  // Null: there is no such group.
  GroupRecord* Find(const std::string& name);
  const GroupRecord* Find(const std::string& name) const;
  // The group of a member, which exists as long as a member of it has a record.
  GroupRecord* Of(const MemberRecord& member);
  const GroupRecord* Of(const MemberRecord& member) const;
  // Null: that group was removed; another group may have its name.
  GroupRecord* Find(const std::string& name, uint64_t id);
  const std::map<std::string, std::unique_ptr<GroupRecord>>& all() const { return groups_; }
  std::vector<std::string> names() const;
  // Groups with a running update.
  std::vector<std::string> running() const;
  bool any_running() const;
  // All groups' machines, sorted by name.
  std::vector<const GroupMachine*> machines() const;

  // ---- making and dropping ----
  // Makes an empty group that this daemon coordinates. No group of that name may exist.
  GroupRecord* Coordinate(CoordinatorOptions options, TimePoint now);
  // Makes the record of a group that this daemon begins to join at options.coordinator_address.
  GroupRecord* Follow(FollowerOptions options);
  // Takes the record out of this class. The record's slots are unmapped and its link ends when the
  // result is destroyed, which must not happen under the mutex. The group must exist.
  std::unique_ptr<GroupRecord> Remove(const std::string& name);

  // Returns the empty groups that must be dropped so that the group `name` may exist with a pool of
  // `spec` beside the others; those that have been empty for longest come first. `spec` null: the
  // pool's size is not known yet. RESOURCE_EXHAUSTED: dropping all empty groups would not make
  // room.
  absl::StatusOr<std::vector<std::string>> RoomFor(const std::string& name,
                                                   const GroupSpec* spec) const;

  // ---- empty groups ----
  // Whether the group, which this daemon coordinates, has no members and nobody that waits for it.
  bool Empty(const GroupRecord& group) const;
  // Called after every event of a coordinator. True: the group became empty with this event.
  bool NoteEmpty(GroupRecord* group, TimePoint now);
  // Groups that have been empty for Limits::idle. For a group that a member is about to enter, the
  // time starts again.
  std::vector<std::string> Expired(TimePoint now);

  // ---- time ----
  // The next time at which a machine is due, a try to join begins, or an empty group expires;
  // nullopt: nothing waits.
  std::optional<TimePoint> NextDeadline() const;
  // Groups whose machine is due.
  std::vector<std::string> Due(TimePoint now) const;

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  GroupRecord* Add(const std::string& name, std::unique_ptr<GroupRecord> record);

  const Limits limits_;
  const PeerSessions* const sessions_;
  const PendingAttaches* const pending_;
  std::map<std::string, std::unique_ptr<GroupRecord>> groups_;
  uint64_t next_ = 1;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_GROUPS_H_
