#include "daemon/checks/bucket.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/memory.h"

namespace refitd {
namespace {

using absl::StatusCode;

constexpr size_t kMaxUuidInMessage = 64;

// Names a field's entry, as in `bucket.sizes[3] of tensor "model.norm.weight"`.
std::string At(std::string_view list, size_t index, const TensorSpec& tensor) {
  return fmt::format("bucket.{}[{}] of tensor \"{}\"", list, index, tensor.name);
}

absl::Status CheckListLength(std::string_view list, int got, size_t names) {
  if (static_cast<size_t>(got) == names) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument, "bucket.{} has {} entries where names has {}", list,
               got, names);
}

// The range carried of tensor i: all of it, or the part that sizes and starts name.
absl::StatusOr<TensorRange> RangeOf(const v1::Bucket& bucket, const TensorSpec& tensor,
                                    size_t index) {
  REFITD_ASSIGN_OR_RETURN(const int64_t whole, ElementCount(tensor.shape));
  const int i = static_cast<int>(index);
  TensorRange range{static_cast<uint32_t>(index), 0, whole};
  if (bucket.sizes_size() == 0) return range;

  range.count = bucket.sizes(i);
  if (range.count < 0) {
    return Error(StatusCode::kInvalidArgument, "{} is {}, less than 0", At("sizes", index, tensor),
                 range.count);
  }
  if (bucket.starts_size() == 0) {
    if (range.count == whole) return range;
    return Error(StatusCode::kInvalidArgument,
                 "{} is {} where {} has {} elements (a part needs bucket.starts)",
                 At("sizes", index, tensor), range.count, ToString(tensor.dtype, tensor.shape),
                 whole);
  }
  range.start = bucket.starts(i);
  if (range.start < 0) {
    return Error(StatusCode::kInvalidArgument, "{} is {}, less than 0", At("starts", index, tensor),
                 range.start);
  }
  if (range.start > whole || range.count > whole - range.start) {
    return Error(StatusCode::kInvalidArgument,
                 "{} is {} with start {}: outside of {}, which has {} elements",
                 At("sizes", index, tensor), range.count, range.start,
                 ToString(tensor.dtype, tensor.shape), whole);
  }
  return range;
}

// Returns the bytes carried of each tensor; fills in out->ranges and out->bytes.
absl::StatusOr<std::vector<int64_t>> CheckRanges(const v1::Bucket& bucket, CheckedBucket* out) {
  if (bucket.sizes_size() != 0) {
    REFITD_RETURN_IF_ERROR(CheckListLength("sizes", bucket.sizes_size(), out->tensors.size()));
  }
  if (bucket.starts_size() != 0) {
    REFITD_RETURN_IF_ERROR(CheckListLength("starts", bucket.starts_size(), out->tensors.size()));
    if (bucket.sizes_size() == 0) {
      return Error(StatusCode::kInvalidArgument,
                   "bucket.starts has {} entries where bucket.sizes has none",
                   bucket.starts_size());
    }
  }
  std::vector<int64_t> bytes;
  bytes.reserve(out->tensors.size());
  out->ranges.reserve(out->tensors.size());
  for (size_t i = 0; i < out->tensors.size(); ++i) {
    const TensorSpec& tensor = out->tensors[i];
    REFITD_ASSIGN_OR_RETURN(const TensorRange range, RangeOf(bucket, tensor, i));
    out->ranges.push_back(range);
    bytes.push_back(range.count * ElementBytes(tensor.dtype));  // at most kMaxTensorBytes
    if (bytes.back() > kMaxBucketBytes - out->bytes) {
      return Error(StatusCode::kInvalidArgument, "{} ({}): the bucket is larger than {} bytes",
                   At("shapes", i, tensor), ToString(tensor.dtype, tensor.shape), kMaxBucketBytes);
    }
    out->bytes += bytes.back();
  }
  return bytes;
}

// Where each tensor lies in a packed buffer, and the length of that buffer.
struct Packing {
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  bool explicit_offsets = false;
};

// OK: no two tensors share a byte.
absl::Status CheckDisjoint(const Packing& packing, const std::vector<TensorSpec>& tensors,
                           const std::vector<int64_t>& bytes) {
  std::vector<size_t> order;
  order.reserve(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return packing.offsets[a] < packing.offsets[b]; });
  for (size_t k = 1; k < order.size(); ++k) {
    const size_t before = order[k - 1];
    const size_t i = order[k];
    if (packing.offsets[before] + bytes[before] > packing.offsets[i]) {
      return Error(StatusCode::kInvalidArgument,
                   "{} is {}: overlaps \"{}\", which has bytes {} to {}",
                   At("byte_offsets", i, tensors[i]), packing.offsets[i], tensors[before].name,
                   packing.offsets[before], packing.offsets[before] + bytes[before]);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Packing> PackingOf(const v1::Bucket& bucket, const std::vector<TensorSpec>& tensors,
                                  const std::vector<int64_t>& bytes) {
  Packing packing;
  packing.explicit_offsets = bucket.byte_offsets_size() != 0;
  packing.offsets.reserve(tensors.size());
  if (!packing.explicit_offsets) {
    for (const int64_t b : bytes) {
      packing.offsets.push_back(packing.bytes);
      packing.bytes += b;
    }
    return packing;
  }
  REFITD_RETURN_IF_ERROR(
      CheckListLength("byte_offsets", bucket.byte_offsets_size(), tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t offset = bucket.byte_offsets(static_cast<int>(i));
    if (offset < 0 || offset > kMaxBucketBytes) {
      return Error(StatusCode::kInvalidArgument, "{} is {}, outside of 0 to {}",
                   At("byte_offsets", i, tensors[i]), offset, kMaxBucketBytes);
    }
    if (offset % ElementBytes(tensors[i].dtype) != 0) {
      return Error(StatusCode::kInvalidArgument, "{} is {}: unaligned, not a multiple of {} bytes",
                   At("byte_offsets", i, tensors[i]), offset, ElementBytes(tensors[i].dtype));
    }
    packing.offsets.push_back(offset);
    packing.bytes = std::max(packing.bytes, offset + bytes[i]);
  }
  REFITD_RETURN_IF_ERROR(CheckDisjoint(packing, tensors, bytes));
  return packing;
}

absl::Status CheckRefCount(std::string_view field, int got, bool packed, size_t tensors) {
  const size_t want = packed ? 1 : tensors;
  if (static_cast<size_t>(got) == want) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument, "bucket.{} has {} entries where {} needs {}", field,
               got, packed ? "a packed bucket" : "an unpacked bucket of so many tensors", want);
}

absl::Status PlaceInline(const v1::InlineBytes& source, const std::optional<Packing>& packing,
                         const std::vector<int64_t>& bytes, const BucketLimits& limits,
                         CheckedBucket* out) {
  REFITD_RETURN_IF_ERROR(CheckRefCount("inline_bytes.chunks", source.chunks_size(),
                                       packing.has_value(), out->tensors.size()));
  size_t total = 0;  // these bytes are in memory already, so the sum can't overflow
  for (const std::string& chunk : source.chunks()) total += chunk.size();
  if (total > static_cast<size_t>(std::max<int64_t>(limits.inline_bytes, 0))) {
    return Error(StatusCode::kResourceExhausted,
                 "bucket.inline_bytes has {} bytes, more than limits.inline_bytes of {}", total,
                 limits.inline_bytes);
  }
  out->source = CheckedBucket::Source::kInline;
  if (packing.has_value()) {
    const std::string& chunk = source.chunks(0);
    // As in a region, bytes after the last tensor are ignored: packers pad their buffers.
    if (chunk.size() < static_cast<size_t>(packing->bytes)) {
      return Error(StatusCode::kInvalidArgument,
                   "bucket.inline_bytes.chunks[0] has {} bytes where the packed tensors end at {}",
                   chunk.size(), packing->bytes);
    }
    for (const int64_t offset : packing->offsets) {
      out->places.push_back({.inline_data = chunk.data() + offset});
    }
    return absl::OkStatus();
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    const std::string& chunk = source.chunks(static_cast<int>(i));
    if (chunk.size() != static_cast<size_t>(bytes[i])) {
      return Error(StatusCode::kInvalidArgument, "{} has {} bytes where {} are carried",
                   At("inline_bytes.chunks", i, out->tensors[i]), chunk.size(), bytes[i]);
    }
    out->places.push_back({.inline_data = chunk.data()});
  }
  return absl::OkStatus();
}

// OK: [ref.byte_offset, + bytes) lies in a region of this member.
absl::Status CheckRef(const v1::RegionRef& ref, int64_t bytes, int index,
                      const RegionBytes& region_bytes) {
  const std::optional<int64_t> size = region_bytes(RegionId(ref.region_id()));
  if (!size.has_value()) {
    return Error(StatusCode::kNotFound,
                 "bucket.regions.refs[{}].region_id is {}: this member registered no such region",
                 index, ref.region_id());
  }
  if (ref.byte_offset() < 0 || ref.byte_offset() > *size) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.regions.refs[{}].byte_offset is {}: outside of region {}, which has {} "
                 "bytes",
                 index, ref.byte_offset(), ref.region_id(), *size);
  }
  if (bytes > *size - ref.byte_offset()) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.regions.refs[{}]: region {} is too small: {} bytes at byte_offset {} "
                 "where it has {}",
                 index, ref.region_id(), bytes, ref.byte_offset(), *size);
  }
  return absl::OkStatus();
}

