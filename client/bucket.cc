#include "client/bucket.h"

#include <algorithm>
#include <utility>

#include "client/c_structures.h"
#include "proto/convert.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

absl::Status WrongLength(std::string_view field, size_t length, size_t expected) {
  return InvalidField(fmt::format("bucket.{}", field), "bucket.{} has {} entries, not {}", field,
                      length, expected);
}

// Checks that the bucket has exactly one of the three sources; a bucket of empty tensors may have
// none.
absl::Status CheckOneSource(const Bucket& bucket) {
  const int sources = (bucket.region != nullptr ? 1 : 0) + (bucket.slot != nullptr ? 1 : 0) +
                      (bucket.bytes.empty() ? 0 : 1);
  if (sources == 1) return absl::OkStatus();
  return InvalidField("bucket", "bucket has {} sources: exactly one of region, slot, bytes",
                      sources);
}

absl::Status CheckTensors(const Bucket& bucket) {
  if (bucket.tensors.empty()) {
    return InvalidField("bucket.tensors", "bucket.tensors is empty");
  }
  if (!bucket.ranges.empty() && bucket.ranges.size() != bucket.tensors.size()) {
    return WrongLength("ranges", bucket.ranges.size(), bucket.tensors.size());
  }
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    REFITD_RETURN_IF_ERROR(AboutField(ValidateTensor(bucket.tensors[i]), "bucket.tensors"));
    if (bucket.ranges.empty()) continue;
    const TensorRange& range = bucket.ranges[i];
    REFITD_ASSIGN_OR_RETURN(const int64_t count, ElementCount(bucket.tensors[i].shape));
    if (range.tensor != i || range.start < 0 || range.count < 0 || range.start > count ||
        range.count > count - range.start) {
      return InvalidField(
          "bucket.ranges",
          "bucket.ranges[{}]: tensor {}, start {}, count {} is not a range of \"{}\" of {}"
          " elements",
          i, range.tensor, range.start, range.count, bucket.tensors[i].name, count);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLists(const Bucket& bucket) {
  if (!bucket.packed && !bucket.byte_offsets.empty()) {
    return InvalidField("bucket.byte_offsets", "bucket.byte_offsets are for packed buckets only");
  }
  if (!bucket.byte_offsets.empty() && bucket.byte_offsets.size() != bucket.tensors.size()) {
    return WrongLength("byte_offsets", bucket.byte_offsets.size(), bucket.tensors.size());
  }
  if (bucket.slot != nullptr && !bucket.packed) {
    return InvalidField("bucket.packed", "a bucket in a slot must be packed");
  }
  const size_t references = bucket.packed ? 1 : bucket.tensors.size();
  if (bucket.region != nullptr && bucket.region_offsets.size() != references) {
    return WrongLength("region_offsets", bucket.region_offsets.size(), references);
  }
  if (!bucket.bytes.empty() && bucket.bytes.size() != references) {
    return WrongLength("bytes", bucket.bytes.size(), references);
  }
  return absl::OkStatus();
}

void EncodeTensors(const Bucket& bucket, v1::Bucket* message) {
  for (const TensorSpec& tensor : bucket.tensors) {
    message->add_names(tensor.name);
    message->add_dtypes(ToProto(tensor.dtype));
    *message->add_shapes() = ToProto(tensor.shape);
  }
  for (const TensorRange& range : bucket.ranges) {
    message->add_starts(range.start);
    message->add_sizes(range.count);
  }
}

void EncodeSource(const Bucket& bucket, v1::Bucket* message) {
  if (bucket.packed) message->set_packed(true);
  for (const int64_t offset : bucket.byte_offsets) message->add_byte_offsets(offset);
  if (bucket.region != nullptr) {
    for (const int64_t offset : bucket.region_offsets) {
      v1::RegionRef* ref = message->mutable_regions()->add_refs();
      ref->set_region_id(bucket.region->id().value());
      ref->set_byte_offset(offset);
    }
  } else if (bucket.slot == nullptr) {
    for (const auto& chunk : bucket.bytes) {
      message->mutable_inline_bytes()->add_chunks(chunk.data(), chunk.size());
    }
  }
}

// ---- the C structure of a bucket ----

absl::Status SetRanges(const refit_bucket& given, Bucket* bucket) {
  const refit_tensor* end = given.tensors + given.tensor_count;
  if (std::all_of(given.tensors, end,
                  [](const refit_tensor& tensor) { return tensor.count == REFIT_WHOLE; })) {
    return absl::OkStatus();
  }
  for (int64_t i = 0; i < given.tensor_count; ++i) {
    const refit_tensor& tensor = given.tensors[i];
    TensorRange range{static_cast<uint32_t>(i), tensor.start, tensor.count};
    if (tensor.count == REFIT_WHOLE) {
      REFITD_ASSIGN_OR_RETURN(range.count, ElementCount(bucket->tensors[i].shape));
    }
    bucket->ranges.push_back(range);
  }
  return absl::OkStatus();
}

absl::Status SetSource(const refit_bucket& given, Bucket* bucket) {
  if (given.region != nullptr) {
    bucket->region = given.region->region;
    const int64_t offsets = bucket->packed ? 1 : given.tensor_count;
    if (given.region_offsets != nullptr) {
      bucket->region_offsets.assign(given.region_offsets, given.region_offsets + offsets);
    } else if (bucket->packed) {
      bucket->region_offsets = {0};
    } else {
      return Null("bucket.region_offsets");
    }
  }
  REFITD_RETURN_IF_ERROR(CheckList(given.chunks, given.chunk_count, "bucket.chunks"));
  REFITD_RETURN_IF_ERROR(CheckList(given.chunk_bytes, given.chunk_count, "bucket.chunk_bytes"));
  for (int32_t i = 0; i < given.chunk_count; ++i) {
    REFITD_RETURN_IF_ERROR(CheckList(given.chunks[i], given.chunk_bytes[i], "bucket.chunks[i]"));
    bucket->bytes.emplace_back(static_cast<const char*>(given.chunks[i]), given.chunk_bytes[i]);
  }
  return absl::OkStatus();
}

// ---- a part ----

bool Inside(int64_t offset, int64_t size, int64_t limit) {
  return offset >= 0 && size >= 0 && offset <= limit && size <= limit - offset;
}

absl::StatusOr<TensorView> DecodeView(const v1::BucketReady& bucket, int index,
                                      std::span<const char> slot) {
  TensorView view;
  view.tensor.name = bucket.names(index);
  REFITD_ASSIGN_OR_RETURN(view.tensor.dtype, DTypeFromProto(bucket.dtypes(index)));
  const auto& dims = bucket.shapes(index).dims();
  view.tensor.shape.assign(dims.begin(), dims.end());
  REFITD_RETURN_IF_ERROR(ValidateTensor(view.tensor));
  REFITD_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(view.tensor.shape));
  view.start = bucket.starts(index);
  view.count = bucket.sizes(index);
  if (!Inside(view.start, view.count, elements)) {
    return Error(absl::StatusCode::kInternal, "\"{}\" of {} elements: start {}, size {}",
                 view.tensor.name, elements, view.start, view.count);
  }
  const int64_t offset = bucket.byte_offsets(index);
  const int64_t bytes = view.count * ElementBytes(view.tensor.dtype);
  if (!Inside(offset, bytes, static_cast<int64_t>(slot.size()))) {
    return Error(absl::StatusCode::kInternal, "\"{}\": {} bytes at {} are outside of a slot of {}",
                 view.tensor.name, bytes, offset, slot.size());
  }
  view.data = slot.data() + offset;
  return view;
}

}  // namespace

