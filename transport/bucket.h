// A pushed bucket whose metadata was checked. One object serves from the check to the plan: the
// call, the group's records, the parts and the executor share it, and nothing copies its lists.
//
// Immutable once it is shared, and so thread-safe.
#ifndef REFITD_TRANSPORT_BUCKET_H_
#define REFITD_TRANSPORT_BUCKET_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/pool.h"

namespace refitd {

inline constexpr int64_t kMaxTensorsPerBucket = 65'536;
// Limit for the bytes of one bucket; sums below it can't overflow.
inline constexpr int64_t kMaxBucketBytes = kMaxTensorBytes;

// A bucket whose metadata is consistent and fits the memory that it names.
struct CheckedBucket {
  int64_t seq = 0;
  std::vector<TensorSpec> tensors;
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
  };
  std::vector<Place> places;
  std::optional<SlotGrant> slot;  // set exactly with kSlot

  // The bytes that this range of one of `tensors` has.
  int64_t BytesOf(const TensorRange& range) const {
    return range.count * ElementBytes(tensors[range.tensor].dtype);
  }
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BUCKET_H_
