// For tests: the message of a bucket, read and placed at once.
#ifndef REFITD_DAEMON_CHECKS_BUCKET_TEST_UTIL_H_
#define REFITD_DAEMON_CHECKS_BUCKET_TEST_UTIL_H_

#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/checks/bucket_message.h"
#include "transport/base/status.h"

namespace refitd {

inline absl::StatusOr<CheckedBucket> CheckBucket(const v1::Bucket& message,
                                                 const BucketLimits& limits,
                                                 const RegionBytes& region_bytes,
                                                 const DeviceSource& device = {}) {
  REFITD_ASSIGN_OR_RETURN(const ReceivedBucket received, ReadBucket(message));
  CheckedBucket bucket = *received.bucket;
  REFITD_ASSIGN_OR_RETURN(bucket.places, PlacesOf(received, limits, region_bytes, device));
  return bucket;
}

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_BUCKET_TEST_UTIL_H_
