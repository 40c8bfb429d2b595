// The compiled refit of an update, over its nodes: each node gets its part of the plan and builds
// it, the streams that they derived are compared (P5), replicas are compared if the group asks for
// it, the nodes run the program, and what was received is compared with what was sent (P1).
//
//   Announce --> built by all --> agreed [--> compared] --> sent --> issued --> ended: complete
//                                                            ^                    | a node was lost
//                                                            +------- again ------+
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_PROGRAM_ON_NODES_H_
#define REFITD_DAEMON_GROUP_PROGRAM_ON_NODES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "daemon/group/on_nodes.h"

namespace refitd::coordinator {

// Compares the two ends of every stream of a compiled refit, as the nodes report them.
//
// A node reports all its streams at once; a stream that it does not list has digest 0. The two ends
// of a stream are compared when the second of them is reported, so that a report costs only its own
// length, whatever the number of nodes. An end that was not reported is not compared.
class StreamEnds {
 public:
  // Takes a node's report in place of its earlier report. Nodes and peers have the plan's numbers.
  void Add(uint32_t node, const std::vector<PeerStream>& streams);
  // The node is lost: its report no longer counts.
  void Forget(uint32_t node);
  // The first stream, by sender and then receiver, whose reported ends differ.
  std::optional<std::pair<uint32_t, uint32_t>> FirstDifference() const;

  // How many ends were looked at so far, which tests use to check the cost.
  int64_t looked_at() const { return looked_at_; }

 private:
  struct Ends {
    uint64_t out = 0;
    uint64_t in = 0;
  };
  using PeerEnds = absl::flat_hash_map<uint32_t, Ends>;  // by peer

  void Compare(uint32_t node, const Ends& here, uint32_t peer, const PeerEnds& there);

  // These are hash tables because they are freed quickly: the end of an update, under the mutex,
  // waits for that.
  absl::flat_hash_map<uint32_t, PeerEnds> reported_;
  // By peer: the nodes that reported a stream to or from it.
  absl::flat_hash_map<uint32_t, absl::flat_hash_set<uint32_t>> named_by_;
  std::set<std::pair<uint32_t, uint32_t>> different_;  // sender, receiver
  int64_t looked_at_ = 0;
};

class ProgramOnNodes {
 public:
  // The update has a program.
  explicit ProgramOnNodes(const UpdateRecord& update) : update_(update), use_(*update.use) {}

  bool sent() const { return sent_; }
  bool complete() const { return complete_; }
  // Whether it was sent and the group waits for its end.
  bool runs() const { return sent_ && !complete_; }
  // Whether the nodes run it again when all of them have ended this attempt and its read-back.
  bool again() const { return again_; }
  bool wired() const { return wired_; }
  bool OnWire() const { return issued_ && !shares_.ended(); }
  // The program's place in the order of parts, once the group has asked for its run.
  bool Is(PartSeq seq) const { return run_.has_value() && run_->part == seq; }
  PartSeq seq() const { return run_->part; }
  Shares* shares() { return &shares_; }
  void AddOwing(std::set<NodeId>* owing) const;

  // Sends each node its part of the plan. `prepares`: what the nodes were sent of the update.
  void Announce(const std::map<NodeId, PeerPrepare>& prepares, const Around& around);
  void Built(NodeId node, const PeerProgramBuilt& built, const Around& around);

  // The group asks for a comparison of replicas, or for the run.
  void Compare(ReplicaFraction part) { compare_ = part; }
  void Run(StartRefit run) { run_ = std::move(run); }
  // Sends what the group asked for, if the nodes agreed to the program.
  void CompareIfAgreed(const Around& around);
  void Compared(NodeId node, const CompareDone& compared, const Around& around);
  // Returns whether it was sent now; then wired() says whether it waits for its place on the wire.
  bool RunIfAgreed(const Around& around);
  void Issue(const Around& around);
  // A node has ended its share. Returns whether its result is to be added to the shares: a result
  // of an attempt that is run again does not count.
  bool ShareEnded(NodeId node, const RefitDone& done, const Around& around);
  // Answers the group if all shares have ended.
  void CompleteIfEnded(const Around& around);

