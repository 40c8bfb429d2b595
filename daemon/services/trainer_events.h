// What a trainer's requests have that only its own daemon reads: the lease and the bytes of a
// bucket. daemon/link/trainer_messages.h has the rest.
//
// Pure functions, thread-safe. Errors name field and value.
#ifndef REFITD_DAEMON_SERVICES_TRAINER_EVENTS_H_
#define REFITD_DAEMON_SERVICES_TRAINER_EVENTS_H_

#include "absl/status/statusor.h"
#include "daemon/node/member.h"
#include "daemon/node/member_calls.h"
#include "refitd/v1/trainer.pb.h"

namespace refitd {

// The caller, with the lease that the request presents.
Caller CallerOf(const v1::Lease& lease, const Peer& peer);

// The result points into the request.
absl::StatusOr<ReceivedPush> PushOf(const v1::PushBucketRequest& request);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_TRAINER_EVENTS_H_
