// One daemon's share of a group's updates: it packs the parts of its trainers, runs its end of the
// collectives, unpacks into its engines' memory and reads back. The worker takes the coordinator's
// commands and gives local actions and reports. The coordinator's own daemon has a worker as well.
//
// A part on the root:  header -> pack (slots, own engines) -> issued: collective -> done
//      on the others:  header -> issued: collective -> unpack (own engines, their slots) -> done
// Packing needs no agreement, since it stays inside the daemon. Collectives start in the order of
// Issue (P7), so that one part is packed and another unpacked while a third is on the wire.
//
// If the part's communicator is closed before the collective has ended, the daemon's share ends
// without the part. The header may come again: the root keeps what it packed, so nothing is read or
// written twice.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_WORKER_H_
#define REFITD_DAEMON_GROUP_WORKER_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/machine.h"
#include "daemon/group/program.h"
#include "daemon/group/worker_index.h"
#include "daemon/group/worker_wire.h"

namespace refitd {

namespace worker {

// A round of the program that has begun.
struct Round {
  bool packing = false;
  bool packed = false;
  bool out = false;  // handed to the wire
  bool on_wire = false;
  bool unpacking = false;
  bool over = false;
  bool unpacked = false;  // something was stored
};
// One update's program on this daemon.
struct Job {
  PeerProgram command;
  bool reported = false;                      // PeerProgramBuilt was sent
  std::shared_ptr<const BoundProgram> bound;  // null: not built
  bool comparing = false;
  // Whether the run is between two steps that look at the sources (MoveStep::kWitness), and how far
  // these are.
  enum class Witness : uint8_t { kNone, kDue, kBefore, kRun, kAfter, kDone };
  Witness witness = Witness::kNone;
  ReplicaFraction part;  // the share of the replicas that is, or was, compared
  std::optional<StartRefit> run;
  bool issued = false;
  bool local_begun = false;
  bool local_running = false;
  int64_t first_round = 0;          // the first that has not ended
  std::map<int64_t, Round> rounds;  // begun and not ended
  // The program failed or was given up: no new step is started.
  bool stopped = false;
  bool done = false;  // RefitDone was sent
  // A move failed, or rounds ended out of order: the program can't go on from a round.
  bool broken = false;
  RefitDone result;
  // Nodes that left before the run began, its first round, and what earlier attempts have stored.
  NodeProgram::Course course;
  // Rounds before this one were packed, in this attempt or in an earlier attempt that it continues.
  int64_t packed_before = 0;
  // By rank of the communicator, as the wire reported last in this attempt. Empty: it has not
  // reported yet.
  std::vector<WireUse> uses;
  // Sums of the digests of each section, by outgoing or incoming stream. They count this attempt
  // and the earlier attempts that it continues; a step that was sent again counts once.
  std::map<uint32_t, std::vector<uint64_t>> sent;
  std::map<uint32_t, std::vector<uint64_t>> received;

  // Whether one of its steps runs, or a round is on the wire.
  bool running() const;
  bool on_wire() const;
  // P1: a run that went on after a round that this node lacks would leave a gap.
  absl::Status CheckResume(const StartRefit& command) const;
  // Keeps what was stored, and the digests of it and of what was sent: both ends count each step of
  // a stream once (P1). A step that is sent again is read again, so if its source has changed, its
  // receivers' digests differ from what counted for the source.
  void Resume(const StartRefit& command);
  absl::Status CheckSlots() const;
  // The wire's counts begin when the communicator is opened, and parts may have been pushed over it
  // since. So the first round of a run only says from where to count.
  void CountLinks(const WireDone& round_done);
  // Steps that run go on to their end. The first failure is the one that is reported.
  void Stop(const absl::Status& status);
  // Takes note of what the run has stored, when none of its steps runs.
  void NoteHeldSteps();
  void CheckInvariants() const;
};
// A part of a bucket, and how far this daemon's share of it is.
struct Part {
  PeerHeader header;
  bool issued = false;
  bool transferring = false;
  bool transferred = false;  // root: packed; other nodes: unpacked
  bool on_wire = false;
  bool held = false;    // root: its slot is packed; other nodes: they have stored the part
  TransferDone result;  // with the ids and destinations of the coordinator's PeerPrepare

  bool running() const { return transferring || on_wire; }
  // Whether the part is handed to ranks, or may be sent again, after it was reported.
  bool kept() const { return header.wired || !header.readers.empty(); }
};
// One update that this daemon takes part in.
struct Update : PeerPrepare {
  UpdateId id() const { return update; }
  UpdateId local;
  // Earlier ids, of runs after which the program was begun anew because a node was lost.
  std::vector<UpdateId> earlier_locals;
  TimePoint deadline;
  std::map<PartSeq, Part> parts;  // the parts that were not reported yet
  // Those that were, and are kept; also of parts that came again since.
  std::map<PartSeq, Part> ended;
  std::deque<PartSeq> to_wire;  // issued and not started, in order of Issue
  // Parts that this daemon has not stored because the wire failed. If the update goes on, they
  // are announced again.
  std::set<PartSeq> cut;
  bool abandoned = false;
  bool over = false;
  std::optional<VerifyUpdate> to_verify;  // set until no part is left
  bool verifying = false;
  std::optional<Job> job;

