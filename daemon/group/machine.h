// A group as one daemon runs it: a Coordinator on the daemon where the group lives, a Follower on
// each daemon that joined it. Events in, actions out.
//
// Pure, as Group is: no I/O, no gRPC, no threads, no clock of its own. The caller serialises
// events, carries out the actions in order and feeds their results back. The same event sequence
// gives the same actions; tests/sim depends on that.
//
//   Coordinator  Group (the decisions) + one link per joined daemon + the communicator + agreement
//   Follower     forwards its members' events, passes commands on to them
//   Worker       in both: this daemon's share of the data plane
#ifndef REFITD_DAEMON_GROUP_MACHINE_H_
#define REFITD_DAEMON_GROUP_MACHINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/group.h"
#include "daemon/group/peer.h"
#include "daemon/group/program.h"
#include "proto/peer_defaults.h"
#include "proto/protocol.h"

namespace refitd {

// ---- events beside those of Group ----

// Coordinator: a daemon's link is up. `node` is a new number.
struct NodeJoined {
  NodeId node;
  std::string daemon_id;
  std::string address;            // where its connection comes from; for status
  Protocol protocol = kProtocol;  // the version agreed with it
  std::string boot_id{};          // names the daemon's process
};
// Coordinator: a daemon's link is down. No report comes from it any more.
struct NodeLost {
  NodeId node;
  std::string reason;
};
struct ReportReceived {
  NodeId node;
  PeerReport report;
};

// Follower: the coordinator took this daemon in.
struct LinkUp {
  uint64_t incarnation = 0;
  GroupSpec spec;
  std::optional<Version> version;
  std::string coordinator_id;
  Protocol protocol = kProtocol;  // the version agreed with it
};
// Follower: joining failed, or the link is down. No command comes any more.
struct LinkLost {
  absl::Status status;
};
struct CommandReceived {
  PeerCommand command;
};
// Follower: the answer to MakeSlots. Not OK: the member is refused with this status.
struct SlotsMade {
  MemberId member;
  absl::Status status;
};

// The collective that StartWire or StartExchange asked for has ended: it touches no memory any
// more.
struct WireDone {
  CommunicatorId communicator;
  WireSeq seq;
  absl::Status status;
  // An exchange's: Wire::Uses of the communicator. Empty: the wire does not measure.
  std::vector<WireUse> uses{};
};
// Coordinator and follower: the answers of the daemon's wire lock (wire_lock.h).
struct WireGranted {};
struct WireWaits {
  std::string holder;
};
struct WireWanted {};

// Those from CommunicatorOpened on are for the daemon's worker. The group gets a TransferDone or
// VerifyDone of its own, which the coordinator makes when every daemon's share has ended.
using PeerEvent =
    std::variant<NodeJoined, NodeLost, ReportReceived, LinkUp, LinkLost, CommandReceived, SlotsMade,
                 CommunicatorOpened, CommunicatorUp, WireDone, WireGranted, WireWaits, WireWanted,
                 ProgramBuilt, MovesDone, TransferDone, VerifyDone>;
using MachineEvent = std::variant<GroupEvent, PeerEvent>;

// ---- actions beside those of Group ----

struct SendCommand {
  NodeId node;
  PeerCommand command;
};
// End the link of that daemon with this status. A NodeLost that follows is ignored.
struct DropNode {
  NodeId node;
  absl::Status status;
};
struct SendReport {
  PeerReport report;
};
// Follower: end the link. Nothing is sent or expected on it any more.
struct CloseLink {
  std::string reason;
};
// Follower: make the staging slots that an engine rank awaits (EngineAttached::awaits_slots); the
// group's spec is known by now. Answered by SlotsMade; only then the rank is reported to the
// coordinator.
struct MakeSlots {
  MemberId member;
};
// Connect the communicator to the ends at `addresses`. Answered by CommunicatorUp.
struct ConnectCommunicator {
  CommunicatorId communicator;
  std::vector<std::string> addresses;
  Duration timeout{};
};
// Run one collective on the slot; collectives start in the order of these actions. Answered by
// WireDone. If `ranks` is empty, every rank of the communicator takes part; else the first of
// `ranks`, the root, sends to each of the others.
struct StartWire {
  CommunicatorId communicator;
  WireSeq seq;
  SlotGrant slot;
  int64_t bytes = 0;
  std::vector<uint32_t> ranks;
  uint32_t rank = 0;  // this daemon's rank
  int size = 0;       // ranks of the communicator
  Duration timeout{};
};
// Run one round of a compiled refit, point to point; it starts in the order of these actions and of
// StartWire. Answered by WireDone.
struct StartExchange {
  struct Leg {
    uint32_t rank = 0;  // of the communicator
    int64_t bytes_out = 0;
    int64_t out_offset = 0;
    int64_t bytes_in = 0;
    int64_t in_offset = 0;
  };
  CommunicatorId communicator;
  WireSeq seq;
  SlotIndex out;
  SlotIndex in;
  std::vector<Leg> legs;
  Duration timeout{};
};
// Ask for the daemon's wire lock. Answered by WireGranted, or by WireWaits and later WireGranted.
struct AcquireWire {};
struct ReleaseWire {};

using PeerAction =
    std::variant<SendCommand, DropNode, SendReport, CloseLink, MakeSlots, OpenCommunicator,
                 ConnectCommunicator, CloseCommunicator, StartWire, StartExchange, BuildProgram,
                 StartMoves, StartTransfer, StartVerify, AcquireWire, ReleaseWire>;
using MachineAction = std::variant<GroupAction, PeerAction>;
using MachineActions = std::vector<MachineAction>;

// ---- what status shows ----

struct NodeView {
  NodeId node;
  std::string daemon_id;
  std::string address;
  std::string_view state;  // "self", "joining", "joined"
  int members = 0;
  Duration silent{};              // time since its last message
  Protocol protocol = kProtocol;  // the version spoken with it
  // Why its instances take part in no update; empty: they take part.
  std::string kept_out;
  // Why updates leave its instances to catch-ups; empty: they do not.
  std::string slow;
  // The daemon's share of the last run of a program over several daemons (coordinator only).
  struct Send {
    std::string to;  // daemon_id
    int64_t bytes = 0;
  };
  std::vector<Send> sends;  // the most bytes first, at most kMaxShownSends
  int64_t bytes_sent = 0;
  int64_t bytes_forwarded = 0;  // of bytes_sent
  int64_t bytes_received = 0;
  Duration data_took{};  // from the command to run until its report; 0: it had no part
};
// A group of a thousand daemons has a million pairs, too many for a status message.
inline constexpr size_t kMaxShownSends = 16;
struct MachineView {
  GroupView group;
  std::string coordinator_address;  // a follower's: the coordinator's address
  std::vector<NodeView> nodes;      // a coordinator's: itself first
  std::optional<CommunicatorId> communicator;
  std::string_view communicator_state;  // "opening", "connecting", "up"
};

// Limits on waits for other daemons (P4).
struct PeerLimits {
  Duration peer = kDefaultSilence;    // a daemon that is silent for so long is lost
  Duration wire = kDefaultWireLimit;  // one collective, connecting, or the wire lock
  // A node that holds the others back for longer is slow (slow_nodes.h); 0: no node is.
  Duration slow{};
};

// Not thread-safe.
class GroupMachine {
 public:
  virtual ~GroupMachine() = default;
  // Appends to `actions`. May take large parts out of the event. What is left may be large as well,
  // so the caller frees the event where nothing waits for that.
  virtual void Handle(MachineEvent& event, TimePoint now, MachineActions* actions) = 0;
  void Handle(MachineEvent&& event, TimePoint now, MachineActions* actions) {
    Handle(event, now, actions);
  }
  // The time at which the next Tick is due; nullopt: nothing waits.
  virtual std::optional<TimePoint> NextDeadline() const = 0;

