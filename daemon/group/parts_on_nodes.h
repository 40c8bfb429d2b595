// The parts of an update whose bytes cross between daemons, or whose members are not all on the
// coordinator's: from the header to every node's end of its share.
//
//   Start: headers --> agreement of every node (P5) --> Issue --> every node has ended --> done
//
// If a node is lost while parts are under way, they are *cut*: each remaining node ends its share,
// and those that some sink lacks are sent again over the next communicator, in their order (P7).
// The trainer's bytes, or the slot into which the root has packed them, are held until the part is
// done (P6).
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_PARTS_ON_NODES_H_
#define REFITD_DAEMON_GROUP_PARTS_ON_NODES_H_

#include <map>
#include <set>
#include <vector>

#include "daemon/group/on_nodes.h"

namespace refitd::coordinator {

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
  // Whether a node that has read back still runs a part that it has not written before.
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

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_PARTS_ON_NODES_H_
