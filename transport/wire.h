// The data plane between daemons: broadcasts and exchanges of bytes.
//
// A *communicator* is one communicator over a fixed set of ranks (daemons). Each daemon opens its
// end, the control plane brings every rank's address to every rank, all connect, and then all
// submit the same operations in the same order. The control plane agrees on operations before (P5),
// and the wire checks that again: if a peer runs another operation, or one with another number of
// bytes, both fail and no wrong byte is written.
//
// Promises kept here:
//   P4 every operation, and Connect, ends within its own timeout, counted from its submission.
//   P6   `keep_alive` is held until the last byte of the memory was read or written.
//   P7   operations of one communicator run in order of submission, one at a time. One thread
//   begins and
//        ends each; a wire may let more threads move parts of an operation between these.
//   P10  addresses come from the network: length, counts and fields are checked before use.
//
// Errors of an operation or of Connect:
//   INVALID_ARGUMENT     a rank, a span or an address is malformed; nothing was sent
//   FAILED_PRECONDITION  not connected (yet), or the communicator failed before (the message holds
//   the
//                        first failure), or the peer is at another operation
//   DEADLINE_EXCEEDED    the timeout passed; names the rank that was waited for
//   UNAVAILABLE          the connection to the named rank broke. A rank that fails drops all its
//                        connections, so the rank named may itself be a victim; a wire
//                        may then also name the ranks that this rank waited for
//   CANCELLED            Close
//   NOT_FOUND            no such communicator is open
//   RESOURCE_EXHAUSTED   one of the limits below
// After an operation began and failed, the communicator is lost: every later operation fails at
// once, and a new communicator is needed. Failure::ranks (transport/base/failure.h) of a status are
// the ranks that may be at fault, all of them; its message names some for people.
//
// Whether bytes are encrypted and authenticated is each wire's own matter (P9); where they are not,
// the configuration must name interfaces that are trusted. Thread-safe. No call waits for a peer.
// Every `done` runs once, on a thread of the wire, never inside the call that it was passed to; it
// may call the wire but must not destroy it.
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

// The most ranks of a communicator: Connect gets the addresses of all, in one message.
inline constexpr int kMaxWireRanks = 256;
// The most bytes of an address: it has a few fields and an identity.
inline constexpr size_t kMaxWireAddressBytes = 4096;
// The most communicators open at once in one daemon; each has a thread, and connections to its
// peers.
inline constexpr size_t kMaxWireCommunicators = 64;
// The most operations of one communicator that have not ended.
inline constexpr size_t kMaxWireQueue = 4096;
// Longer timeouts are cut to this one, so that deadlines can be added up safely.
inline constexpr Duration kMaxWireTimeout = std::chrono::hours(24);

// Moves `memory` from rank `root`, which reads it, to all other ranks, which write it. The number
// of bytes and the root must be equal on all ranks. Two operations of a communicator that are under
// way at once on any rank must have different `seq`.
struct WireBroadcast {
  CommunicatorId communicator;
  WireSeq seq;
  int root = 0;
  MemorySpan memory;
  Duration timeout{};
};

// Moves bytes from rank to rank, all legs at once. Each send of a rank needs a receive at `peer`
// with the same number of bytes and the same `seq`. There is at most one leg for each peer and
// direction, and none to the rank itself. A leg that is received must not overlap another leg in
// memory.
struct WireExchange {
  struct Leg {
    int peer = 0;
    MemorySpan memory;
  };
  CommunicatorId communicator;
  WireSeq seq;
  std::vector<Leg> sends;
  std::vector<Leg> receives;
  Duration timeout{};
};

// Counts of payload bytes, without headers.
struct WireStats {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

// The bytes that a rank has sent to another rank since their communicator was opened, and the time
// that they took.
struct WireUse {
  int64_t bytes = 0;  // payload
  // How long bytes were under way to the peer while the peer had room for more: the time that the
  // network between the two took. Where several connections carry an operation, the longest counts.
  // 0: the wire does not measure it.
  Duration busy{};
  bool operator==(const WireUse&) const = default;
};

class Wire {
 public:
  // Closes every communicator, and waits until every `done` has run.
  virtual ~Wire() = default;

  // Opens this daemon's end of a communicator of `size` ranks and returns its address: at most
  // kMaxWireAddressBytes bytes (not text), which tell peers how to reach this end.
  // INVALID_ARGUMENT, ALREADY_EXISTS, RESOURCE_EXHAUSTED, UNAVAILABLE (no socket).
  virtual absl::StatusOr<std::string> Open(CommunicatorId communicator, int rank, int size) = 0;

  // Connects the communicator's ends: every rank with every other, or, where a wire makes
  // connections as operations need them, with its neighbours in the ring of ranks at least.
  // `addresses` has the addresses of all ranks, this rank's too, by rank. Operations may be
  // submitted at once; they run after Connect. Refused addresses (INVALID_ARGUMENT) leave the
  // communicator as it was; after any other failure the communicator is lost.
  virtual void Connect(CommunicatorId communicator, std::vector<std::string> addresses,
                       Duration timeout, std::function<void(absl::Status)> done) = 0;

  // Runs the operation. OK means on the sender that the next rank has received all bytes, and on a
  // receiver that the memory holds all bytes.
  virtual void Submit(WireBroadcast broadcast, std::function<void(absl::Status)> done) = 0;
  virtual void Submit(WireExchange exchange, std::function<void(absl::Status)> done) = 0;

  // Closes the communicator: running and queued operations end soon with CANCELLED, and no memory
  // of an operation is touched after its `done`. Peers in the same operation get UNAVAILABLE. Does
  // not wait. Idempotent.
  virtual void Close(CommunicatorId communicator) = 0;

  // Returns counts over all communicators since the start, or of one open communicator (zeros if it
  // is not open).
  virtual WireStats Stats() const = 0;
  virtual WireStats Stats(CommunicatorId communicator) const = 0;

  // Returns what this rank has sent to each rank (by rank) in the operations of one open
  // communicator that have ended; an operation counts before its `done` runs. Empty: the wire does
  // not measure, or the communicator is not open.
  virtual std::vector<WireUse> Uses(CommunicatorId /*communicator*/) const { return {}; }
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_WIRE_H_
