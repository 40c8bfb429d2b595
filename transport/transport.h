// What every transport does for the daemon: run programs over memory that it has mapped, and verify
// it. Of the three moves of docs/architecture.md this interface carries `copy`; wire.h has the two
// between daemons.
//
// Knows neither gRPC nor groups. Transports own their threads; callers never block.
#ifndef REFITD_TRANSPORT_TRANSPORT_H_
#define REFITD_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/layout.h"
#include "transport/plan/plan.h"

namespace refitd {

enum class Verification : uint8_t { kOff = 1, kTransfer = 2, kReadback = 3 };

// How the bytes of one source reach several devices of this node.
//   kAuto       whichever is expected to be the fastest for the bytes and the devices
//   kDirect     the source's device stores into every destination; no staging
//   kChain      copy engines relay chunks from device to device, slot to slot
//   kSymmetric  each receiver gets its share, then all-gather over symmetric windows (NCCL)
//   kNccl       one NCCL broadcast, slot to slot
enum class BroadcastMethod : uint8_t {
  kAuto = 0,
  kDirect = 1,
  kChain = 2,
  kSymmetric = 3,
  kNccl = 4
};

// Memory that can be copied to or from: a mapped region, a slot, a request's bytes. `keep_alive`
// outlives every copy (P6).
struct MemorySpan {
  char* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<const void> keep_alive;
};

// One piece with its memory.
struct BoundPiece {
  DType dtype = DType::kUint8;
  Dims shape;  // global
  Box box;
  Dims strides;          // elements
  char* data = nullptr;  // first element of the box
  std::string name;      // tensor, for messages
};

// What a destination piece must hold after the copies: the sum of digests computed by passes over
// the *sources'* bytes. The caller adds them up per piece over all transfers of an update and hands
// them to Verify.
struct PieceDigest {
  uint32_t destination = 0;  // index into Transfer::destinations
  uint32_t piece = 0;        // index into that destination's pieces
  uint64_t digest = 0;
};

// All of a transfer's source, packed, in one slot of each device that needs it; destinations are
// then written from the slot of their own device.
struct Broadcast {
  BroadcastMethod method = BroadcastMethod::kDirect;  // of those through slots
  std::vector<MemorySpan> slots;                      // one a device; filled in any case
  std::vector<int64_t> byte_offsets;  // of each source piece's first element, in every slot
};

// One bucket (or part of one), or a step of a compiled refit, from some places to several.
struct Transfer {
  std::vector<BoundPiece> source;  // pieces of all sources, one list
  // destinations[d] are the bound pieces of destination d that this transfer may write, indexed as
  // in `program`.
  std::vector<std::vector<BoundPiece>> destinations;
  // moves[i].source is 0; source_piece and destination_piece index the above. Byte offsets in the
  // moves are relative to BoundPiece::data of the piece *they* name (the binder rewrites them), so
  // that a wrong program shows in the digests.
  Program program;
  Verification verification = Verification::kOff;
  // Destinations that are verified by reading back inside the transfer (staging slots), under
  // kReadback.
  std::vector<bool> readback_now;
  // Digests of whole source pieces are wanted, moved or not: what another daemon must have
  // received.
  bool want_source_digests = false;
  // Through slots: of source pieces that lie row-major on one device, by a method other than kAuto
  // and kDirect that CanBroadcast. Without: kDirect.
  std::optional<Broadcast> broadcast;
  std::vector<std::shared_ptr<const void>> keep_alive;  // all memory named above (P6)
  std::string label;                                    // for messages: "version 3, part 7"
};

struct TransferResult {
  absl::Status status;  // DATA_LOSS: verification failed, naming tensor and destination index
  std::vector<int64_t> bytes_written;    // per destination
  std::vector<PieceDigest> expected;     // under kReadback, for destinations without readback_now
  std::vector<uint64_t> source_digests;  // per source piece, if wanted
  int failed_destination = -1;           // whose bytes were wrong, if status is not OK
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

// A transfer that was bound and checked, to be run any number of times over the same memory, which
// it keeps alive (P6). Immutable; belongs to the transport that made it.
class PreparedTransfer {
 public:
  virtual ~PreparedTransfer() = default;
};

// A ReadbackJob to be run any number of times over the same memory, which it keeps alive (P6).
// Immutable; belongs to the transport that made it.
class PreparedReadback {
 public:
  virtual ~PreparedReadback() = default;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Whether transfers can go by this method. UNIMPLEMENTED: why not.
  virtual absl::Status CanBroadcast(BroadcastMethod method) const {
    if (method == BroadcastMethod::kDirect) return absl::OkStatus();
    return absl::UnimplementedError("broadcasts through slots need GPUs");
  }

  // Runs the transfer; calls `done` once, on a thread of the transport, after the last byte was
  // read and written. Transfers start in the order of submission and overlap (the next one's work
  // fills the tail of the one before).
  virtual void Submit(Transfer transfer, std::function<void(TransferResult)> done) = 0;

  // Does once what every run of the transfer needs: checks, order, shares of the work. Takes up to
  // seconds for millions of moves; thread-safe. INTERNAL: a wrong program. A transport that gains
  // nothing by it keeps the transfer.
  virtual absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) {
    return std::make_shared<const KeptTransfer>(std::move(transfer));
  }

  // Runs it as Submit would, with this verification and label in place of its own.
  virtual void Replay(const std::shared_ptr<const PreparedTransfer>& prepared,
                      Verification verification, std::string label,
                      std::function<void(TransferResult)> done) {
    Transfer transfer = static_cast<const KeptTransfer&>(*prepared).transfer;
    transfer.verification = verification;
    transfer.label = std::move(label);
    Submit(std::move(transfer), std::move(done));
  }

  // Reads destinations again and compares. Same threads, same order rules.
  virtual void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) = 0;

  // For Replay, at once: whatever takes long is done by the first run. `expected` of the pieces
  // counts for nothing.
  virtual std::shared_ptr<const PreparedReadback> Prepare(ReadbackJob job) {
    return std::make_shared<const KeptReadback>(std::move(job));
  }

  // Runs it as Submit would; expected[i] is what piece i of the job must have.
  virtual void Replay(const std::shared_ptr<const PreparedReadback>& prepared,
                      std::vector<uint64_t> expected, std::function<void(ReadbackResult)> done) {
    ReadbackJob job = static_cast<const KeptReadback&>(*prepared).job;
    for (size_t i = 0; i < job.pieces.size(); ++i) job.pieces[i].expected = expected[i];
    Submit(std::move(job), std::move(done));
  }

 private:
  struct KeptTransfer : PreparedTransfer {
    explicit KeptTransfer(Transfer kept) : transfer(std::move(kept)) {}
    const Transfer transfer;
  };
  struct KeptReadback : PreparedReadback {
    explicit KeptReadback(ReadbackJob kept) : job(std::move(kept)) {}
    const ReadbackJob job;
  };
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TRANSPORT_H_
