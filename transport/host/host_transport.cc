#include "transport/host/host_transport.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/bound_moves.h"
#include "transport/derive/derive.h"
#include "transport/host/box_copy.h"
#include "transport/host/worker_threads.h"

namespace refitd {
namespace {

// The size of the chunks that threads take: small enough that all threads end at nearly the same
// time.
constexpr int64_t kChunkBytes = 256 << 10;

// A chunk is copied in blocks of this size times the number of moves that read the chunk. A block
// stays in the first- or second-level cache between the source pass and the copies, and the next
// block is fetched from memory while this one is written. (Measured with verification `transfer`:
// 11 GB/s with one block per chunk, 16 GB/s with blocks of 32 KiB. A plain memcpy reaches 15 GB/s.)
constexpr int64_t kBlockBytes = 32 << 10;

constexpr int kMaxThreads = 16;  // more threads don't make memory faster

const char* AddressOf(const BoundPiece& piece, const Box& box) {
  return piece.data + ByteDistance(box, piece.box, piece.strides, ElementBytes(piece.dtype));
}

uint64_t DigestPiece(const BoundPiece& piece, const Box& box) {
  return DigestBox(AddressOf(piece, box), piece.strides, box, piece.shape,
                   static_cast<int>(ElementBytes(piece.dtype)));
}

// The smallest box around both boxes; neither is empty.
Box Around(const Box& a, const Box& b) {
  Box around = a;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t begin = std::min(a.offset[d], b.offset[d]);
    const int64_t end = std::max(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    around.offset[d] = begin;
    around.extent[d] = end - begin;
  }
  return around;
}

// Cuts a box into boxes of at most `most_bytes`, along the first dimension of which a row fits; the
// dimensions before it are taken one index at a time. Calls add(box), in ascending order.
template <typename Add>
void Cut(const Box& box, int64_t element_bytes, int64_t most_bytes, Add add) {
  const int64_t most = most_bytes / element_bytes;
  const size_t rank = box.extent.size();
  if (ElementCount(box) == 0) return;
  size_t cut = rank;
  int64_t row = 1;  // elements of one step in dimension `cut`
  while (cut > 0 && row * box.extent[cut - 1] <= most) row *= box.extent[--cut];
  if (cut == 0) return add(box);
  --cut;  // the dimension to cut: one of its rows fits, all of them don't
  const int64_t step = std::max<int64_t>(1, most / row);

  Box chunk = box;
  for (size_t d = 0; d < cut; ++d) chunk.extent[d] = 1;
  while (true) {
    for (int64_t done = 0; done < box.extent[cut]; done += step) {
      chunk.offset[cut] = box.offset[cut] + done;
      chunk.extent[cut] = std::min(step, box.extent[cut] - done);
      add(chunk);
    }
    size_t d = cut;
    while (d > 0 && chunk.offset[d - 1] + 1 == box.offset[d - 1] + box.extent[d - 1]) {
      chunk.offset[d - 1] = box.offset[d - 1];
      --d;
    }
    if (d == 0) return;
    ++chunk.offset[d - 1];
  }
}

// Cuts a box of a piece into chunks. A box that is computed is cut between blocks, so that each
// block is read for one chunk, and into parts that are computed from at most kChunkBytes, or from
// one block.
template <typename Add>
void CutPiece(const BoundPiece& piece, const Box& box, Add add) {
  if (piece.held == nullptr) return Cut(box, ElementBytes(piece.dtype), kChunkBytes, add);
  const Derivation& derivation = *piece.held->derivation;
  const bool scales = derivation.role == DerivedRole::kScales;
  const Dims block = BlockOf(derivation);
  int64_t block_bytes = ElementBytes(derivation.from.dtype);
  Box blocks = box;
  for (size_t d = 0; d < block.size(); ++d) {
    block_bytes *= block[d];
    if (scales) continue;
    blocks.offset[d] = box.offset[d] / block[d];
    blocks.extent[d] = (box.offset[d] + box.extent[d] + block[d] - 1) / block[d] - blocks.offset[d];
  }
  Cut(blocks, block_bytes, std::max(kChunkBytes, block_bytes), [&](Box chunk) {
    if (scales) return add(chunk);
    for (size_t d = 0; d < block.size(); ++d) {
      chunk.offset[d] *= block[d];
      chunk.extent[d] *= block[d];
    }
    if (const std::optional<Box> inside = Intersect(chunk, box); inside.has_value()) add(*inside);
  });
}

// Keeps only the failure with the lowest position, so that the message does not depend on timing.
class FirstFailure {
 public:
  void Offer(int64_t position, int destination, absl::Status status) {
    MutexLock lock(&mutex_);
    if (!status_.ok() && position_ <= position) return;
    position_ = position;
    destination_ = destination;
    status_ = std::move(status);
  }
  // Returns the destination (-1: none) and the status.
  std::pair<int, absl::Status> Take() {
    MutexLock lock(&mutex_);
    return {destination_, status_};
  }