absl::Status CheckRefAlignment(const v1::RegionRef& ref, int index, const TensorSpec& tensor) {
  if (ref.byte_offset() % ElementBytes(tensor.dtype) == 0) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument,
               "bucket.regions.refs[{}].byte_offset is {}: unaligned for tensor \"{}\", not a "
               "multiple of {} bytes",
               index, ref.byte_offset(), tensor.name, ElementBytes(tensor.dtype));
}

absl::Status PlaceInRegions(const v1::RegionRefs& source, const std::optional<Packing>& packing,
                            const std::vector<int64_t>& bytes, const RegionBytes& region_bytes,
                            CheckedBucket* out) {
  REFITD_RETURN_IF_ERROR(
      CheckRefCount("regions.refs", source.refs_size(), packing.has_value(), out->tensors.size()));
  out->source = CheckedBucket::Source::kRegions;
  if (packing.has_value()) {
    const v1::RegionRef& ref = source.refs(0);
    REFITD_RETURN_IF_ERROR(CheckRef(ref, packing->bytes, 0, region_bytes));
    for (size_t i = 0; i < bytes.size(); ++i) {
      // Implied offsets may be unaligned. Only the start of the buffer must be aligned, for its
      // first tensor.
      if (i == 0 || packing->explicit_offsets) {
        REFITD_RETURN_IF_ERROR(CheckRefAlignment(ref, 0, out->tensors[i]));
      }
      out->places.push_back({.region = RegionId(ref.region_id()),
                             .byte_offset = ref.byte_offset() + packing->offsets[i]});
    }
    return absl::OkStatus();
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int index = static_cast<int>(i);
    const v1::RegionRef& ref = source.refs(index);
    REFITD_RETURN_IF_ERROR(CheckRef(ref, bytes[i], index, region_bytes));
    REFITD_RETURN_IF_ERROR(CheckRefAlignment(ref, index, out->tensors[i]));
    out->places.push_back({.region = RegionId(ref.region_id()), .byte_offset = ref.byte_offset()});
  }
  return absl::OkStatus();
}

