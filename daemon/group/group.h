// The logic of one group: its members, instances, slots and running update. Events in, actions out.
//
// Pure: no I/O, no gRPC, no threads, no clock of its own (`now` comes with every event). The caller
// serialises events (one mutex), carries out the actions in order, and feeds their results back as
// events. The same event sequence gives the same actions.
//
// The state machines of its parts are in group_state.h, instance_state.h, member_state.h and
// update_state.h; docs/protocol.md draws them. This class keeps P1 (an update commits only when
// every destination element of every instance still in it was written once and verified), P2 (an
// instance is dirty from its first byte to the commit), P3 (one update, growing versions, request
// ids), P4 (every wait has a deadline and names its culprit), P6 (ReleaseMember comes only when no
// transfer touches the member's memory), P8 (a lost member leaves nothing behind) and P10 (refused
// events change nothing).
//
// Texts name members "engine INSTANCE rank R", "trainer rank R", or "instance INSTANCE", with pid
// where known. What programs decide by stands beside each text as a Failure.
#ifndef REFITD_DAEMON_GROUP_GROUP_H_
#define REFITD_DAEMON_GROUP_GROUP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/bucket.h"
#include "daemon/group/ownership.h"
#include "daemon/group/readiness.h"
#include "daemon/group/slot_ledger.h"
#include "proto/delivery.h"
#include "transport/base/failure.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/plan/plan.h"
#include "transport/plan/refit_plan.h"
#include "transport/plan/route.h"
#include "transport/transport.h"