 private:
  Mutex mutex_;
  int64_t position_ ABSL_GUARDED_BY(mutex_) = 0;
  int destination_ ABSL_GUARDED_BY(mutex_) = -1;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// ---- copies ----

// A box of one source piece and the moves that may read it.
struct Chunk {
  const BoundPiece* source = nullptr;
  size_t first_move = 0;
  size_t last_move = 0;  // one past the last move; equal to the first: only a digest is wanted
  Box box;
};

// The work of a transfer. Points into the transfer.
struct CopyPlan {
  absl::Status status;
  BoundMoves bound;
  std::vector<Chunk> chunks;
};

void MakeChunks(const Transfer& transfer, CopyPlan* plan) {
  const std::vector<BoundMove>& moves = plan->bound.moves;
  const auto add = [plan](const BoundPiece* source, size_t first, size_t last, const Box& whole) {
    CutPiece(*source, whole, [&](const Box& box) {
      plan->chunks.push_back(
          {.source = source, .first_move = first, .last_move = last, .box = box});
    });
  };
  size_t next_piece = 0;  // first piece whose digest is not planned yet
  const auto digest_until = [&](size_t piece, size_t move) {
    for (; next_piece < piece; ++next_piece) {
      const BoundPiece& source = transfer.source[next_piece];
      if (WantsDigest(transfer, source)) add(&source, move, move, source.box);
    }
  };
  for (size_t first = 0; first < moves.size();) {
    const BoundPiece* const source = moves[first].source;
    // Cover only the moved boxes, because a bucket may carry a small part of a large piece.
    Box around = *moves[first].box;
    size_t last = first + 1;
    for (; last < moves.size() && moves[last].source == source; ++last) {
      around = Around(around, *moves[last].box);
    }
    const auto piece = static_cast<size_t>(source - transfer.source.data());
    digest_until(piece, first);
    add(source, first, last, WantsDigest(transfer, *source) ? source->box : around);
    next_piece = piece + 1;
    first = last;
  }
  digest_until(transfer.source.size(), moves.size());
}

// FAILED_PRECONDITION, naming the tensor: only GPUs have the arithmetic of a derived tensor.
absl::Status CheckKinds(const Transfer& transfer) {
  for (const BoundPiece& piece : transfer.source) {
    if (piece.held == nullptr || !NeedsGpu(piece.held->derivation->kind)) continue;
    return AboutTensor(
        Precondition("tensor {}: the {} are computed by GPUs only, and {} is in host "
                     "memory",
                     piece.name, Describe(*piece.held->derivation),
                     piece.held->derivation->from.name),
        piece.name);
  }
  return absl::OkStatus();
}

CopyPlan MakePlan(const Transfer& transfer) {
  CopyPlan plan;
  absl::StatusOr<BoundMoves> bound = BindMoves(transfer);
  if (!bound.ok()) {
    plan.status = bound.status();
    plan.bound.bytes.resize(transfer.destinations.size());
    return plan;
  }
  plan.bound = *std::move(bound);
  plan.status = CheckKinds(transfer);
  if (plan.status.ok()) MakeChunks(transfer, &plan);
  return plan;
}

// A transfer with its plan, which points into the transfer.
struct PreparedCopy : PreparedTransfer {
  explicit PreparedCopy(Transfer of) : transfer(std::move(of)), plan(MakePlan(transfer)) {}
  PreparedCopy(const PreparedCopy&) = delete;
  PreparedCopy& operator=(const PreparedCopy&) = delete;
  const Transfer transfer;
  const CopyPlan plan;
};

class CopyTask : public WorkTask {
 public:
  using Done = std::function<void(TransferResult)>;

  CopyTask(std::shared_ptr<const PreparedCopy> prepared, Verification verification,
           std::string label, Done done, TransferFaults* faults)
      : WorkTask(static_cast<int64_t>(prepared->plan.chunks.size())),
        prepared_(std::move(prepared)),
        transfer_(prepared_->transfer),
        plan_(prepared_->plan),
        verification_(verification),
        label_(std::move(label)),
        done_(std::move(done)),
        faults_(faults),
        sums_(verification == Verification::kReadback ? plan_.bound.sums.size() : 0),
        source_sums_(transfer_.want_source_digests ? transfer_.source.size() : 0) {}

