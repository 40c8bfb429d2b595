// Decodes a BucketReady into views on the mapped pool. Pure; no number of the message is used as an
// offset or a count before it was checked (P10).
#ifndef REFITD_CLIENT_PART_H_
#define REFITD_CLIENT_PART_H_

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "client/engine.h"
#include "refitd/v1/engine.pb.h"

namespace refitd::client {

// INTERNAL, with field and value: the daemon's message disagrees with itself or with the pool.
absl::StatusOr<Part> DecodePart(const v1::BucketReady& bucket, std::span<const char> pool,
                                int64_t slot_bytes);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_PART_H_
