// An engine's event has three forms: the daemon's message, client::Event, and the structure of the
// C interface. events.cc is the only file that translates them. Pure; no number of a message is
// used as an offset or a count before it was checked (P10).
#ifndef REFITD_CLIENT_EVENTS_H_
#define REFITD_CLIENT_EVENTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/engine.h"
#include "client/refit.h"
#include "refitd/v1/engine.pb.h"

namespace refitd::client {

// Returns the event that the message tells of. The result is Nothing if this client does not know
// the message's kind, or if the message alone does not make an event: Welcome, and BucketReady (see
// DecodePart).
Event DecodeEvent(const v1::EngineEvent& event);

// Decodes a part into views on the mapped pool. INTERNAL, with field and value: the daemon's
// message disagrees with itself or with the pool.
absl::StatusOr<Part> DecodePart(const v1::BucketReady& bucket, std::span<const char> pool,
                                int64_t slot_bytes);

// Fills `views` with pointers into `tensors`, which must stay in place while `views` are used.
void Show(const std::vector<TensorView>& tensors, std::vector<refit_view>* views);
// The result points into `event` and into `views`, which this function fills.
refit_event Show(const Event& event, std::vector<refit_view>* views);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_EVENTS_H_
