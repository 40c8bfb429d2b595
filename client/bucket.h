// A bucket in its three forms: the structure of the C interface, client::Bucket, and the message of
// PushBucket. bucket.cc is the only file of the client that translates them. Pure.
#ifndef REFITD_CLIENT_BUCKET_H_
#define REFITD_CLIENT_BUCKET_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/refit.h"
#include "client/trainer.h"
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

}  // namespace refitd::client

#endif  // REFITD_CLIENT_BUCKET_H_
