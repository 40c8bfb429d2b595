#include "daemon/checks/bucket_message.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/checks/fields.h"
#include "proto/convert.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The range carried of the tensor at `index`: all of it, or the part that sizes and starts name.
// CheckRanges has made sure that each of these has an entry for every tensor, or none at all.
absl::StatusOr<TensorRange> RangeOf(const v1::Bucket& bucket, const TensorSpec& tensor,
                                    size_t index) {
  REFITD_ASSIGN_OR_RETURN(const int64_t whole, ElementCount(tensor.shape));
  const int i = static_cast<int>(index);
  TensorRange range{static_cast<uint32_t>(index), 0, whole};
  if (bucket.sizes_size() == 0) return range;

  range.count = bucket.sizes(i);
  if (range.count < 0) {
    return InvalidField("bucket.sizes", "{} is {}, less than 0",
                        BucketEntry("sizes", index, tensor), range.count);
  }
  if (bucket.starts_size() == 0) {
    if (range.count == whole) return range;
    return InvalidField("bucket.sizes",
                        "{} is {} where {} has {} elements (a part needs bucket.starts)",
                        BucketEntry("sizes", index, tensor), range.count,
                        ToString(tensor.dtype, tensor.shape), whole);
  }
  range.start = bucket.starts(i);
  if (range.start < 0) {
    return InvalidField("bucket.starts", "{} is {}, less than 0",
                        BucketEntry("starts", index, tensor), range.start);
  }
  if (range.start > whole || range.count > whole - range.start) {
    return InvalidField("bucket.sizes",
                        "{} is {} with start {}: outside of {}, which has {} elements",
                        BucketEntry("sizes", index, tensor), range.count, range.start,
                        ToString(tensor.dtype, tensor.shape), whole);
  }
  return range;
}

// Returns the bytes carried of each tensor; fills in out->ranges and out->bytes.
absl::StatusOr<std::vector<int64_t>> CheckRanges(const v1::Bucket& bucket, CheckedBucket* out) {
  if (bucket.sizes_size() != 0) {
    REFITD_RETURN_IF_ERROR(SameLength(bucket.sizes_size(), out->tensors.size(), "bucket.sizes"));
  }
  if (bucket.starts_size() != 0) {
    REFITD_RETURN_IF_ERROR(SameLength(bucket.starts_size(), out->tensors.size(), "bucket.starts"));
    if (bucket.sizes_size() == 0) {
      return InvalidField("bucket.starts",
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
      return InvalidField("bucket.shapes", "{} ({}): the bucket is larger than {} bytes",
                          BucketEntry("shapes", i, tensor), ToString(tensor.dtype, tensor.shape),
                          kMaxBucketBytes);
    }
    out->bytes += bytes.back();
  }
  return bytes;
}

// Two tensors that share a byte, the one with the lesser offset first; nullopt: there are none.
std::optional<std::pair<size_t, size_t>> Overlap(const std::vector<int64_t>& offsets,
                                                 const std::vector<int64_t>& bytes) {
  std::vector<size_t> order;
  order.reserve(offsets.size());
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (bytes[i] > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  for (size_t k = 1; k < order.size(); ++k) {
    const size_t before = order[k - 1];
    if (offsets[before] + bytes[before] > offsets[order[k]]) return {{before, order[k]}};
  }
  return std::nullopt;
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
      SameLength(bucket.byte_offsets_size(), tensors.size(), "bucket.byte_offsets"));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t offset = bucket.byte_offsets(static_cast<int>(i));
    if (offset < 0 || offset > kMaxBucketBytes) {
      return InvalidField("bucket.byte_offsets", "{} is {}, outside of 0 to {}",
                          BucketEntry("byte_offsets", i, tensors[i]), offset, kMaxBucketBytes);
    }
    if (offset % ElementBytes(tensors[i].dtype) != 0) {
      return InvalidField("bucket.byte_offsets", "{} is {}: unaligned, not a multiple of {} bytes",
                          BucketEntry("byte_offsets", i, tensors[i]), offset,
                          ElementBytes(tensors[i].dtype));
    }
    packing.offsets.push_back(offset);
    packing.bytes = std::max(packing.bytes, offset + bytes[i]);
  }
  const auto overlap = Overlap(packing.offsets, bytes);
  if (!overlap.has_value()) return packing;
  const auto [before, i] = *overlap;
  return InvalidField("bucket.byte_offsets", "{} is {}: overlaps \"{}\", which has bytes {} to {}",
                      BucketEntry("byte_offsets", i, tensors[i]), packing.offsets[i],
                      tensors[before].name, packing.offsets[before],
                      packing.offsets[before] + bytes[before]);
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
  return InvalidField("bucket.source",
                      "bucket.source is missing: one of inline_bytes, regions, slot, cuda_ipc");
}

