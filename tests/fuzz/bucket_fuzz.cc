// Any bytes as a Bucket: what CheckBucket accepts lies inside the memory that it names (P10).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/wire.h"
#include "refitd/v1/types.pb.h"
#include "tests/fuzz/proto_mutator.h"
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

using Wide = __int128;

// Where tensor i begins, in the space of its source.
Wide Begin(const CheckedBucket& checked, size_t i) {
  const CheckedBucket::Place& place = checked.places[i];
  if (checked.source != CheckedBucket::Source::kInline) return place.byte_offset;
  return reinterpret_cast<uintptr_t>(place.inline_data);
}

void CheckAccepted(const v1::Bucket& bucket, const CheckedBucket& checked) {
  const size_t tensors = static_cast<size_t>(bucket.names_size());
  REFITD_CHECK(checked.seq == bucket.seq() && checked.seq >= 0);
  REFITD_CHECK(tensors > 0 && checked.tensors.size() == tensors);
  REFITD_CHECK(checked.ranges.size() == tensors && checked.places.size() == tensors);
  std::set<std::string> names;
  std::vector<std::pair<Wide, Wide>> spans;  // of a packed buffer
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
    if (bucket.packed() && bytes > 0) {
      const Wide begin = Begin(checked, i);
      spans.emplace_back(begin, begin + bytes);
    }
    // Implied offsets fall where they fall, inside a buffer that is itself aligned.
    const bool implied = bucket.packed() && bucket.byte_offsets_size() == 0;
    if (checked.source != CheckedBucket::Source::kInline &&
        (!implied || checked.source == CheckedBucket::Source::kSlot)) {
      REFITD_CHECK(checked.places[i].byte_offset % ElementBytes(tensor.dtype) == 0);
    }

    int64_t boxed = 0;
    for (const Box& box : BoxesOfRange(tensor.shape, range.start, range.count)) {
      REFITD_CHECK(ValidateBox(box, tensor.shape).ok());
      boxed += ElementCount(box);
    }
    REFITD_CHECK(boxed == range.count);
  }
  REFITD_CHECK(total == checked.bytes);
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) REFITD_CHECK(spans[i - 1].second <= spans[i].first);
}

void FuzzOne(const v1::Bucket& bucket) {
  const auto checked = CheckBucket(bucket, kLimits, Regions);
  if (checked.ok()) {
    CheckAccepted(bucket, *checked);
  } else {
    REFITD_CHECK(!checked.status().message().empty());
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::v1::Bucket)
