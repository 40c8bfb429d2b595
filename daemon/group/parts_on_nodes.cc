#include "daemon/group/parts_on_nodes.h"

#include <algorithm>
#include <array>
#include <utility>

#include "transport/base/status.h"

namespace refitd::coordinator {

bool PartsOnNodes::AnyCut() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const auto& p) { return p.second.cut; });
}

bool PartsOnNodes::AnyWired() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const auto& p) { return p.second.header.wired; });
}

bool PartsOnNodes::OnWire() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const auto& p) {
    return p.second.header.wired && p.second.issued && !p.second.shares.ended();
  });
}

void PartsOnNodes::AddOwing(std::set<NodeId>* owing) const {
  for (const auto& [seq, part] : parts_) {
    owing->insert(part.shares.running().begin(), part.shares.running().end());
  }
}

// The root of a part that is sent again wrote its own destinations before the part was cut.
bool PartsOnNodes::WritesOn(NodeId node) const {
  return std::any_of(parts_.begin(), parts_.end(), [node](const auto& p) {
    const Part& part = p.second;
    if (!part.shares.running().contains(node)) return false;
    const auto header = part.headers.find(node);
    return part.header.root != node || header == part.headers.end() || !header->second.again;
  });
}

bool PartsOnNodes::Start(MovePart move, const Around& around) {
  ReadersByNode readers;
  const PartSeq seq = move.part;
  const std::vector<bool> skip = std::exchange(move.skip, {});
  Part& part = parts_.emplace(seq, MakePart(std::move(move), around, &readers)).first->second;
  const bool wired = part.header.wired;
  if (wired && around.communicator == nullptr) {
    // The communicator failed, and the update with it: nothing is sent.
    part.unacknowledged.clear();
    part.shares.Begin({}, update_.destinations.size());
    part.shares.SetStatus(absl::UnavailableError("the data plane is closed"));
    CompleteIfEnded(seq, around);
    return false;
  }
  if (wired) PlaceOnWire(part.sinks, around.communicator, &part);
  for (const NodeId node : part.shares.running()) {
    PeerHeader header = HeaderFor(node, part, around);
    header.skip = update_.destinations.SkipOn(node, skip);
    header.readers = std::move(readers[node]);
    if (wired) part.headers.emplace(node, header);
    around.Send(node, std::move(header));
  }
  return wired;
}

void PartsOnNodes::PlaceOnWire(const std::set<NodeId>& receivers, Communicator* communicator,
                               Part* part) {
  PeerHeader& h = part->header;
  h.communicator = communicator->id();
  h.wire_seq = communicator->Take(1);
  // The number of ranks stands for a root that is not in the communicator.
  const auto size = static_cast<uint32_t>(communicator->ranks().size());
  h.ranks = {communicator->RankOf(part->header.root).value_or(size)};
  for (const NodeId node : receivers) h.ranks.push_back(communicator->RankOf(node).value_or(size));
}

// The part without its place on the wire. `readers` gets the loader ranks that read it, by node and
// with the ids that the node gave them.
PartsOnNodes::Part PartsOnNodes::MakePart(MovePart move, const Around& around,
                                          ReadersByNode* readers) const {
  Part part;
  // The members of a node that is being lost are evicted one by one, so such a node may still have
  // members among the destinations.
  const auto add_sink = [&, root = move.root](NodeId node) {
    if (node != root && update_.nodes.contains(node)) part.sinks.insert(node);
  };
  for (const MemberId member : std::exchange(move.readers, {})) {
    const NodeId node = around.members.NodeOf(member);
    (*readers)[node].push_back(around.members.IdOnNode(member));
    add_sink(node);
  }
  for (const uint32_t d : move.touched) add_sink(update_.destinations.NodeOf(d));
  PeerHeader& h = part.header = std::move(move);
  h.wired = !part.sinks.empty();
  if (h.wired) h.digest = HeaderDigest(h);
  const bool broadcasts = h.broadcast != BroadcastMethod::kDirect;
  h.fill_slot = h.slot.has_value() && (h.wired || readers->contains(h.root) || broadcasts);
  std::set<NodeId> running = part.sinks;
  running.insert(h.root);
  if (h.wired) part.unacknowledged = running;
  part.shares.Begin(std::move(running), update_.destinations.size());
  return part;
}

