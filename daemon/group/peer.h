// What daemons say to each other about one group, as values. proto/refitd/v1/peer.proto carries the
// same over the wire; daemon/link/ translates and checks.
//
// A joined daemon (a *node* of the group) sends reports, the coordinator sends commands, each over
// one ordered link. Member and call ids are those of the joined daemon in both directions; update,
// part, slot, grant and epoch ids are the coordinator's.
//
// One part of a bucket (promises P5 and P7): the coordinator sends its header to every node that
// takes part; each answers with the digest of what it read, and with the first tensor that differs
// from what it knows by itself (the root: the trainer's bucket; the others: their engines'
// layouts); when all agree, Issue goes out in part order, and nodes start their collectives in that
// order.
#ifndef REFITD_DAEMON_GROUP_PEER_H_
#define REFITD_DAEMON_GROUP_PEER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/group.h"
#include "transport/base/ids.h"
#include "transport/plan/refit_plan.h"
#include "transport/plan/route.h"
#include "transport/wire.h"

namespace refitd {

inline constexpr NodeId kCoordinatorNode{0};
inline constexpr int kMaxNodes = 1024;  // that a plan and its messages can number
// Of one group, the coordinator among them: all of them may have to be in one epoch of the wire.
// A join that would make more is refused.
inline constexpr int kMaxGroupDaemons = kMaxWireRanks;
static_assert(kMaxGroupDaemons <= kMaxNodes);
inline constexpr size_t kMaxDaemonIdBytes = 128;           // [A-Za-z0-9._-]
inline constexpr size_t kMaxEpochAddressBytes = 64 << 10;  // opaque, of a data plane's end

// ---- from a joined daemon to the coordinator ----

struct PeerAttach {
  MemberId member;
  std::variant<TrainerIdentity, EngineIdentity> identity;
};
struct PeerGone {
  MemberId member;
  std::string reason;
};
// Structure only: regions and offsets are the joined daemon's business. Answered by PeerReply, OK
// once updates that begin count on it.
struct PeerLayout {
  MemberId member;
  std::shared_ptr<const Layout> layout;
  CallId call{};
  // As received. OK: the structure may be a destination's; else why it may be a source's only.
  absl::Status destination{};
  // Of the layout, where it was found out as it came; not sent.
  std::optional<uint64_t> digest{};
};
struct PeerReady {
  MemberId member;
  UpdateId update;
};
struct PeerFailed {
  MemberId member;
  UpdateId update;
  std::string reason;
};
struct PeerAck {
  MemberId member;
  UpdateId update;
  PartSeq part;
};
// A trainer rank's call; the event's `call` and `member` are the joined daemon's.
struct PeerCall {
  std::variant<BeginEvent, LeaseSlotEvent, ReleaseSlotEvent, BucketEvent, CommitEvent, RefitEvent,
               AbortEvent>
      event;
};
struct PeerCallGone {
  CallId call;
};
struct PeerHeaderAck {
  UpdateId update;
  PartSeq part;
  uint64_t digest = 0;   // HeaderDigest of the header as it came
  std::string mismatch;  // names the first tensor that differs; empty: none
};
// This node's share of a part has ended: nothing of it is read, written, sent or received any more.
struct PeerPartDone {
  UpdateId update;
  PartSeq part;
  absl::Status status;
  bool wire_failed = false;            // the data plane failed: its epoch can't be used any more
  std::vector<int64_t> bytes_written;  // by destination of PeerPrepare
  int failed_destination = -1;         // of PeerPrepare, if not OK and known
  // By range of the header, unless verification is off. Root: of the trainer's bytes; others: of
  // the slot as it was received.
  std::vector<uint64_t> digests;
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // root: as TransferDone::broadcast
};
struct PeerVerified {
  UpdateId update;
  absl::Status status;
  std::vector<uint32_t> failed_destinations;  // of PeerPrepare
};
struct PeerEpochOpened {
  EpochId epoch;
  absl::Status status;
  std::string address;  // opaque: what the others need to reach this node
};
struct PeerEpochUp {
  EpochId epoch;
  absl::Status status;
};
struct PeerWireGranted {
  UpdateId update;
};
// Told when it can't be granted at once.
struct PeerWireWaits {
  UpdateId update;
  std::string holder;  // which group has it
};
// Another group waits for this daemon's wire.
struct PeerWireWanted {
  UpdateId update;
};
struct PeerPong {
  uint64_t number = 0;
};

// A stream of a program between this node and another, by its digest at this end; 0: there is none.
struct PeerStream {
  uint32_t peer = 0;  // of the plan
  uint64_t out = 0;
  uint64_t in = 0;
};
// This node's part of the update's program is compiled and bound to its members' memory.
struct PeerProgramBuilt {
  UpdateId update;
  absl::Status status;
  int64_t rounds = 0;
  std::vector<PeerStream> streams;  // of their structure (Stream::Digest); ascending peers
};
struct PeerCompared {
  UpdateId update;
  absl::Status status;
  std::vector<uint64_t> digests;  // by PeerProgram::replicas
};
// This node's share of the program has ended: nothing of it is read, written, sent or received any
// more.
struct PeerRunDone {
  UpdateId update;
  absl::Status status;
  bool wire_failed = false;            // the data plane failed: its epoch can't be used any more
  std::vector<int64_t> bytes_written;  // by destination of PeerPrepare
  int failed_destination = -1;         // of PeerPrepare, if not OK and known
  // Unless verification is off: HashChain from 0 over the digests of a stream's sections. Out: of
  // the sources' bytes; in: of what was received.
  std::vector<PeerStream> streams;
};

using PeerReport =
    std::variant<PeerAttach, PeerGone, PeerLayout, PeerReady, PeerFailed, PeerAck, PeerCall,
                 PeerCallGone, PeerHeaderAck, PeerPartDone, PeerVerified, PeerProgramBuilt,
                 PeerCompared, PeerRunDone, PeerEpochOpened, PeerEpochUp, PeerWireGranted,
                 PeerWireWaits, PeerWireWanted, PeerPong>;

// ---- from the coordinator to a joined daemon ----

struct PeerWelcome {
  MemberId member;
  std::optional<Version> group_version;
  int trainer_ranks = 0;  // of the group's spec as it is now; 0: not told
};
struct PeerRefuse {
  MemberId member;
  absl::Status status;
};
struct PeerReply {
  CallId call;
  absl::Status status;
  ReplyPayload payload;
};
// An update in which this node takes part is assembled.
struct PeerPrepare {
  UpdateId update;
  Version version;
  Duration remaining{};
  int64_t tensor_count = 0;
  Verification verification = Verification::kOff;
  std::vector<MemberId> engines;         // of this node: those that Prepare is sent to
  std::vector<MemberId> destinations;    // of this node: registered ranks, in the order of
                                         // bytes_written, skip and failed_destinations
  std::vector<uint64_t> layout_digests;  // of the destinations, as the coordinator knows them
  int trainer_ranks = 0;                 // of the group's spec as it is now; 0: not told
};
struct BucketHeader {
  UpdateId update;
  Version version;
  PartSeq part;
  int64_t group_seq = 0;  // of its bucket
  NodeId root;
  std::shared_ptr<const PartContent> content;
  std::optional<SlotGrant> slot;  // absent: no wire and no staged reader
  bool leased = false;            // the trainer packed it into the slot
  Verification verification = Verification::kOff;
};
struct PeerHeader {
  BucketHeader header;
  uint64_t digest = 0;          // HeaderDigest(header): the same for every node
  bool is_root = false;         // this node's trainer has the bytes
  bool wired = false;           // bytes go over the data plane; else the part is this node's alone
  bool fill_slot = false;       // root: pack into the slot (wire, or staged readers of its own)
  EpochId epoch;                // wired
  WireSeq wire_seq;             // wired
  std::vector<uint32_t> ranks;  // wired: ranks of the epoch that take part, the root's first
  CallId bucket_call;           // root: which bucket
  MemberId trainer;             // root
  std::vector<uint32_t> bucket_ranges;  // root: as StartTransfer::bucket_ranges
  std::vector<bool> skip;               // by destination: evicted since
  std::vector<MemberId> staged;         // of this node: ranks that will be handed the slot
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // root: as StartTransfer::broadcast
};
struct PeerIssue {
  UpdateId update;
  PartSeq part;
};
struct PeerSendPart {
  MemberId member;
  UpdateId update;
  PartSeq part;  // its header came before, with the member among `staged`
};
struct PeerCommitted {
  MemberId member;
  Version version;
};
struct PeerAborted {
  MemberId member;
  Version version;
  std::string reason;
  bool dirty = false;
};
struct PeerDraining {
  MemberId member;
};
// Read back all destinations, once every part that was announced before has ended.
struct PeerVerify {
  UpdateId update;
  std::vector<bool> skip;  // by destination: evicted since
};
// A rank of a plan, and who it is on this node.
struct PlanMember {
  uint32_t rank = 0;  // index into the plan's sources or destinations
  MemberId member;
};
// The program of an update; comes after its PeerPrepare, to some daemons at a time where it brings
// a plan. Answered by PeerProgramBuilt.
struct PeerProgram {
  UpdateId update;
  ProgramId program;
  uint32_t node = 0;        // this one's number in the plan
  int64_t chunk_bytes = 0;  // of a round, per peer and direction
  std::vector<PlanMember> sources;
  std::vector<PlanMember> destinations;  // all of PeerPrepare, in its order
  // What this node needs of the plan (PartOf), and the boxes whose digests PeerCompare asks for, by
  // plan numbers. Both null: as they came with the same program before.
  std::shared_ptr<const RoutePlan> plan;
  std::shared_ptr<const std::vector<ReplicaShare>> replicas;
  // Until WithItsPart: the plan that both are a part of, and the layouts of the node's members.
  // Where `plan` is set already (the coordinator's own node has it all), `replicas` alone is made.
  std::shared_ptr<const RefitPlan> whole;
  std::vector<std::shared_ptr<const Layout>> local_layouts;
};
// The command with this node's part of `whole`, if it has that. Goes through all of the plan: not
// for where a daemon's mutex is held.
PeerProgram WithItsPart(PeerProgram command);
// Digests of what several ranks hold, before anything is written. Answered by PeerCompared.
struct PeerCompare {
  UpdateId update;
  ReplicaPart part = {};  // digests of the others may come, too
};
inline constexpr uint32_t kNoRank = UINT32_MAX;
// Run the program: what stays on this node at once, rounds over the data plane from the PeerIssue
// of `part` on. Answered by PeerRunDone.
struct PeerRun {
  UpdateId update;
  PartSeq part;                  // its place among the update's parts
  bool wired = false;            // any node has a round
  EpochId epoch;                 // wired
  WireSeq wire_seq;              // wired: of the first round; the others follow
  std::vector<uint32_t> ranks;   // wired: of the epoch, by node of the plan; kNoRank: it is gone
  std::vector<SlotGrant> slots;  // wired: to send from, to receive into, in turn
  std::vector<bool> skip;        // by destination: evicted since
};
// The update is given up: parts that were not issued are not started any more; all that was
// announced is answered by PeerPartDone all the same.
struct PeerAbandon {
  UpdateId update;
};
struct PeerUpdateEnded {
  UpdateId update;
  Version version;
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
};
struct PeerEpochOpen {
  EpochId epoch;
  int rank = 0;
  int size = 0;
};
struct PeerEpochConnect {
  EpochId epoch;
  std::shared_ptr<const std::vector<std::string>> addresses;  // by rank; null: none
  Duration timeout{};
};
struct PeerEpochClose {
  EpochId epoch;
};
struct PeerWireLock {
  UpdateId update;
};
struct PeerWireUnlock {
  UpdateId update;
};
struct PeerPing {
  uint64_t number = 0;
};
// The group was replaced.
struct PeerIncarnation {
  uint64_t incarnation = 0;
};

using PeerCommand = std::variant<PeerWelcome, PeerRefuse, PeerReply, PeerPrepare, PeerHeader,
                                 PeerIssue, PeerSendPart, PeerCommitted, PeerAborted, PeerDraining,
                                 PeerVerify, PeerProgram, PeerCompare, PeerRun, PeerAbandon,
                                 PeerUpdateEnded, PeerEpochOpen, PeerEpochConnect, PeerEpochClose,
                                 PeerWireLock, PeerWireUnlock, PeerPing, PeerIncarnation>;

// Over update, version, part, group_seq, root, names, dtypes, shapes, starts, counts, byte offsets,
// bytes, slot, grant, leased and verification, in this order; 64 bits, the same on every daemon
// (P5).
uint64_t HeaderDigest(const BucketHeader& header);

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_PEER_H_
