// Checks bucket metadata and names from the wire and turns them into values (P10). proto/convert.h
// has the conversions that clients need, too.
//
// Pure functions of the message and of what the caller knows about the member. No number is used
// for an allocation, an index or a loop bound before it was checked. Errors name field, index and
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
#include "transport/bucket.h"
#include "transport/plan/layout.h"
#include "transport/transport.h"

namespace refitd {

inline constexpr size_t kMaxGroupNameBytes = 128;
inline constexpr size_t kMaxRequestIdBytes = 64;
inline constexpr size_t kMaxReasonBytes = 512;
inline constexpr size_t kMaxNoteBytes = 256;  // of an update

struct BucketLimits {
  int64_t inline_bytes = 0;  // of one call
  int64_t slot_bytes = 0;    // of the group's slots
};

// The opened blocks of device memory that bucket.cuda_ipc names: blocks[i] belongs to
// handles(indices[i]). A packed bucket has one block, any other bucket one for each tensor.
struct DeviceSource {
  std::vector<int> indices;
  std::vector<MemorySpan> blocks;
};

// Which of the bucket's handles are for the GPU `uuid`, found before any is opened: one for a
// packed bucket, which may bring one handle for each GPU; one for each tensor of any other.
// INVALID_ARGUMENT: wrong number of handles, or of bytes. FAILED_PRECONDITION: all handles are for
// other GPUs.
absl::StatusOr<std::vector<int>> HandlesOn(const v1::Bucket& bucket, std::string_view uuid);

// Errors: as listed at Trainer.PushBucket (INVALID_ARGUMENT, NOT_FOUND region, RESOURCE_EXHAUSTED
// inline bytes, UNIMPLEMENTED cuda_ipc if `device` is empty).
absl::StatusOr<CheckedBucket> CheckBucket(const v1::Bucket& bucket, const BucketLimits& limits,
                                          const RegionBytes& region_bytes,
                                          const DeviceSource& device = {});

// 1 to kMaxGroupNameBytes characters of [A-Za-z0-9._-]. `field` is "group" or "instance".
absl::Status CheckName(std::string_view name, std::string_view field);

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_BUCKET_H_