namespace refitd {

struct GroupForTests;  // plants errors that CheckInvariants must find

template <typename T, typename Variant>
inline constexpr bool kIsOneOf = false;
template <typename T, typename... Ts>
inline constexpr bool kIsOneOf<T, std::variant<Ts...>> = (std::is_same_v<T, Ts> || ...);

template <typename A, typename B>
struct JoinOf;
template <typename... As, typename... Bs>
struct JoinOf<std::variant<As...>, std::variant<Bs...>> {
  using Type = std::variant<As..., Bs...>;
};
// The variant of the alternatives of both variants.
template <typename A, typename B>
using Joined = typename JoinOf<A, B>::Type;

// ---- what a group is made with ----

inline constexpr int kMaxSlots = 64;
inline constexpr int kMaxTrainerRanks = 65'536;
inline constexpr int kMaxEngineRanks = 65'536;  // of one group
inline constexpr int kMaxPartsPerBucket = 4096;
// The limit of patterns that are no exact names, in GroupSpec::engine_only_tensors and in
// unwanted_tensors: each is compared with each tensor.
inline constexpr int kMaxNamePatterns = 64;
// The largest GroupSpec::max_lag. Differences of versions fit into an integer by far.
inline constexpr int64_t kMaxLag = 1'000'000'000;
// The largest GroupSpec::hold_previous_seconds: a week.
inline constexpr int64_t kMaxHoldPreviousSeconds = int64_t{7} * 24 * 3600;
// GroupSpec::keep_seconds where a spec does not say, and the largest.
inline constexpr int kDefaultKeepSeconds = 600;
inline constexpr int kMaxKeepSeconds = 86'400;
// How many instances give at a time in one catch-up. Planning, comparing and the set of daemons
// that must stay up grow with their number, while from a few source instances on a late instance's
// own link is the limit.
inline constexpr int kMaxSourceInstances = 8;
inline constexpr int kRememberedUpdates = 64;          // outcomes kept for GetUpdate
inline constexpr int kRememberedRequests = 256;        // finished request ids kept per member
inline constexpr size_t kRememberedIncarnations = 16;  // that were replaced
// Records of ended buckets that are kept, of the running update or else of the last update.
inline constexpr int kRememberedBuckets = 4096;

struct GroupSpec {
  // Trainers of another world size replace this number when they attach while no trainer is
  // attached.
  int trainer_ranks = 1;
  int min_instances = 1;
  int64_t slot_bytes = 0;  // never 0: the caller has filled in defaults
  int slots = 0;
  // Patterns of names (transport/plan/name_patterns.h), sorted, unique, here and below.
  std::vector<std::string> engine_only_tensors;
  // Tensors that trainers may bring though no engine wants them.
  std::vector<std::string> unwanted_tensors{};
  // How far an instance's version may be behind the group's while the instance counts as ready:
  // the difference of the two numbers, 0 to kMaxLag.
  int64_t max_lag = 0;
  // Bytes cross between daemons encrypted or not at all.
  bool encrypted_data = false;
  // How long after a commit shadowed instances keep the version before in their backs: the next
  // update is not staged until then. 0 to kMaxHoldPreviousSeconds.
  int64_t hold_previous_seconds = 0;
  // How long daemons keep the arenas of an engine rank whose lease has ended; 0: not at all.
  int keep_seconds = kDefaultKeepSeconds;
  bool operator==(const GroupSpec&) const = default;
};
// Whether both are equal apart from trainer_ranks, which the attaching trainers decide.
bool EqualButTrainers(GroupSpec a, const GroupSpec& b);

// Limits from the daemon's config. Each wait ends at its own limit or with the update, whichever
// comes first (P4).
struct GroupLimits {
  Duration default_duration = std::chrono::seconds(120);
  Duration max_duration = std::chrono::hours(1);
  Duration ready_limit = std::chrono::seconds(30);  // from Prepare to Ready
  // From Staged to Processed. Half of what remains of the update, if that is less.
  Duration processing_limit = std::chrono::seconds(60);
  // The wait from BucketReady, or from the previous Ack if that came later, to Ack.
  Duration ack_limit = std::chrono::seconds(30);
  // How long an update may go without a call from a trainer rank while no call is outstanding.
  Duration idle_limit = std::chrono::seconds(30);
  // How long a leased slot may stay unsubmitted.
  Duration grant_limit = std::chrono::seconds(30);
  // How long transfers may drain after an abort. The coordinator waits for its own daemon's
  // transfers even longer (P6). When this time has passed, members whose memory no transfer touches
  // are sent the outcome, and other daemons that have not ended their share are lost.
  Duration cleanup_limit = std::chrono::seconds(1);
  // A compiled refit compares every box that several ranks hold once within this many versions: a
  // part of the boxes on each version. 1: all boxes on every version.
  int64_t compare_every = 32;
  // The limit of unanswered buckets of each trainer rank, and of how far a seq may be ahead of the
  // next in order.
  int outstanding_buckets = 256;
  // For updates whose Begin names no verification. kReadback: see Membership::DefaultVerification.
  Verification default_verification = Verification::kReadback;
  // A bucket that needs no slot is cut, between tensors, into parts of at least this size, so that
  // one part moves while the next is planned. Operators do not set these limits; tests lower them.
  int64_t direct_part_bytes = int64_t{128} << 20;
  int64_t direct_part_tensors = 64;
  // Whether instances that lack the group's version catch up by clean instances.
  bool catch_ups = true;
  // The time from the moment at which a catch-up is possible to its start, so that instances which
  // attach at about the same time catch up at once.
  Duration catch_up_gather = std::chrono::milliseconds(100);
  // How long an instance whose catch-up failed is left alone; doubled at each further failure, up
  // to catch_up_most_wait.
  Duration catch_up_wait = std::chrono::seconds(1);
  Duration catch_up_most_wait = std::chrono::seconds(64);
};

// ---- members ----

struct TrainerIdentity {
  int rank = 0;
  int world_size = 1;
  int pid = 0;
  NodeId node{};         // node of the daemon that it is attached to
  std::string daemon{};  // that daemon's id, for messages; empty: the coordinator's
  // Who it is, as the daemon that it is attached to found out; empty: not known.
  std::string identity{};
  // A rule of that daemon lets it in, whoever owns the group.
  bool any_owner = false;
};

struct EngineIdentity {
  std::string instance;
  int rank = 0;
  int world_size = 1;
  DeliveryMode delivery = DeliveryMode::kInPlace;
  int pid = 0;
  std::optional<Version> held_version;
  // Loader delivery: the tensors that every update must bring. Absent: Begin's tensor count
  // decides.
  std::optional<std::vector<TensorSpec>> manifest;
  NodeId node{};         // node of the daemon that it is attached to
  std::string daemon{};  // that daemon's id, for messages; empty: the coordinator's
  // The rank's weights are dirty or unknown since an earlier lease. Never set beside held_version.
  bool dirty = false;
  // The incarnation in which held_version was committed; 0: the rank did not name it. Status shows
  // it; it never raises the group's version.
  uint64_t held_origin = 0;
  // The rank's memory is on a GPU. Known only of members of the coordinator's own daemon.
  bool on_device = false;
  // In-place delivery: between two updates the rank's registered memory is its weights,
  // unchanged, so that it may be given to other instances; and the rank answers Prepare at any
  // time, so that it may catch up. False for clients and daemons that do not say so.
  bool catch_up = false;
  // The pattern of identities whose weights the rank takes: it enters no group that another one
  // owns. Empty: it takes those of any owner.
  std::string trainer_identity{};
  // The identity that owned the group when held_version, or the version before its weights became
  // dirty, was committed; empty: the rank does not say.
  std::string held_owner{};
  // Not OK: a limit refuses what the rank declares. The group does not take the rank in, and calls
  // that wait for its instance fail with this status.
  absl::Status refused{};
  // SendCommitted::digest as it came with held_version; 0: the rank does not say.
  uint64_t held_digest = 0;
  // If held_version is a rollback: the version whose content it has.
  std::optional<Version> held_content{};
  // Counts the manifest among its sender's bytes while it lives; null: nobody counts.
  std::shared_ptr<const void> counted{};
  bool wants_staged = false;  // in place: the rank is sent SendStaged before SendFlip
};

// ---- how an update ends ----

enum class Outcome : uint8_t { kUnknown, kRunning, kCommitted, kAborted };
// The class of reasons for which an update was given up, for metrics. The update's own reason has
// the words.
enum class GiveUpClass : uint8_t {
  kNone,
  kDeadline,
  kMemberLost,
  kPeerLost,
  kVerification,
  kAborted,
  kOperator,
  kTransfer,
  kSlow,
  kOther
};

// ---- how buckets went ----

// How much buckets moved by one broadcast method.
struct BroadcastTotals {
  BroadcastMethod method = BroadcastMethod::kDirect;
  int64_t bytes = 0;    // tensor data, counted once however many ranks received it
  int64_t buckets = 0;  // buckets that moved most of their bytes by this method
};

// The record of a bucket whose last part has ended.
struct BucketRecord {
  int64_t group_seq = 0;
  int trainer_rank = 0;
  int64_t seq = 0;  // in that rank's order
  int64_t tensors = 0;
  int64_t bytes = 0;
  int64_t parts = 0;
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // the method that moved most bytes
  Duration took{};  // from its turn in the group's order to its end
};

// How the buckets of the running update, or else of the last update, went.
struct UpdateStatistics {
  std::vector<BroadcastTotals> pushed;  // only methods that were used
  std::vector<BucketRecord> buckets;    // by end; the last kRememberedBuckets
  // Buckets that ended earlier, whose records are no longer kept.
  int64_t left_out = 0;
};

// ---- what calls are answered with ----

// The most tensors that LeftOut names.
inline constexpr size_t kMaxNamedLeftOut = 64;

// Tensors that an update brought and that were written nowhere, because no engine wants them
// (GroupSpec::unwanted_tensors) or their memory is another tensor's (Tie).
struct LeftOut {
  int64_t tensors = 0;
  int64_t bytes = 0;
  std::vector<std::string> names;  // sorted; the first kMaxNamedLeftOut
};

struct InstanceOutcome {
  std::string instance;
  bool committed = false;
  std::string reason;
  Failure failure{};  // of an instance that was not committed
  bool shadowed = false;
  bool flipped_back = false;  // it was sent Aborted after a Prepare with flip
  // From when the first of its ranks stopped (ReadyEvent::stopped) to its outcome; nullopt: it was
  // not sent both Prepare and the outcome.
  std::optional<Duration> pause{};
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
  LeftOut left_out;
  std::optional<Version> content{};  // of a rollback: the version whose content is served again
};
struct EmptyReply {};
using ReplyPayload = std::variant<EmptyReply, BeginReply, LeaseSlotReply, BucketReply, CommitReply>;

// ---- events ----

struct TrainerAttached {
  MemberId member;
  TrainerIdentity identity;
};
struct EngineAttached {
  MemberId member;
  EngineIdentity identity;
  // The rank is on a GPU where staging slots could not be made: an update that is being opened
  // can't broadcast through slots.
  bool lacks_slots = false;
  // At a follower: the rank is on a GPU that needs slots, as many and as large as the coordinator
  // says.
  bool awaits_slots = false;
};

// The member's stream ended, its process died, or it detached.
struct MemberLost {
  MemberId member;
  std::string reason;
};

// A validated layout (ValidateLayout) of an engine rank. The call is answered once the coordinator
// has the layout: updates that begin after the answer count the rank as registered.
struct LayoutRegistered {
  MemberId member;
  std::shared_ptr<const Layout> layout;
  CallId call{};  // 0: nobody waits for an answer
  // The layout's digest, if the caller knows it. Otherwise it is computed here, which takes
  // milliseconds.
  std::optional<uint64_t> digest{};
  // The ContentDigest of the memory that an engine rank registers; 0: its daemon has not read it.
  // Daemons read the memory of ranks that claim a version with its digest, and take part in
  // catch-ups.
  uint64_t content = 0;
  // Engine ranks: the layout's regions have backs (Layout::backs).
  bool shadowed = false;
  // Engine ranks: the rank is to have no layout, unless this one is refused (Layout::backs_differ).
  bool backs_differ = false;
};

struct BeginEvent {
  using Answer = BeginReply;
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  Duration duration{};  // 0: default
  std::optional<Verification> verification;
  bool evict_late = false;
  int64_t tensor_count = 0;  // 0: unknown
  int64_t total_bytes = 0;   // 0: unknown
  BroadcastMethod broadcast = BroadcastMethod::kAuto;
  // The GPUs of this rank and of all engines have staging slots, and broadcasting through slots
  // could gain something. With kAuto, buckets pass through slots only if every rank that begins
  // sets this; a method that needs slots is refused if it is not set.
  bool slots_on_devices = false;
  // The rank's registered layout has no part in this update: the rank pushes its weights and ends
  // the update by Commit.
  bool without_layout = false;
  std::string note{};  // for people; at most kMaxNoteBytes
  // When this update has committed, the next one is not staged before ReleasePreviousEvent.
  bool hold = false;
};

struct ReadyEvent {
  MemberId member;
  UpdateId update;  // of the Prepare that it answers; ignored if another update runs
  // For how long the rank has not read its weights; nullopt: since Prepare.
  std::optional<Duration> stopped{};
};
// The answer to SendStaged.
struct ProcessedEvent {
  MemberId member;
  UpdateId update;
};
struct EngineFailed {
  MemberId member;
  UpdateId update;
  std::string reason;
  // Not OK: outside of any update, a limit refused the layout that the rank registered. Calls that
  // wait for its instance fail with this status.
  absl::Status refused{};
};

struct LeaseSlotEvent {
  using Answer = LeaseSlotReply;
  CallId call;
  MemberId member;
  Version version;
  Duration wait{};
  UpdateId update{};  // as BucketEvent::update
};
struct ReleaseSlotEvent {
  using Answer = EmptyReply;
  CallId call;
  MemberId member;
  SlotGrant grant;
};

struct BucketEvent {
  using Answer = BucketReply;
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  std::shared_ptr<const CheckedBucket> bucket;
  // The update that the rank began (BeginReply). A call that names an update is refused for any
  // other update to the same version. 0: `version` alone names the update.
  UpdateId update{};
};

// The move of a part has ended, well or not: the part is neither read, written, sent nor received
// any more. Three senders: an executor answers a worker's StartTransfer with it, a worker reports
// the end of its daemon's share, and the coordinator reports the end of all shares to the group.
// Only the last numbers the destinations as the group does; the others number them as in
// PeerPrepare.
struct TransferDone {
  UpdateId update;
  PartSeq part;
  absl::Status status;  // not OK: verification failed, or the program could not be made
  std::vector<int64_t> bytes_written;  // per destination
  int failed_destination = -1;         // the destination at fault, if not OK and known
  // By range, if they were asked for: digests of the trainer's bytes, or of the slot that a node
  // received.
  std::vector<uint64_t> digests{};
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // the method that moved the bytes
  bool wire_failed = false;  // of a node: its communicator can't be used any more
};

struct AckEvent {
  MemberId member;
  UpdateId update;
  PartSeq part;
};
struct CommitEvent {
  using Answer = CommitReply;
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  int64_t bucket_count = 0;
  // Some of these buckets may still be on their way: the commit waits for them.
  bool pushes_under_way = false;
  UpdateId update{};         // as BucketEvent::update
  int64_t tensor_count = 0;  // of all ranks together; 0: unknown
};
// Begin, the compiled moves and Commit in one call. The rank has a layout, and the caller has
// compared its binding generation. The rank may have begun the update before and pushed buckets of
// its layout's pushed_tensors; it then names the update that it ends.
struct RefitEvent {
  using Answer = CommitReply;
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  Duration duration{};  // 0: default
  std::optional<Verification> verification;
  bool evict_late = false;
  int64_t bucket_count = 0;  // buckets that the rank has pushed
  // The update that the rank began and that this call ends; the call then opens no other update. 0:
  // the call opens or joins the update to `version`, or ends the update that the rank began.
  UpdateId update{};
  bool hold = false;  // as BeginEvent::hold
};
struct AbortEvent {
  using Answer = EmptyReply;
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  std::string reason;
  UpdateId update{};  // as BucketEvent::update
};

// Goes back to the content of the version before the group's, under the number after the group's.
// A trainer rank or an operator asks for it.
struct RollbackEvent {
  using Answer = CommitReply;
  CallId call;
  MemberId member;  // 0: an operator's call
  std::string request_id;
  // The version that is rolled back. The call is refused if the group has another; if that one is
  // the rollback of this version, the call is answered with its number.
  std::optional<Version> version{};
  Duration duration{};  // 0: default
};
// The next update may be staged: what BeginEvent::hold or GroupSpec::hold_previous_seconds held is
// let go.
struct ReleasePreviousEvent {
  using Answer = EmptyReply;
  CallId call;
  MemberId member;  // 0: an operator's call
};

// The calls of trainer ranks. Each names what an OK answer carries as its Answer.
using TrainerCall =
    std::variant<BeginEvent, LeaseSlotEvent, ReleaseSlotEvent, BucketEvent, CommitEvent, RefitEvent,
                 AbortEvent, RollbackEvent, ReleasePreviousEvent>;

// The read-back has ended.
struct VerifyDone {
  UpdateId update;
  absl::Status status;
  std::vector<uint32_t> failed_destinations;
  // By destination: the ContentDigest of what was read back; 0, or no entry: not all that the
  // destination's layout names was read back.
  std::vector<uint64_t> content{};
};

// The answer to PlanRefit.
struct RefitPlanned {
  ProgramId program;
  absl::Status status;
  std::shared_ptr<const RefitPlan> plan;  // if OK
};
// The answer to StartCompare, also of one node. DATA_LOSS: replicas differ; the status names the
// tensor and the ranks.
struct CompareDone {
  UpdateId update;
  absl::Status status;
  std::vector<uint64_t> digests{};  // of a node: by PeerProgram::replicas
};
// The streams of a program between this node and another, by their digests at this end. 0: no
// stream.
struct PeerStream {
  uint32_t peer = 0;  // number in the plan
  uint64_t out = 0;
  uint64_t in = 0;
};
// Counts what one node sent to another over the wire in one run: the bytes, and the time in which
// the connection was busy with them (WireUse).
struct PeerWireUse {
  uint32_t peer = 0;  // number in the plan
  int64_t bytes = 0;
  Duration busy{};
};
// The run that StartRefit asked for has ended: it reads, writes, sends and receives nothing any
// more. Also the report of a node, whose destinations are numbered as in PeerPrepare, on its share.
struct RefitDone {
  UpdateId update;
  absl::Status status;
  std::vector<int64_t> bytes_written;  // per destination
  int failed_destination = -1;         // the destination at fault, if not OK and known
  // The rest is a node's. The wire failed: its communicator can't be used any more.
  bool wire_failed = false;
  // Digests of the bytes that the streams carried: HashChain from 0 over the digests of a stream's
  // sections. `out`: of the sources' bytes; `in`: of the bytes received. Empty if verification is
  // off.
  std::vector<PeerStream> streams{};
  uint32_t attempt = 0;  // StartRefit::attempt of the run that ended
  // The first step of an incoming stream that this node has not stored in this attempt or in an
  // attempt that this one continues; the program's rounds if the node has stored all. nullopt:
  // unknown, so that the program can only run again from its beginning.
  std::optional<int64_t> lacks{};
  // The links over which this node sent in this attempt, ascending peers. Empty: its wire does not
  // measure.
  std::vector<PeerWireUse> links{};
};

// An operator gives the running update up.
struct OperatorAbort {
  CallId call;
  std::string reason;
};
// CreateGroup(replace) starts a new incarnation. Refused while an update runs.
struct ReplaceGroup {
  CallId call;
  uint64_t incarnation = 0;
  std::string by{};  // the identity that asks for it
};
// SIGTERM came: no new update is opened; the running update ends or meets its deadline.
struct DrainEvent {};
// The update can't go on: one of its daemons was lost, or its data plane failed. Ignored if the
// update is over or is being given up already.
struct FailUpdate {
  UpdateId update;
  std::string reason;
  GiveUpClass kind = GiveUpClass::kPeerLost;
  Failure failure{};
};
// Every node was sent the update that is assembled, so that shadowed instances may be written:
// their ranks are not asked before.
struct UpdateAnnounced {
  UpdateId update;
};
// Whether the data plane between the update's nodes is up: while it is not, no transfer is started.
// Without this event it counts as up.
struct DataPlaneState {
  UpdateId update;
  bool up = false;
};
// The data plane of these nodes does not come up. Their instances are evicted from the update and
// take part in no later update until the last member of the node has left; members that attach
// after that are not kept out. If no instance would be left, the update is given up instead and no
// node is kept out.
struct KeepNodesOut {
  UpdateId update;
  std::map<NodeId, std::string> nodes;  // the reason, by node
  std::string reason;                   // the reason for giving the update up
  GiveUpClass kind = GiveUpClass::kTransfer;
  // Only this update goes on without the nodes, which take part in the next.
  bool for_now = false;
  Failure failure{};  // beside each of these reasons
};
// Time has passed: the group does whatever is due. Sent at NextDeadline() or later.
struct Tick {};
// The caller went away: its deadline passed or its connection broke. It gets its reply at once
// (CANCELLED), except that the answer to a bucket waits for the last read of its source. The event
// has no other effect: what the call began goes on.
struct CallGone {
  CallId call;
};

using GroupEvent =
    std::variant<TrainerAttached, EngineAttached, MemberLost, LayoutRegistered, BeginEvent,
                 ReadyEvent, ProcessedEvent, EngineFailed, LeaseSlotEvent, ReleaseSlotEvent,
                 BucketEvent, TransferDone, AckEvent, CommitEvent, RefitEvent, AbortEvent,
                 RollbackEvent, ReleasePreviousEvent, VerifyDone, RefitPlanned, CompareDone,
                 RefitDone, OperatorAbort, ReplaceGroup, DrainEvent, FailUpdate, UpdateAnnounced,
                 DataPlaneState, KeepNodesOut, Tick, CallGone>;

// ---- actions ----

// Answers a call. Each call that an event brought is answered exactly once, refused calls included.
// The answer to a PushBucket comes after the last read of its source, whatever its status (P6).
struct Reply {
  CallId call;
  absl::Status status;
  ReplyPayload payload;
};

// Compile a refit. That takes up to seconds, so it must not run on the caller's thread. Answered by
// RefitPlanned, even if no update waits for the program any more.
struct PlanRefit {
  ProgramId program;
  std::vector<RouteMember> sources;
  std::vector<RouteMember> destinations;
  RouteOptions options;
};
// The program that an update runs, and which nodes and members the numbers in its plan mean. The
// plan numbers destinations as UpdateRecord::destinations does.
struct ProgramUse {
  ProgramId program;
  std::shared_ptr<const RefitPlan> plan;
  std::vector<NodeId> nodes;      // by number of the plan
  std::vector<MemberId> sources;  // by number of the plan
  bool catch_up = false;          // the update is a catch-up: the sources are engine ranks
};

// The destinations of an update: in-place engine ranks. The group numbers all of them in the order
// of Add; each node numbers those of its own members, in the same order.
class Destinations {
 public:
  void Add(NodeId node, MemberId rank);
  size_t size() const { return ranks_.size(); }
  // `destination`: the group's number.
  MemberId operator[](size_t destination) const { return ranks_.at(destination); }
  NodeId NodeOf(uint32_t destination) const { return node_of_.at(destination); }
  // The group's number of each destination of the node, in the order of the node's numbers.
  const std::vector<uint32_t>& On(NodeId node) const;
  const std::map<NodeId, std::vector<uint32_t>>& by_node() const { return by_node_; }
  // `skip` is indexed by the group's numbers, the result by the node's.
  std::vector<bool> SkipOn(NodeId node, const std::vector<bool>& skip) const;