absl::StatusOr<Bucket> BucketOf(const refit_bucket* raw) {
  REFITD_ASSIGN_OR_RETURN(const refit_bucket given, Read(raw, "bucket"));
  Bucket bucket;
  // Take the slot first, so that it is given up whatever else is wrong.
  if (given.slot != nullptr) {
    bucket.slot = std::move(given.slot->slot);
    if (bucket.slot == nullptr) {
      return Error(absl::StatusCode::kFailedPrecondition, "bucket.slot was pushed before");
    }
  }
  bucket.packed = given.packed != 0;
  REFITD_ASSIGN_OR_RETURN(bucket.tensors, SpecsOf(given.tensors, given.tensor_count));
  REFITD_RETURN_IF_ERROR(SetRanges(given, &bucket));
  if (given.byte_offsets != nullptr) {
    bucket.byte_offsets.assign(given.byte_offsets, given.byte_offsets + given.tensor_count);
  }
  REFITD_RETURN_IF_ERROR(SetSource(given, &bucket));
  return bucket;
}

int64_t InlineBytes(const Bucket& bucket) {
  int64_t total = 0;
  for (const auto& chunk : bucket.bytes) total += static_cast<int64_t>(chunk.size());
  return total;
}

absl::Status EncodeBucket(const Bucket& bucket, int64_t max_inline_bytes, v1::Bucket* message) {
  REFITD_RETURN_IF_ERROR(CheckOneSource(bucket));
  REFITD_RETURN_IF_ERROR(CheckTensors(bucket));
  REFITD_RETURN_IF_ERROR(CheckLists(bucket));
  const int64_t inline_bytes = InlineBytes(bucket);
  if (inline_bytes > max_inline_bytes) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "{} inline bytes in a bucket; the daemon's limit (inline_bytes) is {}",
                 inline_bytes, max_inline_bytes);
  }
  EncodeTensors(bucket, message);
  EncodeSource(bucket, message);
  return absl::OkStatus();
}

