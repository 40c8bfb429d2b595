// The interface of a transport: it runs programs over memory that the daemon has mapped, and
// verifies the result. It copies within one daemon; wire.h moves bytes between daemons.
//
// Transports know neither gRPC nor groups. They own their threads; callers never block.
#ifndef REFITD_TRANSPORT_TRANSPORT_H_
#define REFITD_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/broadcast_method.h"
#include "transport/plan/derived.h"
#include "transport/plan/layout.h"
#include "transport/plan/overlap.h"
#include "transport/plan/plan.h"

namespace refitd {

enum class Verification : uint8_t { kOff = 1, kTransfer = 2, kReadback = 3 };

// Memory that can be copied to or from: a mapped region, a slot, a request's bytes. `keep_alive`
// outlives every copy (P6).
struct MemorySpan {
  char* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<const void> keep_alive;
  MemoryOrigin origin{};
};

struct HeldPiece;

// One piece, with the memory in which it lies.
struct BoundPiece {
  DType dtype = DType::kUint8;
  Dims shape;  // global
  Box box;
  Dims strides;          // elements
  char* data = nullptr;  // first element of the box
  std::string name;      // tensor, for messages
  // Sources only. Set: the box lies nowhere and is computed from this. Offsets and strides are
  // those of a dense box, and `data` is that of the first shard.
  std::shared_ptr<const HeldPiece> held = nullptr;
};

// What trainers hold of the tensor from which a box of a derived tensor is computed.
struct HeldPiece {
  std::shared_ptr<const Derivation> derivation;
  // Disjoint boxes of derivation->from, which hold together all blocks that the box meets. That of
  // the rank for which the box was planned is first.
  std::vector<BoundPiece> shards;
  // False: Transfer::want_source_digests does not mean the computed piece.
  bool digested = true;
};

// The digest that a destination piece must have after the copies: a sum of digests computed by
// passes over the *sources'* bytes. The caller adds these sums up per piece over all transfers of
// an update, and gives them to a ReadbackJob.
struct PieceDigest {
  uint32_t destination = 0;  // index into Transfer::destinations
  uint32_t piece = 0;        // index into that destination's pieces
  uint64_t digest = 0;
};

// A transfer through slots: all of the source is packed into one slot of each device that needs it,
// and destinations are then written from the slot of their own device.
struct Broadcast {
  BroadcastMethod method = BroadcastMethod::kDirect;  // one of the methods through slots
  // One for each device; filled whether or not a destination reads them.
  std::vector<MemorySpan> slots;
  std::vector<int64_t> byte_offsets;  // where each source piece begins in every slot
};

// The copies of one bucket, of a part of one, or of a step of a compiled refit.
struct Transfer {
  std::vector<BoundPiece> source;  // pieces of all sources, one list
  // destinations[d] are the bound pieces of destination d that this transfer may write, indexed as
  // in `plan`.
  std::vector<std::vector<BoundPiece>> destinations;
  // moves[i].source is 0; source_piece and destination_piece index the above. Byte offsets in a
  // move are relative to BoundPiece::data of the piece that the move names (the binder rewrites
  // them), so that a wrong plan shows in the digests.
  MovePlan plan;
  Verification verification = Verification::kOff;
  // Destinations that are verified by reading back inside the transfer (staging slots), under
  // kReadback.
  std::vector<bool> readback_now;
  // True: digests of whole source pieces are computed, even of bytes that are not moved; another
  // daemon must have received bytes with these digests.
  bool want_source_digests = false;
  // Present: the transfer goes through slots. Its source pieces must lie row-major on one device,
  // and the method must be one that CanBroadcast accepts, not kAuto or kDirect. Absent: kDirect.
  std::optional<Broadcast> broadcast;
  std::vector<std::shared_ptr<const void>> keep_alive;  // all memory named above (P6)
  std::string label;                                    // for messages: "version 3, part 7"
};

struct TransferResult {
  absl::Status status;  // DATA_LOSS: verification failed, naming tensor and destination index
  std::vector<int64_t> bytes_written;    // per destination
  std::vector<PieceDigest> expected;     // under kReadback, for destinations without readback_now
  std::vector<uint64_t> source_digests;  // per source piece, if wanted
  // Index of the destination whose bytes were wrong, if status is not OK.
  int failed_destination = -1;
};

struct ReadbackPiece {
  BoundPiece piece;
  uint64_t expected = 0;
  uint32_t destination = 0;
};

struct ReadbackJob {
  std::vector<ReadbackPiece> pieces;
  std::vector<std::shared_ptr<const void>> keep_alive;
};

struct ReadbackResult {
  absl::Status status;  // DATA_LOSS naming the first tensor that differs
  std::vector<uint32_t> failed_destinations;
};

// A transfer that was bound and checked. It can run any number of times over the same memory, which
// it keeps alive (P6). Immutable; usable only with the transport that made it.
class PreparedTransfer {
 public:
  virtual ~PreparedTransfer() = default;
};

// A ReadbackJob that can run any number of times over the same memory, which it keeps alive (P6).
// Immutable; usable only with the transport that made it.
class PreparedReadback {
 public:
  virtual ~PreparedReadback() = default;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // OK if this transport has the method; UNIMPLEMENTED says why not.
  virtual absl::Status CanBroadcast(BroadcastMethod method) const {
    if (method == BroadcastMethod::kDirect) return absl::OkStatus();
    return absl::UnimplementedError("broadcasts through slots need GPUs");
  }

  // Runs the transfer; calls `done` once, on a thread of the transport, after the last byte was
  // read and written and `keep_alive` was released (P8), but for memory that a lost device may
  // still touch. Transfers may overlap: a transfer starts before the end of the transfer before
  // it. They start in the order of submission, but a replay may start before transfers that are
  // not prepared.
  virtual void Submit(Transfer transfer, std::function<void(TransferResult)> done) = 0;

  // Does once what every run of the transfer needs: checks, order, shares of the work. Takes up to
  // seconds for millions of moves; thread-safe. INTERNAL: a wrong plan.
  virtual absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) = 0;

  // Runs the prepared transfer as Submit would, with this verification and label in place of the
  // transfer's own.
  virtual void Replay(const std::shared_ptr<const PreparedTransfer>& prepared,
                      Verification verification, std::string label,
                      std::function<void(TransferResult)> done) = 0;

  // Reads destinations again and compares their digests. Threads and order are as for transfers.
  virtual void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) = 0;

  // Prepares a job for Replay. Returns at once; slow preparations are done by the first run. The
  // `expected` digests in the job's pieces are ignored.
  virtual std::shared_ptr<const PreparedReadback> Prepare(ReadbackJob job) = 0;

  // Runs the prepared job as Submit would; expected[i] is the digest that piece i of the job must
  // have.
  virtual void Replay(const std::shared_ptr<const PreparedReadback>& prepared,
                      std::vector<uint64_t> expected, std::function<void(ReadbackResult)> done) = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TRANSPORT_H_