 private:
  std::map<NodeId, std::vector<uint32_t>> by_node_;
  std::vector<NodeId> node_of_;
  std::vector<MemberId> ranks_;
};

// A running update. The group and the coordinator share this one record: Group fills it in, and the
// machines of both read it.
struct UpdateRecord {
  UpdateRecord(UpdateId update, Version wanted) : id(update), version(wanted) {}
  UpdateRecord(const UpdateRecord&) = delete;
  UpdateRecord& operator=(const UpdateRecord&) = delete;

  UpdateId id;  // constant once the update is assembled
  const Version version;
  // When each phase began or must end, then what Begin asked for.
  TimePoint started;
  TimePoint data_began;   // when every rank had answered Ready
  TimePoint data_ended;   // when the last Commit came
  TimePoint staged_at;    // when all was verified, in an update with shadowed instances
  TimePoint flips_began;  // when shadowed instances were to flip
  TimePoint deadline;
  TimePoint ready_deadline;  // set from Preparing on; while staged: of the answers to SendStaged
  int64_t tensor_count = 0;  // 0: Begin named none
  int64_t total_bytes = 0;
  std::string note;
  Verification verification = Verification::kReadback;
  bool evict_late = false;
  bool hold = false;  // the next update is not staged before ReleasePreviousEvent
  // A rollback puts the content of this version into place again. No byte is moved, and neither
  // trainers nor the data plane take part. nullopt: the update is no rollback.
  std::optional<Version> content;
  // Set when the update is assembled (UpdateAssembled).
  std::optional<ProgramUse> use;  // nullopt: nothing but pushed buckets is moved
  Destinations destinations;
  // The index of the destinations' layouts. Null: some ranks of the update are on other daemons.
  std::shared_ptr<const DestinationIndex> index;
  // The coordinator sets these.
  std::set<NodeId> nodes;  // with a trainer or engine rank in the update, and not lost
  bool abandoned = false;  // the update is given up: nodes start nothing new

