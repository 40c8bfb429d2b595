// Any bytes as a Bucket: what CheckBucket accepts lies inside the memory that it names (P10).
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include "daemon/wire.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/status.h"
#include "transport/layout.h"

namespace refitd {
namespace {

constexpr BucketLimits kLimits{.inline_bytes = 1024, .slot_bytes = 4096};

std::optional<int64_t> Regions(RegionId id) {
  if (id == RegionId(1)) return 4096;
  if (id == RegionId(2)) return 100;
  return std::nullopt;
}

bool InsideAChunk(const v1::Bucket& bucket, const char* data, int64_t bytes) {
  const std::less_equal<const char*> le;
  for (const std::string& chunk : bucket.inline_bytes().chunks()) {
    const char* end = chunk.data() + chunk.size();
    if (le(chunk.data(), data) && le(data, end) && bytes <= end - data) return true;
  }
  return false;
}

void CheckPlace(const v1::Bucket& bucket, const CheckedBucket& checked, size_t i, int64_t bytes) {
  const CheckedBucket::Place& place = checked.places[i];
  switch (checked.source) {
    case CheckedBucket::Source::kInline:
      REFITD_CHECK(InsideAChunk(bucket, place.inline_data, bytes));
      return;
    case CheckedBucket::Source::kRegions:
      REFITD_CHECK(Regions(place.region).has_value());
      REFITD_CHECK(place.byte_offset >= 0 && bytes <= *Regions(place.region) - place.byte_offset);
      return;
    case CheckedBucket::Source::kSlot:
      REFITD_CHECK(checked.slot.has_value());
      REFITD_CHECK(place.byte_offset >= 0 && bytes <= kLimits.slot_bytes - place.byte_offset);
      return;
  }
  REFITD_CHECK(false);
}

void CheckAccepted(const v1::Bucket& bucket, const CheckedBucket& checked) {
  const size_t tensors = static_cast<size_t>(bucket.names_size());
  REFITD_CHECK(checked.seq == bucket.seq() && checked.seq >= 0);
  REFITD_CHECK(tensors > 0 && checked.tensors.size() == tensors);
  REFITD_CHECK(checked.ranges.size() == tensors && checked.places.size() == tensors);
  std::set<std::string> names;
  int64_t total = 0;
  for (size_t i = 0; i < tensors; ++i) {
    const TensorSpec& tensor = checked.tensors[i];
    const TensorRange& range = checked.ranges[i];
    REFITD_CHECK(ValidateTensor(tensor).ok());
    REFITD_CHECK(names.insert(tensor.name).second);
    const int64_t whole = *ElementCount(tensor.shape);
    REFITD_CHECK(range.tensor == i && range.start >= 0 && range.count >= 0);
    REFITD_CHECK(range.count <= whole - range.start);
    const int64_t bytes = range.count * ElementBytes(tensor.dtype);
    CheckPlace(bucket, checked, i, bytes);
    total += bytes;

    int64_t boxed = 0;
    for (const Box& box : BoxesOfRange(tensor.shape, range.start, range.count)) {
      REFITD_CHECK(ValidateBox(box, tensor.shape).ok());
      boxed += ElementCount(box);
    }
    REFITD_CHECK(boxed == range.count);
  }
  REFITD_CHECK(total == checked.bytes);
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  refitd::v1::Bucket bucket;
  if (!bucket.ParseFromArray(data, static_cast<int>(size))) return 0;
  const auto checked = refitd::CheckBucket(bucket, refitd::kLimits, refitd::Regions);
  if (checked.ok()) {
    refitd::CheckAccepted(bucket, *checked);
  } else {
    REFITD_CHECK(!checked.status().message().empty());
  }
  return 0;
}
