// A pushed bucket whose metadata was checked, and its parts. One object serves from the check to
// the plan: the call, the group's records, the parts and the executor share it, and nothing copies
// its lists.
//
// Immutable once it is shared, and so thread-safe.
#ifndef REFITD_DAEMON_GROUP_BUCKET_H_
#define REFITD_DAEMON_GROUP_BUCKET_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/group/slot_ledger.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/plan/overlap.h"

namespace refitd {

inline constexpr int64_t kMaxTensorsPerBucket = 65'536;
// Limit for the bytes of one bucket; sums below it can't overflow.
inline constexpr int64_t kMaxBucketBytes = kMaxTensorBytes;

// A bucket whose metadata is consistent and fits the memory that it names.
struct CheckedBucket {
  int64_t seq = 0;
  std::vector<TensorSpec> tensors;  // at least one, which may have no elements
  std::vector<TensorRange> ranges;  // ranges[i].tensor == i: the range carried of tensor i
  int64_t bytes = 0;                // carried, of all tensors

  // kNone: the bytes are known to another daemon only.
  enum class Source : uint8_t { kNone, kInline, kRegions, kSlot, kDevice };
  Source source = Source::kNone;
  // The place of the first carried element of tensor i. kInline: `inline_data` points into the
  // message. kDevice: `inline_data` points into a block that `keep_alive` holds open (P6).
  // kRegions: in `region`, at `byte_offset`. kSlot: at `byte_offset` from the slot's start.
  struct Place {
    const char* inline_data = nullptr;
    RegionId region{};
    int64_t byte_offset = 0;
    std::shared_ptr<const void> keep_alive{};
    MemoryOrigin origin{};  // kDevice
  };
  std::vector<Place> places;
  // Indices of tensors whose first carried element lies at no multiple of the element size.
  std::vector<uint32_t> unaligned;
  std::optional<SlotGrant> slot;  // set with kSlot, and only then

  // The bytes that this range of one of `tensors` has.
  int64_t BytesOf(const TensorRange& range) const {
    return range.count * ElementBytes(tensors[range.tensor].dtype);
  }
};

// The content of one part of a bucket, which moves through a slot or directly.
struct PartContent {
  // The bucket of which this is a part. If the part came from another daemon, this is a bucket that
  // has nothing but the part.
  std::shared_ptr<const CheckedBucket> bucket;
  // ranges[i].tensor is an index into the bucket's lists; the range lies in the bucket's range.
  std::vector<TensorRange> ranges;
  std::vector<int64_t> byte_offsets;  // from the slot's start; empty if there is no slot
  // With a slot, this is the end of the packed bytes in the slot; without a slot, the number of
  // bytes that are carried.
  int64_t bytes = 0;

  const TensorSpec& tensor(size_t i) const { return bucket->tensors[ranges[i].tensor]; }
  int64_t CarriedBytes() const {
    int64_t carried = 0;
    for (const TensorRange& range : ranges) carried += bucket->BytesOf(range);
    return carried;
  }

  // Adds what all daemons of the part must agree on before it moves (P5): all daemons
  // add the same numbers in the same order.
  void AddTo(HashChain* chain) const {
    const auto add = [chain](auto number) { chain->Add(static_cast<uint64_t>(number)); };
    add(ranges.size());
    for (size_t i = 0; i < ranges.size(); ++i) add(TensorHash(tensor(i)));
    add(ranges.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
      add(i);
      add(ranges[i].start);
      add(ranges[i].count);
    }
    add(byte_offsets.size());
    for (const int64_t offset : byte_offsets) add(offset);
    add(bytes);
  }
};

// All of a bucket as one part. A bucket in a leased slot keeps the trainer's offsets, so its part
// reaches from the slot's start to the end of the last tensor. A bucket elsewhere has no slot and
// so no offsets in one.
inline PartContent WholeBucket(std::shared_ptr<const CheckedBucket> bucket) {
  PartContent content;
  content.ranges = bucket->ranges;
  if (bucket->slot.has_value()) {
    for (const TensorRange& range : bucket->ranges) {
      const int64_t offset = bucket->places[range.tensor].byte_offset;
      content.byte_offsets.push_back(offset);
      content.bytes = std::max(content.bytes, offset + bucket->BytesOf(range));
    }
  } else {
    content.bytes = bucket->bytes;
  }
  content.bucket = std::move(bucket);
  return content;
}

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_BUCKET_H_
