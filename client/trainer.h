// A trainer rank: attach once; for every version Begin, Push..., Commit; or register the shards
// once and Refit every version.
//
//   REFITD_ASSIGN_OR_RETURN(auto trainer, Trainer::Attach({.connect = {.group = "policy"}}));
//   REFITD_ASSIGN_OR_RETURN(auto region, trainer->NewRegion(bytes));
//   ... write weights into region->data() ...
//   REFITD_ASSIGN_OR_RETURN(auto update, trainer->Begin({.version = Version(7)}));
//   REFITD_RETURN_IF_ERROR(update->Push(Bucket::Packed(tensors, region, 0)));
//   REFITD_ASSIGN_OR_RETURN(CommitResult result, update->Commit());
//
// With shards that stay where they are, registered once, a version is one call of every rank; the
// moves are compiled at the first and replayed at the others:
//
//   REFITD_RETURN_IF_ERROR(trainer->Register(layout));  // boxes of named global tensors in regions
//   ... train: the shards in place ...
//   REFITD_ASSIGN_OR_RETURN(CommitResult result, trainer->Refit({.version = Version(8)}));
//
// Every call has a deadline (what remains of the update plus ConnectOptions::call_margin) and
// returns a status whose message names who was waited for. An Update that goes without Commit
// aborts: weights are never half installed by forgetting (P2).
//
// With ConnectOptions::reattach, when the daemon goes away the calls of an open Update fail
// (UNAVAILABLE or ABORTED, naming the daemon) and so do all later ones of that Update; the trainer
// attaches again beside that, with the same regions. Calls of the Trainer itself go on: Begin,
// Refit and Register wait for the next lease, also where the lease ends while they run, and are
// then made again with it; Begin and Refit wait for at most their own duration. Where the group
// lived on (a daemon that had joined it, or the way to it, was gone) and has other trainer ranks,
// these were told ABORTED meanwhile: so is a Begin or Refit that was under way, and every rank
// begins anew. Where a Refit turns out to have committed when its lease ended, it is OK, with no
// instances in its result. What became of an update whose Commit failed is not known: the engines
// that heard of the commit hold the version, the others count as dirty. Begin a greater version, or
// ask GetUpdate where the daemon was not restarted. The registered layout is registered again with
// the new lease.
//
// Without it the lease's end is the end: every call then fails with the code of that end
// (UNAVAILABLE where the daemon went away) and a message that says so and why.
#ifndef REFITD_CLIENT_TRAINER_H_
#define REFITD_CLIENT_TRAINER_H_

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/types.h"
#include "transport/transport.h"

namespace refitd::client {

struct TrainerOptions {
  ConnectOptions connect{};
  int rank = 0;
  int world_size = 1;
};

struct BeginOptions {
  Version version{};
  std::chrono::milliseconds duration{0};       // of the whole update; 0: the daemon's default
  std::optional<Verification> verification{};  // absent: the daemon's default
  bool evict_late = false;   // evict late or failing instances instead of aborting
  int64_t tensor_count = 0;  // of all ranks together; 0: not told
  int64_t total_bytes = 0;   // of all ranks together, for progress; 0: not told
  // How what is pushed reaches engines on several GPUs; the same on every rank that begins. Other
  // than kAuto and kDirect: refused unless trainer and engines are on GPUs of one daemon
  // (FAILED_PRECONDITION) that can move bytes so (UNIMPLEMENTED).
  BroadcastMethod broadcast = BroadcastMethod::kAuto;
  // This rank's registered layout has no part in this update, which the rank ends by Commit: so
  // that it may push one version and refit the next without registering in between.
  bool without_layout = false;
};

struct RefitOptions {
  Version version{};
  std::chrono::milliseconds duration{0};       // of the whole update; 0: the daemon's default
  std::optional<Verification> verification{};  // absent: the daemon's default
  bool evict_late = false;  // evict late or failing instances instead of aborting
};

struct InstanceOutcome {
  std::string instance;
  bool committed = false;
  std::string reason;
};

// What was pushed by one method, by all ranks.
struct BroadcastTotals {
  BroadcastMethod method = BroadcastMethod::kDirect;
  int64_t bytes = 0;    // of tensor data, once, whoever received it
  int64_t buckets = 0;  // whose bytes went so for the most part
};

struct CommitResult {
  Version version;
  std::vector<InstanceOutcome> instances;
  int64_t bytes = 0;
  double seconds = 0;                     // first Begin to decision, by the daemon's clock
  std::vector<BroadcastTotals> pushed{};  // by method; what a refit moved is not in it
  // Tensors of trainers' layouts that no engine wants and a refit left out
  // (GroupSpec::unwanted_tensors), and their bytes.
  int64_t left_out_tensors = 0;
  int64_t left_out_bytes = 0;
};

// A staging slot to pack into: at most one bucket; then it is the daemon's again. Move-only;
// unsubmitted, it is given back. It is memory of ConnectOptions::device: on a GPU `data` is an
// address for kernels and copies of this process there, and not for the host; the device work that
// packs has to have ended before the slot is pushed, and before it is given back.
class LeasedSlot {
 public:
  virtual ~LeasedSlot() = default;
  virtual char* data() const = 0;
  virtual int64_t bytes() const = 0;
};

// What one Push hands over: tensors (whole, or parts given by `ranges`) and where their bytes are.
struct Bucket {
  std::vector<TensorSpec> tensors;
  std::vector<TensorRange> ranges;  // empty: every tensor whole; else one a tensor
  bool packed = false;
  // Packed: where each tensor lies from the buffer's start, a multiple of its element size; empty:
  // back to back. A tensor may begin anywhere after the one before it, and the buffer may be longer
  // than where the last tensor ends.
  std::vector<int64_t> byte_offsets;

