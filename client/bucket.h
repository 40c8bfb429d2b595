// Encodes a Bucket as the message of PushBucket, and checks for the caller's mistakes. Pure.
#ifndef REFITD_CLIENT_BUCKET_H_
#define REFITD_CLIENT_BUCKET_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/trainer.h"
#include "refitd/v1/types.pb.h"

namespace refitd::client {

// Fills everything but seq and a slot's number and grant, which the caller knows. Errors:
// INVALID_ARGUMENT naming field and value; RESOURCE_EXHAUSTED: inline bytes over
// `max_inline_bytes`. Whether sizes agree with memory and with the engines is left to the daemon.
absl::Status EncodeBucket(const Bucket& bucket, int64_t max_inline_bytes, v1::Bucket* wire);

// The sum of the bytes of all inline chunks; 0 for other sources.
int64_t InlineBytes(const Bucket& bucket);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_BUCKET_H_