  // Whether its sources are engine ranks.
  bool from_engines() const { return use.has_value() && use->catch_up; }
  bool from_trainers() const { return !from_engines() && !content.has_value(); }
};

// The update is assembled: its participants are known. Comes before its SendPrepare actions.
struct UpdateAssembled {
  std::shared_ptr<UpdateRecord> update;
};
// The ranks of shadowed instances get no SendPrepare but, once the version is staged, SendFlip;
// before that SendStaged, if they asked for it.
struct SendPrepare {
  MemberId member;
  Version version;
  UpdateId update;
  Duration remaining{};
  int64_t tensor_count = 0;
};
// The version lies in the rank's backs, verified, and the rank serves on: it prepares what it can,
// and answers with ProcessedEvent.
struct SendStaged {
  MemberId member;
  Version version;
  UpdateId update;
  Duration remaining{};
  std::optional<Version> content{};  // as SendFlip::content
};
// The version lies in the rank's backs, verified: the rank makes them what it reads, and answers
// Ready.
struct SendFlip {
  MemberId member;
  Version version;
  UpdateId update;
  Duration remaining{};
  std::optional<Version> content{};  // of a rollback: the version that lies in the backs
};
// Hand one part to a loader engine rank.
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
  // The group's incarnation and owner. The member's own daemon sets them when it sends the event.
  uint64_t incarnation = 0;
  std::string owner{};
  // Engines: the ContentDigest of the rank's registered memory; 0: not all of it was read back.
  uint64_t digest = 0;
  // Set if the version is a rollback: the version whose content it has.
  std::optional<Version> content{};
};
struct SendAborted {
  MemberId member;
  Version version;
  std::string reason;
  bool dirty = false;
  Failure failure{};
};
struct SendDraining {
  MemberId member;
};
// The events of a member of another daemon that are sent to that daemon as they are; it performs
// them.
using MemberAction = std::variant<SendStaged, SendFlip, SendCommitted, SendAborted, SendDraining>;

