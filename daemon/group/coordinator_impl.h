// The inside of Coordinator. Only coordinator.cc and coordinator_program.cc include it.
#ifndef REFITD_DAEMON_GROUP_COORDINATOR_IMPL_H_
#define REFITD_DAEMON_GROUP_COORDINATOR_IMPL_H_

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/communicator_search.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/slow_nodes.h"
#include "daemon/group/stream_ends.h"
#include "daemon/group/worker.h"
#include "transport/base/status.h"

namespace refitd {
namespace coordinator {

struct Node {
  NodeId id;
  std::string daemon_id;
  std::string boot_id;  // names its process
  std::string address;
  Protocol protocol = kProtocol;
  TimePoint heard;
  TimePoint next_ping;
  uint64_t pings = 0;
  bool has_readiness = false;            // the node knows everything of Impl::book
  std::string sent_owner;                // what the daemon was told last of who owns the group
  std::map<MemberId, MemberId> members;  // the node's id of a member -> the coordinator's
};
struct KnownLayout {
  std::shared_ptr<const Layout> layout;
  uint64_t digest = 0;
};
struct RemoteMember {
  NodeId node;
  MemberId id;  // on its daemon
  bool engine = false;
  bool caught_up = false;  // an engine rank to which catch-ups bring what it lacks
};
struct RemoteCall {
  NodeId node;
  CallId id;  // on its daemon
};

// A part whose bytes cross between daemons, or whose members are not all on this daemon.
struct PartJob {
  PeerHeader header;  // as the root gets it
  NodeId root;
  std::set<NodeId> sinks;
  std::set<NodeId> unacknowledged;
  std::set<NodeId> running;  // nodes that have not reported its end
  bool issued = false;
  // A node was lost and the communicator closed while the part was under way. The part is sent
  // again to the sinks that lack it when all remaining nodes have ended their shares.
  bool cut = false;
  std::set<NodeId> lack;                 // sinks whose share ended without the part
  std::map<NodeId, PeerHeader> headers;  // as the nodes got them; of a part on the wire only
  absl::Status status;
  int failed_destination = -1;  // a destination's number in the group
  std::vector<int64_t> bytes_written;
  std::map<NodeId, std::vector<uint64_t>> digests;
  BroadcastMethod broadcast = BroadcastMethod::kDirect;  // as the root reported it
};
// The update's program, as the nodes build and run it.
struct ProgramJob {
  ProgramUse use;
  std::map<NodeId, PeerProgram> commands;  // of the nodes with a part in it
  std::set<NodeId> building;               // nodes that have not reported it built
  // The nodes of `building` that are sent the plan when other nodes have built their parts.
  std::deque<NodeId> without_plan;
  // The nodes of `building` that were sent the plan in this update.
  std::set<NodeId> under_way;
  std::map<NodeId, PeerProgramBuilt> built;
  StreamEnds built_ends;  // by the structure of their streams
  bool agreed = false;
  bool compare = false;  // StartCompare came
  ReplicaFraction compare_part;
  bool compare_sent = false;
  std::set<NodeId> comparing;
  absl::Status compared;
  std::vector<std::vector<uint64_t>> digests;  // by node of the plan
  std::optional<StartRefit> run;
  std::optional<VerifyUpdate> readback;  // came before the program was sent
  uint32_t attempt = 0;
  // A node was lost while the program ran. The other nodes run the program again when all of them
  // have ended this attempt and its read-back.
  bool again = false;
  // The first round that each node lacks, as it said at the end of this attempt; nullopt: unknown.
  std::map<NodeId, std::optional<int64_t>> lacks;
  std::optional<int64_t> resume;  // the round from which this attempt goes on
  bool complete = false;          // the group was told how the program ended
  bool sent = false;
  bool wired = false;
  bool issued = false;
  std::set<NodeId> running;
  TimePoint started;                // when the nodes were told to run
  std::map<NodeId, Duration> took;  // of the nodes that have ended their share
  absl::Status status;
  int failed_destination = -1;
  std::vector<int64_t> bytes_written;
  StreamEnds run_ends;               // by what their streams carried
  std::vector<SlowNodes::Use> uses;  // of this attempt
};
// The bytes that each node moved in the last refit that succeeded on several nodes; status shows
// them.
struct LastRun {
  ProgramId program;
  struct Share {
    std::vector<std::pair<NodeId, int64_t>> sends;  // the most bytes first, at most kMaxShownSends
    int64_t sent = 0;
    int64_t forwarded = 0;
    int64_t received = 0;
    Duration took{};
  };
  std::map<NodeId, Share> shares;
};
// The failure of a collective while it is open which node is to blame. In a chain, all nodes behind
// the one that stopped time out at about the same moment and may be heard in any order.
struct WireVerdict {
  struct Word {
    NodeId node;
    std::vector<NodeId> named;  // whom the node waited for
    absl::Status status;
  };
  std::vector<Word> words;  // not empty
  std::string what;         // what was on the wire
  TimePoint due;
};
// The update that runs, as it is spread over nodes.
struct Spread {
  UpdateId update;
  Version version;
  Verification verification = Verification::kOff;
  std::set<NodeId> nodes;  // nodes still in the update
  // Nodes that were told of the update and have no member left in it: they hear only how it ends.
  std::set<NodeId> left;
  std::map<NodeId, PeerPrepare> prepares;
  std::map<NodeId, std::vector<uint32_t>> destinations;  // the node's index -> the group's
  std::vector<NodeId> node_of;                           // by destination
  TimePoint deadline;                                    // of the update
  bool catch_up = false;                                 // the update's sources are engine ranks
  bool data_plane_up = true;                             // what the group was told last
  std::set<NodeId> unreachable;  // nodes that the next communicator leaves out
  bool announced = false;
  bool data_began = false;
  bool pushed = false;  // a part was started
  bool abandoned = false;
  std::map<PartSeq, PartJob> parts;
  std::optional<ProgramJob> program;
  std::deque<PartSeq> to_issue;  // wired, in order; the program comes last
  std::optional<WireVerdict> wire_verdict;
  // A node whose wire failed while its link holds, and why it is dropped.
  std::optional<std::pair<NodeId, std::string>> to_drop;
  bool verify_owed = false;  // the group waits for the read-back
  std::set<NodeId> verifying;
  std::optional<VerifyUpdate> verify;  // the request that the nodes were sent
  absl::Status verify_status;
  std::vector<uint32_t> verify_failed;
  std::vector<uint64_t> verify_content;
  // The wire lock of each node, taken in daemon-id order.
  std::vector<NodeId> lock_order;
  size_t locks_held = 0;
  std::string lock_holder;  // which group has the lock that is waited for
  TimePoint lock_deadline;
  bool yielding = false;    // another group wants a wire lock
  bool turn_taken = false;  // a part was issued since the locks were asked for
};
// The reason why a communicator did not come up.
struct CommunicatorFailure {
  std::string reason;
  GiveUpClass kind = GiveUpClass::kTransfer;
  Failure failure;
};
struct Communicator {
  // A rank for which the communicator did not come up.
  struct Failure {
    std::vector<NodeId> named;  // whom it waited for
    absl::Status status;
  };
  CommunicatorId id;
  std::vector<NodeId> ranks;
  std::map<NodeId, std::string> addresses;
  std::set<NodeId> up;
  std::map<NodeId, Failure> failed;
  NodeId first_failed;
  bool has(NodeId node) const { return std::find(ranks.begin(), ranks.end(), node) != ranks.end(); }
  bool connecting = false;
  bool ready = false;
  Duration limit{};    // for opening, and again for connecting
  TimePoint deadline;  // when the communicator must be open, or up
  TimePoint verdict;   // when its failure is judged; not after `deadline`
  uint64_t next_seq = 0;