  // Whether a transfer, a collective or a read-back of it runs; whether something is on the wire.
  bool running() const;
  bool on_wire() const;
  // P1: what a daemon has stored is not stored once more, and a root sends what it has packed. The
  // header must be that of the first time, since the slot was granted for it.
  absl::Status MayComeAgain(const PeerHeader& command) const;
  // Whether the content has elements for a destination that is not skipped.
  bool Touches(const PartContent& content, const std::vector<bool>& skip) const;
  // The destination's layout at Prepare. An engine that has left since, or was evicted and
  // registered anew, is planned with that layout and skipped when the program runs. Null: this
  // daemon knew of no layout then.
  std::shared_ptr<const Layout> DestinationLayout(size_t d) const;
  void CheckInvariants() const;
};
// When this object is destroyed or replaced, it tells the builder of a program, which may be on
// another thread, that its result is not wanted any more.
class BuildCancel {
 public:
  BuildCancel() = default;
  ~BuildCancel() { Cancel(); }
  BuildCancel(const BuildCancel&) = delete;
  BuildCancel& operator=(const BuildCancel&) = delete;

  // Cancels the previous build. Returns the flag of the next one.
  std::shared_ptr<const std::atomic<bool>> Next() {
    Cancel();
    cancelled_ = std::make_shared<std::atomic<bool>>(false);
    return cancelled_;
  }
  void Cancel() {
    if (cancelled_ != nullptr) cancelled_->store(true);
  }

 private:
  std::shared_ptr<std::atomic<bool>> cancelled_;
};
// The last program and what it was compiled to, kept for later updates that run the same program.
struct KeptProgram {
  ProgramId id;
  uint32_t node = 0;
  int64_t chunk_bytes = 0;
  std::shared_ptr<const RoutePlan> plan;
  std::shared_ptr<const std::vector<ReplicaShare>> replicas;
  uint64_t building = 0;  // 0: no build is under way
  UpdateId building_for;
  BuildCancel cancel;
  std::shared_ptr<const BoundProgram> bound;
};

}  // namespace worker

class Worker {
 public:
  struct Callbacks {
    // Makes an update id for the executor, unique in the daemon.
    std::function<UpdateId()> next_update;
    // The layout that the member registered last. Null: the member is staged, lost, or another
    // daemon's.
    std::function<std::shared_ptr<const Layout>(MemberId)> layout;
    // The digest of that layout. Called only for members whose `layout` is not null.
    std::function<uint64_t(MemberId)> layout_digest;
    // The bucket of this daemon's trainer that came with the call; null if it is gone.
    std::function<std::shared_ptr<const CheckedBucket>(CallId)> bucket;
    // Whether the member is attached to this daemon and its lease lives.
    std::function<bool(MemberId)> attached;
  };
  Worker(Callbacks callbacks, Duration wire_limit);

  using Output = worker::Output;

  void Handle(const PeerPrepare& command, TimePoint now, const Output& out);
  void Handle(const PeerHeader& command, TimePoint now, const Output& out);
  void Handle(const PeerIssue& command, TimePoint now, const Output& out);
  void Handle(const VerifyUpdate& command, TimePoint now, const Output& out);
  void Handle(const PeerProgram& command, TimePoint now, const Output& out);
  void Handle(const StartCompare& command, TimePoint now, const Output& out);
  void Handle(const StartRefit& command, TimePoint now, const Output& out);
  void Handle(const PeerAbandon& command, TimePoint now, const Output& out);
  void Handle(const PeerUpdateEnded& command, TimePoint now, const Output& out);
  void Handle(const CloseCommunicator& command, TimePoint now, const Output& out);
  void Handle(const PeerWireUnlock& command, TimePoint now, const Output& out);

  void Handle(const TransferDone& done, TimePoint now, const Output& out);
  void Handle(const VerifyDone& done, TimePoint now, const Output& out);
  void Handle(const ProgramBuilt& built, TimePoint now, const Output& out);
  void Handle(const MovesDone& done, TimePoint now, const Output& out);
  void Handle(const WireDone& done, TimePoint now, const Output& out);
  // What concerns this daemon's end of the communicator, or its wire lock, alone.
  template <typename Event>
  requires requires(worker::WireEnd& wire, const Event& event, const Output& out) {
    wire.Handle(event, out);
  }
  void Handle(const Event& event, TimePoint /*now*/, const Output& out) {
    wire_.Handle(event, out);
  }

