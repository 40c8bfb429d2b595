// Checks of a pushed bucket (P10), from its message to the values that the daemon works with, and
// of names.
//
// A service reads the message (bucket_message.h): the result is a ReceivedBucket, whose metadata is
// consistent. The daemon then finds the places of the bytes, in memory that it knows of the member.
//
// Pure functions. No number is used for an allocation, an index or a loop bound before it was
// checked. Errors name field, index and value. Thread-safe.
#ifndef REFITD_DAEMON_CHECKS_BUCKET_H_
#define REFITD_DAEMON_CHECKS_BUCKET_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/bucket.h"
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

// The opened blocks of device memory that a bucket names: blocks[i] belongs to the reference
// indices[i]. A packed bucket has one block, any other bucket one for each tensor.
struct DeviceSource {
  std::vector<int> indices;
  std::vector<MemorySpan> blocks;
};

// References to memory, as a pusher makes them: nothing in them is checked.
struct RegionRef {
  RegionId region;
  int64_t byte_offset = 0;
};
// The texts belong to the message.
struct DeviceRef {
  std::string_view device;  // the device's name
  std::string_view handle;  // of CUDA IPC
  int64_t byte_offset = 0;  // from the start of the block
  int64_t bytes = 0;        // 0: up to the end of the block
};

// The place of each tensor in a packed buffer, and the length of that buffer.
struct Packing {
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  bool explicit_offsets = false;
};

// A bucket as it came from a service. It points into its message, which must outlive it.
struct ReceivedBucket {
  std::shared_ptr<CheckedBucket> bucket;  // without places; not shared with anyone yet
  std::optional<Packing> packing;         // none: the bucket is not packed
  // Inline bytes and references to regions: one entry for a packed bucket, else one for each
  // tensor. References to device memory: any number (HandlesOn).
  std::variant<std::vector<std::string_view>, std::vector<RegionRef>, SlotGrant,
               std::vector<DeviceRef>>
      source;
};

// Returns which of the bucket's references to device memory are for the GPU `uuid`, before any of
// them is opened. A packed bucket needs one reference for the GPU and may bring one for each GPU;
// any other bucket needs one for each tensor. INVALID_ARGUMENT: wrong number of handles, or of
// bytes. FAILED_PRECONDITION: all handles are for other GPUs.
absl::StatusOr<std::vector<int>> HandlesOn(const ReceivedBucket& received, std::string_view uuid);

// The places of the bucket's tensors. Errors: as listed at Trainer.PushBucket (INVALID_ARGUMENT,
// NOT_FOUND region, RESOURCE_EXHAUSTED inline bytes, UNIMPLEMENTED cuda_ipc if `device` is empty).
absl::StatusOr<std::vector<CheckedBucket::Place>> PlacesOf(const ReceivedBucket& received,
                                                           const BucketLimits& limits,
                                                           const RegionBytes& region_bytes,
                                                           const DeviceSource& device = {});

// CheckedBucket::unaligned of a bucket that has its places.
std::vector<uint32_t> UnalignedOf(const CheckedBucket& bucket);

// ---- shared with bucket_message.cc ----
// Names a field's entry, as in `bucket.sizes[3] of tensor "model.norm.weight"`.
std::string BucketEntry(std::string_view list, size_t index, const TensorSpec& tensor);
// OK: the bucket has as many references to its memory as it needs.
absl::Status CheckRefCount(std::string_view field, size_t got, bool packed, size_t tensors);

// 1 to kMaxGroupNameBytes characters of [A-Za-z0-9._-]. `field` is "group" or "instance".
absl::Status CheckName(std::string_view name, std::string_view field);

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_BUCKET_H_