// ---- between daemons ----

absl::StatusOr<std::vector<TensorRange>> RangesOf(const v1::PeerTensors& message,
                                                  const std::vector<TensorSpec>& tensors,
                                                  std::string_view field) {
  REFITD_RETURN_IF_ERROR(
      SameLength(message.starts_size(), tensors.size(), fmt::format("{}.starts", field)));
  REFITD_RETURN_IF_ERROR(
      SameLength(message.sizes_size(), tensors.size(), fmt::format("{}.sizes", field)));
  std::vector<TensorRange> ranges;
  ranges.reserve(tensors.size());
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const int64_t whole, ElementCount(tensors[i].shape));
    const int64_t start = message.starts(static_cast<int>(i));
    const int64_t count = message.sizes(static_cast<int>(i));
    REFITD_RETURN_IF_ERROR(InRange(start, 0, whole, fmt::format("{}.starts[{}]", field, i)));
    REFITD_RETURN_IF_ERROR(InRange(count, 0, whole - start, fmt::format("{}.sizes[{}]", field, i)));
    const int64_t carried = count * ElementBytes(tensors[i].dtype);
    if (carried > kMaxBucketBytes - bytes) {
      return InvalidField(fmt::format("{}.sizes", field),
                          "{}.sizes[{}] is {}: more than {} bytes together", field, i, count,
                          kMaxBucketBytes);
    }
    bytes += carried;
    ranges.push_back({static_cast<uint32_t>(i), start, count});
  }
  return ranges;
}

// Checks that the offsets lie in the slot, are aligned, and that the ranges do not overlap.
absl::Status CheckOffsets(const v1::PeerTensors& message, const CheckedBucket& bucket,
                          bool has_slot, int64_t slot_bytes, std::string_view name) {
  const std::string field = fmt::format("{}.byte_offsets", name);
  REFITD_RETURN_IF_ERROR(SameLength(message.byte_offsets_size(),
                                    has_slot ? bucket.tensors.size() : 0,
                                    has_slot ? field : field + " (there is no slot)"));
  if (!has_slot) return absl::OkStatus();
  const std::vector<int64_t> offsets(message.byte_offsets().begin(), message.byte_offsets().end());
  std::vector<int64_t> bytes;
  bytes.reserve(offsets.size());
  for (size_t i = 0; i < offsets.size(); ++i) {
    bytes.push_back(bucket.BytesOf(bucket.ranges[i]));
    REFITD_RETURN_IF_ERROR(
        InRange(offsets[i], 0, slot_bytes - bytes[i], fmt::format("{}[{}]", field, i)));
    const int64_t element = ElementBytes(bucket.tensors[i].dtype);
    if (offsets[i] % element == 0) continue;
    return InvalidField(field, "{}[{}] is {}: unaligned, not a multiple of {} bytes", field, i,
                        offsets[i], element);
  }
  const auto overlap = Overlap(offsets, bytes);
  if (!overlap.has_value()) return absl::OkStatus();
  return InvalidField(field, "{}[{}] is {}: overlaps entry {}", field, overlap->second,
                      offsets[overlap->second], overlap->first);
}

absl::StatusOr<CheckedBucket> ReadTensors(const v1::PeerTensors& tensors,
                                          const std::optional<SlotGrant>& slot, int64_t slot_bytes,
                                          std::string_view field) {
  CheckedBucket out;
  REFITD_RETURN_IF_ERROR(InRange(tensors.names_size(), 1, kMaxTensorsPerBucket,
                                 fmt::format("{}.names' length", field)));
  REFITD_ASSIGN_OR_RETURN(out.tensors,
                          CheckManifest(tensors.names(), tensors.dtypes(), tensors.shapes(), field,
                                        kMaxTensorsPerBucket));
  REFITD_ASSIGN_OR_RETURN(out.ranges, RangesOf(tensors, out.tensors, field));
  for (const TensorRange& range : out.ranges) out.bytes += out.BytesOf(range);
  REFITD_RETURN_IF_ERROR(CheckOffsets(tensors, out, slot.has_value(), slot_bytes, field));
  if (!slot.has_value()) return out;
  out.source = CheckedBucket::Source::kSlot;
  for (const int64_t offset : tensors.byte_offsets()) out.places.push_back({.byte_offset = offset});
  out.slot = slot;
  return out;
}