 private:
  // The digests of boxes of one block, each computed once. It finds the bytes by the source piece's
  // own box and strides, independently of the moves (P1).
  class SourcePass {
   public:
    explicit SourcePass(const BoundPiece& source) : source_(source) {}
    std::optional<uint64_t> Known(const Box& box) const {
      for (const auto& [known, digest] : known_) {
        if (known == box) return digest;
      }
      return std::nullopt;
    }
    void Remember(const Box& box, uint64_t digest) { known_.emplace_back(box, digest); }
    uint64_t Digest(const Box& box) {
      const std::optional<uint64_t> known = Known(box);
      if (known.has_value()) return *known;
      Remember(box, DigestPiece(source_, box));
      return known_.back().second;
    }

   private:
    const BoundPiece& source_;
    absl::InlinedVector<std::pair<Box, uint64_t>, 1> known_;
  };

  void Run(int64_t unit) override {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(unit)];
    if (chunk.source->held != nullptr) return RunComputed(unit, chunk);
    const BoundPiece& source = *chunk.source;
    const int64_t element_bytes = ElementBytes(source.dtype);
    const auto moves =
        std::max<int64_t>(1, static_cast<int64_t>(chunk.last_move - chunk.first_move));
    const int64_t block_bytes = std::min(kBlockBytes * moves, kChunkBytes);
    const bool stream = ElementCount(chunk.box) * element_bytes >= kStreamingBytes;
    const StoreMode mode = stream ? StoreMode::kStreaming : StoreMode::kCached;
    Cut(chunk.box, element_bytes, block_bytes, [&](const Box& block) {
      RunBlock(unit, source, block, {.mode = mode, .block_bytes = block_bytes});
    });
    if (stream) DigestStoreFence();
  }

  // Computes the chunk, then copies the result as any block.
  void RunComputed(int64_t unit, const Chunk& chunk) {
    const BoundPiece& piece = *chunk.source;
    thread_local std::vector<char> computed;
    computed.resize(static_cast<size_t>(ElementCount(chunk.box) * ElementBytes(piece.dtype)));
    if (const std::optional<Dims> fault =
            Derive(*piece.held, piece.dtype, chunk.box, computed.data());
        fault.has_value()) {
      failure_.Offer(unit, -1,
                     Prefixed(NoResult(*piece.held->derivation,
                                       fmt::format("element [{}]", fmt::join(*fault, ", "))),
                              "{}", label_));
      return;
    }
    const BoundPiece source{piece.dtype,     piece.shape,
                            chunk.box,       RowMajorStrides(chunk.box.extent),
                            computed.data(), piece.name};
    RunBlock(unit, source, chunk.box, {});
    DigestStoreFence();
  }

  struct BlockOptions {
    StoreMode mode = StoreMode::kCached;
    int64_t block_bytes = 0;
  };

  // Does the moves' parts in a block of a chunk. `source`: where the block lies.
  void RunBlock(int64_t unit, const BoundPiece& source, const Box& block,
                const BlockOptions& options) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(unit)];
    SourcePass pass(source);
    for (size_t i = chunk.first_move; i < chunk.last_move; ++i) {
      const BoundMove& move = plan_.bound.moves[i];
      const std::optional<Box> box = Intersect(*move.box, block);
      if (!box.has_value()) continue;
      CopyAndVerify(unit, {move, source, *box, options.mode, options.block_bytes}, &pass);
    }
    if (source_sums_.empty()) return;
    // This comes after the moves: if a move took the whole block, its digest is known already.
    source_sums_[static_cast<size_t>(chunk.source - transfer_.source.data())].fetch_add(
        pass.Digest(block), std::memory_order_relaxed);
  }

  // The part of a move that lies in one block.
  struct Part {
    const BoundMove& move;
    const BoundPiece& source;  // the move's, or what was computed of it
    const Box& box;
    StoreMode mode;
    int64_t block_bytes;
  };

  // P1: the digests of two passes over memory must agree.
  void CopyAndVerify(int64_t unit, const Part& part, SourcePass* pass) {
    switch (verification_) {
      case Verification::kOff:
        Copy(part, {.mode = part.mode});
        return;
      case Verification::kTransfer: {
        // The first copy of a box also prefetches the next block, for the next source pass.
        const int64_t prefetch = pass->Known(part.box).has_value() ? 0 : part.block_bytes;
        const uint64_t expected = pass->Digest(part.box);
        const uint64_t stored =
            Copy(part, {.with_digest = true, .mode = part.mode, .prefetch = prefetch});
        if (stored != expected) Fail(unit, part, "what was stored", stored, expected);
        return;
      }
      case Verification::kReadback: {
        const uint64_t expected = CopyForReadback(part, pass);
        if (!ReadbackNow(part.move.destination_index)) {
          sums_[part.move.sum].fetch_add(expected, std::memory_order_relaxed);
          return;
        }
        const uint64_t found = DigestPiece(*part.move.destination, part.box);
        if (found != expected) Fail(unit, part, "read back", found, expected);
        return;
      }
    }
  }