  // Exactly one source. In a region the packed buffer begins at a multiple of the element size of
  // every tensor in it; back to back, of the first one (the others then fall where they fall). A
  // slot's start and inline bytes are aligned for everything; back to back in a slot, each tensor
  // must fall on a multiple of its element size. An unpacked tensor lies at a multiple of its own.
  std::shared_ptr<Region>
      region;  // packed: begins at region_offsets[0]; else region_offsets[i] for tensor i
  std::vector<int64_t> region_offsets;
  std::unique_ptr<LeasedSlot> slot;  // packed
  std::vector<std::span<const char>>
      bytes;  // inline, copied into the call: one if packed, else one a tensor, of just its bytes

  static Bucket Packed(std::vector<TensorSpec> tensors, std::shared_ptr<Region> region,
                       int64_t offset, std::vector<int64_t> byte_offsets = {});
  static Bucket Unpacked(std::vector<TensorSpec> tensors, std::shared_ptr<Region> region,
                         std::vector<int64_t> offsets);
  static Bucket Inline(std::vector<TensorSpec> tensors, std::vector<std::span<const char>> bytes);
  static Bucket InSlot(std::vector<TensorSpec> tensors, std::unique_ptr<LeasedSlot> slot,
                       std::vector<int64_t> byte_offsets);
};

// An open update: the only one of this rank, since a version is begun once at a time (Begin). One
// thread at a time, except that callbacks run on a client thread. Destroyed before Commit: aborts
// the update that it was made for, and no later one to the same version.
class Update {
 public:
  virtual ~Update() = default;
  virtual Version version() const = 0;
  virtual int instances() const = 0;
  virtual int leasable_slots() const = 0;  // that this rank may hold at a time

  // Hands a bucket over and waits until its source is no longer read; its region is then the
  // caller's alone again.
  virtual absl::Status Push(Bucket bucket) = 0;
  // The same without waiting for the end; blocks only while Limits.outstanding_buckets are
  // unanswered. `done` runs once, on a client thread, and must not call into this object, wait for
  // long, or be the last to hold a region. An error is also kept and returned by Commit. The
  // bucket's region stays known to the daemon, though its owner lets go of it, until the next push
  // after `done` ran, Flush, Commit, Refit, or this object's end: the first of them waits as
  // ~Region does.
  virtual void PushAsync(Bucket bucket, std::function<void(absl::Status)> done) = 0;
  // Waits until every PushAsync was answered; the first error of any.
  virtual absl::Status Flush() = 0;

  virtual absl::StatusOr<std::unique_ptr<LeasedSlot>> LeaseSlot(
      std::chrono::milliseconds wait = {}) = 0;

