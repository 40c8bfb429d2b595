#include "daemon/node/pools.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

MemorySpan SlotIn(const MemorySpan& pool, SlotIndex slot, int64_t slot_bytes) {
  return {pool.data + int64_t{slot.value()} * slot_bytes, slot_bytes, pool.keep_alive};
}

}  // namespace

absl::Status Pools::EnsureHost(const std::string& group, int64_t bytes) {
  if (has_host()) return absl::OkStatus();
  if (bytes == 0) return absl::UnavailableError("the coordinator has not answered yet");
  Host host;
  REFITD_ASSIGN_OR_RETURN(host.fd, CreateSealedMemfd("refitd-pool-" + group, bytes));
  REFITD_ASSIGN_OR_RETURN(host.memory, HostRegion::Map(host.fd, bytes, Access::kReadWrite, false));
  host_ = std::move(host);
  return absl::OkStatus();
}

void Pools::Put(int ordinal, Device device) {
  REFITD_CHECK(devices_.emplace(ordinal, std::move(device)).second);
}

void Pools::Drop(int ordinal) {
  REFITD_CHECK(wire_ != ordinal);
  devices_.erase(ordinal);
}

void Pools::SetWire(int ordinal) {
  REFITD_CHECK(!wire_.has_value() && Has(ordinal));
  wire_ = ordinal;
}

absl::StatusOr<MemorySpan> Pools::WireSlot(SlotIndex slot, int64_t slot_bytes) const {
  if (wire_.has_value()) return SlotIn(devices_.at(*wire_).memory, slot, slot_bytes);
  if (!has_host()) return absl::InternalError("the staging pool is not mapped");
  return SlotIn({host_.memory->data(), host_.memory->bytes(), host_.memory}, slot, slot_bytes);
}

absl::StatusOr<MemorySpan> Pools::Slot(std::optional<int> ordinal, SlotIndex slot,
                                       int64_t slot_bytes) const {
  if (!ordinal.has_value()) return WireSlot(slot, slot_bytes);
  const auto device = devices_.find(*ordinal);
  if (device != devices_.end()) return SlotIn(device->second.memory, slot, slot_bytes);
  return Error(absl::StatusCode::kInternal, "there is no staging pool on GPU {}", *ordinal);
}

absl::StatusOr<PoolHandle> Pools::Share(std::optional<int> ordinal, bool read_only) const {
  PoolHandle handle;
  int fd = -1;
  if (ordinal.has_value()) {
    const auto device = devices_.find(*ordinal);
    if (device == devices_.end()) return absl::InternalError("the staging pool went");
    handle.bytes = device->second.memory.bytes;
    fd = device->second.descriptor;
  } else {
    if (!has_host()) return absl::InternalError("the staging pool is not mapped");
    handle.bytes = host_.memory->bytes();
    fd = host_.fd.get();
    if (read_only) {
      REFITD_ASSIGN_OR_RETURN(handle.fd, ReadOnlyDuplicate(host_.fd));
      return handle;
    }
  }
  handle.fd = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!handle.fd.valid()) return ErrnoError(errno, "duplicating the pool's descriptor");
  return handle;
}

int64_t Pools::bytes() const {
  int64_t bytes = has_host() ? host_.memory->bytes() : 0;
  for (const auto& [ordinal, device] : devices_) bytes += device.memory.bytes;
  return bytes;
}

void Pools::CheckInvariants() const {
  REFITD_CHECK(has_host() == host_.fd.valid());
  if (wire_.has_value()) REFITD_CHECK(Has(*wire_));
  for (const auto& [ordinal, device] : devices_) {
    REFITD_CHECK(ordinal >= 0);
    REFITD_CHECK(device.memory.data != nullptr && device.memory.bytes > 0);
  }
}

}  // namespace refitd
