// A member's hello, checked and turned into values (P10).
//
// Pure functions, thread-safe.
#ifndef REFITD_DAEMON_SERVICES_HELLO_H_
#define REFITD_DAEMON_SERVICES_HELLO_H_

#include "absl/status/statusor.h"
#include "daemon/node/member_attach.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/trainer.pb.h"

namespace refitd {

// Errors: as listed at Attach of the role's service; they name field and value.
absl::StatusOr<Arrival> ArrivalOf(const v1::TrainerHello& hello, const Peer& peer);
absl::StatusOr<Arrival> ArrivalOf(const v1::EngineHello& hello, const Peer& peer);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_HELLO_H_