  // `ranks` is ascending.
  std::optional<uint32_t> RankOf(NodeId node) const {
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), node);
    if (at == ranks.end() || *at != node) return std::nullopt;
    return static_cast<uint32_t>(at - ranks.begin());
  }
};

}  // namespace coordinator

struct Coordinator::Impl {
  using Node = coordinator::Node;
  using KnownLayout = coordinator::KnownLayout;
  using RemoteMember = coordinator::RemoteMember;
  using RemoteCall = coordinator::RemoteCall;
  using PartJob = coordinator::PartJob;
  using ProgramJob = coordinator::ProgramJob;
  using Spread = coordinator::Spread;
  using Communicator = coordinator::Communicator;

  explicit Impl(CoordinatorOptions coordinator_options);

  // ---- events ----
  void Handle(MachineEvent& event);
  void On(GroupEvent& event);
  void On(const NodeJoined& e);
  void On(const NodeLost& e) { LoseNode(e.node, e.reason); }
  void On(ReportReceived& e);
  void On(const CommunicatorOpened& e) { worker.Handle(e, Out()); }
  void On(const CommunicatorUp& e) { worker.Handle(e, Out()); }
  void On(const WireDone& e) { worker.Handle(e, now, Out()); }
  void On(const WireGranted& e) { worker.Handle(e, Out()); }
  void On(const WireWaits& e) { worker.Handle(e, Out()); }
  void On(const WireWanted& e) { worker.Handle(e, Out()); }
  void On(const ProgramBuilt& e) { worker.Handle(e, now, Out()); }
  void On(const MovesDone& e) { worker.Handle(e, now, Out()); }
  void On(const LinkUp&) {}
  void On(const LinkLost&) {}
  void On(const CommandReceived&) {}
  void On(const SlotsMade&) {}
  void Tick();
  void FindNodesDue();

