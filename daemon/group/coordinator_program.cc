// The coordinator's part in a compiled refit: it sends each daemon its part of the plan, compares
// the streams that they derived from it (P5), lets them compare replicas and run the program, and
// compares what was received with what was sent (P1).
#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "daemon/group/coordinator_impl.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// At most this many nodes have been sent the plan and have not built their part. The message that
// is encoded for a node stays in memory until the node has read it.
constexpr size_t kMaxPlansUnderWay = 64;

}  // namespace

// ---- compiling ----

// Each node's command lists its destinations already, in the order of its Prepare.
void Coordinator::Impl::AnnounceProgram() {
  ProgramJob& job = *spread->program;
  for (const auto& [node, index] : spread->destinations) {
    std::vector<PlanMember>& members = job.commands[node].destinations;
    for (size_t i = 0; i < std::min(index.size(), members.size()); ++i) members[i].rank = index[i];
  }
  for (uint32_t rank = 0; rank < job.use.sources.size(); ++rank) {
    const MemberId member = job.use.sources[rank];
    const auto remote = remotes.find(member);
    job.commands[NodeOf(member)].sources.push_back(
        {rank, remote == remotes.end() ? member : remote->second.id});
  }
  // With chains, the nodes of the plan share the whole slot (NodeProgramOptions::chunk_bytes).
  const RoutePlan& routes = job.use.plan->routes;
  const auto among =
      static_cast<int64_t>(routes.relay.lag > 0 ? routes.nodes : job.use.nodes.size());
  const int64_t peers = std::max<int64_t>(1, among - 1);
  std::erase_if(job.commands, [this](const auto& c) {
    return c.first != kCoordinatorNode && !nodes.contains(c.first);  // the node is being lost
  });
  for (auto& [node, command] : job.commands) {
    command.update = spread->update;
    command.program = job.use.program;
    command.node = static_cast<uint32_t>(
        std::lower_bound(job.use.nodes.begin(), job.use.nodes.end(), node) - job.use.nodes.begin());
    command.chunk_bytes =
        std::max<int64_t>(options.spec.slot_bytes / peers / kSectionAlignment, 1) *
        kSectionAlignment;
    job.building.insert(node);
  }
  for (const auto& [id, command] : job.commands) {
    if (known_programs[id] == job.use.program) {
      Send(id, command);
    } else {
      job.without_plan.push_back(id);
    }
  }
  SendPlans();
}

// A plan is large, and each node's part is different. So at first only some nodes are sent their
// parts. Each further node is sent its part when a node before it has built its own.
void Coordinator::Impl::SendPlans() {
  ProgramJob& job = *spread->program;
  while (!job.without_plan.empty() && !spread->abandoned &&
         job.under_way.size() < kMaxPlansUnderWay) {
    const NodeId node = job.without_plan.front();
    job.without_plan.pop_front();
    if (!job.building.contains(node)) continue;  // the node was lost
    job.under_way.insert(node);
    known_programs[node] = job.use.program;
    PeerProgram command = job.commands.at(node);
    AttachPlan(node, &command);
    Send(node, std::move(command));
  }
}

// The node's part of the plan is found where the command is encoded (WithItsPart), since that takes
// longer than the daemon's mutex may be held.
void Coordinator::Impl::AttachPlan(NodeId node, PeerProgram* command) const {
  command->whole = spread->program->use.plan;
  if (node == kCoordinatorNode) {
    command->plan = {command->whole, &command->whole->routes};
    return;
  }
  const auto& members = nodes.at(node).members;
  for (const auto* side : {&command->sources, &command->destinations}) {
    for (const PlanMember& m : *side) {
      const auto ours = members.find(m.member);
      const auto layout = ours == members.end() ? layouts.end() : layouts.find(ours->second);
      if (layout != layouts.end()) command->local_layouts.push_back(layout->second.layout);
    }
  }
}

void Coordinator::Impl::Built(NodeId node, const PeerProgramBuilt& r) {
  if (!spread.has_value() || spread->update != r.update || !spread->program.has_value()) return;
  ProgramJob& job = *spread->program;
  if (job.building.erase(node) == 0) return;
  job.under_way.erase(node);
  if (!r.status.ok()) {
    known_programs.erase(node);
    Fail(fmt::format("{}: its part of the program: {}", Name(node), Message(r.status)),
         GiveUpClass::kTransfer, FailureOfNode(node, r.status));
    return;
  }
  SendPlans();
  job.built[node] = r;
  job.built_ends.Add(job.commands.at(node).node, r.streams);
  AgreeIfBuilt();
}