  // Copies, and returns the digest of the source's bytes, which are found by the source's own
  // metadata. If the program reads exactly these bytes, one pass both copies and digests them;
  // else they are digested in a pass before the copy.
  uint64_t CopyForReadback(const Part& part, SourcePass* pass) {
    const std::optional<uint64_t> known = pass->Known(part.box);
    if (!known.has_value() && SourceAddress(part) == AddressOf(part.source, part.box)) {
      const uint64_t digest = Copy(part, {.with_digest = true, .mode = part.mode});
      pass->Remember(part.box, digest);
      return digest;
    }
    const uint64_t digest = pass->Digest(part.box);
    Copy(part, {.mode = part.mode});
    return digest;
  }

  // Returns the address from which the program reads the part. What is computed has one place only
  // (BindMoves).
  static const char* SourceAddress(const Part& part) {
    if (part.move.source->held != nullptr) return AddressOf(part.source, part.box);
    return part.move.from_address() + ByteDistance(part.box, *part.move.box,
                                                   part.move.source->strides,
                                                   ElementBytes(part.move.source->dtype));
  }

  uint64_t Copy(const Part& part, const BoxCopyOptions& options) {
    const BoundPiece& source = part.source;
    const Dims& to_strides = part.move.destination->strides;
    const int64_t element_bytes = ElementBytes(source.dtype);
    char* const to =
        part.move.to_address() + ByteDistance(part.box, *part.move.box, to_strides, element_bytes);
    const uint64_t digest =
        CopyBoxUnfenced(to, to_strides, SourceAddress(part), source.strides, part.box, source.shape,
                        static_cast<int>(element_bytes), options);
    if (faults_ != nullptr) {
      faults_->AfterStore(to, ByteSpan(part.box.extent, to_strides, element_bytes));
    }
    return digest;
  }

  bool ReadbackNow(uint32_t destination) const {
    return destination < transfer_.readback_now.size() && transfer_.readback_now[destination];
  }

  void Fail(int64_t unit, const Part& part, std::string_view what, uint64_t found,
            uint64_t expected) {
    const BoundMove& move = part.move;
    failure_.Offer(
        unit, static_cast<int>(move.destination_index),
        Error(absl::StatusCode::kDataLoss,
              "{}: verification of \"{}\" at destination {} failed near element {}: digest of "
              "the source is {:016x}, {} {:016x}",
              label_, move.source->name, move.destination_index,
              FirstIndex(part.box, move.source->shape), expected, what, found));
  }

  void Finish() override {
    TransferResult result;
    std::tie(result.failed_destination, result.status) = failure_.Take();
    if (!plan_.status.ok()) {
      result.status = Prefixed(plan_.status, "{}", label_);
    }
    result.bytes_written = plan_.bound.bytes;
    if (verification_ == Verification::kReadback) {
      for (size_t i = 0; i < plan_.bound.sums.size(); ++i) {
        if (ReadbackNow(plan_.bound.sums[i].destination)) continue;
        result.expected.push_back(plan_.bound.sums[i]);
        result.expected.back().digest = sums_[i].load(std::memory_order_relaxed);
      }
    }
    for (const auto& sum : source_sums_) {
      result.source_digests.push_back(sum.load(std::memory_order_relaxed));
    }
    // P8: the caller may close the memory as soon as `done_` is called.
    prepared_ = nullptr;
    done_(std::move(result));
    done_ = nullptr;
  }

  std::shared_ptr<const PreparedCopy> prepared_;
  const Transfer& transfer_;
  const CopyPlan& plan_;
  const Verification verification_;
  const std::string label_;
  Done done_;
  TransferFaults* const faults_;
  std::vector<std::atomic<uint64_t>> sums_;         // kReadback
  std::vector<std::atomic<uint64_t>> source_sums_;  // per source piece, if wanted
  FirstFailure failure_;
};

// ---- reading back ----

struct ReadbackChunk {
  size_t piece = 0;
  Box box;
};

struct ReadbackPlan {
  absl::Status status;
  std::vector<ReadbackChunk> chunks;
};