  // ---- reports of a node (also of the coordinator's own worker) ----
  void Report(NodeId node, PeerReport& report);
  void On(Node* node, const PeerAttach& r);
  void On(Node* node, const MemberLost& r);
  void On(Node* node, const PeerLayout& r);
  std::shared_ptr<const Layout> Shared(const std::shared_ptr<const Layout>& layout,
                                       uint64_t digest);
  void On(Node* node, PeerCall& r);
  void On(Node* node, const CallGone& r);
  template <typename MemberEvent>
  void FeedOf(Node* node, MemberEvent event);
  void HeaderAcknowledged(NodeId node, const PeerHeaderAck& r);
  void PartEnded(NodeId node, const PeerPartDone& r);
  void Verified(NodeId node, const VerifyDone& r);
  void Opened(NodeId node, const CommunicatorOpened& r);
  void CameUp(NodeId node, const CommunicatorUp& r);
  void LockGranted(NodeId node, const PeerWireGranted& r);

  // Ends the node's link over a report that no correct daemon sends, and changes nothing else.
  void RefuseReport(NodeId node, const std::string& what);

  // ---- the group's actions ----
  void Feed(GroupEvent event);
  void Route(GroupAction action);
  bool RouteToNode(GroupAction* action);
  bool ReplyToNode(Reply* reply);
  bool RefuseOnNode(RefuseMember* refusal);
  void Assemble(const UpdateAssembled& a);
  void Announce();
  void StartPart(const MovePart& a);
  using ReadersByNode = std::map<NodeId, std::vector<MemberId>>;
  PartJob MakePartJob(const MovePart& a, ReadersByNode* readers) const;
  PeerHeader HeaderFor(NodeId node, const MovePart& a, const PartJob& part,
                       std::vector<MemberId> readers) const;
  void StartReadback(const VerifyUpdate& a);

