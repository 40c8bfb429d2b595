// A bucket in its messages: as a trainer pushes it, as daemons pass it and its parts on, as an
// engine gets of a part. bucket_message.cc is the only file of the daemon that translates them.
// Everything that is read is checked (P10).
//
// Pure functions, thread-safe.
#ifndef REFITD_DAEMON_CHECKS_BUCKET_MESSAGE_H_
#define REFITD_DAEMON_CHECKS_BUCKET_MESSAGE_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/group/bucket.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/peer.pb.h"
#include "refitd/v1/types.pb.h"

namespace refitd {

// The bucket that the message has. The result points to inline bytes and handles in the message.
// Errors: INVALID_ARGUMENT, as listed at Trainer.PushBucket.
absl::StatusOr<ReceivedBucket> ReadBucket(const v1::Bucket& message);

// A bucket, or one part as a bucket of its own, that another daemon sent. `slot`: where its tensors
// lie, as the message names it; without a slot, only the other daemon knows the bytes. Errors:
// INVALID_ARGUMENT.
absl::StatusOr<CheckedBucket> ReadBucket(const v1::PeerBucket& message,
                                         const std::optional<SlotGrant>& slot, int64_t slot_bytes);
absl::StatusOr<CheckedBucket> ReadBucket(const v1::PeerHeader& message,
                                         const std::optional<SlotGrant>& slot, int64_t slot_bytes);

// Fills in what the message has of the content and its bucket. The slot is left to the caller.
void WriteBucket(const PartContent& content, v1::PeerBucket* message);
void WriteBucket(const PartContent& content, v1::PeerHeader* message);
void WriteBucket(const PartContent& content, v1::BucketReady* message);

// The block of device memory that a request to register a region names. It points into the request.
DeviceRef BlockOf(const v1::RegisterRegionRequest& request);

}  // namespace refitd

#endif  // REFITD_DAEMON_CHECKS_BUCKET_MESSAGE_H_
