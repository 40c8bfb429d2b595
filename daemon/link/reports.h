// Reports, which a joined daemon sends to the coordinator (daemon/group/peer.h), from and to the
// messages of proto/refitd/v1/peer.proto. commands.h has the other direction.
//
// Pure. Decoding trusts nothing (P10): no number is used as a size, an index or a loop bound before
// it was checked; errors are INVALID_ARGUMENT naming field and value. What decodes is well-formed,
// not right: whether a member, an update or a slot's grant exists is for the group to say.
//
// A message must not be larger than the other daemon takes (PeerHello.message_bytes), and gRPC
// would end the link over one that is. So encoding fails in time, with RESOURCE_EXHAUSTED naming
// message_bytes, and the link lives. A header is larger than the bucket it came from: a bucket that
// is let in must pass CheckHeaderFits, which encoding a PeerCall does by itself.
//
// Functions are thread-safe; the decoder is not.
#ifndef REFITD_DAEMON_LINK_REPORTS_H_
#define REFITD_DAEMON_LINK_REPORTS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/peer.h"
#include "daemon/link/limits.h"
#include "proto/convert.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

// A layout makes several messages, every other report one; sequence and incarnation are left to the
// link. Durations are rounded up to milliseconds, texts shortened and made UTF-8.
// RESOURCE_EXHAUSTED: larger than `message_bytes`; INVALID_ARGUMENT: what a client says (a call, an
// attach) that the other side would refuse to read, which would end the link and with it the leases
// of all members.
absl::StatusOr<std::vector<v1::PeerMessage>> ToWire(const PeerReport& report,
                                                    const PeerBounds& bounds,
                                                    int64_t message_bytes);

// Whether every header that this bucket can become fits into a message. RESOURCE_EXHAUSTED.
absl::Status CheckHeaderFits(const std::vector<TensorSpec>& tensors, int64_t message_bytes);

// Whether the message is of a kind that this build does not know. A link skips those that come from
// a daemon of a newer protocol version; decoding them is an error.
bool OfUnknownKind(const v1::PeerMessage& message);

// Reports of one link, in order.
class ReportDecoder {
 public:
  explicit ReportDecoder(const PeerBounds& bounds) : bounds_(bounds) {}
  // nullopt: a chunk of a layout that is not complete yet. At most one is being put together.
  absl::StatusOr<std::optional<PeerReport>> Decode(const v1::PeerMessage& message);

 private:
  struct Assembly {
    MemberId member;
    LayoutDecoder decoder;
  };
  absl::StatusOr<std::optional<PeerReport>> AddChunk(const v1::PeerLayout& layout);

  const PeerBounds bounds_;
  std::optional<Assembly> assembly_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_REPORTS_H_
