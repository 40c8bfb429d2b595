// The running update, as its coordinator carries it to the nodes that take part: it brings the
// group's requests to them and their answers back, decides when a part may go over the wire, and
// goes on without nodes that are lost, if it can.
//
// What a node does in the update is in machines of their own: its parts (PartsOnNodes), the
// program (ProgramOnNodes), the read-back (ReadbackOnNodes), the wire locks (WireLocks), and a
// failure of the wire that is not judged yet (FailedWire). This class keeps what goes across them:
// the order in which parts and the program go over the wire (P5, P7), and who is in the update.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_UPDATE_ON_NODES_H_
#define REFITD_DAEMON_GROUP_UPDATE_ON_NODES_H_

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/group/on_nodes.h"
#include "daemon/group/program_on_nodes.h"
#include "daemon/group/readback_on_nodes.h"
#include "daemon/group/wire_locks.h"

namespace refitd::coordinator {

// The parts of buckets in the update, from the header to every node's end of its share:
//
//   Start: headers --> agreement of every node (P5) --> Issue --> every node has ended --> done
//
// If a node is lost while parts are under way, the parts on the wire are *cut*: each remaining node
// ends its share, and the parts that some sink lacks are sent again over the next communicator, in
// their order (P7). The trainer's bytes, or the slot into which the root has packed them, are held
// until the part is done (P6).
class PartsOnNodes {
 public:
  explicit PartsOnNodes(const UpdateRecord& update) : update_(update) {}

  bool Has(PartSeq seq) const { return parts_.contains(seq); }
  bool AnyCut() const;
  bool AnyWired() const;
  // Whether a collective of a part runs.
  bool OnWire() const;
  // Whether every node agreed to the part, which then may be issued.
  bool Agreed(PartSeq seq) const { return parts_.at(seq).unacknowledged.empty(); }
  bool wired(PartSeq seq) const { return parts_.at(seq).header.wired; }
  Shares* shares(PartSeq seq) { return &parts_.at(seq).shares; }
  // Adds the nodes that have not ended their shares.
  void AddOwing(std::set<NodeId>* owing) const;
  // Whether the node still runs a part that it writes to its destinations. The root of a part that
  // is sent again does not count: it wrote them before the part was cut.
  bool WritesOn(NodeId node) const;

  // Returns whether the part waits for its place on the wire (Issue).
  bool Start(MovePart move, const Around& around);
  void Acknowledged(NodeId node, const PeerHeaderAck& ack, const Around& around);
  void Issue(PartSeq seq, const Around& around);
  // A node has ended its share.
  enum class Ended : uint8_t {
    kUnexpected,  // it had none
    kCut,         // and the part may be sent again
    kCounts,      // its result is to be added to the part's shares
  };
  Ended ShareEnded(NodeId node, const TransferDone& done);
  // Answers the group for the part if all its shares have ended.
  void CompleteIfEnded(PartSeq seq, const Around& around);

  // The parts that are on the wire, or wait for it, have to go on over another communicator.
  // Failures that nodes have reported so far are of the wire only: any other would have failed the
  // update.
  void Cut();
  // Completes the cut parts that no remaining node lacks. Returns whether the shares of all cut
  // parts have ended: then no byte of the communicator before can arrive any more in a slot that
  // receives again.
  bool CompleteCut(const Around& around);
  // Sends the cut parts again, over the communicator. Returns them in their order.
  std::vector<PartSeq> SendAgain(const Around& around);
  // Answers for the cut parts whose shares have ended, so that the group need not wait for them.
  void Abandon(const Around& around);
  // No report of the node comes any more, so it is not waited for.
  void LoseNode(NodeId node, const absl::Status& why, const Around& around);

  void CheckInvariants() const;

 private:
  struct Part {
    PeerHeader header;  // as the group gave it, without `skip` and `readers`
    std::set<NodeId> sinks;
    std::set<NodeId> unacknowledged;
    bool issued = false;
    bool cut = false;
    std::set<NodeId> lack;                 // sinks whose share ended without the part
    std::map<NodeId, PeerHeader> headers;  // as the nodes got them; of a part on the wire only
    Shares shares;
    std::map<NodeId, std::vector<uint64_t>> digests;
    BroadcastMethod broadcast = BroadcastMethod::kDirect;  // as the root reported it
  };
  using ReadersByNode = std::map<NodeId, std::vector<MemberId>>;

  Part MakePart(MovePart move, const Around& around, ReadersByNode* readers) const;
  PeerHeader HeaderFor(NodeId node, const Part& part, const Around& around) const;
  static void PlaceOnWire(const std::set<NodeId>& receivers, Communicator* communicator,
                          Part* part);
  static absl::Status CompareDigests(const Part& part, const JoinedNodes& nodes);

  const UpdateRecord& update_;
  std::map<PartSeq, Part> parts_;
};

class UpdateOnNodes {
 public:
  UpdateOnNodes(std::shared_ptr<UpdateRecord> update, const GroupSpec& spec, const Around& around);
  UpdateOnNodes(const UpdateOnNodes&) = delete;
  UpdateOnNodes& operator=(const UpdateOnNodes&) = delete;

  const UpdateRecord& record() const { return record_; }
  bool data_began() const { return data_began_; }
  std::optional<TimePoint> due() const;
  // The nodes that have not ended their shares of what runs, this daemon's worker excepted.
  std::set<NodeId> Owing() const;

  // Adds an engine rank of that node, by the node's number, to the PeerPrepare that Announce sends
  // the node.
  void AddEngine(NodeId node, MemberId theirs) { prepares_[node].engines.push_back(theirs); }
  bool announced() const { return announced_; }
  // Called when the engines of each node are known.
  void Announce(const Around& around);

