// Converts reports, which a joined daemon sends to the coordinator (daemon/group/peer.h), to and
// from the messages of proto/refitd/v1/peer.proto. commands.h has the other direction.
//
// Pure. Decoding trusts nothing (P10): a number is checked before it is used as a size, an index or
// a loop bound; errors are INVALID_ARGUMENT naming field and value. A decoded message is
// well-formed, but may be wrong: the group decides whether a member, an update or a slot's grant
// exists.
//
// A message must not be larger than the other daemon takes (PeerHello.message_bytes), since gRPC
// would end the link over a larger one. So encoding fails in time, with RESOURCE_EXHAUSTED naming
// message_bytes, and the link lives. A header is larger than its bucket: a bucket may be accepted
// only if CheckHeaderFits passes, which encoding a PeerCall checks by itself.
//
// Functions are thread-safe; the decoder is not.
#ifndef REFITD_DAEMON_LINK_REPORTS_H_
#define REFITD_DAEMON_LINK_REPORTS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/peer.h"
#include "daemon/link/greeting.h"
#include "daemon/link/limits.h"
#include "proto/convert.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

// Encodes a report: a layout as several messages, every other report as one. The link adds sequence
// and incarnation. Durations are rounded up to milliseconds, texts are shortened and made UTF-8.
// RESOURCE_EXHAUSTED: a message would be larger than `message_bytes`. INVALID_ARGUMENT: a client's
// call or attach has values that the other side would refuse to read, which would end the link and
// with it the leases of all members.
absl::StatusOr<std::vector<v1::PeerMessage>> ToProto(const PeerReport& report,
                                                     const PeerBounds& bounds,
                                                     int64_t message_bytes);

// Whether every header that this bucket can lead to fits into a message. RESOURCE_EXHAUSTED.
absl::Status CheckHeaderFits(const std::vector<TensorSpec>& tensors, int64_t message_bytes);

// Decodes the reports of one link, in order.
class ReportDecoder {
 public:
  // `room` gives room for one layout or manifest, which keeps it while it lives. A report for which
  // there is none is decoded without the layout or manifest, and says why. Null: nobody counts.
  explicit ReportDecoder(const PeerBounds& bounds, std::function<Room()> room = nullptr)
      : bounds_(bounds), room_(std::move(room)) {}
  // nullopt: the message is a chunk of a layout that is not complete yet. One layout at a time is
  // put together.
  absl::StatusOr<std::optional<PeerReport>> Decode(const v1::PeerMessage& message);

 private:
  struct Assembly {
    MemberId member;
    LayoutDecoder decoder;
    Room room;
    absl::Status refused;  // not OK: there is no room, and the rest is dropped
  };
  Room NewRoom() const { return room_ == nullptr ? nullptr : room_(); }
  // Puts the manifest, if there is one, into a room.
  PeerAttach Counted(PeerAttach attach) const;
  absl::StatusOr<std::optional<PeerReport>> AddChunk(const v1::PeerLayout& layout);

  const PeerBounds bounds_;
  const std::function<Room()> room_;
  std::optional<Assembly> assembly_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_REPORTS_H_
