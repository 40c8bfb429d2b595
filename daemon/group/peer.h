// The messages that daemons exchange about one group, as values. proto/refitd/v1/peer.proto has
// them as protobuf messages; daemon/link/ translates and checks those.
//
// A joined daemon (a *node* of the group) sends reports and the coordinator sends commands, both
// over one ordered link. In both directions, member and call ids are the joined daemon's; update,
// part, slot, grant and communicator ids are the coordinator's.
//
// A part of a bucket takes these steps (P5, P7). The coordinator sends its header to every node
// that takes part. Each node answers with the digest of the header that it read, and with the first
// tensor that differs from what the node itself knows: the root compares with the trainer's bucket,
// the others with their engines' layouts. When all agree, the coordinator sends Issue in part
// order, and the nodes start their collectives in that order.
//
// If a node is lost meanwhile, the communicator is closed, and each remaining node ends its share
// of every part that has to cross the wire (TransferDone). The coordinator then sends the header
// again, for another communicator, to the root and to those that lack the part, and the steps are
// taken once more.
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
#include "daemon/group/readiness.h"
#include "transport/base/ids.h"
#include "transport/plan/refit_plan.h"
#include "transport/plan/route.h"
#include "transport/wire.h"

namespace refitd {

inline constexpr NodeId kCoordinatorNode{0};
inline constexpr int kMaxNodes = 1024;  // how many a plan and its messages can number
// Daemons of one group, the coordinator included, since one communicator of the wire may need all
// of them. A join beyond the limit is refused.
inline constexpr int kMaxGroupDaemons = kMaxWireRanks;
static_assert(kMaxGroupDaemons <= kMaxNodes);
inline constexpr size_t kMaxDaemonIdBytes = 128;  // [A-Za-z0-9._-]
inline constexpr size_t kMaxCommunicatorAddressBytes =
    64 << 10;  // of the opaque address of a wire's end

// ---- communicators, both as messages and inside of a daemon ----

// Open this daemon's end of a communicator; answered by CommunicatorOpened.
struct OpenCommunicator {
  CommunicatorId communicator;
  int rank = 0;
  int size = 0;
};
// Close the communicator. Its running operations end soon, each with WireDone.
struct CloseCommunicator {
  CommunicatorId communicator;
};
struct CommunicatorOpened {
  CommunicatorId communicator;
  absl::Status status;
  std::string address;  // opaque: how other nodes reach this node
};
struct CommunicatorUp {
  CommunicatorId communicator;
  absl::Status status;
};

// ---- from a joined daemon to the coordinator ----

struct PeerAttach {
  MemberId member;
  std::variant<TrainerIdentity, EngineIdentity> identity;
  // Set on receipt. Not OK: why the coordinator has no room for the manifest, which is left out.
  absl::Status room{};
};
// A member's layout, structure only: regions and offsets stay with the joined daemon. Answered by
// Reply, which is OK once updates that begin later count the member as registered.
struct PeerLayout {
  MemberId member;
  std::shared_ptr<const Layout> layout;
  CallId call{};
  // Set on receipt. OK: a destination may have this layout; otherwise why only a source may have
  // it.
  absl::Status destination{};
  // The layout's digest, if it was computed on receipt; not sent.
  std::optional<uint64_t> digest{};
  uint64_t content = 0;  // LayoutRegistered::content
  // Set on receipt. Not OK: why the coordinator has no room for the layout, which is null.
  absl::Status room{};
  bool shadowed = false;      // LayoutRegistered::shadowed
  bool backs_differ = false;  // LayoutRegistered::backs_differ
};
// A trainer rank's call. The event's `call` and `member` are the joined daemon's.
struct PeerCall {
  TrainerCall event;
};
struct PeerHeaderAck {
  UpdateId update;
  PartSeq part;
  uint64_t digest = 0;   // HeaderDigest of the header that came
  std::string mismatch;  // how the first tensor differs; empty: none does
  std::string mismatch_tensor{};
};
struct PeerWireGranted {
  UpdateId update;
};
// Sent if the wire lock can't be granted at once.
struct PeerWireWaits {
  UpdateId update;
  std::string holder;  // the group that has the lock
};
// Another group waits for this daemon's wire lock.
struct PeerWireWanted {
  UpdateId update;
};
struct PeerPong {
  uint64_t number = 0;
};

// This node's part of the update's program is compiled and bound to its members' memory.
struct PeerProgramBuilt {
  UpdateId update;
  absl::Status status;
  int64_t rounds = 0;
  // Digests of the streams' structure (Stream::Digest); ascending peers.
  std::vector<PeerStream> streams;
};
// Some reports are events of Group: those of the joined daemon's members, and the ends of
// what it did, whose destinations are numbered as in PeerPrepare.
using PeerReport =
    std::variant<PeerAttach, MemberLost, PeerLayout, ReadyEvent, ProcessedEvent, EngineFailed,
                 AckEvent, PeerCall, CallGone, PeerHeaderAck, TransferDone, VerifyDone,
                 PeerProgramBuilt, CompareDone, RefitDone, CommunicatorOpened, CommunicatorUp,
                 PeerWireGranted, PeerWireWaits, PeerWireWanted, PeerPong>;

// ---- from the coordinator to a joined daemon ----

struct PeerWelcome {
  MemberId member;
  std::optional<Version> group_version;
  int trainer_ranks = 1;             // of the group's spec as it is now
  std::optional<Version> content{};  // if group_version is a rollback: whose content it has
};
// An update in which this node takes part is assembled.
struct PeerPrepare {
  UpdateId update;
  Version version;
  Duration remaining{};
  int64_t tensor_count = 0;
  Verification verification = Verification::kOff;
  std::vector<MemberId> engines;  // this node's engines that get Prepare
  // This node's in-place ranks, in the order of bytes_written, skip and failed_destinations.
  std::vector<MemberId> destinations;
  std::vector<uint64_t> layout_digests;  // of `destinations`, as the coordinator knows them
  int trainer_ranks = 1;                 // of the group's spec as it is now
  // Set on receipt, so that it is made without the daemon's mutex; not sent. Null, or of other
  // layouts than the destinations have when the command is handled: the worker makes its own.
  std::shared_ptr<const DestinationIndex> index{};
};
struct PeerIssue {
  UpdateId update;
  PartSeq part;
};
// Maps a rank of a plan to the member of this node that has the rank.
struct PlanMember {
  uint32_t rank = 0;  // index into the plan's sources or destinations
  MemberId member;
};
// The program of an update, sent after the update's PeerPrepare. If programs carry plans, the
// coordinator sends them to a limited number of daemons at a time. Answered by PeerProgramBuilt.
struct PeerProgram {
  UpdateId update;
  ProgramId program;
  uint32_t node = 0;        // this node's number in the plan
  int64_t chunk_bytes = 0;  // of one round, per peer and direction
  std::vector<PlanMember> sources;
  std::vector<PlanMember> destinations;  // those of PeerPrepare, in the same order
  // The part of the plan that this node needs (ShareOfNode), and the boxes whose digests
  // StartCompare asks for, by plan numbers. Both null: the node keeps those that came with the same
  // program before.
  std::shared_ptr<const RoutePlan> plan;
  std::shared_ptr<const std::vector<ReplicaShare>> replicas;
  // Set until WithItsPart: the plan from which `plan` and `replicas` are made, and the layouts of
  // the node's members. The coordinator's own node has the whole plan as `plan` already; for it
  // only `replicas` is made.
  std::shared_ptr<const RefitPlan> whole;
  std::vector<std::shared_ptr<const Layout>> local_layouts;
};
// Returns the command with this node's part of `whole`, or unchanged if it has no `whole`. Goes
// through the whole plan, so the caller must not hold a daemon's mutex.
PeerProgram WithItsPart(PeerProgram command);
// The update is given up: the node starts no part that was not issued, and still answers every
// announced part by TransferDone.
struct PeerAbandon {
  UpdateId update;
};
struct PeerUpdateEnded {
  UpdateId update;
  Version version;
  Outcome outcome = Outcome::kUnknown;
  std::string reason;
  bool catch_up = false;  // not an update of the trainers: no answer to GetUpdate
  Failure failure{};
};
struct PeerCommunicatorConnect {
  CommunicatorId communicator;
  std::shared_ptr<const std::vector<std::string>> addresses;  // by rank; null: none
  Duration timeout{};
  // The coordinator's rank, an index of `addresses`; nullopt: it has none, or does not say it.
  std::optional<uint32_t> coordinator_rank{};
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
// The group was replaced by a new incarnation.
struct PeerIncarnation {
  uint64_t incarnation = 0;
};

// Who owns the group now.
struct PeerOwner {
  std::string owner;  // empty: nobody
};

// PeerReadiness (readiness.h) is a command as well.
// The actions of Group among the commands are for members and calls of the joined daemon, or what
// the group wants done, in the node's numbers. Of
// SendPart, the member and the part are sent: the part's header came before, with the member among
// `readers`.
using PeerCommand =
    std::variant<PeerWelcome, RefuseMember, Reply, PeerPrepare, PeerHeader, PeerIssue, SendPart,
                 MemberAction, VerifyUpdate, PeerProgram, StartCompare, StartRefit, PeerAbandon,
                 PeerUpdateEnded, OpenCommunicator, PeerCommunicatorConnect, CloseCommunicator,
                 PeerWireLock, PeerWireUnlock, PeerPing, PeerIncarnation, PeerReadiness, PeerOwner>;

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_PEER_H_