  // ---- the program (coordinator_program.cc) ----
  void AnnounceProgram();
  void Built(NodeId node, const PeerProgramBuilt& r);
  void AgreeIfBuilt();
  void CompareIfAgreed();
  void Compared(NodeId node, const PeerCompared& r);
  void CompleteCompareIfDone();
  void RunIfAgreed();
  void RunEnded(NodeId node, const PeerRunDone& r);
  void NoteRun(const ProgramJob& job);
  void ShowRun(NodeId id, NodeView* view) const;
  void CompleteRunIfDone();
  void RunAgainIfEnded();
  // Whether the program was sent and the group waits for its end.
  bool ProgramRuns() const;
  // The round from which all remaining nodes can go on; nullopt: they run from the beginning.
  std::optional<int64_t> FirstLacked() const;
  void SendPlans();
  void AttachPlan(NodeId node, PeerProgram* command) const;
  void AbandonProgram();
  void LoseNodeInProgram(NodeId node, const absl::Status& why);
  void Abandon();
  void End(const UpdateEnded& a);

  // ---- parts ----
  template <typename Done, typename Job>
  void AddBytes(NodeId node, const Done& r, Job* job) const {
    const auto destinations = spread->destinations.find(node);
    if (destinations == spread->destinations.end()) return;
    const std::vector<uint32_t>& index = destinations->second;
    for (size_t d = 0; d < std::min(index.size(), r.bytes_written.size()); ++d) {
      job->bytes_written[index[d]] += r.bytes_written[d];
    }
  }
  // Adds a node's result to the results that the other nodes gave for the same part or program.
  template <typename Done, typename Job>
  void AddResult(NodeId node, const Done& r, Job* job) const {
    AddBytes(node, r, job);
    const auto destinations = spread->destinations.find(node);
    if (destinations != spread->destinations.end()) {
      const std::vector<uint32_t>& index = destinations->second;
      const auto failed = static_cast<size_t>(std::max(r.failed_destination, 0));
      if (r.failed_destination >= 0 && failed < index.size() && job->status.ok()) {
        job->failed_destination = static_cast<int>(index[failed]);
      }
    }
    if (!r.status.ok() && job->status.ok()) job->status = Told(node, r.status, r.wire_failed);
  }
  // The status of a node's failed result, with the node's name. Ranks of the wire that it names
  // become daemons; a failure that names nobody is the node's own.
  absl::Status Told(NodeId node, const absl::Status& status, bool of_wire) const;
  // Takes note that a node has ended its share of a part or of the program, while other nodes may
  // still run theirs. A failure fails the update: at once, or, if the wire failed, when the other
  // nodes had time to say whom they waited for.
  template <typename Done, typename Job>
  void HearEnd(NodeId node, const Done& r, const std::string& what, bool wired, Job* job) {
    AddResult(node, r, job);
    const bool failed = !r.status.ok();
    if (failed && r.wire_failed && !spread->abandoned) {
      HearOfWire(node, what, r.status);
      if (job->running.empty() && !FindNodeToDrop()) job->status = Judge();
      return;
    }
    if (failed && !job->running.empty()) FailForOthers(what, absl::Status(job->status));
    if (wired && failed) CloseCommunicatorEverywhere();
    if (job->running.empty() && spread.has_value() && spread->wire_verdict.has_value() &&
        !FindNodeToDrop()) {
      job->status = Judge();
    }
  }
  void HearOfWire(NodeId node, const std::string& what, const absl::Status& status);
  // The node whose wire failed, by what the others said of it; nullopt: nobody was named, or the
  // update can't go on without that node.
  std::optional<NodeId> SuspectOfWire() const;
  // Whether the update goes on without the node whose wire failed. Then that node is to be dropped
  // (DropSuspect) once the event that told of it is handled.
  bool FindNodeToDrop();
  void DropSuspect();
  // Closes the communicator and fails the update. Returns the status of a node that waited only for
  // nodes that reported nothing themselves, else the status that came first.
  absl::Status Judge();
  void FailForOthers(const std::string& what, const absl::Status& status);
  void CompleteIfDone(PartSeq seq);
  // Takes note that the program and the parts that are on the wire, or wait for it, have to go on
  // over another communicator. False: there are none.
  bool CutShort();
  void SendCutPartsAgain();
  void SendAgain(PartJob* part);
  void AbandonCutParts();
  void LoseNodeInParts(NodeId node, const absl::Status& why);
  bool AnyCut() const;
  bool AnyWired() const;
  // Gives the part its place on the wire of the current communicator.
  void PlaceOnWire(const std::set<NodeId>& receivers, PartJob* part);
  absl::Status CompareDigests(const PartJob& part) const;
  void CompleteVerifyIfDone();
  void IssueParts();
  bool WaitsForAgreement() const;
  bool WireInFlight() const;
  void Fail(const std::string& reason, GiveUpClass kind, const Failure& failure = {});