absl::Status PlaceInSlot(const v1::SlotRef& source, const std::optional<Packing>& packing,
                         const BucketLimits& limits, CheckedBucket* out) {
  if (!packing.has_value()) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.packed is false where bucket.slot names slot {}: a leased slot carries "
                 "packed buckets",
                 source.slot());
  }
  if (packing->bytes > limits.slot_bytes) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.slot: the packed tensors end at {} where a slot has {} bytes",
                 packing->bytes, limits.slot_bytes);
  }
  for (size_t i = 0; i < out->tensors.size(); ++i) {
    const int64_t offset = packing->offsets[i];
    if (offset % ElementBytes(out->tensors[i].dtype) != 0) {
      return Error(StatusCode::kInvalidArgument,
                   "{} would be {} where none is given: unaligned, not a multiple of {} bytes",
                   At("byte_offsets", i, out->tensors[i]), offset,
                   ElementBytes(out->tensors[i].dtype));
    }
    out->places.push_back({.byte_offset = offset});
  }
  out->source = CheckedBucket::Source::kSlot;
  out->slot = SlotGrant{SlotIndex(source.slot()), GrantId(source.grant())};
  return absl::OkStatus();
}

// OK: [handle.byte_offset, + bytes) lies in the opened block, and in the block size that the handle
// states.
absl::Status CheckHandle(const v1::CudaIpcHandle& handle, int index, int64_t bytes,
                         int64_t block_bytes) {
  if (handle.byte_offset() < 0 || handle.byte_offset() > block_bytes) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.cuda_ipc.handles[{}].byte_offset is {}: outside of the block, which has "
                 "{} bytes",
                 index, handle.byte_offset(), block_bytes);
  }
  const int64_t room = block_bytes - handle.byte_offset();
  if (handle.bytes() < 0 || handle.bytes() > room) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.cuda_ipc.handles[{}].bytes is {}: the block has {} from byte_offset {} on",
                 index, handle.bytes(), room, handle.byte_offset());
  }
  const int64_t has = handle.bytes() == 0 ? room : handle.bytes();
  if (bytes <= has) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument,
               "bucket.cuda_ipc.handles[{}]: {} bytes are too few for the {} that are carried",
               index, has, bytes);
}