  // Keeps the layout of a member whose lease has ended, since the coordinator's next Prepare may
  // still name the member. Nothing new touches its memory (Callbacks::attached); transfers that run
  // hold its mappings.
  void MemberLost(MemberId member, std::shared_ptr<const Layout> layout) {
    index_.MemberLost(member, std::move(layout));
  }
  // The layouts of which an index of the command's destinations is made, so that the caller can
  // make it without the daemon's mutex (PeerPrepare::index). Empty: the worker has that index, or
  // needs none.
  worker::IndexCache::Layouts LayoutsToIndex(const PeerPrepare& command) const {
    return index_.LayoutsToIndex(command);
  }
  // Does what DestinationIndex::Make does, with the labels that the worker gives. Takes as long as
  // there are tensors in the layouts of all destinations.
  static absl::StatusOr<std::shared_ptr<const DestinationIndex>> MakeIndex(
      const std::vector<MemberId>& destinations, worker::IndexCache::Layouts layouts) {
    return worker::IndexCache::MakeIndex(destinations, std::move(layouts));
  }
  // How many indices the worker made itself; tests check the cost by it.
  int64_t indices_made() const { return index_.made(); }

  // The coordinator is lost: nothing new is started, communicators are closed and the wire lock is
  // released.
  void AbandonAll(TimePoint now, const Output& out);

  // The part that a loader rank of this daemon is handed. FAILED_PRECONDITION: the update is over,
  // the part's header never came, or the header did not name the rank, so that no slot was filled
  // for it (P1).
  absl::StatusOr<SendPart> PartFor(MemberId member, UpdateId update, PartSeq part) const;
  bool Participates() const { return !updates_.empty(); }
  // How far this daemon's share of the update's program is.
  RunProgress ProgressOf(UpdateId id) const;
  // Whether no transfer, collective or read-back of this worker runs.
  bool quiet() const;
  // Whether a transfer reads that bucket's source.
  bool Reads(CallId bucket_call) const;
  std::optional<CommunicatorId> communicator() const { return wire_.communicator(); }
  std::string_view communicator_state() const { return wire_.state(); }

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  using Part = worker::Part;
  using Update = worker::Update;
  using Round = worker::Round;
  using Job = worker::Job;
  using KeptProgram = worker::KeptProgram;
  Update* Find(UpdateId id);
  Update* FindLocal(UpdateId local);
  absl::Status Agrees(const Update& update, const PeerHeader& command) const;
  void Announce(Update* update, const PeerHeader& command, const absl::Status& agreed,
                const Output& out);
  std::shared_ptr<const PartContent> OfOwnBucket(const PeerHeader& command) const;
  std::vector<bool> Skip(const Update& update, const std::vector<bool>& skip) const;
  void Transfer(Update* update, Part* part, const Output& out);
  void VerifyIfWritten(Update* update, const Output& out);
  // ---- worker_program.cc ----
  void BindOrBuild(Update* update, const Output& out);
  absl::Status Bind(const Update& update, std::shared_ptr<const NodeProgram> node_program,
                    std::shared_ptr<const BoundProgram>* bound) const;
  void Build(const Update& update, const Output& out);
  void CancelBuildIfUnwanted();
  void ReportBuilt(Update* update, const absl::Status& status, const Output& out);
  void BeginRun(Update* update, const StartRefit& command);
  void AdvanceRun(Update* update, TimePoint now, const Output& out);
  void BeginRounds(Update* update, const Output& out);
  void StartStep(Update* update, MoveStep step, int64_t round, const Output& out);
  // Start a witness step that is due, and return whether the run has to wait for one.
  bool WitnessBefore(Update* update, const Output& out);
  bool WitnessAfter(Update* update, const Output& out);
  void StartRoundOnWire(Update* update, int64_t number, TimePoint now, const Output& out);
  bool FinishRound(const WireDone& done, TimePoint now, const Output& out);
  void EndRunIfQuiet(Update* update, const Output& out);

  void PumpWire(Update* update, TimePoint now, const Output& out);
  void CutPart(Update* update, PartSeq part, const Output& out);
  void CutParts(Update* update, CommunicatorId closed, const Output& out);
  // This daemon's share of the part has ended: reports it, and keeps the part where it may come
  // again or is handed to loader ranks.
  void ReportPart(Update* update, PartSeq part, const absl::Status& status, const Output& out);
  void DropIfOver(UpdateId id, const Output& out);
  void GiveWireBackIfQuiet(const Output& out);

  const Callbacks callbacks_;
  std::map<UpdateId, Update> updates_;
  worker::IndexCache index_;
  worker::WireEnd wire_;
  std::optional<KeptProgram> program_;
  uint64_t next_build_ = 1;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_WORKER_H_