ReadbackPlan MakePlan(const ReadbackJob& job) {
  ReadbackPlan plan;
  for (size_t i = 0; i < job.pieces.size(); ++i) {
    const BoundPiece& piece = job.pieces[i].piece;
    plan.status = CheckRanks(piece);
    if (!plan.status.ok()) return {.status = plan.status, .chunks = {}};
    Cut(piece.box, ElementBytes(piece.dtype), kChunkBytes,
        [&](const Box& box) { plan.chunks.push_back({.piece = i, .box = box}); });
  }
  return plan;
}

// A job with its plan.
struct PreparedRead : PreparedReadback {
  explicit PreparedRead(ReadbackJob of) : job(std::move(of)), plan(MakePlan(job)) {}
  const ReadbackJob job;
  const ReadbackPlan plan;
};

class ReadbackTask : public WorkTask {
 public:
  using Done = std::function<void(ReadbackResult)>;

  // expected[i] is the digest that piece i of the job must have.
  ReadbackTask(std::shared_ptr<const PreparedRead> prepared, std::vector<uint64_t> expected,
               Done done)
      : WorkTask(static_cast<int64_t>(prepared->plan.chunks.size())),
        prepared_(std::move(prepared)),
        expected_(std::move(expected)),
        done_(std::move(done)),
        sums_(expected_.size()) {}

 private:
  void Run(int64_t unit) override {
    const ReadbackChunk& chunk = prepared_->plan.chunks[static_cast<size_t>(unit)];
    sums_[chunk.piece].fetch_add(DigestPiece(prepared_->job.pieces[chunk.piece].piece, chunk.box),
                                 std::memory_order_relaxed);
  }

  void Finish() override {
    ReadbackResult result;
    result.status = prepared_->plan.status;
    if (result.status.ok()) {
      result = CompareReadback(prepared_->job, expected_, {sums_.begin(), sums_.end()});
    }
    prepared_ = nullptr;  // P8, as in CopyTask
    done_(std::move(result));
    done_ = nullptr;
  }

  std::shared_ptr<const PreparedRead> prepared_;
  const std::vector<uint64_t> expected_;
  Done done_;
  std::vector<std::atomic<uint64_t>> sums_;
};

int Threads(int asked) {
  if (asked > 0) return asked;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores, 1, kMaxThreads);
}

class HostTransport : public Transport {
 public:
  explicit HostTransport(const HostTransportOptions& options)
      : faults_(options.faults), workers_(Threads(options.threads)) {}

  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    const Verification verification = transfer.verification;
    std::string label = transfer.label;
    Start(std::make_shared<const PreparedCopy>(std::move(transfer)), verification, std::move(label),
          std::move(done));
  }

  absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) override {
    auto prepared = std::make_shared<const PreparedCopy>(std::move(transfer));
    if (!prepared->plan.status.ok()) return prepared->plan.status;
    return prepared;
  }

  void Replay(const std::shared_ptr<const PreparedTransfer>& prepared, Verification verification,
              std::string label, std::function<void(TransferResult)> done) override {
    Start(std::static_pointer_cast<const PreparedCopy>(prepared), verification, std::move(label),
          std::move(done));
  }

  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    std::vector<uint64_t> expected;
    expected.reserve(job.pieces.size());
    for (const ReadbackPiece& piece : job.pieces) expected.push_back(piece.expected);
    Replay(std::make_shared<const PreparedRead>(std::move(job)), std::move(expected),
           std::move(done));
  }

  std::shared_ptr<const PreparedReadback> Prepare(ReadbackJob job) override {
    return std::make_shared<const PreparedRead>(std::move(job));
  }

  void Replay(const std::shared_ptr<const PreparedReadback>& prepared,
              std::vector<uint64_t> expected, std::function<void(ReadbackResult)> done) override {
    auto read = std::static_pointer_cast<const PreparedRead>(prepared);
    REFITD_CHECK(expected.size() == read->job.pieces.size());
    workers_.Submit(
        std::make_shared<ReadbackTask>(std::move(read), std::move(expected), std::move(done)));
  }

 private:
  void Start(std::shared_ptr<const PreparedCopy> prepared, Verification verification,
             std::string label, std::function<void(TransferResult)> done) {
    workers_.Submit(std::make_shared<CopyTask>(std::move(prepared), verification, std::move(label),
                                               std::move(done), faults_));
  }

  TransferFaults* const faults_;
  WorkerThreads workers_;  // last: its threads end before the other members are destroyed
};

}  // namespace

std::unique_ptr<Transport> MakeHostTransport(const HostTransportOptions& options) {
  return std::make_unique<HostTransport>(options);
}

}  // namespace refitd
