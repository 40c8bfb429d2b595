// These functions check the parts of a member's requests that only its own daemon reads (the hello,
// the lease, a bucket), and turn them into values (P10). daemon/link/trainer_messages.h has a
// trainer's other calls.
//
// Pure functions, thread-safe. Errors name field and value.
#ifndef REFITD_DAEMON_SERVICES_MEMBER_REQUESTS_H_
#define REFITD_DAEMON_SERVICES_MEMBER_REQUESTS_H_

#include "absl/status/statusor.h"
#include "daemon/node/member.h"
#include "daemon/node/member_calls.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/trainer.pb.h"

namespace refitd {

// Errors: as listed at Attach of the role's service.
absl::StatusOr<Arrival> ArrivalOf(const v1::TrainerHello& hello, const Peer& peer);
absl::StatusOr<Arrival> ArrivalOf(const v1::EngineHello& hello, const Peer& peer);

// The peer as a caller with the lease that the request presents.
Caller CallerOf(const v1::Lease& lease, const Peer& peer);

// The result points into the request.
absl::StatusOr<ReceivedPush> PushOf(const v1::PushBucketRequest& request);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_MEMBER_REQUESTS_H_
