// An engine's event has three forms: the daemon's message, client::Event, and the structure of the
// C interface. events.cc is the only file that translates them, except a part (client/bucket.h).
// Pure.
#ifndef REFITD_CLIENT_EVENTS_H_
#define REFITD_CLIENT_EVENTS_H_

#include <vector>

#include "client/engine.h"
#include "client/refit.h"
#include "refitd/v1/engine.pb.h"

namespace refitd::client {

// Returns the event that the message tells of. The result is Nothing if this client does not know
// the message's kind, or if the message alone does not make an event: Welcome, and BucketReady
// (DecodePart of client/bucket.h).
Event DecodeEvent(const v1::EngineEvent& event);

// The result points into `event` and into `views`, which this function fills.
refit_event Show(const Event& event, std::vector<refit_view>* views);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_EVENTS_H_