// One part of a bucket, as its root gets it; the others get what concerns them.
struct PeerHeader {
  // HeaderDigest covers these: they are the same for every node.
  UpdateId update;
  Version version;
  PartSeq part;
  int64_t group_seq = 0;  // of its bucket
  NodeId root;            // of the trainer
  std::shared_ptr<const PartContent> content;
  // The slot that the trainer leased and packed, or else the slot to fill. Absent: neither the wire
  // nor a loader rank needs it.
  std::optional<SlotGrant> slot;
  bool leased = false;  // the trainer packed the part into the slot
  Verification verification = Verification::kOff;

  uint64_t digest = 0;   // HeaderDigest(header)
  bool is_root = false;  // this node's trainer has the bytes
  bool wired = false;    // the bytes cross the wire; else the part stays on this node
  // Root: pack into the slot, for the wire or for loader readers of its own.
  bool fill_slot = false;
  CommunicatorId communicator;  // wired
  WireSeq wire_seq;             // wired
  std::vector<uint32_t> ranks;  // wired: the communicator's ranks that take part, the root's first
  CallId bucket_call;           // root: the call that brought content->bucket
  MemberId trainer;             // root
  // Root: content->ranges[i] lies in the range bucket_ranges[i] of the trainer's bucket.
  std::vector<uint32_t> bucket_ranges;
  std::vector<bool> skip;         // by destination; true: evicted since
  std::vector<MemberId> readers;  // ranks that will be handed the slot
  // Root. The method to use. kAuto: the executor chooses. Without a slot the part goes by kDirect,
  // whatever this says.
  BroadcastMethod broadcast = BroadcastMethod::kDirect;
  // The part was announced before, over a communicator that was closed. The root sends the slot
  // that it packed then; the other nodes of this header lack the part.
  bool again = false;
  bool digests = false;  // root: the answer has digests, by range, whatever the verification
};
// A 64-bit digest over update, version, part, group_seq, root, names, dtypes, shapes, starts,
// counts, byte offsets, bytes, slot, grant, leased and verification, in this order. It is the same
// on every daemon (P5).
uint64_t HeaderDigest(const PeerHeader& header);

