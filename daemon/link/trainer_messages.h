// A trainer's calls and their answers, as the messages of service Trainer. A joined daemon sends a
// call on as the request that came, without the lease, and gets the caller's response; so requests
// are checked by the same functions (P10). The daemon fills in the call and the member, and checks
// what depends on its state.
//
// Pure functions, thread-safe. Errors name field and value.
#ifndef REFITD_DAEMON_LINK_TRAINER_MESSAGES_H_
#define REFITD_DAEMON_LINK_TRAINER_MESSAGES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/group.h"
#include "daemon/link/limits.h"
#include "refitd/v1/peer.pb.h"
#include "refitd/v1/trainer.pb.h"
#include "transport/base/ids.h"

namespace refitd {

// ---- requests to events ----

// `longest`: the maximum of duration_ms.
absl::StatusOr<BeginEvent> EventOf(const v1::BeginRequest& request, Duration longest);
absl::StatusOr<RefitEvent> EventOf(const v1::RefitRequest& request, Duration longest);
absl::StatusOr<LeaseSlotEvent> EventOf(const v1::LeaseSlotRequest& request);
// The slot's number is unchecked.
ReleaseSlotEvent EventOf(const v1::ReleaseSlotRequest& request);
absl::StatusOr<CommitEvent> EventOf(const v1::CommitRequest& request);
absl::StatusOr<AbortEvent> EventOf(const v1::AbortRequest& request);
absl::StatusOr<RollbackEvent> EventOf(const v1::TrainerRollbackRequest& request);
ReleasePreviousEvent EventOf(const v1::TrainerReleasePreviousRequest& request);
absl::Status CheckRequestId(const std::string& id);

// ---- calls between daemons ----

// The requests lack what only the trainer's daemon reads: lease and binding generation.
void Fill(const TrainerCall& call, v1::PeerCall* message);
absl::StatusOr<TrainerCall> TrainerCallOf(const v1::PeerCall& message, const PeerBounds& bounds);

// ---- answers to responses ----

void Fill(const BeginReply& reply, v1::BeginResponse* response);
void Fill(const LeaseSlotReply& reply, v1::LeaseSlotResponse* response);
void Fill(const BucketReply& reply, v1::PushBucketResponse* response);
void Fill(const InstanceOutcome& outcome, v1::InstanceResult* result);
void Fill(const CommitReply& reply, v1::CommitResponse* response);

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_TRAINER_MESSAGES_H_