absl::StatusOr<Part> DecodePart(const v1::BucketReady& bucket, std::span<const char> pool,
                                int64_t slot_bytes) {
  const int count = bucket.names_size();
  if (bucket.dtypes_size() != count || bucket.shapes_size() != count ||
      bucket.starts_size() != count || bucket.sizes_size() != count ||
      bucket.byte_offsets_size() != count) {
    return Error(absl::StatusCode::kInternal, "part {}: lists of unequal length", bucket.part());
  }
  if (!Inside(bucket.slot_byte_offset(), slot_bytes, static_cast<int64_t>(pool.size()))) {
    return Error(absl::StatusCode::kInternal,
                 "part {}: slot at {} of {} bytes is outside of the pool of {}", bucket.part(),
                 bucket.slot_byte_offset(), slot_bytes, pool.size());
  }
  const auto slot = pool.subspan(bucket.slot_byte_offset(), slot_bytes);
  Part part;
  part.version = Version(bucket.version());
  part.update = UpdateId(bucket.update_id());
  part.part = PartSeq(bucket.part());
  part.tensors.reserve(count);
  for (int i = 0; i < count; ++i) {
    REFITD_ASSIGN_OR_RETURN(TensorView view, DecodeView(bucket, i, slot));
    part.tensors.push_back(std::move(view));
  }
  return part;
}

void Show(const std::vector<TensorView>& tensors, std::vector<refit_view>* views) {
  views->clear();
  for (const TensorView& view : tensors) {
    refit_view shown{};
    shown.tensor.name = view.tensor.name.c_str();
    shown.tensor.dtype = static_cast<int32_t>(view.tensor.dtype);
    shown.tensor.dim_count = static_cast<int32_t>(view.tensor.shape.size());
    shown.tensor.dims = view.tensor.shape.data();
    shown.tensor.start = view.start;
    shown.tensor.count = view.count;
    shown.data = view.data;
    views->push_back(shown);
  }
}

void Show(const Part& part, std::vector<refit_view>* views, refit_event* shown) {
  shown->kind = REFIT_EVENT_PART;
  shown->version = part.version.value();
  shown->update_id = part.update.value();
  shown->part = part.part.value();
  Show(part.tensors, views);
  shown->views = views->data();
  shown->view_count = static_cast<int64_t>(views->size());
}

Bucket Bucket::Packed(std::vector<TensorSpec> tensors, std::shared_ptr<Region> region,
                      int64_t offset, std::vector<int64_t> byte_offsets) {
  Bucket bucket;
  bucket.tensors = std::move(tensors);
  bucket.packed = true;
  bucket.byte_offsets = std::move(byte_offsets);
  bucket.region = std::move(region);
  bucket.region_offsets = {offset};
  return bucket;
}

Bucket Bucket::Unpacked(std::vector<TensorSpec> tensors, std::shared_ptr<Region> region,
                        std::vector<int64_t> offsets) {
  Bucket bucket;
  bucket.tensors = std::move(tensors);
  bucket.region = std::move(region);
  bucket.region_offsets = std::move(offsets);
  return bucket;
}

Bucket Bucket::Inline(std::vector<TensorSpec> tensors, std::vector<std::span<const char>> bytes) {
  Bucket bucket;
  bucket.tensors = std::move(tensors);
  bucket.bytes = std::move(bytes);
  return bucket;
}

Bucket Bucket::InSlot(std::vector<TensorSpec> tensors, std::unique_ptr<LeasedSlot> slot,
                      std::vector<int64_t> byte_offsets) {
  Bucket bucket;
  bucket.tensors = std::move(tensors);
  bucket.packed = true;
  bucket.byte_offsets = std::move(byte_offsets);
  bucket.slot = std::move(slot);
  return bucket;
}

}  // namespace refitd::client
