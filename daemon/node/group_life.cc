#include "daemon/node/group_life.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/node/incarnation.h"
#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {

absl::Status NoGroup(const std::string& name) {
  return Error(absl::StatusCode::kNotFound, "group '{}' does not exist", name);
}

absl::Status Followed(const GroupRecord& group) {
  return Error(absl::StatusCode::kFailedPrecondition,
               "group '{}' is coordinated by {}: name it as coordinator", group.name(),
               group.join.address);
}

absl::StatusOr<GroupRecord*> GroupLife::Make(const std::string& name, const GroupSpec& wish,
                                             std::optional<int> trainers,
                                             const std::string& creator, bool* created,
                                             Turn& turn) {
  *created = false;
  REFITD_ASSIGN_OR_RETURN(GroupSpec spec, CheckSpec(wish, state_.spec_limits));
  if (trainers.value_or(spec.trainer_ranks) != spec.trainer_ranks) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} is not the spec's trainer_ranks {}", *trainers,
                 spec.trainer_ranks);
  }
  if (GroupRecord* found = state_.groups.Find(name); found != nullptr) {
    if (found->follower != nullptr) return Followed(*found);
    REFITD_RETURN_IF_ERROR(CheckEqualSpec(name, found->machine->spec(), spec));
    return found;
  }
  if (state_.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(identities_.AdmitGroup(creator, spec.slots * spec.slot_bytes));
  REFITD_RETURN_IF_ERROR(MakeRoom(name, &spec, turn));
  CoordinatorOptions coordinator;
  coordinator.name = name;
  coordinator.daemon_id = state_.options.daemon_id;
  coordinator.incarnation = NewIncarnation();
  coordinator.spec = std::move(spec);
  coordinator.limits = state_.options.group;
  coordinator.peer_limits = state_.options.peers;
  coordinator.next_update = [this] { return state_.NewUpdate(); };
  coordinator.next_member = [this] { return state_.NewMember(); };
  coordinator.next_call = [this] { return state_.NewCall(); };
  // The machine asks while it handles an event, so the mutex is held.
  coordinator.admit_remote = [this] {
    kInTurn.AssertHeld();
    return CheckMembers();
  };
  if (state_.options.owner_rule != nullptr) {
    coordinator.owner_rule = [rule = state_.options.owner_rule, name](const std::string& identity) {
      return rule(name, identity);
    };
  }
  GroupRecord* const group = state_.groups.Coordinate(std::move(coordinator), DaemonState::Now());
  group->creator = creator;
  LogInfo("group {}: created", name);
  state_.timer.Wake();
  *created = true;
  return group;
}

absl::Status GroupLife::MakeRoom(const std::string& name, const GroupSpec* spec, Turn& turn) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<std::string> dropped,
                          state_.groups.RoomFor(name, spec));
  for (const std::string& other : dropped) {
    Drop(other, fmt::format("given up, for it has no member and group {} needs its place", name),
         turn);
  }
  return absl::OkStatus();
}

absl::Status GroupLife::CheckMembers() const {
  size_t members = state_.leases.size() + state_.waiters.size();
  for (const auto& [name, group] : state_.groups.all()) {
    if (group->coordinator != nullptr) members += group->coordinator->remote_members();
  }
  if (members < static_cast<size_t>(state_.options.max_members)) return absl::OkStatus();
  return Error(
      absl::StatusCode::kResourceExhausted,
      "limits.max_members: daemon {} has {} members, with those of daemons that joined its "
      "groups, and takes {}",
      state_.options.daemon_id, members, state_.options.max_members);
}

void GroupLife::NoteEmpty(GroupRecord* group, Turn& turn) {
  if (!state_.groups.NoteEmpty(group, DaemonState::Now()) || !group->pools.has_host()) return;
  // P8: the pool is given back, and made again for the next member that needs it. It is unmapped
  // after the mutex was released.
  turn.Last([host = std::make_shared<Pools::Host>(group->pools.TakeHost())] { *host = {}; });
}

void GroupLife::Drop(const std::string& name, std::string_view why, Turn& turn) {
  std::shared_ptr<GroupRecord> record = state_.groups.Remove(name);
  data_plane_.CloseAll(record->id);
  LogInfo("group {}: {}", name, why);
  if (state_.options.observer != nullptr) state_.options.observer->GroupGone(name);
  state_.peers.EndGroup(name, absl::AbortedError("the group was deleted"));
  state_.watchers.Forget(name);
  state_.readiness.Changed(name, DaemonState::Now());
  // The group's pool is unmapped after the mutex was released.
  turn.Last([record = std::move(record)]() mutable { record.reset(); });
}

void GroupLife::DropExpired(TimePoint now, Turn& turn) {
  for (const std::string& name : state_.groups.Expired(now)) {
    Drop(name,
         fmt::format("given up: it has had no member for {:g} s (limits.group_idle_ms)",
                     std::chrono::duration<double>(state_.options.group_idle).count()),
         turn);
  }
}

void GroupLife::DropFollower(const std::string& name, Turn& turn) {
  std::shared_ptr<GroupRecord> record = state_.groups.Remove(name);
  data_plane_.CloseAll(record->id);
  LogInfo("group {}: left its coordinator at {}", name, record->join.address);
  state_.readiness.Changed(name, DaemonState::Now());
  WireLock::Events events;
  state_.wire_lock.Release(name, &events);
  for (auto& [other, event] : events) turn.Post(other, std::move(event));
  if (state_.options.observer != nullptr) state_.options.observer->GroupGone(name);
  // The group's pool is unmapped and its link destroyed after the mutex was released.
  turn.Last([record = std::move(record)]() mutable { record.reset(); });
}

}  // namespace refitd