// P5: both ends of every stream between daemons must have derived it alike.
void Coordinator::Impl::AgreeIfBuilt() {
  ProgramJob& job = *spread->program;
  if (!job.building.empty() || job.agreed || spread->abandoned || job.built.empty()) return;
  if (const auto differ = job.built_ends.FirstDifference(); differ.has_value()) {
    known_programs.clear();  // one plan is wrong: the next update sends all anew
    return Fail(
        fmt::format("{} and {} do not agree about what the program sends between them",
                    Name(job.use.nodes[differ->first]), Name(job.use.nodes[differ->second])),
        GiveUpClass::kTransfer,
        Suspecting(std::array{job.use.nodes[differ->first], job.use.nodes[differ->second]}));
  }
  const auto& [first_node, first_built] = *job.built.begin();
  for (const auto& [node, built] : job.built) {
    if (built.rounds == first_built.rounds) continue;
    known_programs.clear();
    return Fail(fmt::format("the program has {} rounds for {}, {} for {}", first_built.rounds,
                            Name(first_node), built.rounds, Name(node)),
                GiveUpClass::kTransfer, Suspecting(std::array{first_node, node}));
  }
  job.agreed = true;
  CompareIfAgreed();
  if (spread.has_value()) RunIfAgreed();
}

// ---- replicas ----

void Coordinator::Impl::CompareIfAgreed() {
  ProgramJob& job = *spread->program;
  if (!job.compare || job.compare_sent) return;
  if (!spread->abandoned && !job.agreed) return;
  job.compare_sent = true;
  job.digests.assign(job.use.nodes.size(), {});
  if (spread->abandoned) {
    job.compared = absl::CancelledError("the update was given up");
  } else {
    for (const auto& [node, command] : job.commands) {
      if (!command.sources.empty() && spread->nodes.contains(node)) job.comparing.insert(node);
    }
  }
  const std::set<NodeId> asked = job.comparing;
  if (asked.empty()) return CompleteCompareIfDone();
  for (const NodeId node : asked) Send(node, PeerCompare{spread->update, job.compare_part});
}

void Coordinator::Impl::Compared(NodeId node, const PeerCompared& r) {
  if (!spread.has_value() || spread->update != r.update || !spread->program.has_value()) return;
  ProgramJob& job = *spread->program;
  if (job.comparing.erase(node) == 0) return;
  if (!r.status.ok() && job.compared.ok()) {
    job.compared = Told(node, r.status, false);
  }
  const auto command = job.commands.find(node);
  if (command != job.commands.end()) job.digests[command->second.node] = r.digests;
  CompleteCompareIfDone();
}

void Coordinator::Impl::CompleteCompareIfDone() {
  ProgramJob& job = *spread->program;
  if (!job.comparing.empty()) return;
  if (job.compared.ok()) {
    job.compared = CompareReplicas(*job.use.plan, job.digests, job.compare_part);
  }
  Feed(CompareDone{spread->update, job.compared});
}

// ---- running ----