  // ---- readiness ----
  void SendOwner();
  void SendReadiness();
  void SendJoined();

  // ---- the data plane ----
  // How long one attempt to bring a communicator up may take.
  Duration AttemptLimit() const;
  void ReportDataPlane(bool up);
  // The nodes to blame if the communicator does not come up. `over`: its time has passed. Empty: no
  // node can be left out for the failure. nullopt: no failure names a node.
  std::optional<std::set<NodeId>> Unreachable(bool over) const;
  // Those nodes of `from` that the group can do without.
  template <typename Nodes>
  std::set<NodeId> Candidates(const Nodes& from) const {
    std::set<NodeId> candidates;
    for (const NodeId node : from) {
      if (!group.SendsFrom(node)) candidates.insert(node);
    }
    return candidates;
  }
  // Nodes that share an instance, directly or through others, are left out together, so the search
  // knows such nodes by one name, that of the first.
  struct Sharing {
    std::map<NodeId, NodeId> first;             // of all nodes that share an instance
    std::vector<std::set<NodeId>> by_instance;  // those in the update that is assembled
    std::set<NodeId> FirstOf(const std::set<NodeId>& nodes) const;
    std::set<NodeId> AllOf(const std::set<NodeId>& firsts) const;
    bool LeavesInstance(const std::set<NodeId>& out) const;
  };
  Sharing HowNodesShare() const;
  void LeaveOutSuspects();
  void LeaveOutSlow();
  // Whether catch-ups bring each version to all engine ranks of the node. False for the
  // coordinator's own node.
  bool CatchUpsReach(NodeId node) const;
  void NoteLinks(NodeId node, const PeerRunDone& r);
  // Called when a program has ended, before the group hears of it.
  void JudgeSlow(const ProgramJob& job);
  std::string WhySlow(NodeId node) const;
  coordinator::CommunicatorFailure HowCommunicatorFailed(const std::set<NodeId>& suspects) const;
  // Called when the communicator failed and no node is named: leaves out some of the nodes, for a
  // try.
  void SearchOn();
  void LeaveOutForTry(const std::set<NodeId>& out);
  // Called when the communicator is up. If the search knows by now which nodes are broken, since
  // the communicator came up without them, keeps them out until they attach anew.
  void JudgeSearch();
  void KeepOut(const std::set<NodeId>& suspects, const coordinator::CommunicatorFailure& how);
  std::vector<NodeId> StillAwaited() const;
  void JudgeCommunicator();
  // Goes on without the suspects, or gives the update up.
  void CommunicatorFailed(const std::set<NodeId>& suspects,
                          const coordinator::CommunicatorFailure& how);
  void EnsureCommunicator();
  void CloseCommunicatorEverywhere();
  void AskLocks();
  void AskNextLock();
  void GiveLocksBack();
  void YieldIfQuiet();

