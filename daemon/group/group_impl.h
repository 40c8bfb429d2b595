// The inside of Group: its records and the steps that events take. Only group/*.cc includes it.
//
//   group.cc    events to steps, the clock
//   view.cc     what status shows
//   members.cc  attach, loss, release; instances
//   begin.cc    Begin, Prepare, Ready
//   data.cc     slots, buckets, parts, acknowledgements
//   end.cc      Commit, verification, eviction, giving up
//   catch_up.cc     catch-ups: late instances get the version from clean ones
//   invariants.cc  what must hold after every event
//
// Every event ends in Pump(), which takes all steps that have become possible. Not thread-safe.
#ifndef REFITD_DAEMON_GROUP_GROUP_IMPL_H_
#define REFITD_DAEMON_GROUP_GROUP_IMPL_H_

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "daemon/group/group.h"
#include "daemon/group/group_state.h"
#include "daemon/group/instance_state.h"
#include "daemon/group/member_state.h"
#include "daemon/group/requests.h"
#include "daemon/group/update.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd {

namespace group {

// Versions of different incarnations can't be compared, so a version is kept with its incarnation.
struct HeldVersion {
  Version version;
  uint64_t origin = 0;  // incarnation in which it was committed; 0: the rank did not tell
  auto operator<=>(const HeldVersion&) const = default;
};

struct Member {
  MemberId id;
  MemberState state = MemberState::kAttached;
  bool engine = false;
  std::string instance;
  int rank = 0;
  int world_size = 0;
  int pid = 0;
  NodeId node;             // of the daemon that it is attached to
  std::string label;       // for messages
  std::string daemon;      // that daemon's id; empty: the coordinator's
  std::string identity;    // trainers
  bool any_owner = false;  // trainers: may enter groups of any owner
  // Trainers: another identity owns the group now. The rank's lease ends when no update runs.
  bool unwelcome = false;
  std::string takes_of;  // engines: the pattern of owners whose weights they take; empty: any
  DeliveryMode delivery = DeliveryMode::kInPlace;
  std::shared_ptr<const Manifest> manifest;
  std::shared_ptr<const void> manifest_counted;  // EngineIdentity::counted
  std::shared_ptr<const Layout> layout;
  uint64_t layout_digest = 0;
  uint64_t registrations = 0;       // layouts that the member has registered
  std::optional<HeldVersion> held;  // the version that its memory holds in full, if any
  uint64_t held_digest = 0;         // the ContentDigest that belongs to `held`; 0: not known
  bool on_device = false;           // engines: memory is on a GPU
  bool catch_up = false;            // engines: may give, and be caught up
  bool updated = false;             // engines: an update was committed to it in this lease
  bool verified = false;            // engines: the same, into the rank's present layout
  absl::Status refused;             // engines: not OK: a limit refused the rank's last layout
  RequestLog requests;
  int touching = 0;  // transfers and verifications that touch its memory (P6)
  std::map<std::pair<UpdateId, PartSeq>, SlotGrant>
      reads;  // slots in which it may still read a part
};

struct Instance {
  std::string name;
  int world_size = 0;
  InstanceState state = InstanceState::kForming;
  std::map<int, MemberId> ranks;      // attached
  std::string reason;                 // why it is dirty or was evicted
  std::optional<UpdateId> installed;  // the last update that committed with it
  // Catch-ups of the group's version that failed for this instance since it held a version, and
  // when the next may begin.
  int failed_catch_ups = 0;
  TimePoint catch_up_after;
  std::string catch_up_failure;  // why the last of those catch-ups failed
};

// How the buckets of the running update, or else of the last update, went.
class BucketLog {
 public:
  void Clear() { *this = BucketLog(); }
  void AddBytes(BroadcastMethod method, int64_t bytes);
  void Add(const BucketRecord& record);
  std::vector<BroadcastTotals> Totals() const;
  UpdateStatistics Statistics() const;

