// What daemons tell each other (daemon/group/peer.h), from and to the messages of
// proto/refitd/v1/peer.proto; and the order that a link's messages must keep.
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
// Functions are thread-safe; the classes are not.
#ifndef REFITD_DAEMON_PEER_CONVERT_H_
#define REFITD_DAEMON_PEER_CONVERT_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/machine.h"
#include "daemon/group/peer.h"
#include "daemon/peer_program_convert.h"
#include "proto/convert.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

inline constexpr size_t kMaxPeerTextBytes = 1024;  // of a reason or a status message
inline constexpr size_t kBootIdBytes = 16;
// As the longest wait that a daemon's configuration can have.
inline constexpr Duration kMaxPeerDuration = std::chrono::hours(24);
inline constexpr int64_t kMinPeerMessageBytes = 64 << 10;
// A layout travels in pieces of this size at most, so that a ping does not wait long behind one.
inline constexpr int64_t kPeerLayoutChunkBytes = 256 << 10;
// Incarnations that the coordinator may announce before the joined daemon took up the first.
inline constexpr size_t kMaxIncarnationsAhead = 64;

// What a group's spec says about numbers in messages.
struct PeerBounds {
  int slots = kMaxSlots;
  int64_t slot_bytes = kMaxTensorBytes;
};
inline PeerBounds BoundsOf(const GroupSpec& spec) { return {spec.slots, spec.slot_bytes}; }

// ---- the first message of either side ----

// The message is a hello that may be shown to a group. FAILED_PRECONDITION: no protocol version in
// common, both sides' named.
absl::Status CheckPeerHello(const v1::PeerMessage& message);
// `message_bytes`: the largest that this daemon takes.
v1::PeerAnswer AcceptedToWire(const LinkUp& up, int64_t message_bytes);
struct PeerAcceptance {
  LinkUp up;
  int64_t message_bytes = 0;  // of the largest message that the coordinator takes
  bool newer = false;         // it speaks protocol versions that this build does not know
};
// FAILED_PRECONDITION: a protocol version that this build does not speak.
absl::StatusOr<PeerAcceptance> AcceptedFromWire(const v1::PeerAnswer& answer);

// Whether the message is of a kind that this build does not know. A link skips those that come from
// a daemon of a newer protocol version; decoding them is an error.
bool OfUnknownKind(const v1::PeerMessage& message);
bool OfUnknownKind(const v1::PeerAnswer& answer);

v1::GroupSpec SpecToWire(const GroupSpec& spec);

// ---- reports and commands; sequence and incarnation are left to the link ----

// A layout and a program make several messages, everything else one. Durations are rounded up to
// milliseconds, texts shortened and made UTF-8. RESOURCE_EXHAUSTED: larger than `message_bytes`;
// INVALID_ARGUMENT: what a client says (a call, an attach) that the other side would refuse to
// read, which ends the link and with it the leases of all members.
absl::StatusOr<std::vector<v1::PeerMessage>> ToWire(const PeerReport& report,
                                                    const PeerBounds& bounds,
                                                    int64_t message_bytes);
absl::StatusOr<std::vector<v1::PeerAnswer>> ToWire(const PeerCommand& command,
                                                   int64_t message_bytes);

// Whether every header that this bucket can become fits into a message. RESOURCE_EXHAUSTED.
absl::Status CheckHeaderFits(const std::vector<TensorSpec>& tensors, int64_t message_bytes);

// Of one message; not of a program's chunks.
absl::StatusOr<PeerCommand> FromWire(const v1::PeerAnswer& answer, const PeerBounds& bounds);

// Commands of one link, in order.
class CommandDecoder {
 public:
  explicit CommandDecoder(const PeerBounds& bounds) : bounds_(bounds) {}
  // nullopt: a chunk of a program that is not complete yet.
  absl::StatusOr<std::optional<PeerCommand>> Decode(const v1::PeerAnswer& answer);

 private:
  PeerBounds bounds_;
  ProgramDecoder programs_;
};

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

// ---- order ----

// Sequence and incarnation of what comes in over one link.
class PeerOrder {
 public:
  explicit PeerOrder(uint64_t incarnation) : incarnations_{incarnation} {}

  // Messages may now have this incarnation; once one has, those before are over.
  // RESOURCE_EXHAUSTED: too many that the other side did not take up.
  absl::Status Announce(uint64_t incarnation);
  // Whether the message counts; false: it came before. ABORTED: messages are missing;
  // FAILED_PRECONDITION: another incarnation.
  absl::StatusOr<bool> Check(uint64_t sequence, uint64_t incarnation);

 private:
  uint64_t last_ = 0;
  std::deque<uint64_t> incarnations_;  // the front is the one that messages have now
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PEER_CONVERT_H_
