// A trainer's requests, checked and turned into events of its group (P10). The daemon fills in the
// call and the member, and checks what depends on its state.
//
// Pure functions, thread-safe. Errors name field and value.
#ifndef REFITD_DAEMON_SERVICES_TRAINER_EVENTS_H_
#define REFITD_DAEMON_SERVICES_TRAINER_EVENTS_H_

#include "absl/status/statusor.h"
#include "daemon/group/group.h"
#include "daemon/node/member.h"
#include "daemon/node/trainer_calls.h"
#include "refitd/v1/trainer.pb.h"
#include "transport/base/ids.h"

namespace refitd {

// The caller, with the lease that the request presents.
Caller CallerOf(const v1::Lease& lease, const Peer& peer);

// `longest`: the maximum of duration_ms.
absl::StatusOr<BeginEvent> EventOf(const v1::BeginRequest& request, Duration longest);
absl::StatusOr<RefitEvent> EventOf(const v1::RefitRequest& request, Duration longest);
absl::StatusOr<LeaseSlotEvent> EventOf(const v1::LeaseSlotRequest& request);
// The result points into the request.
absl::StatusOr<ReceivedPush> PushOf(const v1::PushBucketRequest& request);
absl::StatusOr<CommitEvent> EventOf(const v1::CommitRequest& request);
absl::StatusOr<AbortEvent> EventOf(const v1::AbortRequest& request);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_TRAINER_EVENTS_H_