 private:
  std::array<BroadcastTotals, kBroadcastMethods> totals_{};
  std::deque<BucketRecord> records_;  // at most kRememberedBuckets (P10)
  int64_t left_out_ = 0;
};

// An update that is over.
struct EndedUpdate {
  UpdateId update;
  Version version;
  PastUpdate what;
};

// A LeaseSlot call that waits until a slot is free.
struct SlotWaiter {
  CallId call;
  MemberId member;
  TimePoint deadline;
};

// A trainer's call that opens an update and came while a catch-up was running. It is taken when the
// catch-up has given way.
struct DeferredCall {
  std::variant<BeginEvent, RefitEvent> event;
  TimePoint deadline;
};

// Whether the state is in the lower row of instance_state.h: such an instance has no version (P2).
constexpr bool IsDirty(InstanceState state) {
  return state == InstanceState::kFormingDirty || state == InstanceState::kDirty ||
         state == InstanceState::kDirtyPreparing || state == InstanceState::kDirtyReady;
}
// The member as failures name it.
Suspect SuspectOf(const Member& member);
// Whether the next update may succeed where one was given up for such a reason.
bool MayPass(GiveUpClass kind);
// Formats a duration, as in "1.5 s".
std::string Seconds(Duration duration);
// Formats a list that may be long, as in "a, b, c and 4 more".
std::string Few(const std::vector<std::string>& names);
// Checks a number that a rank tells of the update: it must not be negative, and not differ from
// what the ranks before told. 0: not told.
absl::Status CheckCount(std::string_view field, int64_t told, int64_t before);
// The same of tensor_count, which has a limit (RESOURCE_EXHAUSTED).
absl::Status CheckTensorCount(int64_t told, int64_t before);

}  // namespace group

struct Group::Impl {
  using Bucket = group::Bucket;
  using CallKind = group::CallKind;
  using Catalog = group::Catalog;
  using GiveUp = group::GiveUp;
  using Instance = group::Instance;
  using SlotWaiter = group::SlotWaiter;
  using Member = group::Member;
  using Part = group::Part;
  using Participant = group::Participant;
  using Request = group::Request;
  using TrainerProgress = group::TrainerProgress;
  using Readback = group::Readback;
  using Update = group::Update;

