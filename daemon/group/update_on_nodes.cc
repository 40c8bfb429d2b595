#include "daemon/group/update_on_nodes.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "transport/base/status.h"

namespace refitd::coordinator {

UpdateOnNodes::UpdateOnNodes(std::shared_ptr<UpdateRecord> update, const GroupSpec& spec,
                             const Around& around)
    : shared_(std::move(update)),
      record_(*shared_),
      parts_(record_),
      readback_(record_),
      locks_(record_.id, around.limits.wire) {
  if (record_.use.has_value()) program_.emplace(record_);
  for (const NodeId node : record_.nodes) {
    PeerPrepare& prepare = prepares_[node];
    prepare.update = record_.id;
    prepare.version = record_.version;
    prepare.remaining = record_.deadline - around.now;
    prepare.tensor_count = record_.tensor_count;
    prepare.verification = record_.verification;
    prepare.trainer_ranks = spec.trainer_ranks;
    prepare.index = record_.index;
    for (const uint32_t d : record_.destinations.On(node)) {
      prepare.destinations.push_back(around.members.IdOnNode(record_.destinations[d]));
      prepare.layout_digests.push_back(around.layouts.DigestOf(record_.destinations[d]));
    }
  }
}

std::optional<TimePoint> UpdateOnNodes::due() const {
  if (record_.abandoned) return std::nullopt;
  std::optional<TimePoint> due = locks_.due();
  if (!failed_wire_.has_value()) return due;
  return std::min(due.value_or(failed_wire_->due()), failed_wire_->due());
}

std::set<NodeId> UpdateOnNodes::Owing() const {
  std::set<NodeId> owing = readback_.running();
  parts_.AddOwing(&owing);
  if (program_.has_value()) program_->AddOwing(&owing);
  owing.erase(kCoordinatorNode);
  return owing;
}

void UpdateOnNodes::Announce(const Around& around) {
  announced_ = true;
  const std::map<NodeId, PeerPrepare> prepares = std::exchange(prepares_, {});
  for (const auto& [node, prepare] : prepares) around.Send(node, prepare);
  if (program_.has_value()) program_->Announce(prepares, around);
}

void UpdateOnNodes::Fail(const std::string& reason, GiveUpClass kind, const Failure& failure,
                         const Around& around) const {
  if (!record_.abandoned) around.Feed(FailUpdate{record_.id, reason, kind, failure});
}

// ---- the group's requests ----

// The locks are asked for while the headers travel, so that the wait for the agreement and the wait
// for the wire overlap.
void UpdateOnNodes::Start(MovePart move, const Around& around) {
  data_began_ = pushed_ = true;
  const PartSeq seq = move.part;
  if (!parts_.Start(std::move(move), around)) return;
  to_issue_.push_back(seq);
  if (to_issue_.size() == 1 && around.wire_up() && !locks_.asked()) AskLocks(around);
}

void UpdateOnNodes::Compare(const StartCompare& compare, const Around& around) {
  program_->Compare(compare.part);
  program_->CompareIfAgreed(around);
}

void UpdateOnNodes::Run(StartRefit run, const Around& around) {
  data_began_ = true;
  program_->Run(std::move(run));
  RunIfAgreed(around);
}

// A node reads back when all shares that it knows have ended, so it must have been sent its share
// of the program first.
void UpdateOnNodes::ReadBack(const VerifyUpdate& request, const Around& around) {
  readback_.Ask(request);
  if (program_.has_value() && !program_->sent()) return;
  readback_.SendIfAsked(around);
  CompleteIfEnded(around);
}

void UpdateOnNodes::Abandon(const Around& around) {
  if (std::exchange(record_.abandoned, true)) return;
  failed_wire_.reset();
  to_issue_.clear();
  for (const NodeId node : record_.nodes) around.Send(node, PeerAbandon{record_.id});
  if (OnWire()) {
    around.Do(WireBroken{});
  } else {
    around.Send(locks_.GiveBack());
  }
  if (program_.has_value()) {
    program_->Abandon(around);
    // The group waits for an answer to its StartRefit. If no node was sent the run yet, none will
    // report its end, so RunIfAgreed answers that the run failed.
    RunIfAgreed(around);
    CompleteIfEnded(around);
  }
  parts_.Abandon(around);
}

void UpdateOnNodes::End(const UpdateEnded& ended, const Around& around) {
  around.Send(locks_.GiveBack());
  std::set<NodeId> nodes = record_.nodes;
  nodes.insert(left_.begin(), left_.end());
  for (const NodeId node : nodes) {
    around.Send(node, PeerUpdateEnded{ended.update, ended.version, ended.outcome, ended.reason,
                                      ended.catch_up || ended.rollback, ended.failure});
  }
}

// ---- reports ----

void UpdateOnNodes::On(NodeId node, const PeerHeaderAck& r, const Around& around) {
  parts_.Acknowledged(node, r, around);
}

void UpdateOnNodes::On(NodeId node, const TransferDone& r, const Around& around) {
  const PartsOnNodes::Ended ended = parts_.ShareEnded(node, r);
  if (ended == PartsOnNodes::Ended::kUnexpected) return;
  if (ended == PartsOnNodes::Ended::kCut) return GoOn(around);
  if (AddEnd(node, r, fmt::format("part {}", r.part), parts_.wired(r.part), parts_.shares(r.part),
             around)) {
    parts_.CompleteIfEnded(r.part, around);
  }
}

void UpdateOnNodes::On(NodeId node, const VerifyDone& r, const Around& around) {
  if (readback_.Ended(node, r, parts_.WritesOn(node), around)) CompleteIfEnded(around);
}

void UpdateOnNodes::On(NodeId node, const PeerProgramBuilt& r, const Around& around) {
  if (!program_.has_value()) return;
  program_->Built(node, r, around);
  RunIfAgreed(around);
}

void UpdateOnNodes::On(NodeId node, const CompareDone& r, const Around& around) {
  if (program_.has_value()) program_->Compared(node, r, around);
}

void UpdateOnNodes::On(NodeId node, const RefitDone& r, const Around& around) {
  if (!program_.has_value()) return;
  if (!program_->ShareEnded(node, r, around) ||
      AddEnd(node, r, "the refit", program_->wired(), program_->shares(), around)) {
    CompleteIfEnded(around);
  }
}

void UpdateOnNodes::On(NodeId node, const PeerWireGranted& /*r*/, const Around& around) {
  around.Send(locks_.Granted(node, around.now));
}

void UpdateOnNodes::On(NodeId /*node*/, const PeerWireWaits& r, const Around& /*around*/) {
  locks_.Waits(r.holder);
}

void UpdateOnNodes::On(NodeId /*node*/, const PeerWireWanted& /*r*/, const Around& /*around*/) {
  locks_.Wanted();
}

// ---- the wire ----

std::vector<NodeId> UpdateOnNodes::Ranks() const {
  std::vector<NodeId> ranks;
  std::set_difference(record_.nodes.begin(), record_.nodes.end(), off_wire_.begin(),
                      off_wire_.end(), std::back_inserter(ranks));
  return ranks;
}

bool UpdateOnNodes::NeedsWire() const {
  if (!data_began_ || !program_.has_value() || parts_.AnyWired()) return true;
  return !program_->complete();  // the program is the last part
}

bool UpdateOnNodes::KeepOffWire(NodeId node) {
  return record_.nodes.contains(node) && off_wire_.insert(node).second;
}

void UpdateOnNodes::ShowWire(bool up, const Around& around) {
  up = up && !parts_.AnyCut();
  if (std::exchange(wire_shown_, up) != up) around.Feed(DataPlaneState{record_.id, up});
}

// Until all shares of cut parts have ended, and their communicator is up, the group starts no part
// (ShowWire).
void UpdateOnNodes::GoOn(const Around& around) {
  if (record_.abandoned || !parts_.AnyCut() || !parts_.CompleteCut(around)) return;
  if (parts_.AnyCut()) {
    if (!around.wire_up()) return;
    const std::vector<PartSeq> again = parts_.SendAgain(around);
    to_issue_.insert(to_issue_.end(), again.begin(), again.end());
    around.Log(LogLine::kInfo, fmt::format("the update to version {} goes on from part {}",
                                           record_.version, again.front()));
  }
  RunIfAgreed(around);
  around.Do(RanksChanged{});
}

void UpdateOnNodes::IssueAndYield(const Around& around) {
  Issue(around);
  if (OnWire()) return;
  // An update that is given up, or whose nodes have not agreed to the next part yet, has no use for
  // the locks.
  const bool idle = record_.abandoned || WaitsForAgreement();
  NodeCommands back = locks_.GiveBackIfWanted(idle);
  const bool yielded = !back.empty();
  around.Send(std::move(back));
  if (yielded) Issue(around);
}

// The wire locks are asked for only when there is something to send: by Start, or here if the
// communicator came up later or another group had its turn.
void UpdateOnNodes::Issue(const Around& around) {
  if (record_.abandoned || !around.wire_up()) return;
  while (!to_issue_.empty()) {
    const PartSeq seq = to_issue_.front();
    const bool program = program_.has_value() && program_->Is(seq);
    if (!program && !parts_.Has(seq)) {
      to_issue_.pop_front();
      continue;
    }
    if (WaitsForAgreement()) return;
    if (!locks_.asked()) AskLocks(around);
    if (!locks_.may_issue()) return;
    locks_.Issued();
    to_issue_.pop_front();
    if (program) {
      program_->Issue(around);
    } else {
      parts_.Issue(seq, around);
    }
  }
}

bool UpdateOnNodes::WaitsForAgreement() const {
  if (to_issue_.empty()) return false;
  if (parts_.Has(to_issue_.front())) return !parts_.Agreed(to_issue_.front());
  return program_.has_value() && !program_->sent();
}

void UpdateOnNodes::AskLocks(const Around& around) {
  std::vector<NodeId> order(record_.nodes.begin(), record_.nodes.end());
  std::sort(order.begin(), order.end(), [&around](NodeId a, NodeId b) {
    return around.nodes.DaemonId(a) < around.nodes.DaemonId(b);
  });
  around.Send(locks_.Ask(std::move(order), around.now));
}

void UpdateOnNodes::Tick(const Around& around) {
  if (record_.abandoned) return;
  if (failed_wire_.has_value() && around.now >= failed_wire_->due()) {
    if (!DropSuspectOfWire(around)) JudgeWire(around).IgnoreError();
  } else if (const auto due = locks_.due(); due.has_value() && around.now >= *due) {
    Fail(locks_.WhyLate(around.nodes), GiveUpClass::kDeadline,
         around.nodes.Suspecting(std::array{*locks_.awaited()}), around);
  }
}

// ---- shares that end ----

template <typename Done>
bool UpdateOnNodes::AddEnd(NodeId node, const Done& done, const std::string& what, bool wired,
                           Shares* shares, const Around& around) {
  shares->Add(node, done, record_.destinations, around);
  const bool failed = !done.status.ok();
  if (failed && done.wire_failed && !record_.abandoned) {
    if (!failed_wire_.has_value()) {
      const Duration wait = std::min<Duration>(around.limits.wire / 4, kWaitForReports);
      failed_wire_.emplace(what, around.now + wait);
    }
    std::vector<NodeId> named;
    if (around.communicator != nullptr) named = around.communicator->NodesNamed(done.status);
    failed_wire_->Add(node, std::move(named), around.StatusOf(node, done.status, true));
  } else if (failed) {
    if (!shares->ended()) FailForOthers(what, shares->status(), around);
    if (wired) around.Do(WireBroken{});
  }
  if (!shares->ended() || !failed_wire_.has_value()) return true;
  if (DropSuspectOfWire(around)) return false;
  shares->SetStatus(JudgeWire(around));
  return true;
}

bool UpdateOnNodes::DropSuspectOfWire(const Around& around) {
  if (!ProgramRuns() && !parts_.AnyWired()) return false;
  const std::optional<NodeId> node = failed_wire_->Suspect(
      [&around](NodeId id) { return id == kCoordinatorNode || around.needed(id); });
  if (!node.has_value() || !around.nodes.contains(*node)) return false;
  const auto& by_node = record_.destinations.by_node();
  const bool others = std::any_of(by_node.begin(), by_node.end(), [&](const auto& d) {
    return d.first != *node && record_.nodes.contains(d.first);
  });
  if (!others || !CanGoOnWithout(*node, around)) return false;
  const absl::Status why = failed_wire_->ReportOf(*node);
  failed_wire_.reset();
  CutShort();
  around.Do(DropSuspect{*node, fmt::format("its data plane failed: {}", Message(why))});
  return true;
}

absl::Status UpdateOnNodes::JudgeWire(const Around& around) {
  const FailedWire failed = *std::exchange(failed_wire_, std::nullopt);
  absl::Status status = failed.Cause(around.nodes);
  around.Do(WireBroken{});
  FailForOthers(failed.what(), status, around);
  return status;
}

// The other nodes may be waiting for the node that failed. The update can't go on, so it is given
// up before they report.
void UpdateOnNodes::FailForOthers(const std::string& what, const absl::Status& status,
                                  const Around& around) const {
  const bool lost = status.code() == absl::StatusCode::kDataLoss;
  Fail(fmt::format("{} of {}: {}", lost ? "verification" : "transfer", what, Message(status)),
       lost ? GiveUpClass::kVerification : GiveUpClass::kTransfer, FailureOf(status), around);
}

void UpdateOnNodes::RunIfAgreed(const Around& around) {
  if (!program_.has_value() || (parts_.AnyCut() && !record_.abandoned)) return;
  if (!program_->RunIfAgreed(around)) return;
  if (program_->wired() && !program_->shares()->ended()) to_issue_.push_back(program_->seq());
  readback_.SendIfAsked(around);
  CompleteIfEnded(around);
}

// While the program runs, a node may still be lost, and then all are read back once more.
void UpdateOnNodes::CompleteIfEnded(const Around& around) {
  if (program_.has_value()) {
    program_->CompleteIfEnded(around);
    if (program_->again()) {
      if (!program_->shares()->ended() || !readback_.ended()) return;
      std::erase(to_issue_, program_->seq());
      program_->BeginAgain(around);
      readback_.AskAgain();
      return RunIfAgreed(around);
    }
    if (program_->runs()) return;
  }
  readback_.CompleteIfEnded(around);
}

// ---- nodes that go ----

bool UpdateOnNodes::CanGoOnWithout(NodeId node, const Around& around) const {
  // A second run of a program would drop the digests of buckets that were pushed before it.
  return !around.needed(node) && (!ProgramRuns() || !pushed_);
}

bool UpdateOnNodes::CutShort() {
  const bool runs = ProgramRuns();
  if (runs) program_->MarkAgain();
  parts_.Cut();
  std::erase_if(to_issue_, [this](PartSeq seq) { return parts_.Has(seq); });
  return runs || parts_.AnyCut();
}

void UpdateOnNodes::GoOnWithout(NodeId node, const std::string& reason, const Failure& loss,
                                const Around& around) {
  if (record_.abandoned) return;
  if (!CanGoOnWithout(node, around)) return Fail(reason, GiveUpClass::kPeerLost, loss, around);
  failed_wire_.reset();
  if (!CutShort()) return;
  around.Log(LogLine::kWarning, fmt::format("the update to version {} goes on without a daemon: {}",
                                            record_.version, reason));
}

void UpdateOnNodes::LoseNode(NodeId node, const absl::Status& why, const Around& around) {
  left_.erase(node);
  parts_.LoseNode(node, why, around);
  GoOn(around);
  if (program_.has_value()) {
    program_->LoseNode(node, why, around);
    RunIfAgreed(around);
  }
  readback_.LoseNode(node);
  CompleteIfEnded(around);
  if (!record_.abandoned) around.Send(locks_.Forget(node, around.now));
}

bool UpdateOnNodes::LeaveOut(NodeId node, const Around& around) {
  if (record_.abandoned || data_began_ || !Remove(node)) return false;
  left_.insert(node);
  around.Send(node, PeerAbandon{record_.id});
  if (locks_.asks(node)) {
    around.Send(locks_.Forget(node, around.now));
    around.Send(node, PeerWireUnlock{record_.id});
  }
  if (program_.has_value()) {
    program_->LoseNode(node,
                       Error(absl::StatusCode::kUnavailable, "{} has nobody left in the update",
                             around.nodes.Name(node)),
                       around);
    RunIfAgreed(around);
  }
  return true;
}

void UpdateOnNodes::CheckInvariants(const JoinedNodes& nodes) const {
  REFITD_CHECK(announced_ && prepares_.empty());
  for (const NodeId node : record_.nodes) REFITD_CHECK(nodes.exists(node) && !left_.contains(node));
  parts_.CheckInvariants();
  if (program_.has_value()) program_->CheckInvariants();
  readback_.CheckInvariants();
  locks_.CheckInvariants();
  if (failed_wire_.has_value()) failed_wire_->CheckInvariants();
  // P7: parts are issued in their order, those that were cut first.
  if (parts_.AnyCut()) REFITD_CHECK(to_issue_.empty() && !wire_shown_);
  REFITD_CHECK(std::is_sorted(to_issue_.begin(), to_issue_.end()));
  REFITD_CHECK(!record_.abandoned || (to_issue_.empty() && !failed_wire_.has_value()));
}

// ---- PartsOnNodes ----

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
