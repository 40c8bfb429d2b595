#include "daemon/node/staging_pools.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

MemorySpan SlotIn(const GroupRecord& group, const MemorySpan& pool, SlotIndex slot) {
  const int64_t bytes = group.machine->spec().slot_bytes;
  return {pool.data + int64_t{slot.value()} * bytes, bytes, pool.keep_alive};
}

}  // namespace

StagingPools::StagingPools(Options options, StateMutex* mutex, const State& state)
    : options_(std::move(options)), mutex_(mutex), state_(state) {}

// ---- where members may lie ----

bool StagingPools::Spans(const GroupRecord& group) const {
  return group.follower != nullptr || state_.sessions->Any(group.name());
}

absl::Status StagingPools::CheckSpanning(const std::string& group,
                                         const MemberRecord* entering) const {
  const MemberRecord* on_device = nullptr;
  const MemberRecord* on_host = nullptr;
  const auto look = [&](const MemberRecord& member) {
    (member.ordinal.has_value() ? on_device : on_host) = &member;
  };
  for (const auto& [id, member] : state_.members->all()) {
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

absl::Status StagingPools::CheckEntering(const GroupRecord& group,
                                         const MemberRecord& record) const {
  if (Spans(group)) REFITD_RETURN_IF_ERROR(CheckSpanning(record.group, &record));
  for (const auto& [id, member] : state_.members->all()) {
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

bool StagingPools::OnDevice(const std::string& group, int ordinal) const {
  return state_.members->OnDevice(group, ordinal) || state_.pending->AnyOfSlots(group, ordinal);
}

std::optional<StagingPools::Missing> StagingPools::MissingOf(const MemberRecord& member) const {
  if (!member.ordinal.has_value()) return std::nullopt;
  const GroupRecord* const group = std::as_const(*state_.groups).Of(member);
  if (Has(*group, *member.ordinal)) return std::nullopt;
  return Missing{member.group, group->id, *member.ordinal};
}

std::vector<StagingPools::Missing> StagingPools::MissingFor(const std::string& group) const {
  std::map<int, Missing> missing;
  for (const auto& [id, member] : state_.members->all()) {
    if (member.lost || member.group != group || !member.engine) continue;
    const std::optional<Missing> lacks = MissingOf(member);
    if (lacks.has_value()) missing[lacks->ordinal] = *lacks;
  }
  std::vector<Missing> all;
  for (auto& [ordinal, lacks] : missing) all.push_back(std::move(lacks));
  return all;
}

absl::StatusOr<GroupRecord*> StagingPools::Lacking(const Missing& missing) const {
  GroupRecord* const found = state_.groups->Find(missing.group, missing.id);
  if (found == nullptr) {
    return Error(absl::StatusCode::kNotFound, "group '{}' does not exist", missing.group);
  }
  return Has(*found, missing.ordinal) ? nullptr : found;
}

// The last reference to slots may be dropped anywhere, even under the mutex. Freeing the memory
// waits for the driver, so it is a job of the thread.
StagingPools::Device StagingPools::Shared(DevicePool made) const {
  auto held = std::make_shared<DevicePool>(std::move(made));
  Device pool;
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

absl::Status StagingPools::MakeNow(const Missing& missing) {
  REFITD_CHECK(options_.memory != nullptr);
  int64_t bytes = 0;
  {
    MutexLock lock(mutex_->raw());
    REFITD_ASSIGN_OR_RETURN(const GroupRecord* lacking, Lacking(missing));
    if (lacking == nullptr) return absl::OkStatus();
    // The job may have waited long in line, and the member may have left meanwhile.
    if (!OnDevice(missing.group, missing.ordinal)) {
      return absl::CancelledError("the member went away");
    }
    bytes = lacking->pool_bytes();
  }
  absl::StatusOr<DevicePool> made = options_.memory->MakePool(missing.ordinal, bytes);
  if (!made.ok()) {
    return Prefixed(made.status(), "group '{}': staging slots", missing.group);
  }
  Device pool = Shared(*std::move(made));
  MutexLock lock(mutex_->raw());
  REFITD_ASSIGN_OR_RETURN(GroupRecord * lacking, Lacking(missing));
  if (!OnDevice(missing.group, missing.ordinal)) {
    return absl::CancelledError("the member went away");
  }
  if (lacking != nullptr) Put(*lacking, missing.ordinal, std::move(pool));
  return absl::OkStatus();
}

void StagingPools::Put(const GroupRecord& group, int ordinal, Device device) {
  REFITD_CHECK(Of(group).devices.emplace(ordinal, std::move(device)).second);
}

void StagingPools::Drop(const GroupRecord& group, int ordinal) {
  if (WireOf(group) == ordinal || OnDevice(group.name(), ordinal)) return;
  Of(group).devices.erase(ordinal);
}

void StagingPools::DropUnused(const GroupRecord& group, int ordinal) {
  DropWire(group);
  Drop(group, ordinal);
}

void StagingPools::DropWire(const GroupRecord& group) {
  const std::optional<int> wire = WireOf(group);
  if (!wire.has_value() || state_.members->HasDevices(group.name()) ||
      group.machine->update_running()) {
    return;
  }
  ClearWire(group);
  Drop(group, *wire);
}

// ---- in host memory ----

absl::Status StagingPools::EnsureHost(const GroupRecord& group) {
  if (HasHost(group)) return absl::OkStatus();
  const int64_t bytes = group.pool_bytes();
  if (bytes == 0) return absl::UnavailableError("the coordinator has not answered yet");
  Host host;
  REFITD_ASSIGN_OR_RETURN(host.fd, CreateSealedMemfd("refitd-pool-" + group.name(), bytes));
  REFITD_ASSIGN_OR_RETURN(host.memory, HostRegion::Map(host.fd, bytes, Access::kReadWrite, false));
  Of(group).host = std::move(host);
  return absl::OkStatus();
}

StagingPools::Host StagingPools::TakeHost(const GroupRecord& group) {
  return std::exchange(Of(group).host, {});
}

// ---- the wire's place ----

void StagingPools::SetWire(const GroupRecord& group, int ordinal) {
  REFITD_CHECK(!WireOf(group).has_value() && Has(group, ordinal));
  Of(group).wire = ordinal;
}

bool StagingPools::Lacks(const GroupRecord& group) const {
  return Spans(group) && !WireOf(group).has_value() && state_.members->HasDevices(group.name());
}

absl::Status StagingPools::Ensure(const GroupRecord& group) {
  if (Lacks(group)) return absl::UnavailableError("the slots on GPUs are not made");
  return WireOf(group).has_value() ? absl::OkStatus() : EnsureHost(group);
}

// The slots are on the lowest GPU that a member is on; bytes that other GPUs of the daemon send or
// receive pass through them.
void StagingPools::Make(const GroupRecord& group, Then then) {
  std::optional<int> lowest;
  for (const auto& [id, member] : state_.members->all()) {
    if (member.group != group.name() || !member.ordinal.has_value()) continue;
    lowest = std::min(lowest.value_or(*member.ordinal), *member.ordinal);
  }
  REFITD_CHECK(lowest.has_value());
  options_.thread->Submit([this, missing = Missing{group.name(), group.id, *lowest},
                           then = std::move(then)] { MakeWire(missing, then); });
}

void StagingPools::MakeWire(const Missing& missing, const Then& then) {
  absl::Status made = MakeNow(missing);
  StateLock lock(mutex_);
  GroupRecord* const found = state_.groups->Find(missing.group, missing.id);
  if (found == nullptr) return;
  if (made.ok() && !Has(*found, missing.ordinal)) {
    made = absl::CancelledError("the members on that GPU went away");
  }
  // The members on this GPU have left, but members may still be on another GPU.
  if (absl::IsCancelled(made) && !OnDevice(missing.group, missing.ordinal) &&
      state_.members->HasDevices(missing.group)) {
    return Make(*found, then);
  }
  if (made.ok() && !WireOf(*found).has_value()) SetWire(*found, missing.ordinal);
  then(found, made, lock);
}

// ---- what members and wires see ----

absl::StatusOr<MemorySpan> StagingPools::WireSlot(const GroupRecord& group, SlotIndex slot) const {
  const Places& places = Of(group);
  if (places.wire.has_value()) return SlotIn(group, places.devices.at(*places.wire).memory, slot);
  if (!HasHost(group)) return absl::InternalError("the staging pool is not mapped");
  const std::shared_ptr<HostRegion>& host = places.host.memory;
  return SlotIn(group, {host->data(), host->bytes(), host}, slot);
}

absl::StatusOr<MemorySpan> StagingPools::Slot(const GroupRecord& group, std::optional<int> ordinal,
                                              SlotIndex slot) const {
  if (!ordinal.has_value()) return WireSlot(group, slot);
  const auto device = Of(group).devices.find(*ordinal);
  if (device != Of(group).devices.end()) return SlotIn(group, device->second.memory, slot);
  return Error(absl::StatusCode::kInternal, "there is no staging pool on GPU {}", *ordinal);
}

absl::StatusOr<PoolHandle> StagingPools::Share(const GroupRecord& group, std::optional<int> ordinal,
                                               bool read_only) const {
  const Places& places = Of(group);
  PoolHandle handle;
  handle.slot_bytes = group.machine->spec().slot_bytes;
  int fd = -1;
  if (ordinal.has_value()) {
    const auto device = places.devices.find(*ordinal);
    if (device == places.devices.end()) return absl::InternalError("the staging pool was freed");
    handle.bytes = device->second.memory.bytes;
    fd = device->second.descriptor;
  } else {
    if (!HasHost(group)) return absl::InternalError("the staging pool is not mapped");
    handle.bytes = places.host.memory->bytes();
    fd = places.host.fd.get();
    if (read_only) {
      REFITD_ASSIGN_OR_RETURN(handle.fd, ReadOnlyDuplicate(places.host.fd));
      return handle;
    }
  }
  handle.fd = Duplicate(fd);
  if (!handle.fd.valid()) return ErrnoError(errno, "duplicating the pool's descriptor");
  return handle;
}

int64_t StagingPools::BytesOf(const GroupRecord& group) const {
  int64_t bytes = HasHost(group) ? Of(group).host.memory->bytes() : 0;
  for (const auto& [ordinal, device] : Of(group).devices) bytes += device.memory.bytes;
  return bytes;
}

const StagingPools::Places& StagingPools::Of(const GroupRecord& group) const {
  static const Places* const kNone = new Places;
  const auto it = places_.find(group.id);
  return it == places_.end() ? *kNone : it->second;
}

StagingPools::Places StagingPools::Take(uint64_t group_id) {
  auto taken = places_.extract(group_id);
  return taken.empty() ? Places() : std::move(taken.mapped());
}

void StagingPools::CheckInvariants() const {
  std::set<uint64_t> groups;
  for (const auto& [name, group] : state_.groups->all()) groups.insert(group->id);
  for (const auto& [id, places] : places_) {
    REFITD_CHECK(groups.contains(id));
    REFITD_CHECK((places.host.memory != nullptr) == places.host.fd.valid());
    if (places.wire.has_value()) REFITD_CHECK(places.devices.contains(*places.wire));
    for (const auto& [ordinal, device] : places.devices) {
      REFITD_CHECK(ordinal >= 0);
      REFITD_CHECK(device.memory.data != nullptr && device.memory.bytes > 0);
    }
  }
}

}  // namespace refitd