// The part's header as the node gets it: only the root reads the trainer's bucket.
PeerHeader PartsOnNodes::HeaderFor(NodeId node, const Part& part, const Around& around) const {
  PeerHeader header = part.header;
  header.is_root = node == header.root;
  if (!header.is_root) {
    header.fill_slot = header.digests = false;
    header.bucket_call = CallId();
    header.trainer = MemberId();
    header.broadcast = BroadcastMethod::kDirect;
    return header;
  }
  const std::optional<RemoteMembers::Call> call = around.members.FindCall(header.bucket_call);
  if (call.has_value()) header.bucket_call = call->id;
  header.trainer = around.members.IdOnNode(header.trainer);
  if (header.wired || node != kCoordinatorNode) {
    for (const TensorRange& range : header.content->ranges) {
      header.bucket_ranges.push_back(range.tensor);
    }
  }
  return header;
}

void PartsOnNodes::Acknowledged(NodeId node, const PeerHeaderAck& ack, const Around& around) {
  const auto it = parts_.find(ack.part);
  if (it == parts_.end() || !it->second.unacknowledged.contains(node)) return;
  Part& part = it->second;
  if (ack.mismatch.empty() && ack.digest == part.header.digest) {
    part.unacknowledged.erase(node);
    return;
  }
  Failure failure = around.nodes.Suspecting(std::array{node});
  failure.tensor = ack.mismatch_tensor;
  around.Feed(FailUpdate{
      update_.id,
      fmt::format("{} does not agree about part {}: {}", around.nodes.Name(node), ack.part,
                  ack.mismatch.empty() ? "the digest of what it read differs" : ack.mismatch),
      GiveUpClass::kTransfer, std::move(failure)});
}

void PartsOnNodes::Issue(PartSeq seq, const Around& around) {
  Part& part = parts_.at(seq);
  part.issued = true;
  for (const NodeId node : part.shares.running()) around.Send(node, PeerIssue{update_.id, seq});
}

PartsOnNodes::Ended PartsOnNodes::ShareEnded(NodeId node, const TransferDone& done) {
  const auto it = parts_.find(done.part);
  if (it == parts_.end() || !it->second.shares.End(node)) return Ended::kUnexpected;
  Part& part = it->second;
  part.unacknowledged.erase(node);
  part.digests[node] = done.digests;
  if (node == part.header.root) part.broadcast = done.broadcast;
  if (done.wire_failed && node != part.header.root) part.lack.insert(node);
  // The share ended well, or only because the wire failed: the update goes on with the cut part.
  if (!part.cut || (!done.status.ok() && !done.wire_failed)) return Ended::kCounts;
  part.shares.AddBytes(node, done, update_.destinations);
  return Ended::kCut;
}

// Compares what each node received with what the root read (P1).
absl::Status PartsOnNodes::CompareDigests(const Part& part, const JoinedNodes& nodes) {
  if (!part.header.wired || part.header.verification == Verification::kOff) {
    return absl::OkStatus();
  }
  const auto& content = *part.header.content;
  const auto root = part.digests.find(part.header.root);
  for (const NodeId sink : part.sinks) {
    const auto received = part.digests.find(sink);
    for (size_t i = 0; i < content.ranges.size(); ++i) {
      const bool same = root != part.digests.end() && received != part.digests.end() &&
                        i < root->second.size() && i < received->second.size() &&
                        root->second[i] == received->second[i];
      if (same) continue;
      return AboutTensor(
          Error(absl::StatusCode::kDataLoss, "tensor '{}': what {} received is not what {} sent",
                content.tensor(i).name, nodes.Name(sink), nodes.Name(part.header.root)),
          content.tensor(i).name);
    }
  }
  return absl::OkStatus();
}

void PartsOnNodes::CompleteIfEnded(PartSeq seq, const Around& around) {
  const auto it = parts_.find(seq);
  if (it == parts_.end() || !it->second.shares.ended()) return;
  Part part = std::move(it->second);
  parts_.erase(it);
  if (part.shares.status().ok()) part.shares.SetStatus(CompareDigests(part, around.nodes));
  TransferDone done;
  done.update = update_.id;
  done.part = seq;
  part.shares.MoveTo(&done);
  done.broadcast = part.broadcast;
  if (const auto root = part.digests.find(part.header.root); root != part.digests.end()) {
    done.digests = std::move(root->second);
  }
  around.Feed(std::move(done));
}

