#include "daemon/checks/bucket_message.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/convert.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;

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
    return Error(StatusCode::kInvalidArgument, "{} is {}, less than 0",
                 BucketEntry("sizes", index, tensor), range.count);
  }
  if (bucket.starts_size() == 0) {
    if (range.count == whole) return range;
    return Error(StatusCode::kInvalidArgument,
                 "{} is {} where {} has {} elements (a part needs bucket.starts)",
                 BucketEntry("sizes", index, tensor), range.count,
                 ToString(tensor.dtype, tensor.shape), whole);
  }
  range.start = bucket.starts(i);
  if (range.start < 0) {
    return Error(StatusCode::kInvalidArgument, "{} is {}, less than 0",
                 BucketEntry("starts", index, tensor), range.start);
  }
  if (range.start > whole || range.count > whole - range.start) {
    return Error(StatusCode::kInvalidArgument,
                 "{} is {} with start {}: outside of {}, which has {} elements",
                 BucketEntry("sizes", index, tensor), range.count, range.start,
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
                   BucketEntry("shapes", i, tensor), ToString(tensor.dtype, tensor.shape),
                   kMaxBucketBytes);
    }
    out->bytes += bytes.back();
  }
  return bytes;
}

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
      return Error(
          StatusCode::kInvalidArgument, "{} is {}: overlaps \"{}\", which has bytes {} to {}",
          BucketEntry("byte_offsets", i, tensors[i]), packing.offsets[i], tensors[before].name,
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
                   BucketEntry("byte_offsets", i, tensors[i]), offset, kMaxBucketBytes);
    }
    if (offset % ElementBytes(tensors[i].dtype) != 0) {
      return Error(StatusCode::kInvalidArgument, "{} is {}: unaligned, not a multiple of {} bytes",
                   BucketEntry("byte_offsets", i, tensors[i]), offset,
                   ElementBytes(tensors[i].dtype));
    }
    packing.offsets.push_back(offset);
    packing.bytes = std::max(packing.bytes, offset + bytes[i]);
  }
  REFITD_RETURN_IF_ERROR(CheckDisjoint(packing, tensors, bytes));
  return packing;
}

DeviceRef RefOf(const v1::CudaIpcHandle& handle) {
  return {handle.gpu_uuid(), handle.handle(), handle.byte_offset(), handle.bytes()};
}

// Reads where the bytes are, as the message tells it.
absl::Status ReadSource(const v1::Bucket& message, ReceivedBucket* out) {
  const size_t tensors = out->bucket->tensors.size();
  const bool packed = out->packing.has_value();
  switch (message.source_case()) {
    case v1::Bucket::kInlineBytes: {
      const auto& chunks = message.inline_bytes().chunks();
      REFITD_RETURN_IF_ERROR(CheckRefCount("inline_bytes.chunks",
                                           static_cast<size_t>(chunks.size()), packed, tensors));
      out->source.emplace<std::vector<std::string_view>>(chunks.begin(), chunks.end());
      out->bucket->source = CheckedBucket::Source::kInline;
      return absl::OkStatus();
    }
    case v1::Bucket::kRegions: {
      const auto& refs = message.regions().refs();
      REFITD_RETURN_IF_ERROR(
          CheckRefCount("regions.refs", static_cast<size_t>(refs.size()), packed, tensors));
      auto& read = out->source.emplace<std::vector<RegionRef>>();
      read.reserve(static_cast<size_t>(refs.size()));
      for (const v1::RegionRef& ref : refs) {
        read.push_back({RegionId(ref.region_id()), ref.byte_offset()});
      }
      out->bucket->source = CheckedBucket::Source::kRegions;
      return absl::OkStatus();
    }
    case v1::Bucket::kSlot:
      out->bucket->slot = out->source.emplace<SlotGrant>(
          SlotGrant{SlotIndex(message.slot().slot()), GrantId(message.slot().grant())});
      out->bucket->source = CheckedBucket::Source::kSlot;
      return absl::OkStatus();
    case v1::Bucket::kCudaIpc: {
      auto& read = out->source.emplace<std::vector<DeviceRef>>();
      for (const v1::CudaIpcHandle& handle : message.cuda_ipc().handles()) {
        read.push_back(RefOf(handle));
      }
      out->bucket->source = CheckedBucket::Source::kDevice;
      return absl::OkStatus();
    }
    case v1::Bucket::SOURCE_NOT_SET:
      break;
  }
  return Error(StatusCode::kInvalidArgument,
               "bucket.source is missing: one of inline_bytes, regions, slot, cuda_ipc");
}

}  // namespace

DeviceRef BlockOf(const v1::RegisterRegionRequest& request) { return RefOf(request.cuda_ipc()); }

absl::StatusOr<ReceivedBucket> ReadBucket(const v1::Bucket& message) {
  ReceivedBucket out;
  out.bucket = std::make_shared<CheckedBucket>();
  CheckedBucket& bucket = *out.bucket;
  bucket.seq = message.seq();
  if (bucket.seq < 0) {
    return Error(StatusCode::kInvalidArgument, "bucket.seq is {}, less than 0", bucket.seq);
  }
  if (message.names_size() == 0) {
    return Error(StatusCode::kInvalidArgument, "bucket.names is empty: nothing is carried");
  }
  REFITD_ASSIGN_OR_RETURN(
      bucket.tensors, CheckManifest(message.names(), message.dtypes(), message.shapes(), "bucket",
                                    kMaxTensorsPerBucket));
  REFITD_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes, CheckRanges(message, &bucket));
  if (message.packed()) {
    REFITD_ASSIGN_OR_RETURN(out.packing, PackingOf(message, bucket.tensors, bytes));
  } else if (message.byte_offsets_size() != 0) {
    return Error(StatusCode::kInvalidArgument,
                 "bucket.byte_offsets has {} entries where bucket.packed is false",
                 message.byte_offsets_size());
  }
  REFITD_RETURN_IF_ERROR(ReadSource(message, &out));
  return out;
}

}  // namespace refitd
