// The data plane between daemons: the moves `broadcast` and `exchange` of docs/architecture.md.
//
// An *epoch* is one communicator over a fixed set of ranks (daemons). Each daemon opens its end,
// the control plane brings every rank's address to every rank, all connect, and then all submit the
// same operations in the same order. What is agreed on before (P5) is checked again here: a peer
// that is at another operation, or at another number of bytes, is an error, never a wrong byte.
//
// Promises kept here:
//   P4   every operation, and Connect, ends by its own timeout, counted from its submission.
//   P6   `keep_alive` is held until the last byte of the memory was read or written.
//   P7   operations of one epoch run in order of submission, one at a time, on one thread.
//   P10  addresses come from the network: length, counts and fields are checked before use.
//
// Errors of an operation or of Connect:
//   INVALID_ARGUMENT     a rank, a span or an address is malformed; nothing was sent
//   FAILED_PRECONDITION  not connected (yet), or the epoch failed before (the message holds the
//                        first failure), or the peer is at another operation
//   DEADLINE_EXCEEDED    the timeout passed; names the rank that was waited for
//   UNAVAILABLE          the connection to the named rank broke. A rank that fails drops all its
//                        connections, so the rank named may itself be a victim
//   CANCELLED            Close
//   NOT_FOUND            no such epoch is open
//   RESOURCE_EXHAUSTED   one of the limits below
// After an operation began and failed, the epoch is lost: every later one fails at once. A new
// epoch is needed.
//
// Neither encrypted nor authenticated (P9): only for interfaces that the configuration trusts.
// Thread-safe. No call waits for a peer. Every `done` runs once, on a thread of the wire, never
// inside the call that it was given to; it may call the wire but must not destroy it.
#ifndef REFITD_TRANSPORT_WIRE_H_
#define REFITD_TRANSPORT_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/transport.h"

namespace refitd {

// Ranks of an epoch. A full mesh costs every rank one connection to every other.
inline constexpr int kMaxWireRanks = 256;
// An address: a few fields and one port for each rank.
inline constexpr size_t kMaxWireAddressBytes = 1024;
// Open at once in one daemon; each has a thread and a connection to each peer.
inline constexpr size_t kMaxWireEpochs = 64;
// Operations of one epoch that have not ended.
inline constexpr size_t kMaxWireQueue = 4096;
// Longer timeouts are cut to this one, so that deadlines can be added up safely.
inline constexpr Duration kMaxWireTimeout = std::chrono::hours(24);

// `memory.bytes` from rank `root`, which reads it, to all other ranks, which write it. Bytes and
// root must be equal on all ranks. No two operations of an epoch that are under way at once on any
// rank share a `seq`.
struct WireBroadcast {
  EpochId epoch;
  WireSeq seq;
  int root = 0;
  MemorySpan memory;
  Duration timeout{};
};

// Point to point, all legs at once. To each send of a rank belongs a receive of `peer` with the
// same number of bytes and the same `seq`. At most one leg for each peer and direction; none to
// itself. Legs must not overlap in memory where one of them is received.
struct WireExchange {
  struct Leg {
    int peer = 0;
    MemorySpan memory;
  };
  EpochId epoch;
  WireSeq seq;
  std::vector<Leg> sends;
  std::vector<Leg> receives;
  Duration timeout{};
};

// Payload only: no headers.
struct WireStats {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

class Wire {
 public:
  // Closes every epoch and waits until every `done` has run.
  virtual ~Wire() = default;

  // Opens this daemon's end of a communicator of `size` ranks and returns its address: bytes (not
  // text), at most kMaxWireAddressBytes, that hold what every peer needs to reach it.
  // INVALID_ARGUMENT, ALREADY_EXISTS, RESOURCE_EXHAUSTED, UNAVAILABLE (no socket).
  virtual absl::StatusOr<std::string> Open(EpochId epoch, int rank, int size) = 0;

  // `addresses[rank]` of all ranks, this one's too. Operations may be submitted at once; they run
  // after it. Refused addresses (INVALID_ARGUMENT) leave the epoch as it was; any other failure
  // loses it.
  virtual void Connect(EpochId epoch, std::vector<std::string> addresses, Duration timeout,
                       std::function<void(absl::Status)> done) = 0;

  // OK on the sender means that the next rank has received all; on a receiver, that the memory
  // holds all.
  virtual void Submit(WireBroadcast broadcast, std::function<void(absl::Status)> done) = 0;
  virtual void Submit(WireExchange exchange, std::function<void(absl::Status)> done) = 0;

  // What runs and what is queued ends soon with CANCELLED; no memory of the epoch is touched after
  // its `done`. Peers in the same operation get UNAVAILABLE. Does not wait. Idempotent.
  virtual void Close(EpochId epoch) = 0;

  // Over all epochs, since the start; of one that is open (zeros if it is not).
  virtual WireStats Stats() const = 0;
  virtual WireStats Stats(EpochId epoch) const = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_WIRE_H_