// Move one part of a bucket to every rank that wants elements of it. Answered by TransferDone. The
// header has what the group knows, in the group's numbers.
struct MovePart : PeerHeader {
  std::vector<uint32_t> touched;  // destinations that the part has elements for
};

// Before anything moves, compare what the update's program reads from several ranks: the digests of
// a share of the boxes that several ranks hold. Answered by CompareDone.
struct StartCompare {
  UpdateId update;
  ReplicaFraction part = {};  // the share of the replicas to compare
};
inline constexpr uint32_t kNoRank = UINT32_MAX;
// Run the update's program, which takes the place of one part in the order of collectives: the
// moves within a node at once, the rounds over the wire once PeerIssue of `part` comes. Answered by
// RefitDone.
struct StartRefit {
  UpdateId update;
  PartSeq part;
  // One or two pairs of slots, to send from and to receive into, in turn. Empty: no bytes cross
  // between daemons.
  std::vector<SlotGrant> slots;
  std::vector<bool> skip;  // by destination; true: evicted since
  // The coordinator fills in what follows.
  bool wired = false;             // at least one node has a round
  CommunicatorId communicator{};  // wired
  WireSeq wire_seq{};             // wired: of the first round; those of the other rounds follow
  // Wired: the communicator's rank by node of the plan; kNoRank: gone.
  std::vector<uint32_t> ranks{};
  // Grows each time the program runs again because a node was lost.
  uint32_t attempt = 0;
  // An attempt after the first goes on from this round: nodes keep what they have stored, and its
  // digests. nullopt: the program runs from its beginning.
  std::optional<int64_t> resume{};
};

