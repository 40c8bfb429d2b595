#include "client/part.h"

#include <utility>

#include "transport/base/status.h"

namespace refitd::client {
namespace {

bool Inside(int64_t offset, int64_t size, int64_t limit) {
  return offset >= 0 && size >= 0 && offset <= limit && size <= limit - offset;
}

absl::StatusOr<TensorView> DecodeView(const v1::BucketReady& bucket, int index,
                                      std::span<const char> slot) {
  TensorView view;
  view.tensor.name = bucket.names(index);
  REFITD_ASSIGN_OR_RETURN(view.tensor.dtype, DTypeFromWire(bucket.dtypes(index)));
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

}  // namespace refitd::client