// ---- writing ----

// `message`: a v1::PeerTensors or a v1::BucketReady.
template <typename Message>
void WriteTensors(const PartContent& content, Message* message) {
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorSpec& tensor = content.tensor(i);
    message->add_names(tensor.name);
    message->add_dtypes(ToProto(tensor.dtype));
    *message->add_shapes() = ToProto(tensor.shape);
    message->add_starts(content.ranges[i].start);
    message->add_sizes(content.ranges[i].count);
  }
  message->mutable_byte_offsets()->Add(content.byte_offsets.begin(), content.byte_offsets.end());
}

}  // namespace

DeviceRef BlockOf(const v1::RegisterRegionRequest& request) { return RefOf(request.cuda_ipc()); }

absl::StatusOr<ReceivedBucket> ReadBucket(const v1::Bucket& message) {
  ReceivedBucket out;
  out.bucket = std::make_shared<CheckedBucket>();
  CheckedBucket& bucket = *out.bucket;
  bucket.seq = message.seq();
  if (bucket.seq < 0) {
    return InvalidField("bucket.seq", "bucket.seq is {}, less than 0", bucket.seq);
  }
  if (message.names_size() == 0) {
    return InvalidField("bucket.names", "bucket.names is empty: nothing is carried");
  }
  REFITD_ASSIGN_OR_RETURN(
      bucket.tensors, CheckManifest(message.names(), message.dtypes(), message.shapes(), "bucket",
                                    kMaxTensorsPerBucket));
  REFITD_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes, CheckRanges(message, &bucket));
  if (message.packed()) {
    REFITD_ASSIGN_OR_RETURN(out.packing, PackingOf(message, bucket.tensors, bytes));
  } else if (message.byte_offsets_size() != 0) {
    return InvalidField("bucket.byte_offsets",
                        "bucket.byte_offsets has {} entries where bucket.packed is false",
                        message.byte_offsets_size());
  }
  REFITD_RETURN_IF_ERROR(ReadSource(message, &out));
  return out;
}

absl::StatusOr<CheckedBucket> ReadBucket(const v1::PeerBucket& message,
                                         const std::optional<SlotGrant>& slot, int64_t slot_bytes) {
  REFITD_RETURN_IF_ERROR(NotNegative(message.seq(), "bucket.seq"));
  REFITD_ASSIGN_OR_RETURN(CheckedBucket out,
                          ReadTensors(message.tensors(), slot, slot_bytes, "bucket.tensors"));
  out.seq = message.seq();
  REFITD_RETURN_IF_ERROR(InRange(message.unaligned_size(), 0,
                                 static_cast<int64_t>(out.tensors.size()), "bucket.unaligned"));
  for (const uint32_t tensor : message.unaligned()) {
    REFITD_RETURN_IF_ERROR(
        InRange(tensor, 0, static_cast<int64_t>(out.tensors.size()) - 1, "bucket.unaligned"));
    out.unaligned.push_back(tensor);
  }
  return out;
}

absl::StatusOr<CheckedBucket> ReadBucket(const v1::PeerHeader& message,
                                         const std::optional<SlotGrant>& slot, int64_t slot_bytes) {
  return ReadTensors(message.content(), slot, slot_bytes, "header.content");
}

void WriteBucket(const PartContent& content, v1::PeerBucket* message) {
  message->set_seq(content.bucket->seq);
  WriteTensors(content, message->mutable_tensors());
  message->mutable_unaligned()->Add(content.bucket->unaligned.begin(),
                                    content.bucket->unaligned.end());
}

void WriteBucket(const PartContent& content, v1::PeerHeader* message) {
  WriteTensors(content, message->mutable_content());
  message->set_bytes(content.bytes);
}

void WriteBucket(const PartContent& content, v1::BucketReady* message) {
  WriteTensors(content, message);
  message->set_bytes(content.bytes);
}

}  // namespace refitd