  // `own`: of this daemon's share.
  RunProgress Progress(const RunProgress& own) const;

  // A node was lost while it ran.
  void MarkAgain() { again_ = true; }
  // Prepares the next attempt, which goes on from the first round that a remaining node lacks, or
  // moves all bytes again. The sums that nodes report are accordingly over all attempts, or over
  // the next attempt alone (P1).
  void BeginAgain(const Around& around);
  // Answers the requests that the group has made and that have not begun, so that the group need
  // not wait for them.
  void Abandon(const Around& around);
  void LoseNode(NodeId node, const absl::Status& why, const Around& around);

  void CheckInvariants() const;

 private:
  // Sends the plan to nodes that lack it, a limited number at a time.
  void SendPlans(const Around& around);
  void AttachPlan(NodeId node, const Around& around, PeerProgram* command) const;
  void AgreeIfBuilt(const Around& around);
  void Disagree(size_t a, size_t b, const std::string& why, const Around& around);
  void CompleteCompareIfEnded(const Around& around);
  StartRefit CommandToRun(const Around& around);
  // The round from which all remaining nodes can go on; nullopt: they run from the beginning.
  std::optional<int64_t> FirstLacked() const;
  int64_t rounds() const { return built_.empty() ? 0 : built_.begin()->second; }
  uint32_t NumberOf(NodeId node) const { return commands_.at(node).node; }

  const UpdateRecord& update_;
  const ProgramUse& use_;
  std::map<NodeId, PeerProgram> commands_;  // of the nodes with a part in it
  std::set<NodeId> building_;               // nodes that have not reported it built
  // The nodes of `building_` that are sent the plan when other nodes have built their parts.
  std::deque<NodeId> without_plan_;
  // The nodes of `building_` that were sent the plan in this update.
  std::set<NodeId> under_way_;
  std::map<NodeId, int64_t> built_;  // how many rounds it has for the node
  StreamEnds built_ends_;            // by the structure of their streams
  bool agreed_ = false;

  std::optional<ReplicaFraction> compare_;  // the share to compare, if the group asked for it
  bool compare_sent_ = false;
  std::set<NodeId> comparing_;
  absl::Status compared_;
  std::vector<std::vector<uint64_t>> digests_;  // by node of the plan

  std::optional<StartRefit> run_;
  uint32_t attempt_ = 0;
  bool again_ = false;
  // The first round that each node lacks, as it said at the end of this attempt; nullopt: unknown.
  std::map<NodeId, std::optional<int64_t>> lacks_;
  std::optional<int64_t> resume_;  // the round from which this attempt goes on
  bool sent_ = false;
  bool wired_ = false;
  bool issued_ = false;
  bool complete_ = false;  // the group has its result
  TimePoint started_;      // when the nodes were sent StartRefit
  Shares shares_;
  StreamEnds run_ends_;  // by what their streams carried
  ProgramEnded record_;  // of this attempt
};

// The bytes that each node moved in the last refit that succeeded on several nodes; status shows
// them.
class LastRun {
 public:
  // The program ran. Reads the plan's matrix only once for each program, since it has a number for
  // each pair of nodes. `took`: of the nodes that ended their share.
  void Set(const ProgramUse& use, const std::map<NodeId, Duration>& took);
  void Show(NodeId node, const JoinedNodes& nodes, NodeView* view) const;

 private:
  struct Share {
    std::vector<std::pair<NodeId, int64_t>> sends;  // the most bytes first, at most kMaxShownSends
    int64_t sent = 0;
    int64_t forwarded = 0;
    int64_t received = 0;
    Duration took{};
  };
  void ReadPlan(const ProgramUse& use);

  std::optional<ProgramId> program_;
  std::map<NodeId, Share> shares_;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_PROGRAM_ON_NODES_H_
