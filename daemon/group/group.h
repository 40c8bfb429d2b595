// One group's logic: members, instances, the running update, slots. Events in, actions out.
//
// Pure: no I/O, no gRPC, no threads, no clock of its own (`now` comes with every event). The caller
// serialises events (one mutex), carries out the actions in order, and feeds their results back as
// events. The same event sequence gives the same actions.
//
// The state machines of its parts are in group_state.h, instance_state.h, member_state.h and
// update_state.h; docs/protocol.md draws them. What this class keeps: P1 (decides committed only
// when every destination element of every instance still in was written once and verified), P2
// (dirty from the first byte to the commit), P3 (one update, growing versions, request ids), P4
// (every wait has a deadline and names its culprit), P6 (ReleaseMember only when no transfer
// touches the member's memory), P8 (a lost member leaves nothing behind), P10 (refused events
// change nothing).
//
// Culprits are named "engine INSTANCE rank R", "trainer rank R", or "instance INSTANCE", with pid
// where known.
#ifndef REFITD_DAEMON_GROUP_GROUP_H_
#define REFITD_DAEMON_GROUP_GROUP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/plan/plan.h"
#include "transport/plan/refit_plan.h"
#include "transport/plan/route.h"
#include "transport/pool.h"
#include "transport/transport.h"

