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
// returns a status whose message names who was waited for. An Update that is destroyed without
// Commit aborts, so that forgetting a call never leaves weights half installed (P2).
//
// With ConnectOptions::reattach, when the daemon goes away the calls of an open Update fail
// (UNAVAILABLE or ABORTED, naming the daemon), and so do all later calls of that Update; meanwhile
// the trainer attaches again, with the same regions, and registers its layout again. Begin, Refit
// and Register wait for the new lease, also if the old lease ends while they run, and are then made
// again; Begin and Refit wait for at most their own duration. If the group itself lived on (only a
// daemon that had joined it, or the way to it, was gone) and has other trainer ranks, these ranks
// got ABORTED; a Begin or Refit that was under way here then ends with ABORTED too, and every
// rank begins anew. A Refit that turns out to have committed when its lease ended returns OK, with
// no instances in its result. If a Commit failed, the outcome of its update is not known: the
// engines that got Committed hold the version, the others count as dirty. Begin a greater
// version, or ask GetUpdate if the daemon was not restarted.
//
// Without ConnectOptions::reattach the trainer does not attach again: after the lease ended, every
// call fails with the code of that end (UNAVAILABLE if the daemon went away) and a message that
// says why.
#ifndef REFITD_CLIENT_TRAINER_H_
#define REFITD_CLIENT_TRAINER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/types.h"
#include "transport/base/failure.h"
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
  int64_t tensor_count = 0;  // of all ranks together; 0: unknown, Commit may name it
  int64_t total_bytes = 0;   // of all ranks together, for progress; 0: unknown
  // The way in which pushed buckets reach engines on several GPUs; the same on every rank that
  // begins. Methods other than kAuto and kDirect are refused unless trainer and engines are on GPUs
  // of one daemon (FAILED_PRECONDITION) that can move bytes in this way (UNIMPLEMENTED).
  BroadcastMethod broadcast = BroadcastMethod::kAuto;
  // This rank's registered layout has no part in this update, and the rank ends the update by
  // Commit. A rank can so push one version and refit the next without registering in between.
  bool without_layout = false;
  // Text for people, such as "step 1200", shown in the update's status and in the daemon's log. At
  // most 256 bytes of UTF-8 without control characters. If several ranks give a text, the update
  // keeps the first that is not empty.
  std::string note{};
  // When this update has committed, instances with arenas keep the version before it in their other
  // side: the next update is not staged before ReleasePrevious or Rollback. That of one rank is
  // enough.
  bool hold = false;
};

struct RefitOptions {
  Version version{};
  std::chrono::milliseconds duration{0};       // of the whole update; 0: the daemon's default
  std::optional<Verification> verification{};  // absent: the daemon's default
  bool evict_late = false;  // evict late or failing instances instead of aborting
  bool hold = false;        // as BeginOptions::hold
};

struct InstanceOutcome {
  std::string instance;
  bool committed = false;
  std::string reason;  // why not, for people
  Failure failure{};
};

// Totals of what all ranks of an update pushed by one method of broadcast.
struct BroadcastTotals {
  BroadcastMethod method = BroadcastMethod::kDirect;
  int64_t bytes = 0;    // of tensor data, counted once however many engines received it
  int64_t buckets = 0;  // buckets most of whose bytes went by this method
};

struct CommitResult {
  Version version;
  std::vector<InstanceOutcome> instances;
  int64_t bytes = 0;
  double seconds = 0;                     // first Begin to decision, by the daemon's clock
  std::vector<BroadcastTotals> pushed{};  // by method; what a refit moved is not counted
  // Tensors that came and were written nowhere, because no engine wants them
  // (GroupSpec::unwanted_tensors) or their memory is another tensor's; their bytes; and the names
  // of the first 64, sorted.
  int64_t left_out_tensors = 0;
  int64_t left_out_bytes = 0;
  std::vector<std::string> left_out{};
  // The version whose content the instances serve: `version` itself, or of a rollback an earlier
  // one.
  Version content{};
};

// An open update: the only one of this rank (Begin refuses a second). Used by one thread at a time;
// callbacks run on a thread of the client. Destroying it before Commit aborts the update that it
// was made for, and no later update to the same version.
class Update {
 public:
  virtual ~Update() = default;
  virtual Version version() const = 0;
  virtual int instances() const = 0;
  virtual int leasable_slots() const = 0;  // slots that this rank may hold at a time

  // Pushes a bucket, and waits until the daemon has read it. From then on the caller may write to
  // the region again.
  virtual absl::Status Push(Bucket bucket) = 0;
  // Pushes without waiting for the end; blocks only while Limits.outstanding_buckets are
  // unanswered, or two buckets and together more than 2,048 tensors. `done` runs once, on a thread
  // of the client, and must not call into this object, wait for long, or be the last to hold a
  // region. An error is also kept and returned by Commit. After `done` ran, this object still holds
  // the bucket's region until the next push, Flush, Commit, Refit or the destructor lets it go. If
  // the caller has let the region go by then, that call destroys the region, and waits as ~Region
  // does.
  virtual void PushAsync(Bucket bucket, std::function<void(absl::Status)> done) = 0;
  // Waits until every PushAsync was answered; returns the first error of any of them.
  virtual absl::Status Flush() = 0;

  virtual absl::StatusOr<std::unique_ptr<LeasedSlot>> LeaseSlot(
      std::chrono::milliseconds wait = {}) = 0;