void Coordinator::Impl::RunIfAgreed() {
  ProgramJob& job = *spread->program;
  if (!job.run.has_value() || job.sent) return;
  // The program comes after all parts (P7).
  if (!spread->abandoned && (!job.agreed || AnyCut())) return;
  job.sent = true;
  job.started = now;
  job.took.clear();
  job.bytes_written.resize(spread->node_of.size());
  PeerRun run;
  run.update = spread->update;
  run.part = job.run->part;
  run.attempt = job.attempt;
  run.resume = job.resume;
  // If only one daemon is left, the bytes for the others are sent nowhere.
  run.wired = job.wired = job.use.plan->routes.wire_bytes > 0 && spread->nodes.size() > 1;
  if (run.wired && !spread->abandoned && communicator.has_value()) {
    run.slots = job.run->slots;
    run.communicator = communicator->id;
    run.wire_seq = WireSeq(communicator->next_seq);
    communicator->next_seq += static_cast<uint64_t>(job.built.begin()->second.rounds);
    for (const NodeId node : job.use.nodes) {
      const std::optional<uint32_t> rank = communicator->RankOf(node);
      run.ranks.push_back(spread->nodes.contains(node) ? rank.value_or(kNoRank) : kNoRank);
    }
  } else if (spread->abandoned) {
    job.status = absl::CancelledError("the update was given up");
  } else if (run.wired) {
    job.status = absl::UnavailableError("the data plane is closed");
  }
  if (job.status.ok()) {
    for (const auto& [node, command] : job.commands) {
      if (spread->nodes.contains(node)) job.running.insert(node);
    }
  }
  const std::set<NodeId> told = job.running;
  for (const NodeId node : told) {
    PeerRun mine = run;
    if (const auto d = spread->destinations.find(node); d != spread->destinations.end()) {
      for (const uint32_t index : d->second) {
        mine.skip.push_back(index < job.run->skip_destination.size() &&
                            job.run->skip_destination[index]);
      }
    }
    Send(node, std::move(mine));
  }
  if (run.wired && !told.empty()) spread->to_issue.push_back(run.part);
  if (auto readback = std::exchange(job.readback, std::nullopt); readback.has_value()) {
    StartReadback(*readback);
  }
  if (told.empty()) CompleteRunIfDone();
}

void Coordinator::Impl::RunEnded(NodeId node, const PeerRunDone& r) {
  if (!spread.has_value() || spread->update != r.update || !spread->program.has_value()) return;
  ProgramJob& job = *spread->program;
  if (r.attempt != job.attempt || job.running.erase(node) == 0) return;
  job.lacks[node] = r.lacks;
  NoteLinks(node, r);
  if (job.again) return RunAgainIfEnded();
  job.took[node] = now - job.started;
  job.run_ends.Add(job.commands.at(node).node, r.streams);
  HearEnd(node, r, "the refit", job.wired, &job);
  if (!spread.has_value() || !spread->program.has_value()) return;
  if (spread->to_drop.has_value()) return DropSuspect();
  CompleteRunIfDone();
}

bool Coordinator::Impl::ProgramRuns() const {
  return spread->program.has_value() && spread->program->sent && !spread->program->complete;
}

void Coordinator::Impl::CompleteRunIfDone() {
  ProgramJob& job = *spread->program;
  if (job.again) return RunAgainIfEnded();
  if (!job.running.empty() || job.complete) return;
  job.complete = true;
  if (job.status.ok() && spread->verification != Verification::kOff) {
    if (const auto differ = job.run_ends.FirstDifference(); differ.has_value()) {
      const NodeId from = job.use.nodes[differ->first];
      const NodeId to = job.use.nodes[differ->second];
      job.status = WithFailure(Error(absl::StatusCode::kDataLoss,
                                     "what {} received is not what {} sent", Name(to), Name(from)),
                               Suspecting(std::array{from, to}));
    }
  }
  if (job.status.ok() && job.wired) NoteRun(job);
  if (job.wired) JudgeSlow(job);
  RefitDone done;
  done.update = spread->update;
  done.status = job.status;
  done.bytes_written = job.bytes_written;
  done.failed_destination = job.failed_destination;
  Feed(std::move(done));
  if (spread.has_value()) CompleteVerifyIfDone();
}

// Reads the plan's matrix only once for each program, since it has a number for each pair of nodes.
void Coordinator::Impl::NoteRun(const ProgramJob& job) {
  const std::vector<NodeId>& ids = job.use.nodes;
  const RouteBytes& links = job.use.plan->routes.links;
  // The plan counts no node behind the last one with a part in it.
  const size_t count = job.use.plan->routes.nodes;
  REFITD_CHECK(count <= ids.size() && links.matrix.size() == count * count);
  if (!last_run.has_value() || last_run->program != job.use.program) {
    last_run.emplace();
    last_run->program = job.use.program;
    for (size_t from = 0; from < count; ++from) {
      coordinator::LastRun::Share& share = last_run->shares[ids[from]];
      share.sent = links.node_sends[from];
      share.forwarded = links.node_forwards[from];
      share.received = links.node_receives[from];
      for (size_t to = 0; to < count; ++to) {
        const int64_t bytes = links.matrix[from * count + to];
        if (to != from && bytes > 0) share.sends.emplace_back(ids[to], bytes);
      }
      std::stable_sort(share.sends.begin(), share.sends.end(),
                       [](const auto& a, const auto& b) { return a.second > b.second; });
      if (share.sends.size() > kMaxShownSends) share.sends.resize(kMaxShownSends);
    }
  }
  for (auto& [node, share] : last_run->shares) {
    const auto took = job.took.find(node);
    share.took = took == job.took.end() ? Duration(0) : took->second;
  }
}

