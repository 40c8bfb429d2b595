#include "daemon/node/groups.h"

#include <algorithm>
#include <set>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

GroupRecord* Groups::Find(const std::string& name) {
  const auto it = groups_.find(name);
  return it == groups_.end() ? nullptr : it->second.get();
}

const GroupRecord* Groups::Find(const std::string& name) const {
  const auto it = groups_.find(name);
  return it == groups_.end() ? nullptr : it->second.get();
}

GroupRecord* Groups::Of(const MemberRecord& member) {
  GroupRecord* const group = Find(member.group);
  REFITD_CHECK(group != nullptr);
  return group;
}

const GroupRecord* Groups::Of(const MemberRecord& member) const {
  const GroupRecord* const group = Find(member.group);
  REFITD_CHECK(group != nullptr);
  return group;
}

GroupRecord* Groups::Find(const std::string& name, uint64_t id) {
  GroupRecord* const found = Find(name);
  return found != nullptr && found->id == id ? found : nullptr;
}

std::vector<std::string> Groups::names() const {
  std::vector<std::string> names;
  for (const auto& [name, group] : groups_) names.push_back(name);
  return names;
}

std::vector<std::string> Groups::running() const {
  std::vector<std::string> names;
  for (const auto& [name, group] : groups_) {
    if (group->machine->update_running() && !group->machine->catch_up_running())
      names.push_back(name);
  }
  return names;
}

bool Groups::any_running() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& entry) { return entry.second->machine->update_running(); });
}

std::vector<const GroupMachine*> Groups::machines() const {
  std::vector<const GroupMachine*> all;
  for (const auto& [name, group] : groups_) all.push_back(group->machine.get());
  return all;
}

GroupRecord* Groups::Add(const std::string& name, std::unique_ptr<GroupRecord> record) {
  REFITD_CHECK(!name.empty() && name == record->name());
  record->id = next_++;
  const auto [it, added] = groups_.emplace(name, std::move(record));
  REFITD_CHECK(added);
  return it->second.get();
}

GroupRecord* Groups::Coordinate(CoordinatorOptions options, TimePoint now) {
  const std::string name = options.name;
  auto machine = std::make_unique<Coordinator>(std::move(options));
  auto record = std::make_unique<GroupRecord>();
  record->coordinator = machine.get();
  record->machine = std::move(machine);
  record->empty_since = now;
  return Add(name, std::move(record));
}

GroupRecord* Groups::Follow(FollowerOptions options) {
  const std::string name = options.name;
  auto record = std::make_unique<GroupRecord>();
  record->join.address = options.coordinator_address;
  record->join.joining = true;
  auto machine = std::make_unique<Follower>(std::move(options));
  record->follower = machine.get();
  record->machine = std::move(machine);
  return Add(name, std::move(record));
}

std::unique_ptr<GroupRecord> Groups::Remove(const std::string& name) {
  const auto it = groups_.find(name);
  REFITD_CHECK(it != groups_.end());
  std::unique_ptr<GroupRecord> record = std::move(it->second);
  groups_.erase(it);
  return record;
}

absl::StatusOr<std::vector<std::string>> Groups::RoomFor(const std::string& name,
                                                         const GroupSpec* spec) const {
  const int64_t needed = spec == nullptr ? 0 : spec->slots * spec->slot_bytes;
  const bool known = Find(name) != nullptr;
  size_t count = groups_.size();
  int64_t pools = 0;
  std::vector<const GroupRecord*> empty;
  for (const auto& [other, record] : groups_) {
    pools += record->pool_bytes();
    if (record->empty_since.has_value() && Empty(*record)) empty.push_back(record.get());
  }
  std::sort(empty.begin(), empty.end(), [](const GroupRecord* a, const GroupRecord* b) {
    return *a->empty_since < *b->empty_since;
  });
  const auto place = [&] { return known || count < static_cast<size_t>(limits_.groups); };
  const auto fits = [&] { return needed <= limits_.pool_bytes - pools; };
  std::vector<std::string> dropped;
  for (size_t i = 0; i < empty.size() && (!place() || !fits()); ++i) {
    --count;
    pools -= empty[i]->pool_bytes();
    dropped.push_back(empty[i]->name());
  }
  if (!place()) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "group '{}': the daemon has max_groups ({}) groups", name, limits_.groups);
  }
  if (!fits()) {
    return Error(
        absl::StatusCode::kResourceExhausted,
        "group '{}': {} slots of {} bytes do not fit: {} of max_pool_bytes {} are taken by "
        "other groups",
        name, spec->slots, spec->slot_bytes, pools, limits_.pool_bytes);
  }
  return dropped;
}

bool Groups::Empty(const GroupRecord& group) const {
  return group.coordinator != nullptr && !group.machine->has_members() &&
         !group.machine->update_running() && !sessions_->Any(group.name()) &&
         !pending_->AnyOfSlots(group.name());
}

bool Groups::NoteEmpty(GroupRecord* group, TimePoint now) {
  REFITD_CHECK(group->coordinator != nullptr);
  if (!Empty(*group)) {
    group->empty_since.reset();
    return false;
  }
  if (group->empty_since.has_value()) return false;
  group->empty_since = now;
  return true;
}

std::vector<std::string> Groups::Expired(TimePoint now) {
  std::vector<std::string> expired;
  for (const auto& [name, group] : groups_) {
    if (!group->empty_since.has_value()) continue;
    if (now - *group->empty_since < limits_.idle) continue;
    if (Empty(*group)) {
      expired.push_back(name);
    } else {
      group->empty_since = now;  // a member is about to enter
    }
  }
  return expired;
}

std::optional<TimePoint> Groups::NextDeadline() const {
  std::optional<TimePoint> next;
  const auto consider = [&next](std::optional<TimePoint> due) {
    if (due.has_value()) next = std::min(next.value_or(*due), *due);
  };
  for (const auto& [name, group] : groups_) {
    consider(group->machine->NextDeadline());
    consider(group->join.redial);
    if (group->empty_since.has_value()) consider(*group->empty_since + limits_.idle);
  }
  return next;
}

std::vector<std::string> Groups::Due(TimePoint now) const {
  std::vector<std::string> due;
  for (const auto& [name, group] : groups_) {
    const auto deadline = group->machine->NextDeadline();
    if (deadline.has_value() && *deadline <= now) due.push_back(name);
  }
  return due;
}

void Groups::CheckInvariants() const {
  std::set<uint64_t> ids;
  REFITD_CHECK(groups_.size() <= static_cast<size_t>(limits_.groups));
  for (const auto& [name, group] : groups_) {
    REFITD_CHECK(group->name() == name && group->id < next_ && ids.insert(group->id).second);
    const bool coordinates = group->coordinator != nullptr;
    REFITD_CHECK(coordinates != (group->follower != nullptr));
    REFITD_CHECK(coordinates == group->machine->is_coordinator());
    REFITD_CHECK(coordinates == group->join.address.empty());
    REFITD_CHECK(coordinates || group->named.empty());
    REFITD_CHECK(!group->join.redial.has_value() || group->join.joining);
    REFITD_CHECK(!coordinates || (!group->join.joining && group->join.link == nullptr));
    REFITD_CHECK(!group->empty_since.has_value() || coordinates);
    REFITD_CHECK(group->preparing_begins >= 0);
    group->machine->CheckInvariants();
  }
}

}  // namespace refitd
