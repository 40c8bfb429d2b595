#include "daemon/link/trainer_messages.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <variant>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "daemon/link/values.h"
#include "proto/convert.h"
#include "proto/failure.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using peer::BucketOf;
using peer::CallOf;
using peer::CheckSlot;
using peer::MemberOf;
using peer::MillisToProto;
using peer::SetBucket;
using peer::TextToProto;
using peer::VersionOf;

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
  event.hold = request.hold();
  REFITD_RETURN_IF_ERROR(CheckVersion(request.version()));
  return event;
}

// Fills in the fields that a Begin and a Refit share.
template <typename Event, typename Request>
void FillOpening(const Event& event, Request* request) {
  request->set_request_id(event.request_id);
  request->set_version(event.version.value());
  request->set_duration_ms(MillisToProto(event.duration));
  if (event.verification.has_value()) request->set_verification(ToProto(*event.verification));
  request->set_evict_late(event.evict_late);
  request->set_hold(event.hold);
}

// ---- events to requests, without what only the trainer's daemon reads ----

void PutEvent(const BeginEvent& event, v1::PeerCall* message) {
  v1::BeginRequest* request = message->mutable_begin();
  FillOpening(event, request);
  request->set_tensor_count(event.tensor_count);
  request->set_total_bytes(event.total_bytes);
  request->set_broadcast(ToProto(event.broadcast));
  request->set_without_layout(event.without_layout);
  request->set_note(event.note);
}

void PutEvent(const RefitEvent& event, v1::PeerCall* message) {
  v1::RefitRequest* request = message->mutable_refit();
  FillOpening(event, request);
  request->set_bucket_count(event.bucket_count);
  request->set_update_id(event.update.value());
}

void PutEvent(const LeaseSlotEvent& event, v1::PeerCall* message) {
  v1::LeaseSlotRequest* request = message->mutable_lease_slot();
  request->set_version(event.version.value());
  request->set_wait_ms(MillisToProto(event.wait));
  request->set_update_id(event.update.value());
}

void PutEvent(const ReleaseSlotEvent& event, v1::PeerCall* message) {
  v1::ReleaseSlotRequest* request = message->mutable_release_slot();
  request->set_slot(event.grant.slot.value());
  request->set_grant(event.grant.grant.value());
}

void PutEvent(const CommitEvent& event, v1::PeerCall* message) {
  v1::CommitRequest* request = message->mutable_commit();
  request->set_request_id(event.request_id);
  request->set_version(event.version.value());
  request->set_bucket_count(event.bucket_count);
  request->set_pushes_under_way(event.pushes_under_way);
  request->set_update_id(event.update.value());
  request->set_tensor_count(event.tensor_count);
}

void PutEvent(const AbortEvent& event, v1::PeerCall* message) {
  v1::AbortRequest* request = message->mutable_abort();
  request->set_request_id(event.request_id);
  request->set_version(event.version.value());
  request->set_reason(TextToProto(event.reason, kMaxReasonBytes));
  request->set_update_id(event.update.value());
}

void PutEvent(const RollbackEvent& event, v1::PeerCall* message) {
  v1::TrainerRollbackRequest* request = message->mutable_rollback();
  request->set_request_id(event.request_id);
  if (event.version.has_value()) request->set_version(event.version->value());
}

void PutEvent(const ReleasePreviousEvent& /*event*/, v1::PeerCall* message) {
  message->mutable_release_previous();
}

void PutEvent(const BucketEvent& e, v1::PeerCall* message) {
  v1::PeerBucket* out = message->mutable_bucket();
  out->set_request_id(e.request_id);
  out->set_version(e.version.value());
  SetBucket(WholeBucket(e.bucket), e.bucket->slot, out);
  out->set_update_id(e.update.value());
}

// ---- what daemons pass on to events ----

absl::StatusOr<TrainerCall> CallFrom(const v1::PeerBucket& message, const PeerBounds& bounds) {
  BucketEvent out;
  REFITD_RETURN_IF_ERROR(CheckRequestId(message.request_id()));
  out.request_id = message.request_id();
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "bucket.version"));
  REFITD_ASSIGN_OR_RETURN(CheckedBucket bucket, BucketOf(message, bounds, "bucket.slot"));
  out.bucket = std::make_shared<const CheckedBucket>(std::move(bucket));
  out.update = UpdateId(message.update_id());
  return TrainerCall(std::move(out));
}

template <typename Event>
absl::StatusOr<TrainerCall> CallFrom(absl::StatusOr<Event> event) {
  if (!event.ok()) return event.status();
  return TrainerCall(*std::move(event));
}

absl::StatusOr<TrainerCall> CallFrom(const v1::ReleaseSlotRequest& message,
                                     const PeerBounds& bounds) {
  REFITD_RETURN_IF_ERROR(CheckSlot(message.slot(), bounds, "release_slot.slot"));
  return TrainerCall(EventOf(message));
}