namespace refitd {

// ---- what a group is made with ----

inline constexpr int kMaxSlots = 64;
inline constexpr int kMaxTrainerRanks = 65'536;
inline constexpr int kMaxEngineRanks = 65'536;  // of one group
inline constexpr int kMaxPartsPerBucket = 4096;
// Prefixes in GroupSpec::unwanted_tensors: each is compared with each tensor of the trainers.
inline constexpr int kMaxUnwantedPrefixes = 64;
inline constexpr int kRememberedUpdates = 64;    // outcomes kept for GetUpdate
inline constexpr int kRememberedRequests = 256;  // finished request ids kept per member
inline constexpr int kRememberedBuckets = 4096;  // ended, of the running update or the last one

struct GroupSpec {
  int trainer_ranks = 1;  // until trainers of another world size come when none is attached
  int min_instances = 1;
  int64_t slot_bytes = 0;  // never 0 here: defaults are filled in before
  int slots = 0;
  std::vector<std::string> engine_only_tensors;  // sorted, unique
  // Tensors that trainers' layouts may have though no engine wants them: names, and prefixes that
  // end with '*'. Sorted, unique.
  std::vector<std::string> unwanted_tensors{};
  bool operator==(const GroupSpec&) const = default;
};
// Equal but for trainer_ranks, which the trainers that attach decide.
bool EqualButTrainers(GroupSpec a, const GroupSpec& b);
// A name or a prefix of `unwanted_tensors` fits.
bool MayBeUnwanted(const GroupSpec& spec, std::string_view tensor);

// From the daemon's config; each wait is the smaller of its own limit and what remains of the
// update (P4).
struct GroupLimits {
  Duration default_duration = std::chrono::seconds(120);
  Duration max_duration = std::chrono::hours(1);
  Duration ready_limit = std::chrono::seconds(30);  // Prepare to Ready
  Duration ack_limit =
      std::chrono::seconds(30);  // BucketReady (or the Ack before, if later) to Ack
  Duration idle_limit =
      std::chrono::seconds(30);  // no call from any trainer rank, and none outstanding
  Duration lease_limit = std::chrono::seconds(30);  // a leased slot unsubmitted
  Duration cleanup_limit =
      std::chrono::seconds(1);  // draining transfers after an abort. This daemon's own are waited
                                // for beyond it (P6); who is not touched by them hears the outcome,
                                // and other daemons that still owe one are lost
  // Versions of a compiled refit within which each box that several ranks hold is compared again,
  // a part of them on each version; 1: all of them on every version.
  int64_t compare_every = 32;
  int outstanding_buckets = 256;  // per trainer rank; also how far ahead of order a seq may be
  // Of updates whose Begin says none. kReadback: see Group::Impl::DefaultVerification.
  Verification default_verification = Verification::kReadback;
  // What goes directly is cut, between tensors, into parts of so much at least: one moves while the
  // next is planned. Not an operator's: tests use less.
  int64_t direct_part_bytes = int64_t{128} << 20;
  int64_t direct_part_tensors = 64;
};

// ---- members ----

enum class DeliveryMode : uint8_t { kRegistered = 1, kStaged = 2 };

struct TrainerIdentity {
  int rank = 0;
  int world_size = 1;
  int pid = 0;
  NodeId node{};         // whose daemon it is attached to; 0: the coordinator's
  std::string daemon{};  // its id, for messages; empty: the coordinator's
};

struct EngineIdentity {
  std::string instance;
  int rank = 0;
  int world_size = 1;
  DeliveryMode delivery = DeliveryMode::kRegistered;
  int pid = 0;
  std::optional<Version> held_version;
  // Staged delivery: what must arrive in every update; absent: Begin's tensor count.
  std::optional<std::vector<TensorSpec>> manifest;
  NodeId node{};         // whose daemon it is attached to; 0: the coordinator's
  std::string daemon{};  // its id, for messages; empty: the coordinator's
  // Its weights are dirty or in doubt from an earlier lease; not with held_version.
  bool dirty = false;
  // The incarnation in which held_version was committed; 0: not told. It is shown, and never raises
  // the group's version.
  uint64_t held_origin = 0;
  // Its memory is on a GPU. Known of members of the coordinator's own daemon only.
  bool on_device = false;
};

// ---- how an update ends ----

enum class Outcome : uint8_t { kUnknown, kRunning, kCommitted, kAborted };
// Why an update was given up, as a class (for metrics); the words are in its reason.
enum class GiveUpClass : uint8_t {
  kNone,
  kDeadline,
  kMemberLost,
  kPeerLost,
  kVerification,
  kAborted,
  kOperator,
  kTransfer,
  kOther
};

// ---- how buckets went ----

// What went by one method.
struct BroadcastTotals {
  BroadcastMethod method = BroadcastMethod::kDirect;
  int64_t bytes = 0;    // of tensor data, once, whoever received it
  int64_t buckets = 0;  // whose bytes went so for the most part
};

// A bucket whose last part has ended.
struct BucketRecord {
  int64_t group_seq = 0;
  int trainer_rank = 0;
  int64_t seq = 0;  // of that rank
  int64_t tensors = 0;
  int64_t bytes = 0;
  int64_t parts = 0;
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // of most of its bytes
  Duration took{};                                       // from its turn to the end
};

// Of the running update, or the last one.
struct UpdateStatistics {
  std::vector<BroadcastTotals> pushed;  // of the methods that were used
  std::vector<BucketRecord> buckets;    // in the order of their ends, the last kRememberedBuckets
  int64_t left_out = 0;                 // that ended before those
};

// ---- events ----

struct TrainerAttached {
  MemberId member;
  TrainerIdentity identity;
};
struct EngineAttached {
  MemberId member;
  EngineIdentity identity;
  // It is on a GPU where staging slots could not be made: an update that is being opened can't
  // broadcast through slots.
  bool lacks_slots = false;
  // Follower: it is on a GPU where it needs slots, as many and as large as the coordinator says.
  bool awaits_slots = false;
};

// The stream ended, the process died, or it detached.
struct MemberLost {
  MemberId member;
  std::string reason;
};

// A validated layout (ValidateLayout) of an engine rank. Answered once the coordinator has it: an
// update that begins after that counts the rank as registered.
struct LayoutRegistered {
  MemberId member;
  std::shared_ptr<const Layout> layout;
  CallId call{};  // 0: nobody waits for an answer
  // Of the layout, where the caller knows it; found out here if not, which takes milliseconds.
  std::optional<uint64_t> digest{};
};

struct BeginEvent {
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  Duration duration{};  // 0: default
  std::optional<Verification> verification;
  bool evict_late = false;
  int64_t tensor_count = 0;  // 0: not told
  int64_t total_bytes = 0;   // 0: not told
  BroadcastMethod broadcast = BroadcastMethod::kAuto;
  // The GPUs of this rank and of all engines have staging slots, and something could be gained by
  // them. With kAuto, buckets pass through slots only where every rank that begins says so; a
  // method that needs slots is refused without.
  bool slots_on_devices = false;
  // The rank's registered layout has no part in this update: the rank pushes, and ends it by
  // Commit.
  bool without_layout = false;
};

struct ReadyEvent {
  MemberId member;
  UpdateId update;  // of the Prepare that it answers: answers to other updates are ignored
};
struct EngineFailed {
  MemberId member;
  UpdateId update;
  std::string reason;
};

struct LeaseSlotEvent {
  CallId call;
  MemberId member;
  Version version;
  Duration wait{};
  UpdateId update{};  // as BucketEvent
};
struct ReleaseSlotEvent {
  CallId call;
  MemberId member;
  SlotGrant grant;
};

// A bucket whose metadata was validated on its own (lists, dtypes, shapes, sizes, source inside its
// memory).
struct BucketEvent {
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  int64_t seq = 0;
  std::vector<TensorSpec> tensors;
  std::vector<TensorRange> ranges;         // ranges[i].tensor == i
  std::optional<SlotGrant> slot;           // the source is this leased slot
  std::vector<int64_t> slot_byte_offsets;  // with slot: where each tensor lies in it
  // The update that the rank began (BeginReply): the call is of no other update to that version. 0:
  // not told, `version` alone decides.
  UpdateId update{};
};

// What StartTransfer asked for has ended; nothing of the source is read and nothing written any
// more.
struct TransferDone {
  UpdateId update;
  PartSeq part;
  absl::Status status;  // not OK: verification failed, or the program could not be made
  std::vector<int64_t> bytes_written;                    // per destination of StartTransfer::index
  int failed_destination = -1;                           // whose, if not OK and known
  std::vector<uint64_t> source_digests{};                // by range, if they were wanted
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // by which the bytes went
};

struct AckEvent {
  MemberId member;
  UpdateId update;
  PartSeq part;
};
struct CommitEvent {
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  int64_t bucket_count = 0;
  // Some of the buckets may still be on their way: they are waited for.
  bool pushes_under_way = false;
  UpdateId update{};  // as BucketEvent
};
// Begin, the compiled moves and Commit in one. The rank has a layout (the caller has compared its
// binding generation); it may have begun and pushed buckets of its layout's pushed_tensors before,
// and then says which update it ends.
struct RefitEvent {
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  Duration duration{};  // 0: default
  std::optional<Verification> verification;
  bool evict_late = false;
  int64_t bucket_count = 0;  // that the rank has pushed
  // The update that the rank began and ends by this call, which opens no other. 0: it opens or
  // joins the update to `version`, or ends the one that the rank began.
  UpdateId update{};
};
struct AbortEvent {
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  std::string reason;
  UpdateId update{};  // as BucketEvent
};

// What StartVerify asked for has ended.
struct VerifyDone {
  UpdateId update;
  absl::Status status;
  std::vector<uint32_t> failed_destinations;
};

// What CompileProgram asked for.
struct ProgramCompiled {
  ProgramId program;
  absl::Status status;
  std::shared_ptr<const RefitPlan> plan;  // if OK
};
// What StartCompare asked for. DATA_LOSS: replicas differ; names the tensor and the ranks.
struct CompareDone {
  UpdateId update;
  absl::Status status;
};
// What StartRefit asked for has ended; nothing is read or written any more.
struct RefitDone {
  UpdateId update;
  absl::Status status;
  std::vector<int64_t> bytes_written;  // per destination of UpdateAssembled
  int failed_destination = -1;         // whose, if not OK and known
};

// An operator gave the update up.
struct OperatorAbort {
  CallId call;
  std::string reason;
};
// CreateGroup(replace): a new incarnation. Refused while an update runs.
struct ReplaceGroup {
  CallId call;
  uint64_t incarnation = 0;
};
// SIGTERM: no new update is opened; the running one ends or meets its deadline.
struct DrainEvent {};
// The update can't go on (a daemon of it was lost, its data plane failed). Nothing happens if it is
// over or being given up already.
struct FailUpdate {
  UpdateId update;
  std::string reason;
  GiveUpClass kind = GiveUpClass::kPeerLost;
};
// Whether the data plane between the update's nodes is up: no byte is asked for while it is not. It
// is up where nobody says otherwise.
struct DataPlane {
  UpdateId update;
  bool up = false;
};
// The data plane of those nodes does not come up. Their instances are evicted from the update, and
// take part in no later one until the last member of the node has left: who comes then attaches
// anew. If no instance would be left the update is given up instead, and nobody is kept out.
struct KeepNodesOut {
  UpdateId update;
  std::map<NodeId, std::string> nodes;  // why, by node
  std::string reason;                   // of giving up
  GiveUpClass kind = GiveUpClass::kTransfer;
};
// Time passed: whatever is due is done. Sent at NextDeadline() or later.
struct Tick {};
// The caller went away (its deadline, its connection): its reply is not wanted any more and comes
// at once (CANCELLED), but for a bucket, whose answer waits for the last read of its source. Has no
// other effect: what the call began goes on.
struct CallGone {
  CallId call;
};

using GroupEvent =
    std::variant<TrainerAttached, EngineAttached, MemberLost, LayoutRegistered, BeginEvent,
                 ReadyEvent, EngineFailed, LeaseSlotEvent, ReleaseSlotEvent, BucketEvent,
                 TransferDone, AckEvent, CommitEvent, RefitEvent, AbortEvent, VerifyDone,
                 ProgramCompiled, CompareDone, RefitDone, OperatorAbort, ReplaceGroup, DrainEvent,
                 FailUpdate, DataPlane, KeepNodesOut, Tick, CallGone>;

// ---- actions ----

struct InstanceOutcome {
  std::string instance;
  bool committed = false;
  std::string reason;
};

struct BeginReply {
  UpdateId update;
  Duration remaining{};
  int instances = 0;
  int leasable_slots = 0;
};
struct LeaseSlotReply {
  SlotGrant grant;
  Duration expires{};
  int64_t slot_bytes = 0;
};
struct BucketReply {
  int64_t group_seq = 0;
  int64_t bytes = 0;
};
struct CommitReply {
  Version version;
  std::vector<InstanceOutcome> instances;
  int64_t bytes = 0;
  Duration elapsed{};
  std::vector<BroadcastTotals> pushed;  // by method
  // Tensors of trainers' layouts that no engine wants (GroupSpec::unwanted_tensors), and their
  // bytes.
  int64_t left_out_tensors = 0;
  int64_t left_out_bytes = 0;
};
struct EmptyReply {};
using ReplyPayload = std::variant<EmptyReply, BeginReply, LeaseSlotReply, BucketReply, CommitReply>;

// Answers a call; each call that an event brought is answered exactly once (also refused ones). A
// PushBucket's answer comes after the last read of its source, whatever its status (P6).
struct Reply {
  CallId call;
  absl::Status status;
  ReplyPayload payload;
};

// Compile a refit; takes up to seconds: not on the caller's thread. Answered by ProgramCompiled,
// also where nobody wants it any more.
struct CompileProgram {
  ProgramId program;
  std::vector<RouteMember> sources;
  std::vector<RouteMember> destinations;
  RouteOptions options;
};
// The program that an update runs. Sources and destinations by the plan's numbers.
struct ProgramUse {
  ProgramId program;
  std::shared_ptr<const RefitPlan> plan;
  std::vector<NodeId> nodes;      // the plan's
  std::vector<MemberId> sources;  // its destinations are UpdateAssembled's
};

// The update is assembled: who takes part is known. Comes before its SendPrepare actions.
struct UpdateAssembled {
  UpdateId update;
  Version version;
  Duration remaining{};
  int64_t tensor_count = 0;
  Verification verification = Verification::kOff;
  std::vector<NodeId> nodes;           // with a rank in it, trainer or engine; ascending
  std::vector<MemberId> destinations;  // registered ranks, in the order of StartTransfer
  std::optional<ProgramUse> program{};
};
struct SendPrepare {
  MemberId member;
  Version version;
  UpdateId update;
  Duration remaining{};
  int64_t tensor_count = 0;
};
// What a part of a bucket carries, through a slot or directly.
struct PartContent {
  std::vector<TensorSpec> tensors;
  std::vector<TensorRange> ranges;    // ranges[i].tensor == i
  std::vector<int64_t> byte_offsets;  // from the slot's start; empty if there is no slot
  int64_t bytes = 0;  // with a slot: the end of what is packed in it; else what is carried
};
// One staged part for one engine rank.
struct SendPart {
  MemberId member;
  UpdateId update;
  Version version;
  PartSeq part;
  SlotGrant slot;
  std::shared_ptr<const PartContent> content;
};
struct SendCommitted {
  MemberId member;
  Version version;
};
struct SendAborted {
  MemberId member;
  Version version;
  std::string reason;
  bool dirty = false;
};
struct SendDraining {
  MemberId member;
};

// Copy one part of a bucket: into `slot` (packed as `content` says) if there is one to fill, and
// into every destination of `index` that is not skipped. Destinations are (member, its layout) in
// index order.
struct StartTransfer {
  UpdateId update;
  Version version;
  PartSeq part;
  int64_t group_seq = 0;  // of the bucket
  CallId bucket_call;     // names the bucket's source bytes; stays valid until its Reply
  MemberId trainer;
  std::vector<uint32_t>
      bucket_ranges;  // content->ranges[i] is a sub-range of the bucket's ranges[bucket_ranges[i]]
  std::shared_ptr<const PartContent> content;
  std::optional<SlotGrant> source_slot;  // the source is this slot (leased by the trainer)
  // Copy into this slot for staged engines; or, with a method other than kDirect, broadcast through
  // it.
  std::optional<SlotGrant> fill_slot;
  std::shared_ptr<const DestinationIndex> index;  // registered engine ranks of the update
  std::vector<MemberId> destinations;             // in index order
  std::vector<bool> skip_destination;             // evicted since
  std::vector<uint32_t> touched;                  // destinations that have elements of it
  std::vector<MemberId> staged;                   // ranks that will be handed the slot
  bool wired = false;  // the slot is sent to other daemons after it: their place for it is filled
  // With a slot, kAuto leaves the choice to the executor; without one every method is kDirect.
  BroadcastMethod broadcast = BroadcastMethod::kDirect;
  Verification verification = Verification::kOff;
  // Digests of the source by range of `content` are wanted with the result.
  bool want_source_digests = false;
};

// Compare what the update's program reads from several ranks, before it moves anything. Answered by
// CompareDone.
struct StartCompare {
  UpdateId update;
  ReplicaPart part = {};  // of the replicas
};
// Run the update's program. Its place in the order of collectives is that of a part. Answered by
// RefitDone.
struct StartRefit {
  UpdateId update;
  Version version;
  PartSeq part;
  std::vector<SlotGrant> slots;  // where bytes go between daemons: 2 or 4
  std::vector<bool> skip_destination;
  Verification verification = Verification::kOff;
};

// Read every written piece of every destination again and compare with the sums of the update's
// transfers (readback only).
struct StartVerify {
  UpdateId update;
  Version version;
  std::shared_ptr<const DestinationIndex> index;
  std::vector<MemberId> destinations;
  std::vector<bool> skip_destination;
};

// No transfer touches this member's memory any more, and it is gone: unmap its regions (P6, P8).
struct ReleaseMember {
  MemberId member;
};
// No rank of that node takes part in the running update any more: they were evicted or lost.
struct NodeOutOfUpdate {
  UpdateId update;
  NodeId node;
};
// The update is being given up; the transfers that run end first.
struct UpdateAbandoned {
  UpdateId update;
};
// The clean-up limit of an update that is being given up has passed, and something still runs: a
// daemon that does not say that its share has ended must not keep the rest waiting (P4).
struct CleanUpOverdue {
  UpdateId update;
};
// The update ended: forget its digests.
struct UpdateEnded {
  UpdateId update;
  Version version;
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
  // How long each phase took; one that was not reached took no time.
  Duration prepare{};  // Begin to every rank ready
  Duration data{};     // to the last Commit
  Duration verify{};   // to every digest compared
  Duration total{};    // Begin to the outcome
  int64_t bytes = 0;   // of tensor data handed over
  GiveUpClass give_up_class = GiveUpClass::kNone;
  std::vector<BroadcastTotals> pushed{};  // by method
};
// The member is not (or no longer) acceptable: end its stream with this status (e.g. attach
// refused).
struct RefuseMember {
  MemberId member;
  absl::Status status;
};
// An engine rank attached; the caller sends Welcome before any later action for it.
struct WelcomeMember {
  MemberId member;
};
// Something that status or watch shows has changed.
struct StateChanged {};
// One line for the log: said once, where it is first detected.
struct LogLine {
  enum Level { kInfo, kWarning, kError } level = kInfo;
  std::string text;
};

using GroupAction =
    std::variant<Reply, SendPrepare, SendPart, SendCommitted, SendAborted, SendDraining,
                 StartTransfer, StartVerify, CompileProgram, StartCompare, StartRefit,
                 ReleaseMember, UpdateAssembled, NodeOutOfUpdate, UpdateAbandoned, CleanUpOverdue,
                 UpdateEnded, RefuseMember, WelcomeMember, StateChanged, LogLine>;
using GroupActions = std::vector<GroupAction>;

// ---- what status shows ----

struct MemberView {
  MemberId id;
  bool engine = false;
  std::string instance;
  int rank = 0;
  int world_size = 0;
  DeliveryMode delivery = DeliveryMode::kRegistered;
  std::string_view state;
  int pid = 0;
  int64_t pieces = 0;
  uint64_t layout_digest = 0;
};
struct InstanceView {
  std::string name;
  std::string_view state;
  std::optional<Version> version;
  int world_size = 0;
  int attached = 0;
  std::string reason;
  uint64_t origin = 0;  // incarnation in which `version` was committed; 0: not told, or no version
};
struct UpdateView {
  UpdateId id;
  Version version;
  std::string_view state;
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
  int64_t bytes = 0;
  int64_t total_bytes = 0;
  int64_t tensors = 0;
  int64_t tensor_count = 0;
  int64_t buckets = 0;
  Duration elapsed{};
  Duration remaining{};
  std::vector<InstanceOutcome> instances;
};
// Which update a view shows, and the state that it shows it in.
struct UpdateMark {
  UpdateId id;
  std::string_view state;  // of static storage
  bool operator==(const UpdateMark&) const = default;
};
struct SlotView {
  SlotIndex slot;
  SlotState state;
  std::string holder;
};
struct GroupView {
  std::string name;
  uint64_t incarnation = 0;
  std::string_view state;
  GroupSpec spec;
  std::optional<Version> version;
  std::vector<MemberView> members;
  std::vector<InstanceView> instances;
  std::optional<UpdateView> update;
  std::vector<SlotView> slots;
  int64_t committed = 0;
  int64_t aborted = 0;
};
struct PastUpdate {
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
};

// Not thread-safe.
class Group {
 public:
  // `next_update` gives update ids that are unique in the daemon.
  Group(std::string name, uint64_t incarnation, GroupSpec spec, GroupLimits limits,
        std::function<UpdateId()> next_update);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Appends to `actions`.
  void Handle(const GroupEvent& event, TimePoint now, GroupActions* actions);

  // When the next Tick is due; nullopt: nothing waits.
  std::optional<TimePoint> NextDeadline() const;

  const std::string& name() const;
  uint64_t incarnation() const;
  const GroupSpec& spec() const;
  bool has_members() const;
  bool has_trainers() const;  // attached
  bool update_running() const;
  // FAILED_PRECONDITION: the member takes staged delivery, or takes part in the running update.
  absl::Status CanRegisterLayout(MemberId member) const;
  std::optional<Version> version() const;
  // A trainer rank is attached to that node.
  bool TrainsOn(NodeId node) const;
  // Why the instances of that node take part in no update; empty: they do.
  std::string KeptOut(NodeId node) const;
  GroupView View(TimePoint now) const;
  // View's update alone, at the cost of that update's own instances.
  std::optional<UpdateView> ViewUpdate(TimePoint now) const;
  // Whether that has changed: costs nothing.
  std::optional<UpdateMark> MarkUpdate() const;
  // The member's lease lives: copies may begin that touch its memory.
  bool Attached(MemberId member) const;
  UpdateStatistics Statistics() const;
  PastUpdate Past(Version version) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_GROUP_H_
