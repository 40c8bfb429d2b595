// Reads the message of a pushed bucket (P10).
//
// Pure functions, thread-safe.
#ifndef REFITD_DAEMON_CHECKS_BUCKET_MESSAGE_H_
#define REFITD_DAEMON_CHECKS_BUCKET_MESSAGE_H_

#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "refitd/v1/types.pb.h"

namespace refitd {

// The bucket that the message has. The result points to inline bytes and handles in the message.
// Errors: INVALID_ARGUMENT, as listed at Trainer.PushBucket.
absl::StatusOr<ReceivedBucket> ReadBucket(const v1::Bucket& message);

// The block of device memory that a request to register a region names. It points into the request.
DeviceRef BlockOf(const v1::RegisterRegionRequest& request);

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_BUCKET_MESSAGE_H_