absl::Status CheckHandleAlignment(const v1::CudaIpcHandle& handle, int index,
                                  const TensorSpec& tensor) {
  if (handle.byte_offset() % ElementBytes(tensor.dtype) == 0) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument,
               "bucket.cuda_ipc.handles[{}].byte_offset is {}: unaligned for tensor \"{}\", not a "
               "multiple of {} bytes",
               index, handle.byte_offset(), tensor.name, ElementBytes(tensor.dtype));
}

absl::Status PlaceOnDevice(const v1::CudaIpcHandles& source, const std::optional<Packing>& packing,
                           const std::vector<int64_t>& bytes, const DeviceSource& device,
                           CheckedBucket* out) {
  if (device.blocks.empty()) {
    return Error(StatusCode::kUnimplemented,
                 "bucket.cuda_ipc has {} handles: this daemon has no cuda transport",
                 source.handles_size());
  }
  const size_t want = packing.has_value() ? 1 : bytes.size();
  REFITD_CHECK(device.blocks.size() == want && device.indices.size() == want);
  out->source = CheckedBucket::Source::kDevice;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const size_t r = packing.has_value() ? 0 : i;
    const int index = device.indices[r];
    const v1::CudaIpcHandle& handle = source.handles(index);
    const MemorySpan& block = device.blocks[r];
    if (r == i) {
      const int64_t needed = packing.has_value() ? packing->bytes : bytes[i];
      REFITD_RETURN_IF_ERROR(CheckHandle(handle, index, needed, block.bytes));
    }
    // As in a region, implied offsets may be unaligned.
    if (r == i || packing->explicit_offsets) {
      REFITD_RETURN_IF_ERROR(CheckHandleAlignment(handle, index, out->tensors[i]));
    }
    CheckedBucket::Place place;
    place.inline_data =
        block.data + handle.byte_offset() + (packing.has_value() ? packing->offsets[i] : 0);
    place.keep_alive = block.keep_alive;
    out->places.push_back(std::move(place));
  }
  return absl::OkStatus();
}

bool IsNameCharacter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

}  // namespace

