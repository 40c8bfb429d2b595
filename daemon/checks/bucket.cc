#include "daemon/checks/bucket.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/device_memory.h"

namespace refitd {
namespace {

using absl::StatusCode;

constexpr size_t kMaxUuidInMessage = 64;

// Makes places of a bucket, as far as `received.source` and what the caller knows of the member
// allow.
struct Placer {
  const ReceivedBucket& received;
  const BucketLimits& limits;
  const RegionBytes& region_bytes;
  const DeviceSource& device;
  std::vector<CheckedBucket::Place>* places;

  const CheckedBucket& bucket() const { return *received.bucket; }
  bool packed() const { return received.packing.has_value(); }
  size_t count() const { return bucket().tensors.size(); }
  int64_t BytesOf(size_t i) const { return bucket().BytesOf(bucket().ranges[i]); }

  absl::Status operator()(const std::vector<std::string_view>& chunks);
  absl::Status operator()(const std::vector<RegionRef>& refs);
  absl::Status operator()(const SlotGrant& slot);
  absl::Status operator()(const std::vector<DeviceRef>& handles);
};

absl::Status Placer::operator()(const std::vector<std::string_view>& chunks) {
  size_t total = 0;  // these bytes are in memory already, so the sum can't overflow
  for (const std::string_view chunk : chunks) total += chunk.size();
  if (total > static_cast<size_t>(std::max<int64_t>(limits.inline_bytes, 0))) {
    return Error(StatusCode::kResourceExhausted,
                 "bucket.inline_bytes has {} bytes, more than limits.inline_bytes of {}", total,
                 limits.inline_bytes);
  }
  if (packed()) {
    const std::string_view chunk = chunks[0];
    // Bytes after the last tensor are ignored, as they are in a region: packers pad their buffers.
    if (chunk.size() < static_cast<size_t>(received.packing->bytes)) {
      return InvalidField(
          "bucket.inline_bytes.chunks",
          "bucket.inline_bytes.chunks[0] has {} bytes where the packed tensors end at {}",
          chunk.size(), received.packing->bytes);
    }
    for (const int64_t offset : received.packing->offsets) {
      places->push_back({.inline_data = chunk.data() + offset});
    }
    return absl::OkStatus();
  }
  for (size_t i = 0; i < count(); ++i) {
    if (chunks[i].size() != static_cast<size_t>(BytesOf(i))) {
      return AboutTensor(
          InvalidField("bucket.inline_bytes.chunks", "{} has {} bytes where {} are carried",
                       BucketEntry("inline_bytes.chunks", i, bucket().tensors[i]), chunks[i].size(),
                       BytesOf(i)),
          bucket().tensors[i].name);
    }
    places->push_back({.inline_data = chunks[i].data()});
  }
  return absl::OkStatus();
}

// OK: [ref.byte_offset, + bytes) lies in a region of this member.
absl::Status CheckRef(const RegionRef& ref, int64_t bytes, size_t index,
                      const RegionBytes& region_bytes) {
  const std::optional<int64_t> size = region_bytes(ref.region);
  if (!size.has_value()) {
    return Error(StatusCode::kNotFound,
                 "bucket.regions.refs[{}].region_id is {}: this member registered no such region",
                 index, ref.region.value());
  }
  if (ref.byte_offset < 0 || ref.byte_offset > *size) {
    return InvalidField(
        "bucket.regions.refs.byte_offset",
        "bucket.regions.refs[{}].byte_offset is {}: outside of region {}, which has {} "
        "bytes",
        index, ref.byte_offset, ref.region.value(), *size);
  }
  if (bytes > *size - ref.byte_offset) {
    return InvalidField(
        "bucket.regions.refs",
        "bucket.regions.refs[{}]: region {} is too small: {} bytes at byte_offset {} "
        "where it has {}",
        index, ref.region.value(), bytes, ref.byte_offset, *size);
  }
  return absl::OkStatus();
}

absl::Status CheckAlignment(std::string_view list, size_t index, int64_t byte_offset,
                            const TensorSpec& tensor) {
  if (byte_offset % ElementBytes(tensor.dtype) == 0) return absl::OkStatus();
  return AboutTensor(
      InvalidField(
          fmt::format("bucket.{}.byte_offset", list),
          "bucket.{}[{}].byte_offset is {}: unaligned for tensor \"{}\", not a multiple of {} "
          "bytes",
          list, index, byte_offset, tensor.name, ElementBytes(tensor.dtype)),
      tensor.name);
}

absl::Status Placer::operator()(const std::vector<RegionRef>& refs) {
  for (size_t i = 0; i < count(); ++i) {
    // A packed bucket has one reference, which is checked with its first tensor.
    const size_t r = packed() ? 0 : i;
    const RegionRef& ref = refs[r];
    if (r == i) {
      REFITD_RETURN_IF_ERROR(
          CheckRef(ref, packed() ? received.packing->bytes : BytesOf(i), r, region_bytes));
    }
    // Implied offsets may be unaligned. Only the start of the buffer must be aligned, for its first
    // tensor.
    if (r == i || received.packing->explicit_offsets) {
      REFITD_RETURN_IF_ERROR(
          CheckAlignment("regions.refs", r, ref.byte_offset, bucket().tensors[i]));
    }
    const int64_t in_buffer = packed() ? received.packing->offsets[i] : 0;
    places->push_back({.region = ref.region, .byte_offset = ref.byte_offset + in_buffer});
  }
  return absl::OkStatus();
}

absl::Status Placer::operator()(const SlotGrant& slot) {
  if (!packed()) {
    return InvalidField(
        "bucket.packed",
        "bucket.packed is false where bucket.slot names slot {}: a leased slot carries "
        "packed buckets",
        slot.slot.value());
  }
  if (received.packing->bytes > limits.slot_bytes) {
    return InvalidField("bucket.slot",
                        "bucket.slot: the packed tensors end at {} where a slot has {} bytes",
                        received.packing->bytes, limits.slot_bytes);
  }
  for (size_t i = 0; i < count(); ++i) {
    const TensorSpec& tensor = bucket().tensors[i];
    const int64_t offset = received.packing->offsets[i];
    if (offset % ElementBytes(tensor.dtype) != 0) {
      return InvalidField(
          "bucket.byte_offsets",
          "{} would be {} where none is given: unaligned, not a multiple of {} bytes",
          BucketEntry("byte_offsets", i, tensor), offset, ElementBytes(tensor.dtype));
    }
    places->push_back({.byte_offset = offset});
  }
  return absl::OkStatus();
}

// OK: [handle.byte_offset, + bytes) lies in the opened block, and in the block size that the handle
// states.
absl::Status CheckHandle(const DeviceRef& handle, int index, int64_t bytes, int64_t block_bytes) {
  if (handle.byte_offset < 0 || handle.byte_offset > block_bytes) {
    return InvalidField(
        "bucket.cuda_ipc.handles.byte_offset",
        "bucket.cuda_ipc.handles[{}].byte_offset is {}: outside of the block, which has "
        "{} bytes",
        index, handle.byte_offset, block_bytes);
  }
  const int64_t room = block_bytes - handle.byte_offset;
  if (handle.bytes < 0 || handle.bytes > room) {
    return InvalidField(
        "bucket.cuda_ipc.handles.bytes",
        "bucket.cuda_ipc.handles[{}].bytes is {}: the block has {} from byte_offset {} on", index,
        handle.bytes, room, handle.byte_offset);
  }
  const int64_t has = handle.bytes == 0 ? room : handle.bytes;
  if (bytes <= has) return absl::OkStatus();
  return InvalidField(
      "bucket.cuda_ipc.handles",
      "bucket.cuda_ipc.handles[{}]: {} bytes are too few for the {} that are carried", index, has,
      bytes);
}

absl::Status Placer::operator()(const std::vector<DeviceRef>& handles) {
  if (device.blocks.empty()) {
    return Error(StatusCode::kUnimplemented,
                 "bucket.cuda_ipc has {} handles: this daemon has no cuda transport",
                 handles.size());
  }
  const size_t want = packed() ? 1 : count();
  REFITD_CHECK(device.blocks.size() == want && device.indices.size() == want);
  for (size_t i = 0; i < count(); ++i) {
    // A packed bucket has one reference, which is checked with its first tensor.
    const size_t r = packed() ? 0 : i;
    const int index = device.indices[r];
    const DeviceRef& handle = handles[static_cast<size_t>(index)];
    const MemorySpan& block = device.blocks[r];
    if (r == i) {
      const int64_t needed = packed() ? received.packing->bytes : BytesOf(i);
      REFITD_RETURN_IF_ERROR(CheckHandle(handle, index, needed, block.bytes));
    }
    // Implied offsets may be unaligned, as they may be in a region.
    if (r == i || received.packing->explicit_offsets) {
      REFITD_RETURN_IF_ERROR(CheckAlignment("cuda_ipc.handles", static_cast<size_t>(index),
                                            handle.byte_offset, bucket().tensors[i]));
    }
    CheckedBucket::Place place;
    place.inline_data =
        block.data + handle.byte_offset + (packed() ? received.packing->offsets[i] : 0);
    place.keep_alive = block.keep_alive;
    place.origin = block.origin;
    place.origin.begin += place.inline_data - block.data;
    places->push_back(std::move(place));
  }
  return absl::OkStatus();
}

bool IsNameCharacter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

}  // namespace

std::string BucketEntry(std::string_view list, size_t index, const TensorSpec& tensor) {
  return fmt::format("bucket.{}[{}] of tensor \"{}\"", list, index, tensor.name);
}

absl::Status CheckRefCount(std::string_view field, size_t got, bool packed, size_t tensors) {
  const size_t want = packed ? 1 : tensors;
  if (got == want) return absl::OkStatus();
  return InvalidField(fmt::format("bucket.{}", field), "bucket.{} has {} entries where {} needs {}",
                      field, got,
                      packed ? "a packed bucket" : "an unpacked bucket of so many tensors", want);
}

absl::StatusOr<std::vector<int>> HandlesOn(const ReceivedBucket& received, std::string_view uuid) {
  const auto& handles = std::get<std::vector<DeviceRef>>(received.source);
  const bool packed = received.packing.has_value();
  if (!packed) {
    REFITD_RETURN_IF_ERROR(
        CheckRefCount("cuda_ipc.handles", handles.size(), packed, received.bucket->tensors.size()));
  }
  std::vector<int> indices;
  for (int i = 0; i < static_cast<int>(handles.size()); ++i) {
    const DeviceRef& handle = handles[static_cast<size_t>(i)];
    if (handle.device == uuid) {
      if (handle.handle.size() != kBlockHandleBytes) {
        return InvalidField("bucket.cuda_ipc.handles.handle",
                            "bucket.cuda_ipc.handles[{}].handle has {} bytes, a CUDA IPC handle {}",
                            i, handle.handle.size(), kBlockHandleBytes);
      }
      indices.push_back(i);
    } else if (!packed) {
      return Error(StatusCode::kFailedPrecondition,
                   "bucket.cuda_ipc.handles[{}].gpu_uuid is \"{}\", the lease's device is \"{}\"",
                   i, Shorten(handle.device, kMaxUuidInMessage), uuid);
    }
  }
  if (!packed || indices.size() == 1) return indices;
  if (indices.empty() && !handles.empty()) {
    return Error(
        StatusCode::kFailedPrecondition,
        "bucket.cuda_ipc.handles: none of {} is of the lease's device \"{}\"; the first is "
        "of \"{}\"",
        handles.size(), uuid, Shorten(handles[0].device, kMaxUuidInMessage));
  }
  return InvalidField(
      "bucket.cuda_ipc.handles",
      "bucket.cuda_ipc.handles has {} of device \"{}\" where a packed bucket needs 1",
      indices.size(), uuid);
}

absl::StatusOr<std::vector<CheckedBucket::Place>> PlacesOf(const ReceivedBucket& received,
                                                           const BucketLimits& limits,
                                                           const RegionBytes& region_bytes,
                                                           const DeviceSource& device) {
  std::vector<CheckedBucket::Place> places;
  places.reserve(received.bucket->tensors.size());
  REFITD_RETURN_IF_ERROR(
      std::visit(Placer{received, limits, region_bytes, device, &places}, received.source));
  return places;
}

std::vector<uint32_t> UnalignedOf(const CheckedBucket& bucket) {
  std::vector<uint32_t> unaligned;
  for (uint32_t i = 0; i < bucket.places.size(); ++i) {
    const CheckedBucket::Place& place = bucket.places[i];
    const auto element = static_cast<uint64_t>(ElementBytes(bucket.tensors[i].dtype));
    const uint64_t at =
        reinterpret_cast<uintptr_t>(place.inline_data) + static_cast<uint64_t>(place.byte_offset);
    if (at % element != 0) unaligned.push_back(i);
  }
  return unaligned;
}

absl::Status CheckName(std::string_view name, std::string_view field) {
  if (name.empty() || name.size() > kMaxGroupNameBytes) {
    return InvalidField(field, "{} has {} characters, outside of 1 to {}", field, name.size(),
                        kMaxGroupNameBytes);
  }
  const auto bad = std::find_if_not(name.begin(), name.end(), IsNameCharacter);
  if (bad != name.end()) {
    return InvalidField(
        field, "{} has byte 0x{:02x} at {}: only letters, digits, '.', '_' and '-' are allowed",
        field, static_cast<unsigned char>(*bad), bad - name.begin());
  }
  if (name == "." || name == ".." || name.front() == '-') {
    return InvalidField(
        field, "{} is \"{}\": a name is neither \".\" nor \"..\", and does not begin with '-'",
        field, name);
  }
  return absl::OkStatus();
}

}  // namespace refitd