  // Waits for every push of this rank, then commits. OK means that every rank of every instance
  // listed as committed holds the version (P1). `tensor_count`: as BeginOptions::tensor_count, for
  // a caller that learns it only by pushing; 0: unknown.
  virtual absl::StatusOr<CommitResult> Commit(int64_t tensor_count = 0) = 0;
  // Takes the place of Commit if this rank registered its layout: waits for the pushes of the
  // layout's pushed_tensors, then moves all other tensors as Trainer::Refit does. It ends this
  // update and opens no other: if this update was lost meanwhile, the call ends with ABORTED,
  // naming the culprit.
  virtual absl::StatusOr<CommitResult> Refit() = 0;
  virtual absl::Status Abort(const std::string& reason) = 0;
  // After a call that failed because the update is over, and after Abort: the status that other
  // calls of the lost update get. It is ABORTED, and says whether weights of engines are dirty.
  // FAILED_PRECONDITION: the update may not be over.
  virtual absl::Status Lost() = 0;
};

// The outcome of an update.
struct UpdateOutcome {
  enum Kind : uint8_t { kUnknown, kRunning, kCommitted, kAborted };
  // kUnknown: the daemon never had the update, has forgotten it, or it belongs to an
  // incarnation that is gone, as every update from before a daemon's restart does.
  Kind kind = kUnknown;
  std::string reason;  // for people
  Failure failure{};   // of an update that was aborted
};

// A trainer rank, attached to its daemon. Thread-safe. Destroying it detaches.
class Trainer : public SharesMemory {
 public:
  // Attaches the rank. Errors: as refitd.v1.Trainer.Attach; UNAVAILABLE if no daemon answers at the
  // socket within `wait`.
  static absl::StatusOr<std::unique_ptr<Trainer>> Attach(const TrainerOptions& options);
  // Opens or joins the update; OK when every engine rank is ready. Errors: as
  // refitd.v1.Trainer.Begin; ALREADY_EXISTS: this rank has already begun the update, and the Update
  // that Begin returned still exists; the update goes on undisturbed.
  virtual absl::StatusOr<std::unique_ptr<Update>> Begin(const BeginOptions& options) = 0;
  // Registers the shards of this rank for Refit, in place of those registered before. Their regions
  // come from this trainer and must stay until the next Register. A layout without pieces registers
  // no shards; the rank may then end updates by Commit, or by Refit with the other ranks. Tensors
  // may share memory (tied weights). Register fills in binding_generation, and waits for the lease
  // if it was lost. FAILED_PRECONDITION: during an update of this rank.
  virtual absl::Status Register(Layout layout) = 0;
  // Does Begin, the compiled moves and Commit in one call, which every trainer rank makes. The
  // shards must hold the version when Refit is called, and are no longer read when it returns. OK
  // means what it means for Update::Commit. Errors: as refitd.v1.Trainer.Refit. Waits for the lease
  // as Begin does.
  virtual absl::StatusOr<CommitResult> Refit(const RefitOptions& options) = 0;
  // Gives up the update to `version` that this rank has begun, or is refitting, in a call on
  // another thread: the other call then ends with ABORTED. Errors: as refitd.v1.Trainer.Abort;
  // FAILED_PRECONDITION: no update to `version` is open for this rank.
  virtual absl::Status Abort(Version version, const std::string& reason) = 0;
  // Puts the content of the version before the group's into place again, in the instances with
  // arenas that still hold it; the others then catch up from these. The result's version is the
  // group's plus one, and its `content` names whose content that is. One rank calls it.
  // `version`: the version that is rolled back; if the group has another, the call is refused, and
  // if it is rolled back already, the result has only that rollback's version and content; absent:
  // whichever the group has. An update that has not asked an engine for anything yet ends with
  // ABORTED. Errors: as refitd.v1.Operator.Rollback.
  virtual absl::StatusOr<CommitResult> Rollback(std::optional<Version> version = {}) = 0;
  // Lets the next update be staged, though the version before is held (BeginOptions::hold,
  // GroupSpec::hold_previous_seconds). OK also where nothing is held.
  virtual absl::Status ReleasePrevious() = 0;
  // Says what became of an update, for a caller that missed the answer of Commit or Refit. Works
  // after the lease ended, as long as the daemon lives. Asks for the update of the incarnation in
  // which this trainer last began `version`, or of the current incarnation if it never did.
  virtual absl::StatusOr<UpdateOutcome> GetUpdate(Version version) = 0;
  // The greatest committed version that a daemon reported; nullopt: none.
  virtual std::optional<Version> group_version() const = 0;
  // OK while attached; else why the lease ended, or why the trainer could not attach again.
  virtual absl::Status health() const = 0;
  // How often this trainer attached again after it lost its lease.
  virtual int reattachments() const = 0;
};

// Begins a new incarnation of the group, whose first version may be any number, and returns it.
// Every instance is dirty until its next commit, and the leases of trainers end. If there is no
// such group, it is made. Asks the daemon at `connect` and waits for it for `connect.wait`;
// `connect.spec` is the group's. Errors: as refitd.v1.Operator.CreateGroup with `replace`, which
// needs the role OPERATOR_WRITE; FAILED_PRECONDITION also where another daemon has the group
// (named).
absl::StatusOr<uint64_t> ReplaceGroup(const ConnectOptions& connect);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_TRAINER_H_