absl::StatusOr<std::vector<int>> HandlesOn(const v1::Bucket& bucket, std::string_view uuid) {
  const v1::CudaIpcHandles& source = bucket.cuda_ipc();
  const auto check = [&](int i) -> absl::Status {
    const size_t bytes = source.handles(i).handle().size();
    if (bytes == kCudaIpcHandleBytes) return absl::OkStatus();
    return Error(StatusCode::kInvalidArgument,
                 "bucket.cuda_ipc.handles[{}].handle has {} bytes, a CUDA IPC handle {}", i, bytes,
                 kCudaIpcHandleBytes);
  };
  std::vector<int> indices;
  const auto names = static_cast<size_t>(bucket.names_size());
  if (!bucket.packed()) {
    REFITD_RETURN_IF_ERROR(
        CheckRefCount("cuda_ipc.handles", source.handles_size(), /*packed=*/false, names));
  }
  for (int i = 0; i < source.handles_size(); ++i) {
    const v1::CudaIpcHandle& handle = source.handles(i);
    if (handle.gpu_uuid() == uuid) {
      REFITD_RETURN_IF_ERROR(check(i));
      indices.push_back(i);
    } else if (!bucket.packed()) {
      return Error(StatusCode::kFailedPrecondition,
                   "bucket.cuda_ipc.handles[{}].gpu_uuid is \"{}\", the lease's device is \"{}\"",
                   i, Shorten(handle.gpu_uuid(), kMaxUuidInMessage), uuid);
    }
  }
  if (!bucket.packed() || indices.size() == 1) return indices;
  if (indices.empty() && source.handles_size() > 0) {
    return Error(
        StatusCode::kFailedPrecondition,
        "bucket.cuda_ipc.handles: none of {} is of the lease's device \"{}\"; the first is "
        "of \"{}\"",
        source.handles_size(), uuid, Shorten(source.handles(0).gpu_uuid(), kMaxUuidInMessage));
  }
  return Error(StatusCode::kInvalidArgument,
               "bucket.cuda_ipc.handles has {} of device \"{}\" where a packed bucket needs 1",
               indices.size(), uuid);
}

absl::StatusOr<CheckedBucket> CheckBucket(const v1::Bucket& bucket, const BucketLimits& limits,
                                          const RegionBytes& region_bytes,
                                          const DeviceSource& device) {
  CheckedBucket out;
  out.seq = bucket.seq();
  if (out.seq < 0) {
    return Error(StatusCode::kInvalidArgument, "bucket.seq is {}, less than 0", out.seq);
  }
  if (bucket.names_size() == 0) {
    return Error(StatusCode::kInvalidArgument, "bucket.names is empty: nothing is carried");
  }
  REFITD_ASSIGN_OR_RETURN(out.tensors,
                          CheckManifest(bucket.names(), bucket.dtypes(), bucket.shapes(), "bucket",
                                        kMaxTensorsPerBucket));
  REFITD_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes, CheckRanges(bucket, &out));

  std::optional<Packing> packing;
  if (bucket.packed()) {
    REFITD_ASSIGN_OR_RETURN(packing, PackingOf(bucket, out.tensors, bytes));
  } else if (bucket.byte_offsets_size() != 0) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.byte_offsets has {} entries where bucket.packed is false",
                 bucket.byte_offsets_size());
  }

  out.places.reserve(out.tensors.size());
  switch (bucket.source_case()) {
    case v1::Bucket::kInlineBytes:
      REFITD_RETURN_IF_ERROR(PlaceInline(bucket.inline_bytes(), packing, bytes, limits, &out));
      break;
    case v1::Bucket::kRegions:
      REFITD_RETURN_IF_ERROR(PlaceInRegions(bucket.regions(), packing, bytes, region_bytes, &out));
      break;
    case v1::Bucket::kSlot:
      REFITD_RETURN_IF_ERROR(PlaceInSlot(bucket.slot(), packing, limits, &out));
      break;
    case v1::Bucket::kCudaIpc:
      REFITD_RETURN_IF_ERROR(PlaceOnDevice(bucket.cuda_ipc(), packing, bytes, device, &out));
      break;
    case v1::Bucket::SOURCE_NOT_SET:
      return Error(StatusCode::kInvalidArgument,
                   "bucket.source is missing: one of inline_bytes, regions, slot, cuda_ipc");
  }
  return out;
}

absl::Status CheckName(std::string_view name, std::string_view field) {
  if (name.empty() || name.size() > kMaxGroupNameBytes) {
    return Error(StatusCode::kInvalidArgument, "{} has {} characters, outside of 1 to {}", field,
                 name.size(), kMaxGroupNameBytes);
  }
  const auto bad = std::find_if_not(name.begin(), name.end(), IsNameCharacter);
  if (bad != name.end()) {
    return Error(StatusCode::kInvalidArgument,
                 "{} has byte 0x{:02x} at {}: only letters, digits, '.', '_' and '-' are allowed",
                 field, static_cast<unsigned char>(*bad), bad - name.begin());
  }
  return absl::OkStatus();
}

}  // namespace refitd