// Read every written piece of every destination that is not skipped again, once every part that was
// announced before has ended. Answered by VerifyDone. Asked for only with kReadback.
struct VerifyUpdate {
  UpdateId update;
  std::vector<bool> skip;  // by destination; true: evicted since
};

// The member is gone and no transfer touches its memory any more: unmap its regions (P6, P8).
struct ReleaseMember {
  MemberId member;
};
// All ranks of that node were evicted or lost: none takes part in the running update any more.
struct NodeOutOfUpdate {
  UpdateId update;
  NodeId node;
};
// The update is being given up; transfers that run end before it does.
struct UpdateAbandoned {
  UpdateId update;
};
// The clean-up limit of an update that is being given up has passed while a transfer still runs.
// Daemons that have not said that their share has ended must not keep the others waiting (P4).
struct CleanUpOverdue {
  UpdateId update;
};
// The update ended: forget its digests.
struct UpdateEnded {
  UpdateId update;
  Version version;
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
  Failure failure;  // of an update that was aborted
  // How long each phase took; zero for a phase that was not reached.
  Duration prepare{};  // from Begin to every rank ready
  Duration data{};     // from there to the last Commit
  Duration verify{};   // from there to every digest compared
  Duration process{};  // from there to the flips, while ranks process the version
  Duration flip{};     // from there to the outcome
  Duration total{};    // from Begin to the outcome
  int64_t bytes = 0;   // tensor data handed over
  GiveUpClass give_up_class = GiveUpClass::kNone;
  std::vector<BroadcastTotals> pushed{};  // by method
  // The update was a catch-up: `version` is the group's, and no trainer took part.
  bool catch_up = false;
  // A catch-up that is not committed gave way: to an update, to a drain, or since its source
  // instances changed.
  bool gave_way = false;
  bool rollback = false;
  std::vector<InstanceOutcome> instances{};
  // Records that the group needs no more. Freeing those of a large model takes long, so the caller
  // that performs the action frees them where nothing waits.
  std::shared_ptr<const void> remains{};
};
// The member is not, or no longer, acceptable: end its stream with this status.
struct RefuseMember {
  MemberId member;
  absl::Status status;
};
// An engine rank attached. The caller sends Welcome before any later action for the rank.
struct WelcomeMember {
  MemberId member;
};
// The group has changed in a way that status or watch shows.
struct StateChanged {};
// One line for the log, written once where its cause is first detected.
struct LogLine {
  enum Level { kInfo, kWarning, kError } level = kInfo;
  std::string text;
  std::string evicted{};  // the instance whose eviction the line tells; empty: it tells of none
  Version version{};      // of the update from which the instance is evicted
  GiveUpClass cause = GiveUpClass::kNone;  // of the eviction
};