  // ---- the group's requests ----
  void Start(MovePart move, const Around& around);
  void Compare(const StartCompare& compare, const Around& around);
  void Run(StartRefit run, const Around& around);
  void ReadBack(const VerifyUpdate& request, const Around& around);
  // From now on nodes start nothing new. Collectives that run are cut off, since their other ends
  // may be gone.
  void Abandon(const Around& around);
  void End(const UpdateEnded& ended, const Around& around);

  // ---- reports of nodes about this update ----
  void On(NodeId node, const PeerHeaderAck& r, const Around& around);
  void On(NodeId node, const TransferDone& r, const Around& around);
  void On(NodeId node, const VerifyDone& r, const Around& around);
  void On(NodeId node, const PeerProgramBuilt& r, const Around& around);
  void On(NodeId node, const CompareDone& r, const Around& around);
  void On(NodeId node, const RefitDone& r, const Around& around);
  void On(NodeId node, const PeerWireGranted& r, const Around& around);
  void On(NodeId node, const PeerWireWaits& r, const Around& around);
  void On(NodeId node, const PeerWireWanted& r, const Around& around);

  // ---- the wire ----
  // The nodes that the update's communicator has to connect.
  std::vector<NodeId> Ranks() const;
  // Whether the update may still send something over the wire.
  bool NeedsWire() const;
  // The next communicators leave the node out. False: they did, or it is not in the update.
  bool KeepOffWire(NodeId node);
  // Tells the group whether the data plane is up. While a part was cut and waits to be sent again,
  // the parts after it wait as well (P7).
  void ShowWire(bool up, const Around& around);
  // Sends cut parts again, and the program, if the nodes and the communicator are ready for them.
  void GoOn(const Around& around);
  // Called after each event: issues what may go over the wire, and gives the wire locks back if
  // another group wants them and no collective of this group runs.
  void IssueAndYield(const Around& around);
  // A time that due() gave has come.
  void Tick(const Around& around);

  // ---- nodes that go ----
  // The node is lost. False: it takes no part.
  bool Remove(NodeId node) { return record_.nodes.erase(node) > 0; }
  // A node was removed in the data phase. The loss of a node without trainers costs only the node's
  // own instances: the other nodes get another communicator and go on with the program, and parts
  // that were under way are sent again to those that lack them. The writes that the lost node owed
  // do not matter, since its instances are evicted (P1). Else the update fails.
  void GoOnWithout(NodeId node, const std::string& reason, const Failure& loss,
                   const Around& around);
  // No report of the node comes any more.
  void LoseNode(NodeId node, const absl::Status& why, const Around& around);
  // The node has no member left in the update. If no byte has moved, the update goes on without it;
  // in the data phase the node stays: others wait for its end of the communicator, which its daemon
  // serves until the update has ended. Returns whether it goes on without.
  bool LeaveOut(NodeId node, const Around& around);

  // How far its program is. `own`: this daemon's share.
  RunProgress Progress(const RunProgress& own) const {
    return ProgramRuns() ? program_->Progress(own) : RunProgress();
  }

  void CheckInvariants(const JoinedNodes& nodes) const;

 private:
  void Fail(const std::string& reason, GiveUpClass kind, const Failure& failure,
            const Around& around) const;
  bool ProgramRuns() const { return program_.has_value() && program_->runs(); }
  bool OnWire() const { return parts_.OnWire() || (program_.has_value() && program_->OnWire()); }

  // A node has ended its share of a part or of the program, while other nodes may still run theirs.
  // A failure fails the update: at once, or, if the wire failed, when the other nodes had time to
  // say whom they waited for. False: the update goes on without a node that is dropped.
  template <typename Done>
  bool AddEnd(NodeId node, const Done& done, const std::string& what, bool wired, Shares* shares,
              const Around& around);
  // Whether the update goes on without the node whose wire failed, which is then dropped.
  bool DropSuspectOfWire(const Around& around);
  // Closes the communicator and fails the update for what the nodes reported of the wire, which it
  // returns.
  absl::Status JudgeWire(const Around& around);
  void FailForOthers(const std::string& what, const absl::Status& status,
                     const Around& around) const;
  bool CanGoOnWithout(NodeId node, const Around& around) const;
  // The program, and the parts that are on the wire or wait for it, have to go on over another
  // communicator. False: there are none.
  bool CutShort();

  void AskLocks(const Around& around);
  void Issue(const Around& around);
  // Whether the next part still lacks the agreement of a node, which may be hung.
  bool WaitsForAgreement() const;
  void RunIfAgreed(const Around& around);
  // Runs the program again, or answers the group for it or for the read-back, if all have ended.
  void CompleteIfEnded(const Around& around);

  const std::shared_ptr<UpdateRecord> shared_;
  UpdateRecord& record_;
  // Nodes that were sent the update and have no member left in it: they are sent only its end.
  std::set<NodeId> left_;
  std::map<NodeId, PeerPrepare> prepares_;  // until Announce
  std::set<NodeId> off_wire_;               // nodes that the communicator leaves out
  bool wire_shown_ = true;                  // what the group was sent last
  bool announced_ = false;
  bool data_began_ = false;
  bool pushed_ = false;  // a part was started
  PartsOnNodes parts_;
  std::optional<ProgramOnNodes> program_;
  ReadbackOnNodes readback_;
  std::deque<PartSeq> to_issue_;  // wired, in order; the program comes last
  WireLocks locks_;
  std::optional<FailedWire> failed_wire_;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_UPDATE_ON_NODES_H_