void Coordinator::Impl::ShowRun(NodeId id, NodeView* view) const {
  if (!last_run.has_value()) return;
  const auto found = last_run->shares.find(id);
  if (found == last_run->shares.end() || found->second.took == Duration(0)) return;
  const coordinator::LastRun::Share& share = found->second;
  for (const auto& [to, bytes] : share.sends) {
    const auto node = nodes.find(to);
    if (to == kCoordinatorNode) {
      view->sends.push_back({options.daemon_id, bytes});
    } else if (node != nodes.end()) {
      view->sends.push_back({node->second.daemon_id, bytes});
    }
  }
  view->bytes_sent = share.sent;
  view->bytes_forwarded = share.forwarded;
  view->bytes_received = share.received;
  view->data_took = share.took;
}

std::optional<int64_t> Coordinator::Impl::FirstLacked() const {
  const ProgramJob& job = *spread->program;
  std::optional<int64_t> first;
  for (const auto& [node, command] : job.commands) {
    if (!spread->nodes.contains(node)) continue;
    const auto lacks = job.lacks.find(node);
    if (lacks == job.lacks.end() || !lacks->second.has_value()) return std::nullopt;
    first = std::min(first.value_or(*lacks->second), *lacks->second);
  }
  return first;
}

// Begins the next attempt when all remaining nodes have ended the attempt before, and their
// read-backs. The next attempt goes on from the first round that one of these nodes lacks, or moves
// all bytes again. The sums that nodes report are accordingly over all attempts, or over the next
// attempt alone (P1).
void Coordinator::Impl::RunAgainIfEnded() {
  ProgramJob& job = *spread->program;
  if (!job.running.empty() || !spread->verifying.empty()) return;
  ++job.attempt;
  job.resume = FirstLacked();
  job.lacks.clear();
  Do(GroupAction(LogLine{
      LogLine::kInfo,
      job.resume.has_value()
          ? fmt::format("the update to version {} goes on from round {} of {}", spread->version,
                        *job.resume, job.built.empty() ? 0 : job.built.begin()->second.rounds)
          : fmt::format("the update to version {} moves its bytes again", spread->version)}));
  job.again = job.sent = job.issued = false;
  job.status = absl::OkStatus();
  job.failed_destination = -1;
  job.bytes_written.clear();
  job.run_ends = {};
  job.uses.clear();
  std::erase(spread->to_issue, job.run->part);
  job.readback = std::exchange(spread->verify, std::nullopt);
  RunIfAgreed();
}

// ---- giving up ----

// Answers the requests that the group has made and that have not begun, so that the group need not
// wait for them.
void Coordinator::Impl::AbandonProgram() {
  ProgramJob& job = *spread->program;
  if (std::exchange(job.again, false) && job.running.empty()) {
    job.status = absl::CancelledError("the update was given up");
    return CompleteRunIfDone();
  }
  CompareIfAgreed();
  if (spread.has_value() && spread->program.has_value()) RunIfAgreed();
}

void Coordinator::Impl::LoseNodeInProgram(NodeId node, const absl::Status& why) {
  ProgramJob& job = *spread->program;
  job.built.erase(node);
  if (const auto command = job.commands.find(node); command != job.commands.end()) {
    job.built_ends.Forget(command->second.node);
  }
  job.building.erase(node);
  job.under_way.erase(node);
  SendPlans();
  if (job.comparing.erase(node) > 0) {
    if (job.compared.ok()) job.compared = why;
    CompleteCompareIfDone();
  }
  if (spread.has_value() && job.running.erase(node) > 0) {
    if (job.status.ok()) job.status = why;
    CompleteRunIfDone();
  }
  if (spread.has_value()) AgreeIfBuilt();
}

}  // namespace refitd