using GroupAction =
    std::variant<Reply, SendPrepare, SendStaged, SendFlip, SendPart, SendCommitted, SendAborted,
                 SendDraining, MovePart, VerifyUpdate, PlanRefit, StartCompare, StartRefit,
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
  DeliveryMode delivery = DeliveryMode::kInPlace;
  std::string_view state;
  int pid = 0;
  int64_t pieces = 0;
  uint64_t layout_digest = 0;
};
struct InstanceView {
  std::string name;
  std::string_view state;
  bool preparing = false;  // an update waits for its ranks to be ready
  std::optional<Version> version;
  int world_size = 0;
  int attached = 0;
  std::string reason;
  // The incarnation in which `version` was committed; 0: unknown, or no version.
  uint64_t origin = 0;
  Readiness readiness{};
  // Tells what catch-ups do for an instance that lacks the group's version and could catch up.
  // Empty for other instances.
  std::string catch_up;
};
struct UpdateView {
  UpdateId id;
  Version version;
  std::string_view state;
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
  Failure failure;  // of an update that is given up, or was
  int64_t bytes = 0;
  int64_t total_bytes = 0;
  int64_t tensors = 0;
  int64_t tensor_count = 0;
  int64_t buckets = 0;
  Duration elapsed{};
  Duration remaining{};
  std::vector<InstanceOutcome> instances;
  std::string note;
  bool catch_up = false;
  std::optional<Version> content;             // a rollback's
  std::vector<std::string> source_instances;  // a catch-up's: the instances that give
  LeftOut left_out;                           // so far
  std::string waits_for;                      // a running one's: who is waited for now
};
// How far the run of an update's program is, as the coordinator's daemon knows it.
struct RunProgress {
  int64_t bytes = 0;  // stored by nodes that have ended their shares, and by this daemon so far
  double rounds = 0;  // the share of the wire's rounds that this daemon has ended; 0: it has none
};
// Names the update that a view shows and its state, so that a change of either can be seen.
struct UpdateMark {
  UpdateId id;
  std::string_view state;  // points to static storage
  bool operator==(const UpdateMark&) const = default;
};
struct SlotView {
  SlotIndex slot;
  SlotState state;
  std::string holder;
};
// The version before the group's, which backs of shadowed instances hold.
struct PreviousView {
  Version version;
  std::string refused;               // why the group can't go back to it now; empty: it can
  bool held = false;                 // the next update waits
  std::optional<Duration> held_for;  // nullopt: until it is released
};
struct GroupView {
  std::string name;
  uint64_t incarnation = 0;
  std::string owner;  // the identity that owns it; empty: nobody does
  std::string_view state;
  GroupSpec spec;
  std::optional<Version> version;
  std::optional<Version> content;        // if `version` is a rollback
  std::optional<PreviousView> previous;  // nullopt: no instance holds it
  std::vector<MemberView> members;
  std::vector<InstanceView> instances;
  std::optional<UpdateView> update;    // of the trainers: the running update, or else the last
  std::optional<UpdateView> catch_up;  // the running one, or else the last
  std::vector<SlotView> slots;
  int64_t committed = 0;
  int64_t aborted = 0;
  uint32_t chain_daemons = 0;  // of the longest chain of the newest program; 0: no chain
};
struct PastUpdate {
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
  Failure failure{};
};

// Not thread-safe.
class Group {
 public:
  // `next_update` gives update ids that are unique in the daemon.
  // `owner_rule`: what the daemon's policy says of an identity as the group's owner.
  Group(std::string name, uint64_t incarnation, GroupSpec spec, GroupLimits limits,
        std::function<UpdateId()> next_update, Ownership::Rule owner_rule = nullptr);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Appends to `actions`.
  void Handle(const GroupEvent& event, TimePoint now, GroupActions* actions);

  // The time at which the next Tick is due; nullopt: nothing waits.
  std::optional<TimePoint> NextDeadline() const;

  const std::string& name() const;
  uint64_t incarnation() const;
  const GroupSpec& spec() const;
  bool has_members() const;
  bool has_trainers() const;    // attached
  bool update_running() const;  // catch-ups included
  // Whether a catch-up runs, and no update waits beside it.
  bool catch_up_running() const;
  // FAILED_PRECONDITION: the member takes loader delivery, or takes part in the running update.
  absl::Status CanRegisterLayout(MemberId member) const;
  // Whether the group takes that layout.
  absl::Status CheckLayout(const LayoutRegistered& e) const;
  std::optional<Version> version() const;
  // If that version is a rollback: the version whose content it has.
  std::optional<Version> content() const;
  // The identity that owns the group; empty: nobody does.
  const std::string& owner() const;
  // Whether a trainer rank is attached to that node.
  bool TrainsOn(NodeId node) const;
  // Whether the running update can't do without that node: a trainer rank is attached to it, or a
  // rank that gives in the running catch-up.
  bool SendsFrom(NodeId node) const;
  // Why the instances of that node take part in no update; empty: they take part.
  std::string KeptOut(NodeId node) const;
  GroupView View(TimePoint now, const RunProgress& run = {}) const;
  // The update that View would show, at the cost of that update's own instances.
  std::optional<UpdateView> ViewUpdate(TimePoint now, const RunProgress& run = {}) const;
  // The running update or catch-up, or else the one that ended last.
  std::optional<UpdateView> ViewLatest(TimePoint now, const RunProgress& run = {}) const;
  // Which update ViewLatest would show and its state; takes no time, so that callers can poll it.
  std::optional<UpdateMark> MarkLatest() const;
  // The standings of the instances that may have changed since the last call, those of instances
  // that are gone by now included.
  std::vector<InstanceStanding> TakeStandings();
  std::vector<InstanceStanding> Standings() const;  // of all instances; takes as long as View
  // Whether the member's lease lives: only then may copies begin that touch its memory.
  bool Attached(MemberId member) const;
  UpdateStatistics Statistics() const;
  PastUpdate Past(Version version) const;

  // Aborts the process if an invariant does not hold. Takes as long as the group is large.
  void CheckInvariants() const;

 private:
  friend struct GroupForTests;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_GROUP_H_
