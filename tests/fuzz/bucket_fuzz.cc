// Any bytes as a Bucket: every bucket that CheckBucket accepts lies inside the memory that it names
// (P10).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/checks/bucket_test_util.h"
#include "refitd/v1/types.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"

namespace refitd {
namespace {

constexpr BucketLimits kLimits{.inline_bytes = 1024, .slot_bytes = 4096};

std::optional<int64_t> Regions(RegionId id) {
  if (id == RegionId(1)) return 4096;
  if (id == RegionId(2)) return 100;
  return std::nullopt;
}

// Stands for the opened blocks of handles; nothing reads it. A handle whose first byte is even gets
// the larger block.
constexpr char kUuid[] = "GPU-0";
alignas(256) char device_memory[4096];
constexpr int64_t kSmallBlock = 100;

DeviceSource Open(const v1::Bucket& bucket, std::vector<int> indices) {
  static const std::shared_ptr<const void> keep_alive = std::make_shared<int>();
  DeviceSource source;
  for (const int index : indices) {
    const bool large = bucket.cuda_ipc().handles(index).handle()[0] % 2 == 0;
    const int64_t bytes = large ? int64_t{sizeof(device_memory)} : kSmallBlock;
    source.blocks.push_back({device_memory, bytes, keep_alive});
  }
  source.indices = std::move(indices);
  return source;
}

// Whether tensor i lies in the block, and in the size that its handle states.
bool InsideItsBlock(const v1::Bucket& bucket, const DeviceSource& device, size_t i,
                    const char* data, int64_t bytes) {
  const size_t r = bucket.packed() ? 0 : i;
  const v1::CudaIpcHandle& handle = bucket.cuda_ipc().handles(device.indices[r]);
  const char* const begin = device.blocks[r].data + handle.byte_offset();
  const char* const end =
      handle.bytes() == 0 ? device.blocks[r].data + device.blocks[r].bytes : begin + handle.bytes();
  return begin >= device.blocks[r].data && end <= device.blocks[r].data + device.blocks[r].bytes &&
         data >= begin && data <= end && bytes <= end - data;
}

bool InsideAChunk(const v1::Bucket& bucket, const char* data, int64_t bytes) {
  const std::less_equal<const char*> le;
  for (const std::string& chunk : bucket.inline_bytes().chunks()) {
    const char* end = chunk.data() + chunk.size();
    if (le(chunk.data(), data) && le(data, end) && bytes <= end - data) return true;
  }
  return false;
}

void CheckPlace(const v1::Bucket& bucket, const CheckedBucket& checked, const DeviceSource& device,
                size_t i, int64_t bytes) {
  const CheckedBucket::Place& place = checked.places[i];
  switch (checked.source) {
    case CheckedBucket::Source::kNone:
      break;
    case CheckedBucket::Source::kInline:
      REFITD_CHECK(InsideAChunk(bucket, place.inline_data, bytes));
      return;
    case CheckedBucket::Source::kDevice:
      REFITD_CHECK(InsideItsBlock(bucket, device, i, place.inline_data, bytes));
      REFITD_CHECK(place.keep_alive != nullptr);
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

// The first byte of tensor i: an address, or an offset in its source.
Wide Begin(const CheckedBucket& checked, size_t i) {
  const CheckedBucket::Place& place = checked.places[i];
  if (place.inline_data == nullptr) return place.byte_offset;
  return reinterpret_cast<uintptr_t>(place.inline_data);
}

void CheckAccepted(const v1::Bucket& bucket, const CheckedBucket& checked,
                   const DeviceSource& device) {
  const size_t tensors = static_cast<size_t>(bucket.names_size());
  REFITD_CHECK(checked.seq == bucket.seq() && checked.seq >= 0);
  REFITD_CHECK(tensors > 0 && checked.tensors.size() == tensors);
  REFITD_CHECK(checked.ranges.size() == tensors && checked.places.size() == tensors);
  std::set<std::string> names;
  std::vector<std::pair<Wide, Wide>> spans;  // within a packed buffer
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
    CheckPlace(bucket, checked, device, i, bytes);
    total += bytes;
    if (bucket.packed() && bytes > 0) {
      const Wide begin = Begin(checked, i);
      spans.emplace_back(begin, begin + bytes);
    }
    // Implied offsets may be unaligned, inside a buffer that is itself aligned.
    const bool implied = bucket.packed() && bucket.byte_offsets_size() == 0;
    if (checked.places[i].inline_data == nullptr &&
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

absl::StatusOr<std::vector<int>> HandlesOf(const v1::Bucket& bucket) {
  REFITD_ASSIGN_OR_RETURN(const ReceivedBucket received, ReadBucket(bucket));
  return HandlesOn(received, kUuid);
}

void FuzzOne(const v1::Bucket& bucket) {
  DeviceSource device;
  if (bucket.has_cuda_ipc()) {
    absl::StatusOr<std::vector<int>> handles = HandlesOf(bucket);
    if (handles.ok()) {
      device = Open(bucket, *std::move(handles));
    } else {
      REFITD_CHECK(!handles.status().message().empty());
    }
  }
  const auto checked = CheckBucket(bucket, kLimits, Regions, device);
  if (checked.ok()) {
    CheckAccepted(bucket, *checked, device);
  } else {
    REFITD_CHECK(!checked.status().message().empty());
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::v1::Bucket)
