#include "daemon/group/program_on_nodes.h"

#include <algorithm>
#include <array>

#include "transport/base/status.h"

namespace refitd::coordinator {
namespace {

// At most this many nodes have been sent the plan and have not built their part. The message that
// is encoded for a node stays in memory until the node has read it.
constexpr size_t kMaxPlansUnderWay = 64;

}  // namespace

void ProgramOnNodes::AddOwing(std::set<NodeId>* owing) const {
  owing->insert(comparing_.begin(), comparing_.end());
  owing->insert(shares_.running().begin(), shares_.running().end());
}

// ---- compiling ----

void ProgramOnNodes::Announce(const std::map<NodeId, PeerPrepare>& prepares, const Around& around) {
  for (const auto& [node, prepare] : prepares) {
    const std::vector<uint32_t>& index = update_.destinations.On(node);
    for (size_t i = 0; i < prepare.destinations.size(); ++i) {
      commands_[node].destinations.push_back({index.at(i), prepare.destinations[i]});
    }
  }
  for (uint32_t rank = 0; rank < use_.sources.size(); ++rank) {
    const MemberId member = use_.sources[rank];
    commands_[around.members.NodeOf(member)].sources.push_back(
        {rank, around.members.IdOnNode(member)});
  }
  std::erase_if(commands_, [&around](const auto& c) {
    return !around.nodes.exists(c.first);  // the node is being lost
  });
  // With chains, the nodes of the plan share the whole slot (NodeProgramOptions::chunk_bytes).
  const RoutePlan& routes = use_.plan->routes;
  const auto among = static_cast<int64_t>(routes.relay.lag > 0 ? routes.nodes : use_.nodes.size());
  const int64_t peers = std::max<int64_t>(1, among - 1);
  for (auto& [node, command] : commands_) {
    command.update = update_.id;
    command.program = use_.program;
    command.node = static_cast<uint32_t>(
        std::lower_bound(use_.nodes.begin(), use_.nodes.end(), node) - use_.nodes.begin());
    command.chunk_bytes =
        std::max<int64_t>(around.slot_bytes / peers / kSectionAlignment, 1) * kSectionAlignment;
    building_.insert(node);
    if ((*around.plans)[node] == use_.program) {
      around.Send(node, command);
    } else {
      without_plan_.push_back(node);
    }
  }
  SendPlans(around);
}

// A plan is large, and each node's part is different. So at first only some nodes are sent their
// parts. Each further node is sent its part when a node before it has built its own.
void ProgramOnNodes::SendPlans(const Around& around) {
  while (!without_plan_.empty() && !update_.abandoned && under_way_.size() < kMaxPlansUnderWay) {
    const NodeId node = without_plan_.front();
    without_plan_.pop_front();
    if (!building_.contains(node)) continue;  // the node was lost
    under_way_.insert(node);
    (*around.plans)[node] = use_.program;
    PeerProgram command = commands_.at(node);
    AttachPlan(node, around, &command);
    around.Send(node, std::move(command));
  }
}

// The node's part of the plan is found where the command is encoded (WithItsPart), since that takes
// longer than the daemon's mutex may be held.
void ProgramOnNodes::AttachPlan(NodeId node, const Around& around, PeerProgram* command) const {
  command->whole = use_.plan;
  if (node == kCoordinatorNode) {
    command->plan = {command->whole, &command->whole->routes};
    return;
  }
  for (const auto* side : {&command->sources, &command->destinations}) {
    for (const PlanMember& m : *side) {
      const std::optional<MemberId> ours = around.members.OursOf(node, m.member);
      auto layout = ours.has_value() ? around.layouts.Find(*ours) : nullptr;
      if (layout != nullptr) command->local_layouts.push_back(std::move(layout));
    }
  }
}

void ProgramOnNodes::Built(NodeId node, const PeerProgramBuilt& built, const Around& around) {
  if (building_.erase(node) == 0) return;
  under_way_.erase(node);
  if (!built.status.ok()) {
    around.plans->erase(node);
    return around.Feed(FailUpdate{update_.id,
                                  fmt::format("{}: its part of the program: {}",
                                              around.nodes.Name(node), Message(built.status)),
                                  GiveUpClass::kTransfer, around.FailureOf(node, built.status)});
  }
  SendPlans(around);
  built_[node] = built.rounds;
  built_ends_.Add(NumberOf(node), built.streams);
  AgreeIfBuilt(around);
}

void ProgramOnNodes::Disagree(size_t a, size_t b, const std::string& why, const Around& around) {
  around.plans->clear();  // one plan is wrong: the next update sends all anew
  around.Feed(FailUpdate{update_.id, why, GiveUpClass::kTransfer,
                         around.nodes.Suspecting(std::array{use_.nodes[a], use_.nodes[b]})});
}

// P5: both ends of every stream between daemons must have derived it alike.
void ProgramOnNodes::AgreeIfBuilt(const Around& around) {
  if (!building_.empty() || agreed_ || update_.abandoned || built_.empty()) return;
  const auto name = [this, &around](size_t number) {
    return around.nodes.Name(use_.nodes[number]);
  };
  if (const auto differ = built_ends_.FirstDifference(); differ.has_value()) {
    const auto [a, b] = *differ;
    return Disagree(a, b,
                    fmt::format("{} and {} do not agree about what the program sends between them",
                                name(a), name(b)),
                    around);
  }
  const uint32_t first = NumberOf(built_.begin()->first);
  for (const auto& [node, rounds_of_node] : built_) {
    if (rounds_of_node == rounds()) continue;
    const uint32_t number = NumberOf(node);
    return Disagree(first, number,
                    fmt::format("the program has {} rounds for {}, {} for {}", rounds(),
                                name(first), rounds_of_node, name(number)),
                    around);
  }
  agreed_ = true;
  CompareIfAgreed(around);
}

// ---- replicas ----

void ProgramOnNodes::CompareIfAgreed(const Around& around) {
  if (!compare_.has_value() || compare_sent_ || (!update_.abandoned && !agreed_)) return;
  compare_sent_ = true;
  digests_.assign(use_.nodes.size(), {});
  if (update_.abandoned) {
    compared_ = absl::CancelledError("the update was given up");
  } else {
    for (const auto& [node, command] : commands_) {
      if (command.sources.empty() || !update_.nodes.contains(node)) continue;
      comparing_.insert(node);
      around.Send(node, StartCompare{update_.id, *compare_});
    }
  }
  CompleteCompareIfEnded(around);
}

void ProgramOnNodes::Compared(NodeId node, const CompareDone& compared, const Around& around) {
  if (comparing_.erase(node) == 0) return;
  if (!compared.status.ok() && compared_.ok()) {
    compared_ = around.StatusOf(node, compared.status, false);
  }
  digests_[NumberOf(node)] = compared.digests;
  CompleteCompareIfEnded(around);
}

void ProgramOnNodes::CompleteCompareIfEnded(const Around& around) {
  if (!comparing_.empty()) return;
  if (compared_.ok()) compared_ = CompareReplicas(*use_.plan, digests_, *compare_);
  around.Feed(CompareDone{update_.id, compared_});
}

// ---- running ----

StartRefit ProgramOnNodes::CommandToRun(const Around& around) {
  StartRefit run;
  run.update = update_.id;
  run.part = run_->part;
  run.attempt = attempt_;
  run.resume = resume_;
  // If only one daemon is left, the bytes for the others are sent nowhere.
  run.wired = wired_ = use_.plan->routes.wire_bytes > 0 && update_.nodes.size() > 1;
  if (update_.abandoned) {
    shares_.SetStatus(absl::CancelledError("the update was given up"));
  } else if (wired_ && around.communicator == nullptr) {
    shares_.SetStatus(absl::UnavailableError("the data plane is closed"));
  } else if (wired_) {
    run.slots = run_->slots;
    run.communicator = around.communicator->id();
    run.wire_seq = around.communicator->Take(static_cast<uint64_t>(rounds()));
    for (const NodeId node : use_.nodes) {
      const std::optional<uint32_t> rank = around.communicator->RankOf(node);
      run.ranks.push_back(update_.nodes.contains(node) ? rank.value_or(kNoRank) : kNoRank);
    }
  }
  return run;
}

bool ProgramOnNodes::RunIfAgreed(const Around& around) {
  if (!run_.has_value() || sent_ || (!update_.abandoned && !agreed_)) return false;
  sent_ = true;
  started_ = around.now;
  record_.took.clear();
  const StartRefit run = CommandToRun(around);
  std::set<NodeId> running;
  if (shares_.status().ok()) {
    for (const auto& [node, command] : commands_) {
      if (update_.nodes.contains(node)) running.insert(node);
    }
  }
  for (const NodeId node : running) {
    StartRefit mine = run;
    mine.skip = update_.destinations.SkipOn(node, run_->skip);
    around.Send(node, std::move(mine));
  }
  shares_.Begin(std::move(running), update_.destinations.size());
  return true;
}

void ProgramOnNodes::Issue(const Around& around) {
  issued_ = true;
  for (const NodeId node : shares_.running()) around.Send(node, PeerIssue{update_.id, run_->part});
}

bool ProgramOnNodes::ShareEnded(NodeId node, const RefitDone& done, const Around& around) {
  if (done.attempt != attempt_ || !shares_.End(node)) return false;
  lacks_[node] = done.lacks;
  for (const PeerWireUse& link : done.links) {
    if (link.peer >= use_.nodes.size()) continue;
    record_.uses.push_back({node, use_.nodes[link.peer], link.bytes, link.busy});
  }
  if (again_) return false;
  record_.took[node] = around.now - started_;
  run_ends_.Add(NumberOf(node), done.streams);
  return true;
}

void ProgramOnNodes::CompleteIfEnded(const Around& around) {
  if (!sent_ || again_ || complete_ || !shares_.ended()) return;
  complete_ = true;
  if (update_.verification != Verification::kOff) {
    if (const auto differ = run_ends_.FirstDifference(); differ.has_value()) {
      const NodeId from = use_.nodes[differ->first];
      const NodeId to = use_.nodes[differ->second];
      shares_.FailIfOk(
          WithFailure(Error(absl::StatusCode::kDataLoss, "what {} received is not what {} sent",
                            around.nodes.Name(to), around.nodes.Name(from)),
                      around.nodes.Suspecting(std::array{from, to})));
    }
  }
  if (wired_) {
    record_.ok = shares_.status().ok();
    around.Do(std::move(record_));
  }
  RefitDone done;
  done.update = update_.id;
  shares_.MoveTo(&done);
  around.Feed(std::move(done));
}

RunProgress ProgramOnNodes::Progress(const RunProgress& own) const {
  RunProgress made;
  made.bytes = shares_.bytes_written();
  if (!shares_.running().contains(kCoordinatorNode)) return made;
  made.bytes += own.bytes;
  made.rounds = own.rounds;
  return made;
}

std::optional<int64_t> ProgramOnNodes::FirstLacked() const {
  std::optional<int64_t> first;
  for (const auto& [node, command] : commands_) {
    if (!update_.nodes.contains(node)) continue;
    const auto lacks = lacks_.find(node);
    if (lacks == lacks_.end() || !lacks->second.has_value()) return std::nullopt;
    first = std::min(first.value_or(*lacks->second), *lacks->second);
  }
  return first;
}

void ProgramOnNodes::BeginAgain(const Around& around) {
  ++attempt_;
  resume_ = FirstLacked();
  lacks_.clear();
  around.Log(LogLine::kInfo,
             resume_.has_value()
                 ? fmt::format("the update to version {} goes on from round {} of {}",
                               update_.version, *resume_, rounds())
                 : fmt::format("the update to version {} moves its bytes again", update_.version));
  again_ = sent_ = issued_ = false;
  shares_ = {};
  run_ends_ = {};
  record_ = {};
}

// ---- giving up ----

void ProgramOnNodes::Abandon(const Around& around) {
  if (std::exchange(again_, false) && shares_.ended()) {
    shares_.SetStatus(absl::CancelledError("the update was given up"));
  }
  CompareIfAgreed(around);
}

void ProgramOnNodes::LoseNode(NodeId node, const absl::Status& why, const Around& around) {
  built_.erase(node);
  if (const auto command = commands_.find(node); command != commands_.end()) {
    built_ends_.Forget(command->second.node);
  }
  building_.erase(node);
  under_way_.erase(node);
  SendPlans(around);
  if (comparing_.erase(node) > 0) {
    if (compared_.ok()) compared_ = why;
    CompleteCompareIfEnded(around);
  }
  if (shares_.End(node)) shares_.FailIfOk(why);
  AgreeIfBuilt(around);
}

void ProgramOnNodes::CheckInvariants() const {
  const auto have_part = [this](const std::set<NodeId>& nodes) {
    return std::all_of(nodes.begin(), nodes.end(),
                       [this](NodeId node) { return commands_.contains(node); });
  };
  REFITD_CHECK(have_part(building_) && have_part(shares_.running()) && have_part(comparing_));
  REFITD_CHECK(
      std::includes(building_.begin(), building_.end(), under_way_.begin(), under_way_.end()));
  for (const auto& [node, rounds_of_node] : built_) REFITD_CHECK(commands_.contains(node));
  // P5: nothing runs before the nodes agreed, and nothing is issued before it was sent. What a
  // given-up update asked for counts as sent, without any node that runs it.
  const bool settled = agreed_ || update_.abandoned;
  REFITD_CHECK(!agreed_ || building_.empty());
  REFITD_CHECK(!compare_sent_ || settled);
  REFITD_CHECK(!sent_ || (settled && run_.has_value()));
  REFITD_CHECK(shares_.ended() || (sent_ && agreed_));
  REFITD_CHECK(!issued_ || (sent_ && agreed_ && wired_));
}

// ---- StreamEnds ----

void StreamEnds::Add(uint32_t node, const std::vector<PeerStream>& streams) {
  Forget(node);
  PeerEnds& here = reported_[node];
  here.reserve(streams.size());
  for (const PeerStream& stream : streams) {
    // A node has no stream to itself.
    if (stream.peer != node) here[stream.peer] = {stream.out, stream.in};
  }
  for (const auto& [peer, ends] : here) {
    named_by_[peer].insert(node);
    if (const auto there = reported_.find(peer); there != reported_.end()) {
      Compare(node, ends, peer, there->second);
    }
  }
  // Compare streams that only the other end lists.
  const auto named = named_by_.find(node);
  if (named == named_by_.end()) return;
  for (const uint32_t peer : named->second) {
    if (!here.contains(peer)) Compare(node, Ends(), peer, reported_.at(peer));
  }
}

void StreamEnds::Compare(uint32_t node, const Ends& here, uint32_t peer, const PeerEnds& there) {
  ++looked_at_;
  const auto at = there.find(node);
  const Ends ends = at == there.end() ? Ends() : at->second;
  if (here.out != ends.in) different_.insert({node, peer});
  if (here.in != ends.out) different_.insert({peer, node});
}

void StreamEnds::Forget(uint32_t node) {
  const auto it = reported_.find(node);
  if (it == reported_.end()) return;
  for (const auto& [peer, ends] : it->second) {
    if (const auto named = named_by_.find(peer); named != named_by_.end()) {
      named->second.erase(node);
      if (named->second.empty()) named_by_.erase(named);
    }
  }
  reported_.erase(it);
  std::erase_if(different_,
                [node](const auto& ends) { return ends.first == node || ends.second == node; });
}

std::optional<std::pair<uint32_t, uint32_t>> StreamEnds::FirstDifference() const {
  if (different_.empty()) return std::nullopt;
  return *different_.begin();
}

// ---- LastRun ----

void LastRun::ReadPlan(const ProgramUse& use) {
  const RouteBytes& links = use.plan->routes.links;
  // The plan counts no node behind the last one with a part in it.
  const size_t count = use.plan->routes.nodes;
  REFITD_CHECK(count <= use.nodes.size() && links.matrix.size() == count * count);
  program_ = use.program;
  shares_.clear();
  for (size_t from = 0; from < count; ++from) {
    Share& share = shares_[use.nodes[from]];
    share.sent = links.node_sends[from];
    share.forwarded = links.node_forwards[from];
    share.received = links.node_receives[from];
    for (size_t to = 0; to < count; ++to) {
      const int64_t bytes = links.matrix[from * count + to];
      if (to != from && bytes > 0) share.sends.emplace_back(use.nodes[to], bytes);
    }
    std::stable_sort(share.sends.begin(), share.sends.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    if (share.sends.size() > kMaxShownSends) share.sends.resize(kMaxShownSends);
  }
}

void LastRun::Set(const ProgramUse& use, const std::map<NodeId, Duration>& took) {
  if (program_ != use.program) ReadPlan(use);
  for (auto& [node, share] : shares_) {
    const auto of_node = took.find(node);
    share.took = of_node == took.end() ? Duration(0) : of_node->second;
  }
}

void LastRun::Show(NodeId node, const JoinedNodes& nodes, NodeView* view) const {
  const auto found = shares_.find(node);
  if (found == shares_.end() || found->second.took == Duration(0)) return;
  const Share& share = found->second;
  for (const auto& [to, bytes] : share.sends) {
    if (nodes.exists(to)) view->sends.push_back({nodes.DaemonId(to), bytes});
  }
  view->bytes_sent = share.sent;
  view->bytes_forwarded = share.forwarded;
  view->bytes_received = share.received;
  view->data_took = share.took;
}

}  // namespace refitd::coordinator
