#include "daemon/node/device_slots.h"

#include <algorithm>
#include <map>
#include <utility>

#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {

DeviceSlots::DeviceSlots(Options options, TurnHost* turns, Mutex* mutex, const State& state)
    : options_(std::move(options)), turns_(turns), mutex_(mutex), state_(state) {}

// ---- where members may lie ----

bool DeviceSlots::Spans(const GroupRecord& group) const {
  return group.follower != nullptr || state_.peers->Any(group.name());
}

absl::Status DeviceSlots::CheckSpanning(const std::string& group,
                                        const MemberRecord* entering) const {
  const MemberRecord* on_device = nullptr;
  const MemberRecord* on_host = nullptr;
  const auto look = [&](const MemberRecord& member) {
    (member.ordinal.has_value() ? on_device : on_host) = &member;
  };
  for (const auto& [id, member] : state_.leases->all()) {
    if (!member.lost && member.group == group) look(member);
  }
  if (entering != nullptr) look(*entering);
  if (on_device == nullptr) return absl::OkStatus();
  const std::string what =
      entering == nullptr
          ? fmt::format("group '{}' would span daemons", group)
          : fmt::format("device.name: '{}': group '{}' spans daemons", entering->device, group);
  const GroupRecord* const record = state_.groups->Find(group);
  if (record != nullptr && record->machine->spec().encrypted_data) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}, and demands encrypted_data: NCCL, which moves GPU memory between daemons, "
                 "does not encrypt; daemon {} has a member on {}",
                 what, options_.daemon_id, on_device->device);
  }
  if (!options_.has_wire) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}, and device memory moves within daemon {} only: {}", what, options_.daemon_id,
                 options_.no_wire);
  }
  if (on_host == nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}, where all of a daemon's members are on GPUs or none: "
               "daemon {} would have one "
               "on {} and one in host memory",
               what, options_.daemon_id, on_device->device);
}

absl::Status DeviceSlots::CheckEntering(const GroupRecord& group,
                                        const MemberRecord& record) const {
  if (Spans(group)) REFITD_RETURN_IF_ERROR(CheckSpanning(record.group, &record));
  for (const auto& [id, member] : state_.leases->all()) {
    if (member.lost || member.group != record.group) continue;
    if (record.engine && member.engine &&
        record.ordinal.has_value() != member.ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "device.name: '{}': group '{}' has engine ranks on '{}': "
                   "one group's engines are "
                   "all on GPUs, or all in host memory",
                   record.device, record.group, member.device);
    }
    if (member.engine == record.engine) continue;
    const MemberRecord& trainer = record.engine ? member : record;
    const MemberRecord& engine = record.engine ? record : member;
    if (!trainer.ordinal.has_value() || engine.ordinal.has_value()) continue;
    return Error(absl::StatusCode::kFailedPrecondition,
                 "device.name: '{}': group '{}' would have a trainer rank on "
                 "GPU {} and an engine "
                 "rank in host memory: nothing moves weights that way",
                 record.device, record.group, trainer.device);
  }
  return absl::OkStatus();
}

// ---- slots ----

bool DeviceSlots::OnDevice(const std::string& group, int ordinal) const {
  return state_.leases->OnDevice(group, ordinal) || state_.waiters->AnyOfSlots(group, ordinal);
}

std::optional<DeviceSlots::Missing> DeviceSlots::MissingOf(const MemberRecord& member) const {
  if (!member.ordinal.has_value()) return std::nullopt;
  const GroupRecord* const group = std::as_const(*state_.groups).Of(member);
  if (group->pools.Has(*member.ordinal)) return std::nullopt;
  return Missing{member.group, group->id, *member.ordinal};
}

std::vector<DeviceSlots::Missing> DeviceSlots::MissingFor(const MemberRecord& trainer) const {
  std::map<int, Missing> missing;
  for (const auto& [id, member] : state_.leases->all()) {
    if (member.lost || member.group != trainer.group) continue;
    if (!member.engine && id != trainer.id) continue;
    const std::optional<Missing> lacks = MissingOf(member);
    if (lacks.has_value()) missing[lacks->ordinal] = *lacks;
  }
  std::vector<Missing> all;
  for (auto& [ordinal, lacks] : missing) all.push_back(std::move(lacks));
  return all;
}

absl::StatusOr<GroupRecord*> DeviceSlots::Lacking(const Missing& missing) const {
  GroupRecord* const found = state_.groups->Find(missing.group, missing.id);
  if (found == nullptr) {
    return Error(absl::StatusCode::kNotFound, "group '{}' does not exist", missing.group);
  }
  return found->pools.Has(missing.ordinal) ? nullptr : found;
}

