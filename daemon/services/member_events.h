// Translates news for a member to the message on the member's stream.
//
// Pure functions, thread-safe.
#ifndef REFITD_DAEMON_SERVICES_MEMBER_EVENTS_H_
#define REFITD_DAEMON_SERVICES_MEMBER_EVENTS_H_

#include "daemon/node/sinks.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/trainer.pb.h"

namespace refitd {

// `Event` is v1::EngineEvent or v1::TrainerEvent. Aborts the process on news for engines only, if
// the event is a trainer's.
template <typename Event>
Event MemberEventOf(const MemberNews& news);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_MEMBER_EVENTS_H_