  Impl(std::string name, uint64_t incarnation, GroupSpec spec, GroupLimits limits,
       std::function<UpdateId()> next_update, Ownership::Rule owner_rule);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (compiling != nullptr) compiling->cancelled->store(true);
  }

  // ---- group.cc ----
  void On(const TrainerAttached& e);
  void On(const EngineAttached& e);
  void On(const MemberLost& e);
  void On(const LayoutRegistered& e);
  void On(const BeginEvent& e);
  void On(const ReadyEvent& e);
  void On(const EngineFailed& e);
  void On(const LeaseSlotEvent& e);
  void On(const ReleaseSlotEvent& e);
  void On(const BucketEvent& e);
  void On(const TransferDone& e);
  void On(const AckEvent& e);
  void On(const CommitEvent& e);
  void On(const RefitEvent& e);
  void On(const RefitPlanned& e);
  void On(const CompareDone& e);
  void On(const RefitDone& e);
  void On(const AbortEvent& e);
  void On(const VerifyDone& e);
  void On(const OperatorAbort& e);
  void On(const ReplaceGroup& e);
  void On(const DrainEvent& e);
  void On(const FailUpdate& e);
  void On(const DataPlaneState& e);
  void On(const KeepNodesOut& e);
  void On(const Tick& e);
  void On(const CallGone& e);
  // Takes all steps that the event made possible.
  void Pump();
  void PumpUpdate();

  template <typename Action>
  void Do(Action action) {
    actions->push_back(std::move(action));
  }
  void Log(LogLine::Level level, std::string text) { Do(LogLine{level, std::move(text)}); }
  void Changed() { changed = true; }
  void Refuse(CallId call, absl::Status status) {
    Do(Reply{call, std::move(status), EmptyReply{}});
  }

  // Requests. Repeated returns whether the call repeats a request. If so, the call was answered, or
  // waits with the first call.
  bool Repeated(Member* member, CallKind kind, const std::string& id, const std::string& what,
                CallId call);
  std::shared_ptr<Request> Track(Member* member, CallKind kind, const std::string& id,
                                 std::string what, CallId call);
  void Finish(const std::shared_ptr<Request>& request, absl::Status status, ReplyPayload payload);
  // Whether a trainer rank waits for an answer. A Commit that waits for the rank's own buckets does
  // not count.
  bool CallsOutstanding() const;
  void WithdrawIfNobodyWaits(const Request& commit);
  std::optional<TimePoint> IdleDeadline() const;
  // The earliest moment at which an unacknowledged part is late, and the member that owes it.
  std::optional<std::pair<TimePoint, MemberId>> AckDeadline() const;
  // Called when the parts that the reader has to acknowledge have changed.
  void SetAckDue(MemberId id, const group::LoaderReader& reader);
  void TickUpdate();

  // ---- invariants.cc ----
  // The part of the invariants that costs nothing, checked after every event.
  void CheckState() const;
  void CheckInvariants() const;
  void CheckMembers() const;
  void CheckInstances() const;
  void CheckRequests() const;
  void CheckSlots() const;
  void CheckParticipants() const;
  void CheckParts() const;
  void CheckPushed() const;

  // ---- view.cc ----
  UpdateView ViewOf(const Update& u) const;
  std::string HolderOf(SlotIndex index) const;
  std::string HoldersOfSlots() const;

  // ---- members.cc ----
  Member* Find(MemberId id);
  const Member* Find(MemberId id) const;
  // The attached trainer rank of that id. Null: there is none, and the call was refused.
  Member* Trainer(MemberId id, CallId call);
  std::string Label(MemberId id) const;
  // A failure whose suspect is that member.
  Failure Suspecting(MemberId id) const;
  // The failure of an update to `wanted` that was never opened, and whom that is due to.
  Failure Unwritten(Version wanted, MemberId suspect) const;
  void Admit(Member member);
  absl::Status CheckTrainer(const TrainerIdentity& who) const;
  absl::Status CheckEnginesTake(const std::string& identity) const;
  std::string ClaimOf(const EngineIdentity& who) const;
  void RefuseDeclared(Member* member, const absl::Status& why);
  const Member* RefusedRank(const Instance& instance) const;
  void FailIfRefused(absl::Status why);
  void FindUnwelcome();
  absl::Status WhyUnwelcome(const Member& member) const;
  void ExpelUnwelcome();
  absl::Status CheckEngine(const EngineIdentity& identity) const;
  void CompleteIfAllHere(Instance* instance);
  bool Complete(const Instance& instance) const;
  std::optional<group::HeldVersion> VersionOf(const Instance& instance) const;
  InstanceStanding StandingOf(const std::string& instance_name) const;
  // Called where the instance's state, ranks or version change.
  void NoteStanding(const std::string& instance_name) { restood.insert(instance_name); }
  struct Claim {
    group::HeldVersion held;
    uint64_t layouts = 0;  // a digest of the ranks' layouts
    uint64_t content = 0;  // a digest of the digests that the ranks brought
  };
  std::optional<Claim> ClaimOf(const Instance& instance) const;
  using Contents = std::map<std::pair<group::HeldVersion, uint64_t>, uint64_t>;
  Contents FindContents() const;
  void FindLineage();
  void NoteInstalled(const Member& member);
  bool Believed(const EngineIdentity& who) const;
  void CheckContent(Member* member, uint64_t content);
  std::map<MemberId, uint64_t> ReadBack() const;
  bool OfLineage(const Instance& instance, const group::HeldVersion& held) const;
  // Called when a rank brings a version that an earlier incarnation of the group committed.
  void NoteEarlierVersion();
  absl::Status CheckHeld(const EngineIdentity& who) const;
  // Why a complete instance takes part in no update: the node of one of its ranks is kept out.
  // Null: it takes part.
  const std::string* WhyKeptOut(const Instance& instance) const;
  // Whether an update that is assembled now takes the instance in.
  bool Available(const Instance& instance) const;
  void LetInIfEmpty(NodeId node);
  // The member reads no slot any more.
  void EndReads(Member* member);
  void LoseEngine(Member* member, const std::string& reason);
  void LoseTrainer(Member* member, const std::string& reason);
  void ReleaseIfQuiet(MemberId id);
  // Counts the copies that read or write the memory of a member, or of the destinations' members;
  // `by` is 1 when a copy begins and -1 when it has ended.
  void Touch(MemberId id, int by);
  void TouchDestinations(const std::vector<uint32_t>& destinations, int by);

  // ---- begin.cc ----
  absl::Status CheckBegin(const Member& member, const BeginEvent& e) const;
  absl::Status CheckGreater(Version wanted) const;
  Verification DefaultVerification() const;
  absl::Status CheckBroadcast(const BeginEvent& e) const;
  void TakeBroadcast(const Member& member, const BeginEvent& e);
  void TakeNote(const std::string& note);
  absl::Status DecideBroadcast();
  void Open(const BeginEvent& e);
  TrainerProgress& Join(Member* member);
  void AssembleIfAllHere();
  void Assemble();
  void AnnounceAssembled();
  absl::Status MakeParticipants();
  void OpenDataIfReady();
  void FailUnready();
  BeginReply MakeBeginReply() const;
  std::string WaitedForToAssemble() const;
  std::string WaitedForReady() const;
  void SuspectMissing(Failure* failure) const;
  void SuspectUnready(const Participant& participant, Failure* failure) const;

  // ---- data.cc ----
  // The progress of the rank in the running update, or why its data calls are refused. `wanted`:
  // the update that the call names; 0: none.
  absl::StatusOr<TrainerProgress*> OpenFor(const Member& member, Version version, UpdateId wanted);
  absl::Status NotOpen(Version version) const;
  absl::Status Gone(UpdateId wanted, Version version) const;
  // Whether the call names an update other than the running one.
  bool IsAnother(UpdateId wanted) const {
    return wanted != UpdateId() && (update == nullptr || update->id != wanted);
  }
  absl::Status CheckBucket(const TrainerProgress& progress, const BucketEvent& e) const;
  absl::Status CheckTiedBucket(std::string_view tensor) const;
  bool AnyTied(const PartContent& content) const;
  void AddTiedDigests(const PartContent& content, const std::vector<uint64_t>& digests);
  absl::Status CheckTies() const;
  absl::Status CheckParts(const CheckedBucket& bucket) const;
  absl::Status Reserve(const BucketEvent& e);
  // The tensors and elements that a bucket adds: tensors that no bucket brought before, and for the
  // other tensors the elements that were covered before.
  struct Taken {
    std::vector<const std::string*> added;
    std::vector<std::pair<const std::string*, IntervalSet>> before;
  };
  absl::Status TakeElements(const CheckedBucket& bucket, Taken* taken);
  void CountPushed(const group::PushedTensor& tensor, int by);
  void TakeInOrder(TrainerProgress* progress);
  void CutIntoParts(const std::shared_ptr<Bucket>& bucket);
  void CutBetweenTensors(const std::shared_ptr<Bucket>& bucket);
  void AddPart(const std::shared_ptr<Bucket>& bucket, PartContent content);
  void FinishBucket(const Bucket& bucket);
  // Whether the bucket's bytes pass through a slot: for loader ranks, to another daemon, or by a
  // broadcast.
  bool NeedsSlot(const Bucket& bucket) const;
  // Whether all ranks of the update are on this daemon. Otherwise each daemon has an index of its
  // own ranks.
  bool OnThisDaemon() const { return update->nodes.size() == 1 && update->nodes[0] == NodeId(); }
  void StartParts();
  void StartPart(Part* part);
  void GiveBackIfUnread(Part* part);
  void SendParts();
  void SendPartToReaders(Part* part);
  void WriteFirst(uint32_t participant);
  void ServeLeases();
  int LeasesOf(MemberId member) const;
  bool TryGrant(const SlotWaiter& waiter);

  // ---- refit.cc ----
  absl::Status CheckRefit(const Member& member, const RefitEvent& e, bool joined);
  static bool HasShards(const Member& member);
  static bool HasShardsIn(const Member& member, const TrainerProgress& progress) {
    return HasShards(member) && !progress.without_layout;
  }
  uint32_t RelayLag() const;
  void TakeOneCalls();
  absl::StatusOr<bool> ProgramAtHand();
  group::ProgramKey KeyOf(const std::vector<MemberId>& sources) const;
  void Compile(group::ProgramKey key, const std::vector<MemberId>& sources);
  void AddUnheld(const std::vector<MemberId>& sources, std::set<std::string>* pushed) const;
  bool Moves(std::string_view tensor) const;
  bool LeavesOut(const group::PlannedRefit& compiled, std::string_view tensor) const;
  bool Lists(std::string_view tensor) const;
  bool InProgram(std::string_view tensor) const;
  void TouchSources(int by);
  void RunProgramIfDue();
  std::vector<std::shared_ptr<const Layout>> SourceLayouts() const;
  std::vector<std::pair<MemberId, uint64_t>> DestinationBindings() const;
  std::optional<ReplicaFraction> PartToCompare() const;
  void CountCompared();
  bool TakeProgramSlots();
  void StartProgram();

  // ---- catch_up.cc ----
  bool CatchUpRuns() const { return update != nullptr && update->catch_up.has_value(); }
  // Whether every rank of the instance is registered and takes part in catch-ups.
  bool MayCatchUp(const Instance& instance) const;
  // Whether the instance holds the group's version, is clean, and may give it.
  bool Gives(const Instance& instance) const;
  // Whether the instance lacks the group's version and could be caught up.
  bool LacksVersion(const Instance& instance) const;
  // The instances of which `test` is true, by name.
  template <typename Test>
  std::vector<std::string> InstancesThat(const Test& test) const {
    std::vector<std::string> found;
    for (const auto& [instance_name, instance] : instances) {
      if (test(instance)) found.push_back(instance_name);
    }
    return found;
  }
  std::vector<std::string> LateInstances() const;
  std::vector<std::string> ChooseSources(const std::vector<std::string>& late_instances) const;
  void FindCatchUpDue();
  void OpenCatchUpIfDue();
  void AssembleCatchUp();
  bool TakenIn(const Instance& instance) const;
  void GiveUpCatchUpIfSourcesChanged();
  void GiveWay(std::string reason);
  void Defer(std::variant<BeginEvent, RefitEvent> event, Duration duration);
  // Refuses the calls that wait for the catch-up to give way and that would open an update to
  // `wanted`.
  void RefuseDeferred(Version wanted, const absl::Status& why);
  // The versions of the updates that waiting calls of the rank would open.
  std::set<Version> DeferredOf(MemberId member) const;
  bool RefuseDeferredCall(CallId call, const absl::Status& why);
  void RefuseOverdueDeferred();
  void TakeDeferred();
  void NoteFailedCatchUp(Instance* instance, const std::string& reason);
  void NoteFailedCatchUps();
  void ForgetFailedCatchUps();
  int64_t CaughtUpBytes() const;
  void LogCatchUpEnd(Outcome outcome, const std::string& reason);
  std::string CatchUpState(const Instance& instance) const;
  void CheckCatchUp() const;

  // ---- end.cc ----
  absl::Status CheckCommit(const TrainerProgress& progress, const CommitEvent& e) const;
  absl::Status CheckCoverageIfLast(const TrainerProgress& progress, int64_t told) const;
  void TakeCommit(Member* member, TrainerProgress* progress, int64_t bucket_count);
  void TakeAnnounced(Member* member, TrainerProgress* progress);
  void WithdrawAnnounced(TrainerProgress* progress, const absl::Status& why);
  // `told`: how many tensors the update brings; 0: nobody told it.
  absl::Status CheckCoverage(int64_t told) const;
  absl::Status CheckTensorCount(int64_t told) const;
  int64_t UnwantedAndNotPushed() const;
  static LeftOut LeftOutOf(const Update& u);
  absl::Status CheckAllPushed() const;
  absl::Status WrittenInFull() const;
  void ReadBackIfLast();
  void SettleIfDone();
  void Decide();
  void Evict(uint32_t participant, const GiveUp& why);
  // Reports which nodes of the evicted participant have no rank left in the update.
  void EndNodesWithNobodyLeft(const Participant& evicted);
  // Whether a trainer rank, or a rank of an instance still in the update, is attached to that node.
  bool TakesPart(NodeId node) const;
  // A live rank is late or failed: evicts its instance, or gives the update up.
  void FailEngine(uint32_t participant, const GiveUp& why);
  void FailInstalled(const Member& member, const EngineFailed& e);
  GiveUp FailedMove(std::string_view what, const absl::Status& status,
                    int failed_destination) const;
  void Abandon(GiveUp give_up);
  void DropUnstarted();
  void EndIfQuiet();
  void AbortEvictedIfQuiet();
  // Tells the outcome of an update that is being given up to members whose memory no transfer
  // touches any more.
  void NoteQuiet();
  void AbortGivenUp(Participant* participant);
  void ReportOverdueCleanUp();
  void SendAbortedTo(const Participant& participant, const std::string& reason,
                     const Failure& failure);
  void InstallVersion();
  void TearDown();
  // What is known of the update that is given up, with what it leaves of the engines' weights.
  Failure FailureAfterGivingUp() const;
  // `reason` and `failure`: why the update was given up.
  void AnswerAll(bool committed, const std::string& reason, const Failure& failure,
                 const std::vector<InstanceOutcome>& outcomes);
  void Conclude(Outcome outcome, const std::string& reason);
  void LogEnd(Outcome outcome, const std::string& reason);
  UpdateEnded Ended(Outcome outcome, const std::string& reason, const Failure& failure) const;
  std::optional<uint32_t> ParticipantOf(MemberId member) const;
  std::vector<InstanceOutcome> Outcomes(bool committed) const;
  std::string WaitedFor() const;
  // A failure whose suspects are those that WaitedFor names.
  Failure SuspectAwaited() const;

  // Constant after construction, except the incarnation and the spec's trainer_ranks.
  const std::string name;
  uint64_t incarnation;
  GroupSpec spec;
  const GroupLimits limits;
  const std::function<UpdateId()> next_update;

  Ownership ownership;
  // A trainer is attached that may not stay (Member::unwelcome).
  bool any_unwelcome = false;
  GroupState state = GroupState::kIdle;
  std::optional<Version> version;  // last committed in this incarnation
  // The last refusal, by a limit, of what an engine rank declares; OK: none since an update was
  // assembled.
  absl::Status last_refusal;
  // A version was committed in an earlier incarnation: a rank brought it, or the group was
  // replaced.
  bool had_version = false;
  std::map<MemberId, Member> members;
  std::map<int, MemberId> trainers;           // by rank
  std::map<std::string, Instance> instances;  // by name
  // The names of instances, also of those that are gone, whose standing may have changed since
  // TakeStandings.
  std::set<std::string> restood;
  // Of the versions of earlier incarnations that clean instances brought, the one that most of them
  // hold; nullopt: there is none, or the group has committed a version itself.
  std::optional<group::HeldVersion> lineage;
  // The content that most of the same instances brought, by version and by the digest of an
  // instance's layouts.
  Contents contents;
  // The last version of this incarnation that was committed to each rank, with the digest of what
  // was read back, also of instances that are gone, by instance and rank: what a rank that comes
  // back says is compared with it. At most kMaxEngineRanks.
  std::map<std::pair<std::string, int>, std::pair<Version, uint64_t>> committed_to;
  // Incarnations of this group before it was replaced: what they committed is not to be served.
  std::set<uint64_t> replaced;  // at most kRememberedIncarnations
  // Nodes with members that are kept out of updates, and why.
  std::map<NodeId, std::string> kept_out;
  SlotLedger ledger;
  std::deque<SlotWaiter> slot_waiters;
  std::map<CallId, std::shared_ptr<Request>> pending;     // unanswered calls of requests
  std::map<CallId, std::shared_ptr<Request>> unfinished;  // requests, by their first call
  std::unique_ptr<Update> update;
  group::BucketLog bucket_log;  // of the running update, else the last
  // The tensors that engine ranks declare. Each layout and manifest is entered when it comes, so
  // that Begin need not go through all of them.
  const std::shared_ptr<group::TensorTable> declared;
  std::shared_ptr<const Catalog> catalog;                 // of the last update
  std::shared_ptr<group::PlannedRefit> program;           // the newest of an update of the trainers
  std::shared_ptr<group::PlannedRefit> catch_up_program;  // the newest of a catch-up
  std::shared_ptr<group::PlannedRefit> compiling;         // being compiled; null: none
  uint64_t next_program = 0;
  std::optional<UpdateView> last_update;
  std::optional<UpdateView> last_catch_up;
  std::deque<group::DeferredCall> deferred;    // empty unless a catch-up runs
  std::optional<TimePoint> catch_up_possible;  // since when
  std::optional<TimePoint>
      catch_up_due;          // when the next catch-up begins; none: no catch-up is possible
  int failed_catch_ups = 0;  // in a row, of this version
  bool last_was_catch_up = false;
  // A step may have made a catch-up possible or impossible since fill_due was found.
  bool look_for_catch_up = false;
  std::deque<group::EndedUpdate> past;  // newest last; at most kRememberedUpdates
  int64_t committed_updates = 0;
  int64_t aborted_updates = 0;

  // Valid during one Handle.
  TimePoint now;
  GroupActions* actions = nullptr;
  bool changed = false;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_GROUP_IMPL_H_