// ---- parts that were cut ----

void PartsOnNodes::Cut() {
  for (auto& [seq, part] : parts_) {
    if (!part.header.wired) continue;
    part.cut = true;
    part.shares.ForgetFailure();
  }
}

bool PartsOnNodes::CompleteCut(const Around& around) {
  std::vector<PartSeq> whole;
  bool ended = true;
  for (const auto& [seq, part] : parts_) {
    if (!part.cut) continue;
    ended &= part.shares.ended();
    if (part.shares.ended() && part.lack.empty()) whole.push_back(seq);
  }
  for (const PartSeq seq : whole) CompleteIfEnded(seq, around);
  return ended;
}

// P5: the root and the receivers agree to the part once more. The root sends the slot that it has
// packed; its digests, and those of the sinks that have the part, stay known (P1).
std::vector<PartSeq> PartsOnNodes::SendAgain(const Around& around) {
  std::vector<PartSeq> again;
  for (auto& [seq, part] : parts_) {
    if (!part.cut) continue;
    again.push_back(seq);
    std::set<NodeId> nodes = std::exchange(part.lack, {});
    part.cut = part.issued = false;
    PlaceOnWire(nodes, around.communicator, &part);
    nodes.insert(part.header.root);
    part.unacknowledged = nodes;
    for (const NodeId node : nodes) {
      PeerHeader& header = part.headers.at(node);
      header.again = true;
      header.communicator = part.header.communicator;
      header.wire_seq = part.header.wire_seq;
      header.ranks = part.header.ranks;
      around.Send(node, header);
    }
    part.shares.Begin(std::move(nodes), part.shares.destinations());
  }
  return again;
}

void PartsOnNodes::Abandon(const Around& around) {
  std::vector<PartSeq> cut;
  for (auto& [seq, part] : parts_) {
    if (!std::exchange(part.cut, false)) continue;
    part.shares.SetStatus(absl::CancelledError("the update was given up"));
    cut.push_back(seq);
  }
  for (const PartSeq seq : cut) CompleteIfEnded(seq, around);
}

void PartsOnNodes::LoseNode(NodeId node, const absl::Status& why, const Around& around) {
  std::vector<PartSeq> ended;
  for (auto& [seq, part] : parts_) {
    part.unacknowledged.erase(node);
    const bool ran = part.shares.End(node);
    if (part.cut) {
      part.sinks.erase(node);
      part.lack.erase(node);
    } else if (ran) {
      part.shares.FailIfOk(why);
      ended.push_back(seq);
    }
  }
  for (const PartSeq seq : ended) CompleteIfEnded(seq, around);
}

void PartsOnNodes::CheckInvariants() const {
  for (const auto& [seq, part] : parts_) {
    REFITD_CHECK(part.header.part == seq && part.header.update == update_.id);
    REFITD_CHECK(!part.sinks.contains(part.header.root));
    // A part that is, or was, cut may have lost all its sinks.
    const bool may_lack_sinks = part.cut || update_.abandoned;
    REFITD_CHECK(part.header.wired ? may_lack_sinks || !part.sinks.empty() : part.sinks.empty());
    REFITD_CHECK(!part.cut || (part.header.wired && !update_.abandoned));
    REFITD_CHECK(
        std::includes(part.sinks.begin(), part.sinks.end(), part.lack.begin(), part.lack.end()));
    REFITD_CHECK(part.shares.destinations() == update_.destinations.size());
    const std::set<NodeId>& running = part.shares.running();
    // P4: a part that no node runs is answered at once, or waits to be sent again.
    REFITD_CHECK(!running.empty() || (part.cut && !part.lack.empty()));
    REFITD_CHECK(std::includes(running.begin(), running.end(), part.unacknowledged.begin(),
                               part.unacknowledged.end()));
    if (part.issued) REFITD_CHECK(part.unacknowledged.empty());  // P5
  }
}

}  // namespace refitd::coordinator