  virtual const std::string& name() const = 0;
  virtual uint64_t incarnation() const = 0;
  // A follower that has not joined yet has an empty spec, with slots 0.
  virtual const GroupSpec& spec() const = 0;
  virtual bool has_members() const = 0;
  // Whether trainers are attached; for a follower: to this daemon.
  virtual bool has_trainers() const = 0;
  // The identity that owns the group, as far as this daemon knows; empty: nobody does.
  virtual const std::string& owner() const = 0;
  virtual bool update_running() const = 0;  // catch-ups included
  // Whether nothing but a catch-up runs. A follower does not tell it from an update.
  virtual bool catch_up_running() const { return false; }
  virtual bool is_coordinator() const = 0;
  virtual absl::Status CanRegisterLayout(MemberId member) const = 0;
  virtual std::optional<Version> version() const = 0;
  // If that version is a rollback: the version whose content it has.
  virtual std::optional<Version> content() const { return std::nullopt; }
  virtual MachineView View(TimePoint now) const = 0;
  // ViewUpdate gives View's update alone. ViewLatest gives the running update or catch-up, or else
  // the one that ended last, and MarkLatest a mark of its state. A follower does not know the
  // update and gives none of them.
  virtual std::optional<UpdateView> ViewUpdate(TimePoint /*now*/) const { return std::nullopt; }
  virtual std::optional<UpdateView> ViewLatest(TimePoint /*now*/) const { return std::nullopt; }
  virtual std::optional<UpdateMark> MarkLatest() const { return std::nullopt; }
  // A follower has no statistics, and knows only the past updates in which its daemon took part.
  virtual UpdateStatistics Statistics() const = 0;
  virtual PastUpdate Past(Version version) const = 0;
  // The readiness of the group's instances. Null: a follower to which the coordinator has not
  // sent it, or that has lost the coordinator.
  virtual const ReadinessBook* readiness() const = 0;

  // Aborts the process if an invariant does not hold. Takes as long as the group is large, so it is
  // for tests, simulation and fuzzing.
  virtual void CheckInvariants() const = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_MACHINE_H_
