// Turns a group's StartTransfer, StartMoves and StartVerify into jobs of a transport: plans the
// moves, finds the memory, keeps the digests that a read-back compares with.
//
// Pushed parts and compiled refits of one update add to the same digests: destination i of
// StartVerify is destination i of StartTransfer's index and program->destinations[i] of StartMoves
// (the update's registered ranks on this daemon, in one order and number).
//
// A bound program's local moves are prepared once and replayed by every update, as long as the
// BoundProgram lives and no member of it is released.
//
// Keeps P6: every job holds the mappings it touches. P1: the expected digests come from passes over
// the sources, by piece. Not thread-safe: belongs to the node's mutex. Jobs' `done` run on the
// transport's threads.
#ifndef REFITD_DAEMON_EXECUTE_EXECUTOR_H_
#define REFITD_DAEMON_EXECUTE_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/execute/program_executor.h"
#include "daemon/group/group.h"
#include "daemon/group/program.h"
#include "transport/transport.h"

namespace refitd {

class Executor {
 public:
  // `transport` must outlive the executor.
  explicit Executor(Transport* transport) : transport_(transport) {}

  // What came of one transfer. Give it to Finished() under the node's mutex, then to the group as
  // TransferDone.
  struct Done {
    UpdateId update;
    PartSeq part;
    absl::Status status;
    std::vector<int64_t> bytes_written;
    int failed_destination = -1;
    int64_t slot_bytes = 0;  // copied into slots
    BroadcastMethod broadcast = BroadcastMethod::kDirect;
    std::vector<uint64_t> source_digests;  // by range of the content, if they were wanted
    // For Finished(): digests by (destination, piece of its layout).
    struct Sum {
      uint32_t destination;
      uint32_t piece;
      uint64_t digest;
    };
    std::vector<Sum> sums;
  };

  // `bucket` is what start.bucket_call brought, or SlotBucket(start). Not OK: no job was started,
  // and `done` is not called.
  absl::Status Start(const StartTransfer& start, const CheckedBucket& bucket,
                     const MemoryResolver& memory, std::function<void(Done)> done);
  // The bucket of a part that another daemon sent: its bytes lie in start.source_slot as its
  // content says.
  static CheckedBucket SlotBucket(const StartTransfer& start);
  // Adds the transfer's digests to its update's.
  void Finished(const Done& done);

  // Pieces of destinations' layouts: (destination, index), ascending, each once.
  using Pieces = std::vector<std::pair<uint32_t, uint32_t>>;

  // What came of a step of a compiled refit. Give it to Finished() under the node's mutex, then
  // `done` to the group.
  struct Moved {
    MovesDone done;
    int64_t bytes = 0;  // copied: into destinations, or into the slot
    // For Finished(): digests[i] is of (*pieces)[i]; the same list in every run of a step. Null:
    // none.
    std::shared_ptr<const Pieces> pieces;
    std::vector<uint64_t> digests;
  };
  // A step between the three calls below.
  class Moves;

  // The step in three parts, so that the second can run outside the node's mutex. Resolve finds the
  // memory. Not OK: nothing else is to be called.
  absl::StatusOr<std::shared_ptr<Moves>> Resolve(const StartMoves& start,
                                                 const MemoryResolver& memory);
  // False: Bind it first.
  static bool IsBound(const Moves& moves);
  // Takes up to seconds; on any thread, with the transport of the executor that resolved it. Not
  // OK: errors as BindStep.
  static absl::Status Bind(Transport* transport, Moves* moves);
  // `done` is called once. Keeps the step, too.
  void Submit(const std::shared_ptr<Moves>& moves, std::function<void(Moved)> done);
  // For replay: local moves, unless a member of them was released since they were resolved (P8).
  void Keep(const Moves& moves);
  static const StartMoves& StartOf(const Moves& moves);
  // What was kept since they were resolved.
  void TakeKept(Moves* moves) const;
  // All three. Not OK: no job was started, and `done` is not called.
  absl::Status Start(const StartMoves& start, const MemoryResolver& memory,
                     std::function<void(Moved)> done);
  // Takes its digests.
  void Finished(Moved* moved);

  // Lets go of what is prepared with this member's memory (P8).
  void Release(MemberId member);

  // False: Start would read nothing.
  bool AnyWritten(UpdateId update) const { return sums_.contains(update); }
  // Reads again what the update wrote. Not OK: no job was started, and `done` is not called.
  absl::Status Start(const StartVerify& verify, const MemoryResolver& memory,
                     std::function<void(VerifyDone)> done);

  // The update ended: its digests are dropped.
  void Forget(UpdateId update);

 private:
  // What the pieces of an update must have: of one step alone, as it told them; else added up.
  struct UpdateSums {
    std::shared_ptr<const Pieces> pieces;  // null: see by_piece
    std::vector<uint64_t> digests;
    // [destination][piece]: absent until the piece was written; as short as what was written lets
    // them be.
    std::vector<std::vector<std::optional<uint64_t>>> by_piece;
    void Add(uint32_t destination, uint32_t piece, uint64_t digest);
    void Add(const Pieces& of, const std::vector<uint64_t>& shares);
    // Into by_piece, if a step's are kept as they came.
    void AddUp();
  };

  // The digests of each run of a step, in the order of Pieces.
  class StepSums;

  // What a step comes down to, to be run more than once.
  struct Prepared {
    std::shared_ptr<const PreparedTransfer> transfer;
    std::vector<std::vector<uint32_t>> originals;
    std::vector<SectionDigest> sections;
    std::vector<uint32_t> section_of_piece;
    std::shared_ptr<StepSums> sums;
  };
  // Of a bound program's local moves.
  struct Kept {
    std::weak_ptr<const BoundProgram> bound;
    std::vector<bool> skip_destination;
    std::shared_ptr<const Prepared> prepared;
  };

  // What was read back last, for the next version that writes the same pieces.
  struct KeptReadback {
    std::weak_ptr<const DestinationIndex> index;
    std::vector<MemberId> destinations;
    std::shared_ptr<const Pieces> pieces;
    std::shared_ptr<const PreparedReadback> readback;
  };
  // The written pieces of a verification, and what they must have.
  struct Written {
    std::shared_ptr<const Pieces> pieces;
    std::vector<uint64_t> expected;
  };
  Written WrittenIn(const StartVerify& verify);
  absl::StatusOr<std::shared_ptr<const PreparedReadback>> PrepareReadback(
      const StartVerify& verify, std::shared_ptr<const Pieces> pieces,
      const MemoryResolver& memory);

  void DropUnused();

  Transport* const transport_;
  std::vector<std::weak_ptr<Moves>> binding_;  // resolved, and perhaps not bound yet
  std::vector<Kept> kept_;  // few: one a group, or two while a new program takes over
  std::vector<KeptReadback> kept_readbacks_;  // one a group
  std::map<UpdateId, UpdateSums> sums_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTE_EXECUTOR_H_