  // Waits for every push as well; OK means that every rank of every instance listed as committed
  // holds the version (P1).
  virtual absl::StatusOr<CommitResult> Commit() = 0;
  // In place of Commit where this rank registered its layout: waits for every push, of the layout's
  // pushed_tensors, then moves all other tensors as Trainer::Refit does. It ends this update and
  // opens no other: ABORTED, naming the culprit, where this one was lost meanwhile.
  virtual absl::StatusOr<CommitResult> Refit() = 0;
  virtual absl::Status Abort(const std::string& reason) = 0;
};

// What became of an update.
struct UpdateOutcome {
  enum Kind : uint8_t { kUnknown, kRunning, kCommitted, kAborted };
  // kUnknown: never heard of, forgotten, or of an incarnation that is gone, as every one of before
  // a daemon's restart is.
  Kind kind = kUnknown;
  std::string reason;
};

// Thread-safe. Destroying it detaches.
class Trainer {
 public:
  // Errors: as refitd.v1.Trainer.Attach; UNAVAILABLE where no daemon answers at the socket within
  // `wait`.
  static absl::StatusOr<std::unique_ptr<Trainer>> Attach(const TrainerOptions& options);
  virtual ~Trainer() = default;

  // Shared memory that buckets can name as their source.
  virtual absl::StatusOr<std::shared_ptr<Region>> NewRegion(int64_t bytes) = 0;
  // [0, bytes) of a memfd that exists already, sealed against shrinking (fcntl F_ADD_SEALS,
  // F_SEAL_SHRINK: made with MFD_ALLOW_SEALING) and open for reading and writing. It is mapped here
  // too. Errors: INVALID_ARGUMENT not a memfd, of huge pages, not sealed, or smaller than `bytes`;
  // PERMISSION_DENIED not open for both; those of docs/descriptor_socket.md.
  virtual absl::StatusOr<std::shared_ptr<Region>> AddMemfd(UniqueFd memfd, int64_t bytes) = 0;
  // Memory of ConnectOptions::device, which the caller keeps allocated (Region): a block of
  // cudaMalloc, or `bytes` of cuMemCreate exported as a POSIX descriptor (torch's expandable
  // segments, ncclMemAlloc). Buckets and layouts name it as any other. Errors: as
  // refitd.v1.Trainer.RegisterRegion; those of docs/descriptor_socket.md.
  virtual absl::StatusOr<std::shared_ptr<Region>> AddCudaRegion(const CudaIpcBlock& block) = 0;
  virtual absl::StatusOr<std::shared_ptr<Region>> AddCudaRegion(UniqueFd vmm, int64_t bytes) = 0;
  // Opens or joins the update; OK when every engine rank is ready. Errors: as
  // refitd.v1.Trainer.Begin; ALREADY_EXISTS: this rank has begun the update, and the Update of that
  // call lives (that one goes on undisturbed).
  virtual absl::StatusOr<std::unique_ptr<Update>> Begin(const BeginOptions& options) = 0;
  // The shards of this rank for Refit: their regions come from NewRegion and must stay until the
  // next Register. Registers anew what was registered before; a layout without pieces takes it
  // back, and its rank may end updates by Commit, or by Refit with the others. Tensors may share
  // memory (tied weights). binding_generation is filled in. Waits
  // for the lease. FAILED_PRECONDITION: during an update of this rank.
  virtual absl::Status Register(Layout layout) = 0;
  // Begin, the compiled moves and Commit in one, by every trainer rank; the shards hold the version
  // when it is called and are no longer read when it returns. OK as Update::Commit. Errors as
  // refitd.v1.Trainer.Refit. Waits for the lease as Begin does.
  virtual absl::StatusOr<CommitResult> Refit(const RefitOptions& options) = 0;
  // Gives up the update to `version` that this rank has begun, or is refitting, in a call on
  // another thread: that call then ends with ABORTED. Errors: as refitd.v1.Trainer.Abort;
  // FAILED_PRECONDITION: no update to `version` is open for this rank.
  virtual absl::Status Abort(Version version, const std::string& reason) = 0;
  // For whoever missed Commit's or Refit's answer. Works after the lease ended, as long as the
  // daemon lives. Asks for the update of the incarnation in which this trainer last began
  // `version`, else of the current one.
  virtual absl::StatusOr<UpdateOutcome> GetUpdate(Version version) = 0;
  // The greatest committed version that a daemon told of; nullopt: none.
  virtual std::optional<Version> group_version() const = 0;
  // OK while attached; else why the lease ended, or why none follows it.
  virtual absl::Status health() const = 0;
  // How often a lost lease was followed by another.
  virtual int reattachments() const = 0;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_TRAINER_H_