  // ---- nodes ----
  void Send(NodeId node, PeerCommand command);
  void LoseNode(NodeId node, const std::string& reason);
  void LoseInDataPhase(NodeId node, const std::string& reason, const Failure& loss);
  // Whether an update whose data phase has begun can do without a node that is lost.
  bool CanGoOnWithout(NodeId node) const;
  // Whether the update may still send something over the wire.
  bool NeedsWire() const;
  // Called when the node has no member left in the update. If no byte has moved, the update goes on
  // without the node.
  void LeaveOut(NodeId node);
  // Called after the clean-up limit: nodes that have not ended their share of the update count as
  // lost.
  void DropOwing();
  // Stops waiting for the node's wire lock.
  void DropLock(NodeId node);
  std::string Name(NodeId node) const;
  // Whether that daemon's link agreed to `version` of the protocol or a later one, so that it
  // understands what the version added. The coordinator itself understands every version; a daemon
  // that is gone understands none.
  bool Speaks(NodeId node, Protocol version) const;
  NodeId NodeOf(MemberId member) const {
    const auto it = remotes.find(member);
    return it == remotes.end() ? kCoordinatorNode : it->second.node;
  }
  // A failure that a node was lost, which may pass.
  Failure LossOf(NodeId node) const;
  // The daemon as failures name it.
  Suspect SuspectOf(NodeId node) const;
  template <typename Nodes>
  Failure Suspecting(const Nodes& suspects) const {
    Failure failure;
    for (const NodeId node : suspects) failure.Add(SuspectOf(node));
    return failure;
  }
  // The nodes whose ranks of the communicator the wire's failure names.
  std::vector<NodeId> NodesNamed(const absl::Status& status) const;
  // What is known of a failure that a node reported: ranks of the wire become daemons; a failure
  // that names nobody is the node's own.
  Failure FailureOfNode(NodeId node, const absl::Status& status) const;
  std::string NamesOfRanks(const absl::Status& status) const;
  Worker::Output Out() { return {actions, &own_reports}; }
  template <typename Action>
  void Do(Action action) {
    actions->push_back(std::move(action));
  }

  // ---- what must hold after every event (machine_invariants.cc) ----
  // The part of the invariants that costs nothing, checked after every event.
  void CheckState() const;
  void CheckInvariants() const;
  void CheckNodes() const;
  void CheckCommunicator() const;
  void CheckSpread() const;
  void CheckProgram() const;

  const CoordinatorOptions options;
  Group group;
  Worker worker;
  ReadinessBook book;  // of all instances, between events
  std::map<NodeId, Node> nodes;
  std::map<MemberId, RemoteMember> remotes;
  std::map<CallId, RemoteCall> remote_calls;
  std::map<std::pair<NodeId, CallId>, CallId> calls_of;
  std::map<CallId, std::shared_ptr<const CheckedBucket>>
      buckets;                              // of this daemon's trainers, until their reply
  std::map<MemberId, KnownLayout> layouts;  // of all engine ranks
  std::map<uint64_t, std::weak_ptr<const Layout>> shared_layouts;  // of remote engines, by digest
  int64_t layouts_compared = 0;
  std::optional<coordinator::LastRun> last_run;
  std::map<NodeId, ProgramId> known_programs;  // the program whose plan the node has
  std::optional<Spread> spread;
  std::optional<Communicator> communicator;
  CommunicatorSearch search;
  SlowNodes slow;
  coordinator::CommunicatorFailure search_failure;  // the last failure that named nobody
  uint64_t next_communicator = 1;
  // No node has to be pinged, or counted as silent, before this time. A report that comes later
  // moves the real time back; the next Tick computes it anew.
  std::optional<TimePoint> nodes_due;

  // These are set only during one Handle.
  TimePoint now;
  MachineActions* actions = nullptr;
  std::vector<PeerReport> own_reports;
  std::deque<GroupEvent> events;
  bool feeding = false;
  bool overdue = false;      // CleanUpOverdue came
  bool joined_anew = false;  // NodeJoined came
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COORDINATOR_IMPL_H_
