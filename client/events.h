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

// The event that the message tells of. Nothing: the message is of a kind that this client does not
// know, or it needs more than itself to be read: Welcome, and BucketReady (DecodePart).
Event DecodeEvent(const v1::EngineEvent& event);

// Views on the mapped pool. INTERNAL, with field and value: the daemon's message disagrees with
// itself or with the pool.
absl::StatusOr<Part> DecodePart(const v1::BucketReady& bucket, std::span<const char> pool,
                                int64_t slot_bytes);

// Fills `views` with pointers into `tensors`, which must stay in place while `views` are used.
void Show(const std::vector<TensorView>& tensors, std::vector<refit_view>* views);
// The result points into `event` and into `views`, which this function fills.
refit_event Show(const Event& event, std::vector<refit_view>* views);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_EVENTS_H_
