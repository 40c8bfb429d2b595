// A bucket, which a trainer pushes, and a part of a bucket, which a loader engine reads: each is a
// message, a class (client/types.h) and a structure of the C interface. bucket.cc is the only file
// of the client that translates them. Pure; no number of a message is used as an offset or a count
// before it was checked (P10).
#ifndef REFITD_CLIENT_BUCKET_H_
#define REFITD_CLIENT_BUCKET_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/refit.h"
#include "client/types.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/types.pb.h"

namespace refitd::client {

// Makes a Bucket of the structure. The slot that the structure names is taken, whatever else is
// wrong with the structure. Errors: INVALID_ARGUMENT; FAILED_PRECONDITION: the slot was pushed
// before.
absl::StatusOr<Bucket> BucketOf(const refit_bucket* given);

// Fills `wire`, except seq and a slot's number and grant, which the caller knows. Errors:
// INVALID_ARGUMENT naming field and value; RESOURCE_EXHAUSTED: inline bytes over
// `max_inline_bytes`. The daemon checks whether sizes agree with memory and with the engines.
absl::Status EncodeBucket(const Bucket& bucket, int64_t max_inline_bytes, v1::Bucket* message);

// Returns the sum of the bytes of all inline chunks; 0 for other sources.
int64_t InlineBytes(const Bucket& bucket);

// Decodes a part into views on the mapped pool. INTERNAL, with field and value: the daemon's
// message disagrees with itself or with the pool.
absl::StatusOr<Part> DecodePart(const v1::BucketReady& bucket, std::span<const char> pool,
                                int64_t slot_bytes);

// Fills `views` with pointers into `tensors`, which must stay in place while `views` are used.
void Show(const std::vector<TensorView>& tensors, std::vector<refit_view>* views);
// Fills the fields of `shown` that a part has; they point into `part` and `views`.
void Show(const Part& part, std::vector<refit_view>* views, refit_event* shown);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_BUCKET_H_
