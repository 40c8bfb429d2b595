#include "daemon/services/trainer_events.h"

#include "daemon/checks/bucket.h"
#include "daemon/checks/bucket_message.h"
#include "daemon/checks/fields.h"
#include "proto/convert.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// Checks the duration of a Begin or Refit.
absl::StatusOr<Duration> CheckDuration(int64_t ms, Duration max) {
  REFITD_ASSIGN_OR_RETURN(const Duration duration, CheckMillis(ms, "duration_ms"));
  if (duration <= max) return duration;
  return InvalidField("duration_ms", "duration_ms: {} is more than the maximum {}", ms,
                      ToMillis(max));
}

absl::Status CheckVersion(int64_t version) {
  if (version >= 0) return absl::OkStatus();
  return InvalidField("version", "version: {} is negative", version);
}

// Checks the bucket count of a Commit or Refit.
absl::Status CheckBucketCount(int64_t count) {
  if (count >= 0) return absl::OkStatus();
  return InvalidField("bucket_count", "bucket_count: {} is negative", count);
}

absl::Status CheckRequestId(const std::string& id) {
  return CheckLine(id, kMaxRequestIdBytes, "request_id");
}

// Reads and checks the fields that a Begin and a Refit share.
template <typename Event, typename Request>
absl::StatusOr<Event> Opening(const Request& request, Duration longest) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  Event event;
  event.request_id = request.request_id();
  event.version = Version(request.version());
  REFITD_ASSIGN_OR_RETURN(event.duration, CheckDuration(request.duration_ms(), longest));
  REFITD_ASSIGN_OR_RETURN(event.verification, VerificationFromProto(request.verification()));
  event.evict_late = request.evict_late();
  REFITD_RETURN_IF_ERROR(CheckVersion(request.version()));
  return event;
}

}  // namespace

Caller CallerOf(const v1::Lease& lease, const Peer& peer) {
  return {peer, lease.token(), lease.incarnation(), lease.protocol()};
}

absl::StatusOr<BeginEvent> EventOf(const v1::BeginRequest& request, Duration longest) {
  REFITD_ASSIGN_OR_RETURN(const BroadcastMethod broadcast, BroadcastFromProto(request.broadcast()));
  REFITD_ASSIGN_OR_RETURN(BeginEvent event, Opening<BeginEvent>(request, longest));
  if (request.tensor_count() < 0 || request.tensor_count() > kMaxTensorsPerLayout) {
    return InvalidField("tensor_count", "tensor_count: {} is not in 0..{}", request.tensor_count(),
                        kMaxTensorsPerLayout);
  }
  if (request.total_bytes() < 0) {
    return InvalidField("total_bytes", "total_bytes: {} is negative", request.total_bytes());
  }
  event.tensor_count = request.tensor_count();
  event.total_bytes = request.total_bytes();
  event.broadcast = broadcast;
  event.without_layout = request.without_layout();
  REFITD_RETURN_IF_ERROR(CheckLine(request.note(), kMaxNoteBytes, "note"));
  event.note = request.note();
  return event;
}

absl::StatusOr<RefitEvent> EventOf(const v1::RefitRequest& request, Duration longest) {
  REFITD_ASSIGN_OR_RETURN(RefitEvent event, Opening<RefitEvent>(request, longest));
  REFITD_RETURN_IF_ERROR(CheckBucketCount(request.bucket_count()));
  event.bucket_count = request.bucket_count();
  event.update = UpdateId(request.update_id());
  return event;
}

absl::StatusOr<LeaseSlotEvent> EventOf(const v1::LeaseSlotRequest& request) {
  LeaseSlotEvent event;
  event.version = Version(request.version());
  event.update = UpdateId(request.update_id());
  REFITD_ASSIGN_OR_RETURN(event.wait, CheckMillis(request.wait_ms(), "wait_ms"));
  return event;
}

absl::StatusOr<ReceivedPush> PushOf(const v1::PushBucketRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  ReceivedPush push;
  push.event.request_id = request.request_id();
  push.event.version = Version(request.version());
  push.event.update = UpdateId(request.update_id());
  REFITD_ASSIGN_OR_RETURN(push.received, ReadBucket(request.bucket()));
  return push;
}

absl::StatusOr<CommitEvent> EventOf(const v1::CommitRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  REFITD_RETURN_IF_ERROR(CheckBucketCount(request.bucket_count()));
  CommitEvent event;
  event.request_id = request.request_id();
  event.version = Version(request.version());
  event.bucket_count = request.bucket_count();
  event.pushes_under_way = request.pushes_under_way();
  event.update = UpdateId(request.update_id());
  return event;
}

absl::StatusOr<AbortEvent> EventOf(const v1::AbortRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  REFITD_RETURN_IF_ERROR(CheckLine(request.reason(), kMaxReasonBytes, "reason"));
  AbortEvent event;
  event.request_id = request.request_id();
  event.version = Version(request.version());
  event.reason = request.reason();
  event.update = UpdateId(request.update_id());
  return event;
}

}  // namespace refitd
