// From the wire to checked values: bucket metadata and names (P10). proto/convert.h has what
// clients need as well.
//
// Pure functions of the message and what the caller knows of the member; nothing is allocated,
// indexed or looped over by a number that was not checked first. Errors name field, index and
// value. Thread-safe.
#ifndef REFITD_DAEMON_CHECKS_BUCKET_H_
#define REFITD_DAEMON_CHECKS_BUCKET_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/convert.h"
#include "refitd/v1/types.pb.h"
#include "transport/plan/layout.h"
#include "transport/pool.h"
#include "transport/transport.h"

namespace refitd {

inline constexpr int64_t kMaxTensorsPerBucket = 65'536;
// Carried by one bucket; sums below it can't overflow.
inline constexpr int64_t kMaxBucketBytes = kMaxTensorBytes;
inline constexpr size_t kMaxGroupNameBytes = 128;
inline constexpr size_t kMaxRequestIdBytes = 64;
inline constexpr size_t kMaxReasonBytes = 512;

struct BucketLimits {
  int64_t inline_bytes = 0;  // of one call
  int64_t slot_bytes = 0;    // of the group's slots
};

// A bucket whose metadata agrees with itself and with the memory it names.
struct CheckedBucket {
  int64_t seq = 0;
  std::vector<TensorSpec> tensors;
  std::vector<TensorRange> ranges;  // ranges[i].tensor == i: what is carried of tensor i
  int64_t bytes = 0;                // carried, sum over tensors

  enum class Source : uint8_t { kInline, kRegions, kSlot, kDevice };
  Source source = Source::kInline;
  // Where the first carried element of tensor i lies. kInline: `inline_data` points into the
  // message. kDevice: into a block that `keep_alive` holds open (P6). kRegions: region and offset.
  // kSlot: offset from the slot's start.
  struct Place {
    const char* inline_data = nullptr;
    RegionId region{};
    int64_t byte_offset = 0;
    std::shared_ptr<const void> keep_alive{};
  };
  std::vector<Place> places;
  std::optional<SlotGrant> slot;
};

// The blocks of device memory that bucket.cuda_ipc names, open: blocks[i] is that of
// handles(indices[i]). One if the bucket is packed, else one a tensor.
struct DeviceSource {
  std::vector<int> indices;
  std::vector<MemorySpan> blocks;
};

// Which handles are the bucket's on the GPU `uuid`, before any is opened: one of a packed bucket,
// which may bring one a GPU, and one a tensor of another. INVALID_ARGUMENT: their number, or their
// bytes. FAILED_PRECONDITION: of other GPUs.
absl::StatusOr<std::vector<int>> HandlesOn(const v1::Bucket& bucket, std::string_view uuid);

// Errors: as Trainer.PushBucket lists (INVALID_ARGUMENT, NOT_FOUND region, RESOURCE_EXHAUSTED
// inline bytes, UNIMPLEMENTED cuda_ipc where `device` is empty).
absl::StatusOr<CheckedBucket> CheckBucket(const v1::Bucket& bucket, const BucketLimits& limits,
                                          const RegionBytes& region_bytes,
                                          const DeviceSource& device = {});

// 1 to kMaxGroupNameBytes characters of [A-Za-z0-9._-]. `field` is "group" or "instance".
absl::Status CheckName(std::string_view name, std::string_view field);

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_BUCKET_H_
