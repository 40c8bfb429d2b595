// Turns a group's StartTransfer, StartMoves and StartVerify into jobs of a transport: plans the
// moves, finds the memory, and keeps the digests that a read-back compares with.
//
// Pushed parts and compiled refits of one update add to the same digests. For all of them,
// destination i is the same one of the update's in-place ranks on this daemon: in StartVerify, in
// StartTransfer's index, and in program->destinations of StartMoves.
//
// A bound program's local moves are prepared once and replayed by every update, as long as the
// BoundProgram lives and none of its members is released.
//
// Keeps P6: every job holds the mappings that it touches. Keeps P1: the expected digests come from
// passes over the sources, by piece. Not thread-safe: belongs to the node's mutex. Jobs' `done` run
// on the transport's threads.
#ifndef REFITD_DAEMON_EXECUTE_EXECUTOR_H_
#define REFITD_DAEMON_EXECUTE_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "daemon/execute/program_executor.h"
#include "daemon/group/group.h"
#include "daemon/group/program.h"
#include "transport/plan/overlap.h"
#include "transport/transport.h"

namespace refitd {

class Executor {
 public:
  // `transport` must outlive the executor.
  explicit Executor(Transport* transport) : transport_(transport) {}

  // Pieces of a part in memory that can't be recognised, which were read before and after the
  // transfer.
  struct Witnessed {
    std::weak_ptr<const DestinationPlaces> places;
    std::vector<uint64_t> keys;
  };

  // The result of one transfer. Give it to Finished() under the node's mutex, then its base to the
  // group.
  struct Done : TransferDone {
    int64_t slot_bytes = 0;  // bytes copied into slots
    // For Finished(): digests by (destination, piece of its layout).
    struct Sum {
      uint32_t destination;
      uint32_t piece;
      uint64_t digest;
    };
    std::vector<Sum> sums;
    Witnessed witnessed{};  // For Finished()
  };

  // Not OK: no job was started, and `done` is not called.
  absl::Status Start(const StartTransfer& start, const MemoryResolver& memory,
                     std::function<void(Done)> done);
  // Adds the transfer's digests to those of its update.
  void Finished(const Done& done);

  // Pieces of destinations' layouts, as (destination, index); ascending, without repeats.
  using Pieces = std::vector<std::pair<uint32_t, uint32_t>>;

  // The result of a step of a compiled refit. Give it to Finished() under the node's mutex, then
  // `done` to the group.
  struct Moved {
    MovesDone done;
    int64_t bytes = 0;  // bytes copied into destinations or the slot
    // The pieces that `digests` are of, in the same order; Finished() reads both. All runs of a
    // step share one list. Null: there are no digests.
    std::shared_ptr<const Pieces> pieces;
    std::vector<uint64_t> digests;
    std::shared_ptr<const BoundProgram> witnessed;          // witness: what was run, or will be
    std::shared_ptr<const std::vector<std::string>> names;  // witness: of done.digests
  };
  // A step that passes through Resolve, Bind and Submit.
  class Moves;

  // A step is started by three calls, so that the second, Bind, can run outside the node's mutex.
  // Resolve finds the memory. Not OK: none of the other calls may follow.
  absl::StatusOr<std::shared_ptr<Moves>> Resolve(const StartMoves& start,
                                                 const MemoryResolver& memory);
  // False: call Bind before Submit.
  static bool IsBound(const Moves& moves);
  // Takes up to seconds. May run on any thread, with the transport of the executor that resolved
  // the step. Not OK: errors as of BindStep.
  static absl::Status Bind(Transport* transport, Moves* moves);
  // Starts the step; `done` is called once. Keeps the step as Keep does.
  void Submit(const std::shared_ptr<Moves>& moves, std::function<void(Moved)> done);
  // Keeps local moves and comparisons for replay, unless one of their members was released since
  // Resolve (P8). Of comparisons that have a replica in common only the last is kept, so that all
  // together are no larger than one of all replicas.
  void Keep(const Moves& moves);
  static const StartMoves& StartOf(const Moves& moves);
  // Takes over what was kept since Resolve.
  void TakeKept(Moves* moves) const;
  // Resolve, Bind and Submit in one call. Not OK: no job was started, and `done` is not called.
  absl::Status Start(const StartMoves& start, const MemoryResolver& memory,
                     std::function<void(Moved)> done);
  // Adds the step's digests to those of its update.
  void Finished(Moved* moved);

  // Drops what was prepared with this member's memory (P8).
  void Release(MemberId member);

  // Whether the update has written anything; if not, a StartVerify would read nothing.
  bool AnyWritten(UpdateId update) const { return sums_.contains(update); }
  // Reads back what the update wrote. Not OK: no job was started, and `done` is not called.
  absl::Status Start(const StartVerify& verify, const MemoryResolver& memory,
                     std::function<void(VerifyDone)> done);

  // Reads the memory that a member's layout names, and calls `done` with its ContentDigest. Not OK:
  // no job was started, and `done` is not called.
  absl::Status Digest(MemberId member, const std::shared_ptr<const Layout>& layout,
                      const MemoryResolver& memory,
                      std::function<void(absl::StatusOr<uint64_t>)> done);

  // The update ended: drops its digests.
  void Forget(UpdateId update);

 private:
  // Whether each member's regions and backs have changed places (MemoryResolver::Flipped).
  using Sides = std::vector<bool>;
  static Sides SidesOf(const std::vector<MemberId>& members, const MemoryResolver& memory);
  static Sides SidesOf(const BoundProgram& bound, const MemoryResolver& memory);