// The last reference to slots may be dropped anywhere, even under the mutex, and giving memory back
// waits for the driver, so that is a job of the thread.
Pools::Device DeviceSlots::Share(DevicePool made) const {
  auto held = std::make_shared<DevicePool>(std::move(made));
  Pools::Device pool;
  pool.descriptor = held->descriptor.get();
  const DevicePool* const raw = held.get();
  pool.memory = {
      raw->region->data(), raw->region->bytes(),
      std::shared_ptr<const void>(raw, [closer = options_.thread, memory = options_.memory,
                                        held = std::move(held)](const void*) mutable {
        closer->Submit([memory = std::move(memory), pool = std::move(held)] {
          memory->GiveBack(std::move(*pool));
        });
      })};
  return pool;
}

absl::Status DeviceSlots::MakeNow(const Missing& missing) {
  REFITD_CHECK(options_.memory != nullptr);
  int64_t bytes = 0;
  {
    MutexLock lock(mutex_);
    REFITD_ASSIGN_OR_RETURN(const GroupRecord* lacking, Lacking(missing));
    if (lacking == nullptr) return absl::OkStatus();
    // The job may have waited long in line, so that the member may have gone.
    if (!OnDevice(missing.group, missing.ordinal)) {
      return absl::CancelledError("the member went away");
    }
    bytes = lacking->pool_bytes();
  }
  absl::StatusOr<DevicePool> made = options_.memory->MakePool(missing.ordinal, bytes);
  if (!made.ok()) {
    return Prefixed(made.status(), "group '{}': staging slots", missing.group);
  }
  Pools::Device pool = Share(*std::move(made));
  MutexLock lock(mutex_);
  REFITD_ASSIGN_OR_RETURN(GroupRecord * lacking, Lacking(missing));
  if (!OnDevice(missing.group, missing.ordinal)) {
    return absl::CancelledError("the member went away");
  }
  if (lacking != nullptr) lacking->pools.Put(missing.ordinal, std::move(pool));
  return absl::OkStatus();
}

void DeviceSlots::Drop(GroupRecord* group, int ordinal) {
  if (group->pools.wire() == ordinal || OnDevice(group->name(), ordinal)) return;
  group->pools.Drop(ordinal);
}

void DeviceSlots::DropUnused(GroupRecord* group, int ordinal) {
  DropWire(group);
  Drop(group, ordinal);
}

void DeviceSlots::DropWire(GroupRecord* group) {
  if (!group->pools.wire().has_value() || state_.leases->HasDevices(group->name()) ||
      group->machine->update_running()) {
    return;
  }
  const int ordinal = *group->pools.wire();
  group->pools.ClearWire();
  Drop(group, ordinal);
}

// ---- slots in which bytes cross to other daemons ----

bool DeviceSlots::Lacks(const GroupRecord& group) const {
  return Spans(group) && !group.pools.wire().has_value() && state_.leases->HasDevices(group.name());
}

absl::Status DeviceSlots::Ensure(GroupRecord* group) {
  if (Lacks(*group)) return absl::UnavailableError("the slots on GPUs are not made");
  if (group->pools.wire().has_value()) return absl::OkStatus();
  return group->pools.EnsureHost(group->name(), group->pool_bytes());
}

// The slots are on the lowest GPU that a member is on; bytes that other GPUs of the daemon send or
// receive pass through them.
void DeviceSlots::Make(const GroupRecord& group, Then then) {
  std::optional<int> lowest;
  for (const auto& [id, member] : state_.leases->all()) {
    if (member.group != group.name() || !member.ordinal.has_value()) continue;
    lowest = std::min(lowest.value_or(*member.ordinal), *member.ordinal);
  }
  REFITD_CHECK(lowest.has_value());
  options_.thread->Submit([this, missing = Missing{group.name(), group.id, *lowest},
                           then = std::move(then)] { MakeWire(missing, then); });
}

void DeviceSlots::MakeWire(const Missing& missing, const Then& then) {
  absl::Status made = MakeNow(missing);
  Turn turn(turns_, mutex_);
  GroupRecord* const found = state_.groups->Find(missing.group, missing.id);
  if (found == nullptr) return;
  if (made.ok() && !found->pools.Has(missing.ordinal)) {
    made = absl::CancelledError("the members on that GPU went away");
  }
  // The members on this GPU have gone, but members may still be on another GPU.
  if (absl::IsCancelled(made) && !OnDevice(missing.group, missing.ordinal) &&
      state_.leases->HasDevices(missing.group)) {
    return Make(*found, then);
  }
  if (made.ok() && !found->pools.wire().has_value()) found->pools.SetWire(missing.ordinal);
  then(found, made, turn);
}

}  // namespace refitd