absl::StatusOr<TrainerCall> CallFrom(const v1::PeerCall& message, const PeerBounds& bounds) {
  switch (message.event_case()) {
    case v1::PeerCall::kBegin:
      return CallFrom(EventOf(message.begin(), kMaxPeerDuration));
    case v1::PeerCall::kLeaseSlot:
      return CallFrom(EventOf(message.lease_slot()));
    case v1::PeerCall::kReleaseSlot:
      return CallFrom(message.release_slot(), bounds);
    case v1::PeerCall::kBucket:
      return CallFrom(message.bucket(), bounds);
    case v1::PeerCall::kCommit:
      return CallFrom(EventOf(message.commit()));
    case v1::PeerCall::kRefit:
      return CallFrom(EventOf(message.refit(), kMaxPeerDuration));
    case v1::PeerCall::kAbort:
      return CallFrom(EventOf(message.abort()));
    case v1::PeerCall::kRollback:
      return CallFrom(EventOf(message.rollback()));
    case v1::PeerCall::kReleasePrevious:
      return TrainerCall(EventOf(message.release_previous()));
    case v1::PeerCall::EVENT_NOT_SET:
      break;
  }
  return Invalid("event is missing");
}

}  // namespace

absl::Status CheckRequestId(const std::string& id) {
  return CheckLine(id, kMaxRequestIdBytes, "request_id");
}

absl::StatusOr<BeginEvent> EventOf(const v1::BeginRequest& request, Duration longest) {
  REFITD_ASSIGN_OR_RETURN(const BroadcastMethod broadcast, BroadcastFromProto(request.broadcast()));
  REFITD_ASSIGN_OR_RETURN(BeginEvent event, Opening<BeginEvent>(request, longest));
  if (request.tensor_count() < 0) {
    return InvalidField("tensor_count", "tensor_count: {} is negative", request.tensor_count());
  }
  if (request.tensor_count() > kMaxTensorsPerLayout) {
    return TooManyTensors("tensor_count", request.tensor_count());
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

ReleaseSlotEvent EventOf(const v1::ReleaseSlotRequest& request) {
  ReleaseSlotEvent event;
  event.grant = {SlotIndex(request.slot()), GrantId(request.grant())};
  return event;
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
  event.tensor_count = request.tensor_count();
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

absl::StatusOr<RollbackEvent> EventOf(const v1::TrainerRollbackRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  RollbackEvent event;
  event.request_id = request.request_id();
  if (!request.has_version()) return event;
  REFITD_RETURN_IF_ERROR(CheckVersion(request.version()));
  event.version = Version(request.version());
  return event;
}

ReleasePreviousEvent EventOf(const v1::TrainerReleasePreviousRequest& /*request*/) { return {}; }

void Fill(const BeginReply& reply, v1::BeginResponse* response) {
  response->set_update_id(reply.update.value());
  response->set_remaining_ms(MillisToProto(reply.remaining));
  response->set_instances(reply.instances);
  response->set_leasable_slots(reply.leasable_slots);
}

void Fill(const LeaseSlotReply& reply, v1::LeaseSlotResponse* response) {
  response->set_slot(reply.grant.slot.value());
  response->set_grant(reply.grant.grant.value());
  response->set_bytes(reply.slot_bytes);
  response->set_byte_offset(int64_t{reply.grant.slot.value()} * reply.slot_bytes);
  response->set_expires_ms(MillisToProto(reply.expires));
}

void Fill(const BucketReply& reply, v1::PushBucketResponse* response) {
  response->set_group_seq(reply.group_seq);
  response->set_bytes(reply.bytes);
}

void Fill(const InstanceOutcome& outcome, v1::InstanceResult* result) {
  result->set_instance(outcome.instance);
  result->set_committed(outcome.committed);
  result->set_reason(TextToProto(outcome.reason));
  SetFailure(outcome.failure, result);
  result->set_shadowed(outcome.shadowed);
  result->set_flipped_back(outcome.flipped_back);
  if (outcome.pause.has_value()) {
    result->set_pause_seconds(std::chrono::duration<double>(*outcome.pause).count());
  }
}

void Fill(const CommitReply& reply, v1::CommitResponse* response) {
  response->set_version(reply.version.value());
  response->set_bytes(reply.bytes);
  response->set_seconds(
      std::chrono::duration<double>(std::max(reply.elapsed, Duration(0))).count());
  response->set_left_out_tensors(reply.left_out.tensors);
  response->set_left_out_bytes(reply.left_out.bytes);
  for (const std::string& name : reply.left_out.names) response->add_left_out(name);
  if (reply.content.has_value()) response->set_content_version(reply.content->value());
  for (const InstanceOutcome& outcome : reply.instances) {
    Fill(outcome, response->add_instances());
  }
  for (const BroadcastTotals& totals : reply.pushed) {
    *response->add_pushed() = BroadcastTotalsToProto(totals.method, totals.bytes, totals.buckets);
  }
}

void Fill(const TrainerCall& call, v1::PeerCall* message) {
  std::visit(
      [&](const auto& event) {
        message->set_call(event.call.value());
        message->set_member(event.member.value());
        PutEvent(event, message);
      },
      call);
}

absl::StatusOr<TrainerCall> TrainerCallOf(const v1::PeerCall& message, const PeerBounds& bounds) {
  REFITD_ASSIGN_OR_RETURN(const CallId call, CallOf(message.call(), "call"));
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(message.member(), "member"));
  REFITD_ASSIGN_OR_RETURN(TrainerCall out, CallFrom(message, bounds));
  std::visit(
      [&](auto& event) {
        event.call = call;
        event.member = member;
      },
      out);
  return out;
}

}  // namespace refitd