  // The digests that an update's pieces must have. As long as only one step has reported digests,
  // they are kept as that step reported them; afterwards they are added up by piece.
  struct UpdateSums {
    std::shared_ptr<const Pieces> pieces;  // null: see by_piece
    std::vector<uint64_t> digests;
    // [destination][piece]: absent until the piece was written. The vectors are only as long as
    // needed.
    std::vector<std::vector<std::optional<uint64_t>>> by_piece;
    void Add(uint32_t destination, uint32_t piece, uint64_t digest);
    void Add(const Pieces& of, const std::vector<uint64_t>& shares);
    // Moves the digests of a single step into by_piece.
    void AddUp();
  };

  // Collects the digests of each run of a step, in the order of Pieces.
  class StepSums;

  // A step prepared to be run more than once.
  struct Prepared {
    std::shared_ptr<const PreparedTransfer> transfer;
    std::vector<std::vector<uint32_t>> originals;
    std::vector<SectionDigest> sections;
    std::vector<uint32_t> section_of_piece;
    std::shared_ptr<StepSums> sums;
    std::shared_ptr<const std::vector<std::string>> names;  // witness: of the source pieces
    bool unknown = false;                                   // there are sources to witness
  };
  // The prepared local moves of a bound program, or a comparison of a part of its replicas.
  struct Kept {
    std::weak_ptr<const BoundProgram> bound;
    Sides sides;
    MoveStep step = MoveStep::kLocal;
    std::vector<bool> skip_destination;  // local moves
    ReplicaFraction part;                // comparison
    std::shared_ptr<const Prepared> prepared;
    bool Serves(const Moves& moves) const;
  };
  // A bound program, and the sides that it was run with.
  struct BoundSides {
    std::weak_ptr<const BoundProgram> bound;
    Sides sides;
  };
  static bool Lists(const std::vector<BoundSides>& list, const Moves& moves);

  // The pieces that hold a bound program's replicas.
  struct KeptReplicas {
    std::weak_ptr<const BoundProgram> bound;
    std::shared_ptr<const std::vector<HeldReplica>> replicas;
  };

  // The last read-back, kept for the next version that writes the same pieces.
  struct KeptReadback {
    std::weak_ptr<const DestinationIndex> index;
    std::vector<MemberId> destinations;
    Sides sides;
    std::shared_ptr<const Pieces> pieces;
    std::shared_ptr<const PreparedReadback> readback;
    // By entry of `pieces`: the ContentFactor of its tensor; 0: of a destination of which not all
    // pieces are there.
    std::vector<uint64_t> factors;
  };
  // The pieces that a verification reads, and the digests that they must have.
  struct Written {
    std::shared_ptr<const Pieces> pieces;
    std::vector<uint64_t> expected;
  };
  Written WrittenIn(const StartVerify& verify);
  // Valid until the next call.
  absl::StatusOr<const KeptReadback*> PrepareReadback(const StartVerify& verify,
                                                      std::shared_ptr<const Pieces> pieces,
                                                      const MemoryResolver& memory);
  static std::vector<uint64_t> FactorsOf(const StartVerify& verify, const Pieces& pieces);
  static std::vector<uint64_t> ContentOf(const KeptReadback& kept,
                                         const std::vector<uint64_t>& digests);

  // KeptPlaces says where the destinations of pushes lie, for the next part with the same
  // destinations.
  struct KeptPlaces {
    std::weak_ptr<const DestinationIndex> index;
    std::vector<MemberId> destinations;
    Sides sides;
    std::shared_ptr<const DestinationPlaces> places;
    // Keys of the pieces of which a transfer showed that they don't lie in a destination's memory
    // at another place.
    absl::flat_hash_set<uint64_t> witnessed;
  };
  // Null: nothing of the part can lie in an engine's memory. Valid until the next call.
  KeptPlaces* PlacesFor(const StartTransfer& start, const MemoryResolver& memory);
  void Keep(const Witnessed& witnessed);
  void DropUnused();
  // Takes the digests of a witness step: notes them, or compares them with those noted before.
  absl::Status Witness(const Moved& moved);

  Transport* const transport_;
  std::vector<std::weak_ptr<Moves>> binding_;  // resolved and perhaps not bound yet
  // For each group: local moves (of two programs while a new one takes over), and comparisons.
  std::vector<Kept> kept_;
  std::vector<KeptReplicas> kept_replicas_;
  std::vector<KeptReadback> kept_readbacks_;  // one for each group, and for each of its sides
  std::map<UpdateId, UpdateSums> sums_;
  std::vector<KeptPlaces> kept_places_;
  // Bound programs whose members' memory was found not to overlap.
  std::vector<BoundSides> checked_;
  // Bound programs that have sources to witness, until that was done.
  std::vector<BoundSides> unwitnessed_;
  // The digests of sources before a binding's first run. `updates`: the ids of its attempts.
  struct Before {
    std::weak_ptr<const BoundProgram> bound;
    std::set<UpdateId> updates;
    std::vector<uint64_t> digests;
  };
  std::vector<Before> before_;
};

// Makes the answer to moves that could not be started.
MovesDone Refused(const StartMoves& start, absl::Status why);

// Both perform an action that needs no memory. They take up to seconds and may run on any thread.
RefitPlanned CompilePlan(const PlanRefit& a);
ProgramBuilt CompilePart(BuildProgram a);

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTE_EXECUTOR_H_
