#include "daemon/group/coordinator.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>

#include "daemon/group/coordinator_impl.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/node_program.h"
#include "transport/sockets/address_security.h"

namespace refitd {
namespace {

// Once a node said that the wire failed, other nodes have this long to say whom they waited for. It
// is less than the second within which survivors must hear of an abort.
constexpr Duration kLongestVerdict = std::chrono::milliseconds(500);
// If moving could throw, an event that waits for its turn would be copied, and an event may have
// every tensor of a model.
static_assert(std::is_nothrow_move_constructible_v<GroupEvent>);

// The shortest attempt to bring a communicator up from which a daemon can be blamed: if a shorter
// attempt fails, no daemon is left out of the update. If a quarter of PeerLimits::wire is shorter
// than this constant, that quarter is the limit instead.
constexpr Duration kLeastAttempt = std::chrono::seconds(1);
constexpr int kPingsPerLimit = 4;  // so that a lost ping is not a lost daemon

std::string Seconds(Duration duration) {
  return fmt::format("{:g} s", std::chrono::duration<double>(duration).count());
}

}  // namespace

Coordinator::Impl::Impl(CoordinatorOptions coordinator_options)
    : options(std::move(coordinator_options)),
      group(options.name, options.incarnation, options.spec, options.limits, options.next_update,
            options.owner_rule),
      worker({.next_update = options.next_update,
              .layout =
                  [this](MemberId member) {
                    const auto it = layouts.find(member);
                    return it == layouts.end() ? nullptr : it->second.layout;
                  },
              .layout_digest =
                  [this](MemberId member) {
                    const auto it = layouts.find(member);
                    return it == layouts.end() ? 0 : it->second.digest;
                  },
              .bucket =
                  [this](CallId call) {
                    const auto it = buckets.find(call);
                    return it == buckets.end() ? nullptr : it->second;
                  },
              .attached = [this](MemberId member) { return group.Attached(member); }},
             options.peer_limits.wire),
      slow(options.peer_limits.slow) {}

std::string Coordinator::Impl::Name(NodeId node) const {
  if (node == kCoordinatorNode) return "daemon " + options.daemon_id;
  const auto it = nodes.find(node);
  return it == nodes.end() ? fmt::format("daemon {}", node) : "daemon " + it->second.daemon_id;
}

bool Coordinator::Impl::Speaks(NodeId node, Protocol version) const {
  if (node == kCoordinatorNode) return true;
  const auto it = nodes.find(node);
  return it != nodes.end() && it->second.protocol >= version;
}

Suspect Coordinator::Impl::SuspectOf(NodeId node) const {
  Suspect suspect;
  suspect.role = SuspectRole::kDaemon;
  const auto it = nodes.find(node);
  if (node == kCoordinatorNode) {
    suspect.daemon = options.daemon_id;
  } else {
    suspect.daemon = it == nodes.end() ? fmt::format("{}", node) : it->second.daemon_id;
  }
  return suspect;
}

Failure Coordinator::Impl::LossOf(NodeId node) const {
  Failure failure = Suspecting(std::array{node});
  failure.may_be_retried = true;
  return failure;
}

std::vector<NodeId> Coordinator::Impl::NodesNamed(const absl::Status& status) const {
  std::set<NodeId> named;  // a daemon may name a rank twice
  if (!communicator.has_value()) return {};
  for (const int rank : FailureOf(status).ranks) {
    if (static_cast<size_t>(rank) < communicator->ranks.size())
      named.insert(communicator->ranks[rank]);
  }
  return {named.begin(), named.end()};
}

Failure Coordinator::Impl::FailureOfNode(NodeId node, const absl::Status& status) const {
  Failure failure = FailureOf(status);
  for (const NodeId named : NodesNamed(status)) failure.Add(SuspectOf(named));
  failure.ranks.clear();
  if (failure.suspects.empty() && failure.tensor.empty()) failure.Add(SuspectOf(node));
  return failure;
}

// Explains the wire's rank numbers in a message, as in " (rank 2 is daemon c)".
std::string Coordinator::Impl::NamesOfRanks(const absl::Status& status) const {
  constexpr size_t kShown = 16;
  std::string names;
  if (!communicator.has_value()) return names;
  const std::vector<int> ranks = FailureOf(status).ranks;
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) {
    const auto rank = static_cast<size_t>(ranks[i]);
    if (rank >= communicator->ranks.size()) continue;
    names += fmt::format("{}rank {} is {}", names.empty() ? "" : ", ", rank,
                         Name(communicator->ranks[rank]));
  }
  return names.empty() ? "" : fmt::format(" ({})", names);
}

absl::Status Coordinator::Impl::Told(NodeId node, const absl::Status& status, bool of_wire) const {
  return WithFailure(Error(status.code(), "{}: {}{}", Name(node), Message(status),
                           of_wire ? NamesOfRanks(status) : ""),
                     FailureOfNode(node, status));
}

void Coordinator::Impl::Send(NodeId node, PeerCommand command) {
  if (node != kCoordinatorNode) {
    if (nodes.contains(node)) Do(PeerAction(SendCommand{node, std::move(command)}));
    return;
  }
  // Commands for members are not for the worker.
  const auto take = [](Impl* self, const auto& c) {
    if constexpr (requires { self->worker.Handle(c, self->now, self->Out()); }) {
      self->worker.Handle(c, self->now, self->Out());
    }
  };
  std::visit([this, &take](const auto& c) { take(this, c); }, command);
}

// ---- events ----

void Coordinator::Impl::Handle(MachineEvent& event) {
  std::visit(
      [this](auto& outer) {
        using Outer = std::decay_t<decltype(outer)>;
        if constexpr (std::is_same_v<Outer, GroupEvent>) {
          On(outer);
        } else {
          std::visit([this](auto& e) { this->On(e); }, outer);
        }
      },
      event);
  // Reports of the coordinator's own worker are handled like those of any node.
  do {
    for (PeerReport& report : std::exchange(own_reports, {})) {
      Report(kCoordinatorNode, report);
    }
    if (spread.has_value() && own_reports.empty()) {
      IssueParts();
      YieldIfQuiet();
    }
  } while (!own_reports.empty());
}

void Coordinator::Impl::On(GroupEvent& event) {
  if (const auto* done = std::get_if<TransferDone>(&event)) {
    return worker.Handle(*done, now, Out());
  } else if (const auto* verified = std::get_if<VerifyDone>(&event)) {
    return worker.Handle(*verified, now, Out());
  } else if (const auto* lost = std::get_if<MemberLost>(&event)) {
    layouts.erase(lost->member);
  } else if (const auto* layout = std::get_if<LayoutRegistered>(&event)) {
    LayoutRegistered told = *layout;
    if (!told.digest.has_value()) told.digest = told.layout->Digest();
    layouts[told.member] = {told.layout, *told.digest};
    return Feed(std::move(told));
  } else if (const auto* bucket = std::get_if<BucketEvent>(&event)) {
    // The bucket as the trainer described it: this daemon compares the header with it (P5).
    buckets.emplace(bucket->call, bucket->bucket);
  } else if (std::holds_alternative<refitd::Tick>(event)) {
    Tick();
  }
  // If the group takes the new incarnation, the joined daemons hear of it.
  const auto* replace = std::get_if<ReplaceGroup>(&event);
  const std::optional<uint64_t> incarnation =
      replace == nullptr ? std::nullopt : std::optional(replace->incarnation);
  Feed(std::move(event));
  if (std::exchange(overdue, false)) DropOwing();
  if (incarnation.has_value() && group.incarnation() == *incarnation) {
    for (const auto& [id, node] : nodes) {
      Do(PeerAction(SendCommand{id, PeerIncarnation{*incarnation}}));
    }
  }
}

void Coordinator::Impl::Tick() {
  std::vector<NodeId> silent;
  for (auto& [id, node] : nodes) {
    if (now - node.heard > options.peer_limits.peer) {
      silent.push_back(id);
    } else if (now >= node.next_ping) {
      node.next_ping = now + options.peer_limits.peer / kPingsPerLimit;
      Send(id, PeerPing{++node.pings});
    }
  }
  for (const NodeId id : silent) {
    const std::string reason =
        fmt::format("it was silent for {}", Seconds(options.peer_limits.peer));
    Do(PeerAction(DropNode{id, absl::DeadlineExceededError(reason)}));
    LoseNode(id, reason);
  }
  FindNodesDue();
  if (!spread.has_value() || spread->abandoned) return;
  if (spread->wire_verdict.has_value() && now >= spread->wire_verdict->due) {
    if (FindNodeToDrop()) return DropSuspect();
    Judge().IgnoreError();
    return;
  }
  if (communicator.has_value() && !communicator->ready && now >= communicator->verdict) {
    JudgeCommunicator();
  } else if (spread->locks_held < spread->lock_order.size() && now >= spread->lock_deadline) {
    Fail(fmt::format(
             "the wire of {} was not free within {}: {} has it",
             Name(spread->lock_order[spread->locks_held]), Seconds(options.peer_limits.wire),
             spread->lock_holder.empty() ? "nobody answered who" : "group " + spread->lock_holder),
         GiveUpClass::kDeadline, Suspecting(std::array{spread->lock_order[spread->locks_held]}));
  }
}

// This is called at each Tick, not at each event, since every event asks for the next deadline.
void Coordinator::Impl::FindNodesDue() {
  nodes_due.reset();
  for (const auto& [id, node] : nodes) {
    const TimePoint silent = node.heard + options.peer_limits.peer + std::chrono::nanoseconds(1);
    const TimePoint due = std::min(node.next_ping, silent);
    if (!nodes_due.has_value() || due < *nodes_due) nodes_due = due;
  }
}

void Coordinator::Impl::On(const NodeJoined& e) {
  for (const auto& [id, node] : nodes) {
    if (node.daemon_id != e.daemon_id) continue;
    const NodeId old = id;
    Do(PeerAction(DropNode{old, absl::AbortedError("the daemon joined anew")}));
    LoseNode(old, "it joined anew");
    break;
  }
  Node node;
  node.id = e.node;
  node.daemon_id = e.daemon_id;
  node.boot_id = e.boot_id;
  node.address = e.address;
  node.protocol = e.protocol;
  node.heard = now;
  node.next_ping = now + options.peer_limits.peer / kPingsPerLimit;
  nodes_due = std::min(nodes_due.value_or(node.next_ping), node.next_ping);
  nodes.emplace(e.node, std::move(node));
  joined_anew = true;
  std::string joined = fmt::format("daemon {} joined from {}", e.daemon_id, e.address);
  if (e.protocol != kProtocol) {
    joined += fmt::format(", with protocol version {}", static_cast<int>(e.protocol));
  }
  Do(GroupAction(LogLine{LogLine::kInfo, std::move(joined)}));
  Do(GroupAction(StateChanged{}));
}

void Coordinator::Impl::LoseNode(NodeId id, const std::string& reason) {
  const auto it = nodes.find(id);
  if (it == nodes.end()) return;
  const std::string name = Name(id);
  const Failure loss = LossOf(id);
  const Node node = std::move(it->second);
  nodes.erase(it);
  known_programs.erase(id);
  search.Forget(id);
  slow.Forget(id);
  Do(GroupAction(LogLine{LogLine::kWarning, fmt::format("{} left: {}", name, reason)}));
  if (spread.has_value() && spread->nodes.erase(id) > 0 && spread->data_began) {
    LoseInDataPhase(id, fmt::format("{} was lost: {}", name, reason), loss);
  }
  if (communicator.has_value() && std::find(communicator->ranks.begin(), communicator->ranks.end(),
                                            id) != communicator->ranks.end()) {
    CloseCommunicatorEverywhere();
  }
  // The remaining nodes get a new communicator before the steps that follow open the data phase, or
  // go on with it.
  if (spread.has_value() && !spread->abandoned) EnsureCommunicator();
  // The lost node's calls and members stay known as another daemon's until the group is done with
  // them.
  std::vector<CallId> calls;
  for (auto call = calls_of.lower_bound({id, CallId(0)});
       call != calls_of.end() && call->first.first == id; ++call) {
    calls.push_back(call->second);
  }
  for (const CallId call : calls) Feed(CallGone{call});
  for (const auto& [theirs, ours] : node.members) {
    layouts.erase(ours);
    Feed(MemberLost{ours, fmt::format("{} was lost: {}", name, reason)});
  }
  if (spread.has_value() && spread->nodes.erase(id) > 0) {
    // The loss of one member of the node may have assembled an update with its other members, which
    // are lost by now as well. The node was not told of that update.
    if (spread->data_began) {
      Fail(fmt::format("{} was lost: {}", name, reason), GiveUpClass::kPeerLost, loss);
    }
    if (communicator.has_value()) CloseCommunicatorEverywhere();
  }
  if (spread.has_value()) {
    LoseNodeInParts(
        id,
        WithFailure(Error(absl::StatusCode::kUnavailable, "{} was lost: {}", name, reason), loss));
  }
  if (spread.has_value() && spread->program.has_value()) {
    LoseNodeInProgram(
        id,
        WithFailure(Error(absl::StatusCode::kUnavailable, "{} was lost: {}", name, reason), loss));
  }
  // The lost node's destinations were evicted above, so that nobody waits for their read-back.
  if (spread.has_value() && spread->verifying.erase(id) > 0) CompleteVerifyIfDone();
  if (spread.has_value()) spread->left.erase(id);
  if (spread.has_value() && !spread->abandoned) {
    DropLock(id);
    EnsureCommunicator();
  }
  Do(GroupAction(StateChanged{}));
}

// The loss of a node without trainers costs only the node's own instances. The other nodes get a
// new communicator. If the program was running, they go on with it (RunAgainIfEnded), and parts
// that were under way are sent again to those that lack them (SendCutPartsAgain). The writes that
// the lost node owed do not matter, since its instances are evicted (P1).
void Coordinator::Impl::LoseInDataPhase(NodeId id, const std::string& reason, const Failure& loss) {
  if (spread->abandoned) return;
  if (!CanGoOnWithout(id)) return Fail(reason, GiveUpClass::kPeerLost, loss);
  spread->wire_verdict.reset();
  if (!CutShort()) return;
  Do(GroupAction(LogLine{LogLine::kWarning,
                         fmt::format("the update to version {} goes on without a daemon: {}",
                                     spread->version, reason)}));
}

bool Coordinator::Impl::CanGoOnWithout(NodeId id) const {
  if (group.SendsFrom(id)) return false;
  // A second run of a program would drop the digests of buckets that were pushed before it.
  return !ProgramRuns() || !spread->pushed;
}

bool Coordinator::Impl::NeedsWire() const {
  if (!spread->program.has_value() || AnyWired()) return true;
  return !spread->program->complete;  // the program is the last part
}

// In the data phase the node stays: others wait for its end of the communicator, which its daemon
// serves until the update has ended.
void Coordinator::Impl::LeaveOut(NodeId node) {
  if (!spread.has_value() || spread->abandoned || spread->data_began) return;
  if (spread->nodes.erase(node) == 0) return;
  spread->left.insert(node);
  Send(node, PeerAbandon{spread->update});
  if (std::find(spread->lock_order.begin(), spread->lock_order.end(), node) !=
      spread->lock_order.end()) {
    DropLock(node);
    Send(node, PeerWireUnlock{spread->update});
  }
  if (spread->program.has_value()) {
    LoseNodeInProgram(node, Error(absl::StatusCode::kUnavailable,
                                  "{} has nobody left in the update", Name(node)));
  }
  EnsureCommunicator();
}

// A daemon that answers pings and never says that its share has ended would keep every engine of
// the update paused (P4). That daemon keeps its members' memory mapped itself (P6). The share of
// this daemon's own worker is still waited for.
void Coordinator::Impl::DropOwing() {
  if (!spread.has_value()) return;
  std::set<NodeId> owing = spread->verifying;
  for (const auto& [seq, part] : spread->parts) {
    owing.insert(part.running.begin(), part.running.end());
  }
  if (spread->program.has_value()) {
    const ProgramJob& job = *spread->program;
    owing.insert(job.comparing.begin(), job.comparing.end());
    owing.insert(job.running.begin(), job.running.end());
  }
  owing.erase(kCoordinatorNode);
  const std::string reason =
      fmt::format("it did not end its share of the update to version {} within {} of its end",
                  spread->version, Seconds(options.limits.cleanup_limit));
  for (const NodeId id : owing) {
    Do(PeerAction(DropNode{id, absl::DeadlineExceededError(reason)}));
    LoseNode(id, reason);
  }
}

void Coordinator::Impl::DropLock(NodeId node) {
  const auto lock = std::find(spread->lock_order.begin(), spread->lock_order.end(), node);
  if (lock == spread->lock_order.end()) return;
  const auto index = static_cast<size_t>(lock - spread->lock_order.begin());
  spread->lock_order.erase(lock);
  if (index < spread->locks_held) {
    --spread->locks_held;
  } else if (index == spread->locks_held) {
    AskNextLock();
  }
}

// ---- reports ----

void Coordinator::Impl::On(ReportReceived& e) {
  const auto it = nodes.find(e.node);
  if (it == nodes.end()) return;
  it->second.heard = now;
  Report(e.node, e.report);
}

void Coordinator::Impl::Report(NodeId id, PeerReport& report) {
  const auto it = nodes.find(id);
  Node* node = it == nodes.end() ? nullptr : &it->second;
  std::visit(
      [this, id, node](auto& r) {
        using R = std::decay_t<decltype(r)>;
        if constexpr (std::is_same_v<R, PeerHeaderAck>) {
          HeaderAcknowledged(id, r);
        } else if constexpr (std::is_same_v<R, PeerPartDone>) {
          PartEnded(id, r);
        } else if constexpr (std::is_same_v<R, VerifyDone>) {
          Verified(id, r);
        } else if constexpr (std::is_same_v<R, PeerProgramBuilt>) {
          Built(id, r);
        } else if constexpr (std::is_same_v<R, PeerCompared>) {
          Compared(id, r);
        } else if constexpr (std::is_same_v<R, PeerRunDone>) {
          RunEnded(id, r);
        } else if constexpr (std::is_same_v<R, CommunicatorOpened>) {
          Opened(id, r);
        } else if constexpr (std::is_same_v<R, CommunicatorUp>) {
          CameUp(id, r);
        } else if constexpr (std::is_same_v<R, PeerWireGranted>) {
          LockGranted(id, r);
        } else if constexpr (std::is_same_v<R, PeerWireWaits>) {
          if (spread.has_value() && spread->update == r.update) spread->lock_holder = r.holder;
        } else if constexpr (std::is_same_v<R, PeerWireWanted>) {
          if (spread.has_value() && spread->update == r.update) spread->yielding = true;
        } else if constexpr (std::is_same_v<R, PeerPong>) {
          // A pong tells only that the node is alive, which was noted above.
        } else if constexpr (std::is_same_v<R, ReadyEvent> || std::is_same_v<R, EngineFailed> ||
                             std::is_same_v<R, AckEvent>) {
          FeedOf(node, std::move(r));
        } else {
          if (node != nullptr) On(node, r);
        }
      },
      report);
}

// Feeds an event of a member; `node` null: of this daemon's.
template <typename MemberEvent>
void Coordinator::Impl::FeedOf(Node* node, MemberEvent event) {
  if (node != nullptr) {
    const auto it = node->members.find(event.member);
    if (it == node->members.end()) return;
    event.member = it->second;
  }
  Feed(std::move(event));
}

void Coordinator::Impl::On(Node* node, const PeerAttach& r) {
  if (node->members.contains(r.member)) return;
  if (!r.room.ok()) {
    Send(node->id, RefuseMember{r.member, r.room});
    return;
  }
  if (options.admit_remote != nullptr) {
    if (absl::Status status = options.admit_remote(); !status.ok()) {
      Send(node->id, RefuseMember{r.member, std::move(status)});
      return;
    }
  }
  const MemberId ours = options.next_member();
  const bool engine = std::holds_alternative<EngineIdentity>(r.identity);
  node->members[r.member] = ours;
  const auto* const rank = std::get_if<EngineIdentity>(&r.identity);
  const bool caught_up = engine && rank->catch_up && CatchesUp(rank->delivery);
  remotes[ours] = {node->id, r.member, engine, caught_up};
  const NodeId id = node->id;
  const std::string daemon = node->daemon_id;
  if (engine) {
    EngineAttached attached{ours, std::get<EngineIdentity>(r.identity)};
    attached.identity.node = id;
    attached.identity.daemon = daemon;
    Feed(std::move(attached));
  } else {
    TrainerAttached attached{ours, std::get<TrainerIdentity>(r.identity)};
    // Another daemon's rule does not count against a rule of this one (P9).
    TrainerIdentity& who = attached.identity;
    who.any_owner = who.any_owner && (options.owner_rule == nullptr ||
                                      options.owner_rule(who.identity) != OwnerRule::kOther);
    attached.identity.node = id;
    attached.identity.daemon = daemon;
    Feed(std::move(attached));
  }
}

void Coordinator::Impl::On(Node* node, const MemberLost& r) {
  const auto it = node->members.find(r.member);
  if (it == node->members.end()) return;
  const MemberId ours = it->second;
  node->members.erase(it);
  layouts.erase(ours);
  Feed(MemberLost{ours, r.reason});
}

void Coordinator::Impl::On(Node* node, const PeerLayout& r) {
  const auto it = node->members.find(r.member);
  if (it == node->members.end()) {
    Send(node->id, Reply{r.call, absl::UnauthenticatedError("the member is not attached"), {}});
    return;
  }
  if (!r.room.ok()) {
    Send(node->id, Reply{r.call, r.room, {}});
    return;
  }
  const MemberId ours = it->second;
  // The layout may have been sent before this coordinator's Prepare arrived there.
  if (absl::Status status = group.CanRegisterLayout(ours); !status.ok()) {
    Send(node->id, Reply{r.call, std::move(status), {}});
    return;
  }
  if (!r.destination.ok() && remotes.at(ours).engine) {
    Send(node->id, Reply{r.call, r.destination, {}});
    return;
  }
  if (calls_of.contains({node->id, r.call})) return;
  const CallId call = options.next_call();
  remote_calls[call] = {node->id, r.call};
  calls_of[{node->id, r.call}] = call;
  const uint64_t digest = r.digest.has_value() ? *r.digest : r.layout->Digest();
  const std::shared_ptr<const Layout> layout =
      remotes.at(ours).engine ? Shared(r.layout, digest) : r.layout;
  layouts[ours] = {layout, digest};
  Feed(LayoutRegistered{ours, layout, call, digest, r.content});
}

// Only the structure of other daemons' layouts counts here, and many engines have equal ones, so
// equal layouts share one object; plans and catalogs go through each object once. Trainers' layouts
// are not shared, since a new registration is recognised by its new object.
std::shared_ptr<const Layout> Coordinator::Impl::Shared(const std::shared_ptr<const Layout>& layout,
                                                        uint64_t digest) {
  std::weak_ptr<const Layout>& known = shared_layouts[digest];
  std::shared_ptr<const Layout> before = known.lock();
  if (before == layout) return layout;  // the daemon has compared them (KnownLayout)
  if (before != nullptr) {
    ++layouts_compared;
    if (SameStructure(*before, *layout)) return before;
  }
  known = layout;
  if (shared_layouts.size() > 2 * layouts.size() + 1) {
    std::erase_if(shared_layouts, [](const auto& entry) { return entry.second.expired(); });
  }
  return layout;
}

void Coordinator::Impl::On(Node* node, PeerCall& r) {
  std::visit(
      [this, node](auto& event) {
        const CallId theirs = event.call;
        const auto member = node->members.find(event.member);
        if (member == node->members.end()) {
          Send(node->id,
               Reply{theirs, absl::UnauthenticatedError("the member is not attached"), {}});
          return;
        }
        if (calls_of.contains({node->id, theirs})) return;
        const CallId ours = options.next_call();
        remote_calls[ours] = {node->id, theirs};
        calls_of[{node->id, theirs}] = ours;
        event.call = ours;
        event.member = member->second;
        Feed(std::move(event));
      },
      r.event);
}

void Coordinator::Impl::On(Node* node, const CallGone& r) {
  const auto it = calls_of.find({node->id, r.call});
  if (it != calls_of.end()) Feed(CallGone{CallId(it->second)});
}

void Coordinator::Impl::RefuseReport(NodeId node, const std::string& what) {
  REFITD_CHECK(node != kCoordinatorNode);
  const std::string reason = fmt::format("{}: {}", Name(node), what);
  Do(PeerAction(DropNode{node, absl::InvalidArgumentError(reason)}));
  LoseNode(node, reason);
}

// ---- the group's actions ----

// Events are handled in order: an event that an action causes waits until the event before it is
// carried out in full.
void Coordinator::Impl::Feed(GroupEvent event) {
  events.push_back(std::move(event));
  if (feeding) return;
  feeding = true;
  while (!events.empty()) {
    GroupEvent next = std::move(events.front());
    events.pop_front();
    GroupActions group_actions;
    group.Handle(next, now, &group_actions);
    for (GroupAction& action : group_actions) Route(std::move(action));
    if (spread.has_value() && !spread->announced) Announce();
  }
  feeding = false;
}

void Coordinator::Impl::Route(GroupAction action) {
  if (RouteToNode(&action)) return;
  if (auto* a = std::get_if<UpdateAssembled>(&action)) {
    Assemble(*a);
  } else if (auto* a = std::get_if<MovePart>(&action)) {
    return StartPart(*a);
  } else if (auto* a = std::get_if<VerifyUpdate>(&action)) {
    return StartReadback(*a);
  } else if (auto* a = std::get_if<StartCompare>(&action)) {
    spread->program->compare = true;
    spread->program->compare_part = a->part;
    return CompareIfAgreed();
  } else if (auto* a = std::get_if<StartRefit>(&action)) {
    spread->data_began = true;
    spread->program->run = std::move(*a);
    return RunIfAgreed();
  } else if (auto* a = std::get_if<NodeOutOfUpdate>(&action)) {
    return LeaveOut(a->node);
  } else if (std::holds_alternative<CleanUpOverdue>(action)) {
    overdue = true;
    return;
  } else if (std::holds_alternative<UpdateAbandoned>(action)) {
    if (spread.has_value()) Abandon();
  } else if (auto* a = std::get_if<UpdateEnded>(&action)) {
    if (spread.has_value()) End(*a);
  }
  Do(std::move(action));
}

// Sends an action for another daemon's member or call there. False: the action is for this daemon.
bool Coordinator::Impl::RouteToNode(GroupAction* action) {
  if (auto* a = std::get_if<Reply>(action)) return ReplyToNode(a);
  if (auto* a = std::get_if<RefuseMember>(action)) return RefuseOnNode(a);
  // Members of other daemons have no memory here.
  if (auto* a = std::get_if<ReleaseMember>(action)) return remotes.erase(a->member) > 0;
  const auto send = [this](MemberId member, auto command_for) {
    const auto it = remotes.find(member);
    if (it == remotes.end()) return false;
    Send(it->second.node, command_for(it->second.id));
    return true;
  };
  if (auto* a = std::get_if<SendPrepare>(action)) {
    const auto it = remotes.find(a->member);
    if (it == remotes.end()) return false;
    spread->prepares[it->second.node].engines.push_back(it->second.id);
    return true;
  }
  if (auto* a = std::get_if<SendPart>(action)) {
    return send(a->member, [&](MemberId id) { return PeerSendPart{id, a->update, a->part}; });
  }
  if (auto* a = std::get_if<WelcomeMember>(action)) {
    return send(a->member, [this](MemberId id) {
      return PeerWelcome{id, group.version(), group.spec().trainer_ranks};
    });
  }
  return std::visit(
      [&send](auto& a) {
        if constexpr (kIsOneOf<std::decay_t<decltype(a)>, MemberAction>) {
          return send(a.member, [&a](MemberId id) {
            a.member = id;
            return MemberAction(std::move(a));
          });
        }
        return false;
      },
      *action);
}

bool Coordinator::Impl::ReplyToNode(Reply* reply) {
  buckets.erase(reply->call);
  const auto it = remote_calls.find(reply->call);
  if (it == remote_calls.end()) return false;
  const RemoteCall call = it->second;
  remote_calls.erase(it);
  calls_of.erase({call.node, call.id});
  Send(call.node, Reply{call.id, std::move(reply->status), std::move(reply->payload)});
  return true;
}

bool Coordinator::Impl::RefuseOnNode(RefuseMember* refusal) {
  layouts.erase(refusal->member);
  const auto it = remotes.find(refusal->member);
  if (it == remotes.end()) return false;
  const RemoteMember refused = it->second;
  if (const auto node = nodes.find(refused.node); node != nodes.end()) {
    node->second.members.erase(refused.id);
  }
  remotes.erase(it);
  Send(refused.node, RefuseMember{refused.id, std::move(refusal->status)});
  return true;
}

void Coordinator::Impl::Assemble(const UpdateAssembled& a) {
  spread.emplace();
  if (a.program.has_value()) {
    spread->program.emplace();
    spread->program->use = *a.program;
    spread->catch_up = a.program->catch_up;
  }
  spread->update = a.update;
  spread->version = a.version;
  spread->verification = a.verification;
  spread->deadline = now + a.remaining;
  spread->nodes.insert(a.nodes.begin(), a.nodes.end());
  for (const NodeId node : a.nodes) {
    PeerPrepare& prepare = spread->prepares[node];
    prepare.update = a.update;
    prepare.version = a.version;
    prepare.remaining = a.remaining;
    prepare.tensor_count = a.tensor_count;
    prepare.verification = a.verification;
    prepare.trainer_ranks = group.spec().trainer_ranks;
    prepare.index = a.index;
  }
  for (uint32_t d = 0; d < a.destinations.size(); ++d) {
    const MemberId member = a.destinations[d];
    const auto remote = remotes.find(member);
    const NodeId node = remote == remotes.end() ? kCoordinatorNode : remote->second.node;
    PeerPrepare& prepare = spread->prepares[node];
    prepare.destinations.push_back(remote == remotes.end() ? member : remote->second.id);
    const auto layout = layouts.find(member);
    prepare.layout_digests.push_back(layout == layouts.end() ? 0 : layout->second.digest);
    spread->destinations[node].push_back(d);
    spread->node_of.push_back(node);
  }
}

// Called after the group's actions, when the engines of each node are known.
void Coordinator::Impl::Announce() {
  spread->announced = true;
  std::map<NodeId, PeerPrepare> prepares = std::exchange(spread->prepares, {});
  if (spread->program.has_value()) {
    for (const auto& [node, prepare] : prepares) {
      for (const MemberId member : prepare.destinations) {
        spread->program->commands[node].destinations.push_back({0, member});
      }
    }
  }
  for (auto& [node, prepare] : prepares) Send(node, std::move(prepare));
  if (spread->program.has_value()) AnnounceProgram();
  if (search.active() && !spread->catch_up) LeaveOutSuspects();
  if (!slow.slow().empty() && spread.has_value() && !spread->catch_up) LeaveOutSlow();
  EnsureCommunicator();
  // A communicator that came up while the update before was being given up has not been judged yet.
  if (spread.has_value() && !spread->abandoned && communicator.has_value() && communicator->ready)
    JudgeSearch();
}

void Coordinator::Impl::StartPart(const MovePart& a) {
  spread->data_began = spread->pushed = true;
  ReadersByNode readers;
  PartJob part = MakePartJob(a, &readers);
  PeerHeader& h = part.header;
  if (h.wired) {
    if (!communicator.has_value()) {
      // The communicator failed, and the update with it: nothing is sent.
      part.running.clear();
      part.unacknowledged.clear();
      part.status = absl::UnavailableError("the data plane is closed");
      spread->parts.emplace(a.part, std::move(part));
      CompleteIfDone(a.part);
      return;
    }
    PlaceOnWire(part.sinks, &part);
    spread->to_issue.push_back(a.part);
  }
  for (const NodeId node : part.running) {
    PeerHeader header = HeaderFor(node, a, part, std::move(readers[node]));
    if (h.wired) part.headers.emplace(node, header);
    Send(node, std::move(header));
  }
  const bool wired = part.header.wired;
  spread->parts.emplace(a.part, std::move(part));
  // The locks are asked for while the headers travel, so that the wait for the agreement and the
  // wait for the wire overlap.
  const bool first = spread->to_issue.size() == 1;
  if (wired && first && communicator->ready && spread->lock_order.empty()) AskLocks();
}

void Coordinator::Impl::PlaceOnWire(const std::set<NodeId>& receivers, PartJob* part) {
  PeerHeader& h = part->header;
  h.communicator = communicator->id;
  h.wire_seq = WireSeq(communicator->next_seq++);
  // The number of ranks stands for a root that is not in the communicator.
  const auto size = static_cast<uint32_t>(communicator->ranks.size());
  h.ranks = {communicator->RankOf(part->root).value_or(size)};
  for (const NodeId node : receivers) h.ranks.push_back(communicator->RankOf(node).value_or(size));
}

// The part without its place on the wire. `readers` gets the loader ranks that read it, by node and
// with the ids that the node gave them.
coordinator::PartJob Coordinator::Impl::MakePartJob(const MovePart& a,
                                                    ReadersByNode* readers) const {
  PartJob part;
  part.root = NodeOf(a.trainer);
  for (const MemberId member : a.readers) {
    const auto remote = remotes.find(member);
    const NodeId node = remote == remotes.end() ? kCoordinatorNode : remote->second.node;
    (*readers)[node].push_back(remote == remotes.end() ? member : remote->second.id);
    if (node != part.root && spread->nodes.contains(node)) part.sinks.insert(node);
  }
  // The members of a node that is being lost are evicted one by one, so such a node may still have
  // members among the destinations.
  for (const uint32_t d : a.touched) {
    const NodeId node = spread->node_of[d];
    if (node != part.root && spread->nodes.contains(node)) part.sinks.insert(node);
  }
  PeerHeader& h = part.header;
  h.header.update = a.update;
  h.header.version = a.version;
  h.header.part = a.part;
  h.header.group_seq = a.group_seq;
  h.header.root = part.root;
  h.header.content = a.content;
  h.header.slot = a.slot;
  h.header.leased = a.leased;
  h.header.verification = a.verification;
  h.wired = !part.sinks.empty();
  if (h.wired) h.digest = HeaderDigest(h.header);
  const bool broadcasts = a.broadcast != BroadcastMethod::kDirect;
  h.fill_slot =
      h.header.slot.has_value() && (h.wired || readers->contains(part.root) || broadcasts);
  part.bytes_written.resize(spread->node_of.size());
  part.running = part.sinks;
  part.running.insert(part.root);
  if (h.wired) part.unacknowledged = part.running;
  return part;
}

// The part's header as the node gets it.
PeerHeader Coordinator::Impl::HeaderFor(NodeId node, const MovePart& a, const PartJob& part,
                                        std::vector<MemberId> readers) const {
  PeerHeader header = part.header;
  if (const auto d = spread->destinations.find(node); d != spread->destinations.end()) {
    for (const uint32_t index : d->second) {
      header.skip.push_back(index < a.skip_destination.size() && a.skip_destination[index]);
    }
  }
  header.readers = std::move(readers);
  if (node != part.root) {
    header.fill_slot = false;
    return header;
  }
  header.is_root = true;
  const auto call = remote_calls.find(a.bucket_call);
  header.bucket_call = call == remote_calls.end() ? a.bucket_call : call->second.id;
  const auto trainer = remotes.find(a.trainer);
  header.trainer = trainer == remotes.end() ? a.trainer : trainer->second.id;
  if (part.header.wired || node != kCoordinatorNode) {
    for (const TensorRange& range : a.content->ranges) header.bucket_ranges.push_back(range.tensor);
  }
  header.broadcast = a.broadcast;
  header.digests = a.want_source_digests;
  return header;
}

void Coordinator::Impl::Fail(const std::string& reason, GiveUpClass kind, const Failure& failure) {
  if (!spread.has_value() || spread->abandoned) return;
  Feed(FailUpdate{spread->update, reason, kind, failure});
}

// From now on nodes start nothing new. Collectives that run are cut off, since their other ends may
// be gone.
void Coordinator::Impl::Abandon() {
  if (spread->abandoned) return;
  spread->abandoned = true;
  spread->wire_verdict.reset();
  spread->to_issue.clear();
  const bool in_flight = WireInFlight();
  const std::set<NodeId> told = spread->nodes;
  for (const NodeId node : told) Send(node, PeerAbandon{spread->update});
  if (in_flight) {
    CloseCommunicatorEverywhere();
  } else {
    GiveLocksBack();
  }
  if (spread->program.has_value()) AbandonProgram();
  AbandonCutParts();
}

void Coordinator::Impl::End(const UpdateEnded& a) {
  GiveLocksBack();
  const Spread ended = std::move(*spread);
  spread.reset();
  std::set<NodeId> told = ended.nodes;
  told.insert(ended.left.begin(), ended.left.end());
  for (const NodeId node : told) {
    Send(node, PeerUpdateEnded{a.update, a.version, a.outcome, a.reason, a.catch_up, a.failure});
  }
  if (!communicator.has_value() || communicator->ready) return;
  // The next update starts with a new communicator.
  CloseCommunicatorEverywhere();
}

// ---- parts ----

void Coordinator::Impl::HeaderAcknowledged(NodeId node, const PeerHeaderAck& r) {
  if (!spread.has_value() || spread->update != r.update) return;
  const auto it = spread->parts.find(r.part);
  if (it == spread->parts.end() || !it->second.unacknowledged.contains(node)) return;
  PartJob& part = it->second;
  const bool agreed = r.mismatch.empty() && r.digest == part.header.digest;
  if (agreed) {
    part.unacknowledged.erase(node);
    return;
  }
  Failure failure = Suspecting(std::array{node});
  failure.tensor = r.mismatch_tensor;
  Fail(fmt::format("{} does not agree about part {}: {}", Name(node), r.part,
                   r.mismatch.empty() ? "the digest of what it read differs" : r.mismatch),
       GiveUpClass::kTransfer, failure);
}

// The wire locks are asked for only when there is something to send: by StartPart, or here if the
// communicator came up later or another group had its turn. Holding them without need would keep
// other groups waiting.
void Coordinator::Impl::IssueParts() {
  if (spread->abandoned || !communicator.has_value() || !communicator->ready) return;
  while (!spread->to_issue.empty()) {
    const PartSeq seq = spread->to_issue.front();
    // The next in line is the update's program or, if `program` is null, a part.
    ProgramJob* const program = spread->program.has_value() && spread->program->run.has_value() &&
                                        spread->program->run->part == seq
                                    ? &*spread->program
                                    : nullptr;
    const auto it = spread->parts.find(seq);
    if (program == nullptr && it == spread->parts.end()) {
      spread->to_issue.pop_front();
      continue;
    }
    if (program == nullptr && !it->second.unacknowledged.empty()) return;
    if (program != nullptr && !program->sent) return;
    if (spread->lock_order.empty()) AskLocks();
    if (spread->locks_held < spread->lock_order.size()) return;
    // Another group wants the wire, and this group has had its turn.
    if (spread->yielding && spread->turn_taken) return;
    (program == nullptr ? it->second.issued : program->issued) = true;
    spread->turn_taken = true;
    spread->to_issue.pop_front();
    const UpdateId update = spread->update;
    const std::set<NodeId> running = program == nullptr ? it->second.running : program->running;
    for (const NodeId node : running) Send(node, PeerIssue{update, seq});
    if (!spread.has_value()) return;
  }
}

// Whether the next part still lacks the agreement of a node, which may be hung.
bool Coordinator::Impl::WaitsForAgreement() const {
  if (spread->to_issue.empty()) return false;
  const auto next = spread->parts.find(spread->to_issue.front());
  if (next != spread->parts.end()) return !next->second.unacknowledged.empty();
  return spread->program.has_value() && !spread->program->sent;
}

bool Coordinator::Impl::WireInFlight() const {
  if (spread->program.has_value() && spread->program->issued && !spread->program->running.empty()) {
    return true;
  }
  return std::any_of(spread->parts.begin(), spread->parts.end(), [](const auto& p) {
    return p.second.header.wired && p.second.issued && !p.second.running.empty();
  });
}

void Coordinator::Impl::PartEnded(NodeId node, const PeerPartDone& r) {
  if (!spread.has_value() || spread->update != r.update) return;
  const auto it = spread->parts.find(r.part);
  if (it == spread->parts.end() || !it->second.running.contains(node)) return;
  PartJob& part = it->second;
  part.running.erase(node);
  part.unacknowledged.erase(node);
  part.digests[node] = r.digests;
  if (node == part.root) part.broadcast = r.broadcast;
  if (r.wire_failed && node != part.root) part.lack.insert(node);
  // The share ended well, or only because the wire failed: the update goes on with the cut part.
  if (part.cut && (r.status.ok() || r.wire_failed)) {
    AddBytes(node, r, &part);
    return SendCutPartsAgain();
  }
  const PartSeq seq = r.part;
  HearEnd(node, r, fmt::format("part {}", seq), part.header.wired, &part);
  // HearEnd may have ended the update, or found the node whose wire failed.
  if (!spread.has_value()) return;
  if (spread->to_drop.has_value()) return DropSuspect();
  CompleteIfDone(seq);
}

void Coordinator::Impl::HearOfWire(NodeId node, const std::string& what,
                                   const absl::Status& status) {
  std::optional<coordinator::WireVerdict>& verdict = spread->wire_verdict;
  if (!verdict.has_value()) {
    const Duration wait = std::min<Duration>(options.peer_limits.wire / 4, kLongestVerdict);
    verdict = coordinator::WireVerdict{{}, what, now + wait};
  }
  verdict->words.push_back({node, NodesNamed(status), Told(node, status, true)});
}

// Ranks that waited say more than ranks whose connection broke, since the end of one run breaks the
// connections of others. Of the nodes that are named, one that said nothing itself is to blame
// first, and then the one that more of the others name.
std::optional<NodeId> Coordinator::Impl::SuspectOfWire() const {
  const std::vector<coordinator::WireVerdict::Word>& words = spread->wire_verdict->words;
  const auto waited = [](const auto& word) {
    return word.status.code() == absl::StatusCode::kDeadlineExceeded;
  };
  const bool any_waited = std::any_of(words.begin(), words.end(), waited);
  std::map<NodeId, std::set<NodeId>> complaints;  // the nodes that name a node, by that node
  for (const auto& word : words) {
    if (any_waited && !waited(word)) continue;
    for (const NodeId named : word.named) {
      if (named != word.node) complaints[named].insert(word.node);
    }
  }
  const auto blame_of = [&](NodeId node) {
    const bool silent = std::none_of(words.begin(), words.end(),
                                     [node](const auto& word) { return word.node == node; });
    return std::pair(silent, complaints.at(node).size());
  };
  std::optional<NodeId> worst;
  for (const auto& [node, by] : complaints) {
    const bool tie = worst.has_value() && blame_of(node) == blame_of(*worst);
    if (!worst.has_value() || blame_of(node) > blame_of(*worst) ||
        (tie && !group.SendsFrom(node) && node != kCoordinatorNode)) {
      worst = node;
    }
  }
  return worst;
}

bool Coordinator::Impl::FindNodeToDrop() {
  if (!spread->wire_verdict.has_value() || (!ProgramRuns() && !AnyWired())) return false;
  const std::optional<NodeId> node = SuspectOfWire();
  if (!node.has_value() || *node == kCoordinatorNode || !nodes.contains(*node)) return false;
  const bool others = std::any_of(
      spread->destinations.begin(), spread->destinations.end(),
      [&](const auto& d) { return d.first != *node && spread->nodes.contains(d.first); });
  if (!others || !CanGoOnWithout(*node)) return false;
  const auto& words = spread->wire_verdict->words;
  const auto names = [&node](const auto& word) {
    return word.node != *node &&
           std::find(word.named.begin(), word.named.end(), *node) != word.named.end();
  };
  const auto word = std::find_if(words.begin(), words.end(), names);
  spread->to_drop.emplace(*node, fmt::format("its data plane failed: {}", Message(word->status)));
  spread->wire_verdict.reset();
  return CutShort();
}

void Coordinator::Impl::DropSuspect() {
  const auto [node, reason] = *std::exchange(spread->to_drop, std::nullopt);
  Do(PeerAction(DropNode{node, absl::UnavailableError(reason)}));
  LoseNode(node, reason);
  if (spread.has_value() && spread->program.has_value() && spread->program->again) {
    RunAgainIfEnded();
  }
}

// The node to blame is named by others and has reported nothing itself. A report that names only
// such nodes says more than a report that also names a node which waited itself.
absl::Status Coordinator::Impl::Judge() {
  const coordinator::WireVerdict verdict = *std::exchange(spread->wire_verdict, std::nullopt);
  const auto silent = [&verdict](NodeId node) {
    return std::none_of(verdict.words.begin(), verdict.words.end(),
                        [node](const auto& word) { return word.node == node; });
  };
  auto report =
      std::find_if(verdict.words.begin(), verdict.words.end(), [&silent](const auto& word) {
        return !word.named.empty() && std::all_of(word.named.begin(), word.named.end(), silent);
      });
  if (report == verdict.words.end()) {
    report = std::find_if(verdict.words.begin(), verdict.words.end(), [&silent](const auto& word) {
      return std::any_of(word.named.begin(), word.named.end(), silent);
    });
  }
  if (report == verdict.words.end()) report = verdict.words.begin();
  std::set<std::string> likely;  // daemons, by id
  for (const NodeId node : report->named) {
    if (silent(node)) likely.insert(SuspectOf(node).daemon);
  }
  Failure failure = FailureOf(report->status);
  std::stable_partition(failure.suspects.begin(), failure.suspects.end(),
                        [&likely](const Suspect& s) { return likely.contains(s.daemon); });
  absl::Status status = WithFailure(report->status, failure);
  CloseCommunicatorEverywhere();
  FailForOthers(verdict.what, status);
  return status;
}

// The other nodes may be waiting for the node that failed. The update can't go on, so it is given
// up before they report.
void Coordinator::Impl::FailForOthers(const std::string& what, const absl::Status& status) {
  const bool lost = status.code() == absl::StatusCode::kDataLoss;
  Fail(fmt::format("{} of {}: {}", lost ? "verification" : "transfer", what, Message(status)),
       lost ? GiveUpClass::kVerification : GiveUpClass::kTransfer, FailureOf(status));
}

// Compares what each node received with what the root read (P1).
absl::Status Coordinator::Impl::CompareDigests(const PartJob& part) const {
  if (!part.header.wired || part.header.header.verification == Verification::kOff) {
    return absl::OkStatus();
  }
  const auto& content = *part.header.header.content;
  const auto root = part.digests.find(part.root);
  for (const NodeId sink : part.sinks) {
    const auto received = part.digests.find(sink);
    for (size_t i = 0; i < content.ranges.size(); ++i) {
      const bool same = root != part.digests.end() && received != part.digests.end() &&
                        i < root->second.size() && i < received->second.size() &&
                        root->second[i] == received->second[i];
      if (same) continue;
      return AboutTensor(
          Error(absl::StatusCode::kDataLoss, "tensor '{}': what {} received is not what {} sent",
                content.tensor(i).name, Name(sink), Name(part.root)),
          content.tensor(i).name);
    }
  }
  return absl::OkStatus();
}

void Coordinator::Impl::CompleteIfDone(PartSeq seq) {
  if (!spread.has_value()) return;
  const auto it = spread->parts.find(seq);
  if (it == spread->parts.end() || !it->second.running.empty()) return;
  PartJob part = std::move(it->second);
  spread->parts.erase(it);
  if (part.status.ok()) part.status = CompareDigests(part);
  TransferDone done;
  done.update = spread->update;
  done.part = seq;
  done.status = part.status;
  done.bytes_written = std::move(part.bytes_written);
  done.failed_destination = part.failed_destination;
  done.broadcast = part.broadcast;
  if (const auto root = part.digests.find(part.root); root != part.digests.end()) {
    done.source_digests = root->second;
  }
  Feed(done);
}

// ---- parts that were cut ----

bool Coordinator::Impl::AnyCut() const {
  return std::any_of(spread->parts.begin(), spread->parts.end(),
                     [](const auto& p) { return p.second.cut; });
}

bool Coordinator::Impl::AnyWired() const {
  return std::any_of(spread->parts.begin(), spread->parts.end(),
                     [](const auto& p) { return p.second.header.wired; });
}

// The failures that nodes have reported so far are of the wire only: any other would have failed
// the update.
bool Coordinator::Impl::CutShort() {
  const bool runs = ProgramRuns();
  if (runs) spread->program->again = true;
  for (auto& [seq, part] : spread->parts) {
    if (!part.header.wired) continue;
    part.cut = true;
    part.status = absl::OkStatus();
    part.failed_destination = -1;
    std::erase(spread->to_issue, seq);
  }
  return runs || AnyCut();
}

// Completes the cut parts that no remaining node lacks. The others go over the new communicator
// when all remaining nodes have ended their shares of all cut parts: then no byte of the
// communicator before can arrive any more in a slot that receives again, and the parts keep their
// order (P7). Until then the group starts no part (ReportDataPlane). The trainer's bytes, or the
// slot into which the root has packed them, are held until the part is completed (P6).
void Coordinator::Impl::SendCutPartsAgain() {
  if (spread->abandoned || !AnyCut()) return;
  const UpdateId update = spread->update;
  std::vector<PartSeq> whole;
  bool ended = true;
  for (const auto& [seq, part] : spread->parts) {
    if (!part.cut) continue;
    ended &= part.running.empty();
    if (part.running.empty() && part.lack.empty()) whole.push_back(seq);
  }
  for (const PartSeq seq : whole) {
    CompleteIfDone(seq);
    if (!spread.has_value() || spread->update != update || spread->abandoned) return;
  }
  if (!ended) return;
  if (AnyCut()) {
    if (!communicator.has_value() || !communicator->ready) return;
    std::optional<PartSeq> first;
    for (auto& [seq, part] : spread->parts) {
      if (!part.cut) continue;
      if (!first.has_value()) first = seq;
      SendAgain(&part);
    }
    Do(GroupAction(LogLine{
        LogLine::kInfo,
        fmt::format("the update to version {} goes on from part {}", spread->version, *first)}));
  }
  if (spread->program.has_value()) RunIfAgreed();
  if (spread.has_value() && spread->update == update && !spread->abandoned) EnsureCommunicator();
}

// P5: the root and the receivers agree to the part once more. The root sends the slot that it has
// packed; its digests, and those of the sinks that have the part, stay known (P1).
void Coordinator::Impl::SendAgain(PartJob* part) {
  PeerHeader& h = part->header;
  const PartSeq seq = h.header.part;
  const std::set<NodeId> receivers = std::exchange(part->lack, {});
  part->cut = part->issued = false;
  PlaceOnWire(receivers, part);
  part->running = receivers;
  part->running.insert(part->root);
  part->unacknowledged = part->running;
  spread->to_issue.push_back(seq);
  for (const NodeId node : std::set<NodeId>(part->running)) {
    PeerHeader& header = part->headers.at(node);
    header.again = true;
    header.communicator = h.communicator;
    header.wire_seq = h.wire_seq;
    header.ranks = h.ranks;
    Send(node, header);
  }
}

// Answers for the cut parts whose shares have ended, so that the group need not wait for them.
void Coordinator::Impl::AbandonCutParts() {
  std::vector<PartSeq> ended;
  for (auto& [seq, part] : spread->parts) {
    if (!std::exchange(part.cut, false)) continue;
    part.status = absl::CancelledError("the update was given up");
    if (part.running.empty()) ended.push_back(seq);
  }
  for (const PartSeq seq : ended) CompleteIfDone(seq);
}

// No report of the node comes any more, so it is not waited for.
void Coordinator::Impl::LoseNodeInParts(NodeId node, const absl::Status& why) {
  std::vector<PartSeq> ended;
  for (auto& [seq, part] : spread->parts) {
    part.unacknowledged.erase(node);
    const bool ran = part.running.erase(node) > 0;
    if (part.cut) {
      part.sinks.erase(node);
      part.lack.erase(node);
      continue;
    }
    if (!ran) continue;
    if (part.status.ok()) part.status = why;
    ended.push_back(seq);
  }
  for (const PartSeq seq : ended) CompleteIfDone(seq);
  if (spread.has_value()) SendCutPartsAgain();
}

// ---- verification ----

void Coordinator::Impl::StartReadback(const VerifyUpdate& a) {
  if (spread->program.has_value() && !spread->program->sent) {
    // A node reads back when all shares that it was told of have ended, so it must be told of the
    // program first.
    spread->program->readback = a;
    return;
  }
  spread->verify = a;
  spread->verify_owed = true;
  spread->verify_status = absl::OkStatus();
  spread->verify_failed.clear();
  spread->verify_content.assign(spread->node_of.size(), 0);
  std::map<NodeId, PeerVerify> commands;
  for (const auto& [node, index] : spread->destinations) {
    if (!spread->nodes.contains(node)) continue;
    PeerVerify verify{a.update, {}};
    bool any = false;
    for (const uint32_t d : index) {
      const bool skip = d < a.skip_destination.size() && a.skip_destination[d];
      verify.skip.push_back(skip);
      any |= !skip;
    }
    if (any) commands.emplace(node, std::move(verify));
  }
  for (const auto& [node, verify] : commands) spread->verifying.insert(node);
  if (commands.empty()) {
    // Nothing is left to be read. The answer is handled like a worker's report, after this action.
    own_reports.push_back(VerifyDone{a.update, absl::OkStatus(), {}});
    spread->verifying.insert(kCoordinatorNode);
  }
  for (auto& [node, verify] : commands) Send(node, std::move(verify));
}

void Coordinator::Impl::Verified(NodeId node, const VerifyDone& r) {
  if (!spread.has_value() || spread->update != r.update || spread->verifying.erase(node) == 0) {
    return;
  }
  absl::Status status = r.status;
  // The root of a part that is sent again wrote its own destinations before the part was cut.
  if (std::any_of(spread->parts.begin(), spread->parts.end(), [node](const auto& p) {
        const PartJob& part = p.second;
        if (!part.running.contains(node)) return false;
        const auto header = part.headers.find(node);
        return part.root != node || header == part.headers.end() || !header->second.again;
      })) {
    status = absl::InternalError("it read back before its parts had ended");
  }
  if (!status.ok() && spread->verify_status.ok()) {
    spread->verify_status = Told(node, status, false);
  }
  if (const auto index = spread->destinations.find(node); index != spread->destinations.end()) {
    for (const uint32_t d : r.failed_destinations) {
      if (d < index->second.size()) spread->verify_failed.push_back(index->second[d]);
    }
    for (size_t i = 0; i < std::min(r.content.size(), index->second.size()); ++i) {
      const uint32_t d = index->second[i];
      if (d < spread->verify_content.size()) spread->verify_content[d] = r.content[i];
    }
    // The node read nothing back, so all its destinations count as failed.
    if (!status.ok() && r.failed_destinations.empty()) {
      spread->verify_failed.insert(spread->verify_failed.end(), index->second.begin(),
                                   index->second.end());
    }
  }
  CompleteVerifyIfDone();
}

void Coordinator::Impl::CompleteVerifyIfDone() {
  if (spread->program.has_value() && spread->program->again) return RunAgainIfEnded();
  // While the program runs, a node may still be lost, and then all are read back once more.
  if (!spread->verifying.empty() || !spread->verify_owed || ProgramRuns()) return;
  spread->verify_owed = false;
  VerifyDone done{spread->update, spread->verify_status, spread->verify_failed,
                  spread->verify_content};
  Feed(done);
}

// ---- the data plane ----

// An attempt gets half of the remaining time, so that an update that loses this half to an
// unreachable daemon still has the other half for a communicator without that daemon, and for its
// data.
Duration Coordinator::Impl::AttemptLimit() const {
  const Duration half = (spread->deadline - now) / 2;
  return std::min(std::max<Duration>(half, std::chrono::milliseconds(1)), options.peer_limits.wire);
}

// While a part was cut and waits to be sent again, the parts after it wait as well (P7).
void Coordinator::Impl::ReportDataPlane(bool up) {
  up = up && !AnyCut();
  if (spread->data_plane_up == up) return;
  spread->data_plane_up = up;
  Feed(DataPlaneState{spread->update, up});
}

void Coordinator::Impl::EnsureCommunicator() {
  std::vector<NodeId> wanted;
  std::set_difference(spread->nodes.begin(), spread->nodes.end(), spread->unreachable.begin(),
                      spread->unreachable.end(), std::back_inserter(wanted));
  if (wanted.size() < 2) return ReportDataPlane(true);
  if (communicator.has_value() && communicator->ranks == wanted)
    return ReportDataPlane(communicator->ready);
  if (spread->data_began && !NeedsWire()) return;
  CloseCommunicatorEverywhere();
  communicator.emplace();
  communicator->id = CommunicatorId(next_communicator++);
  communicator->ranks = wanted;
  communicator->limit = AttemptLimit();
  communicator->verdict = communicator->deadline = now + communicator->limit;
  const CommunicatorId id = communicator->id;
  for (size_t rank = 0; rank < wanted.size(); ++rank) {
    Send(wanted[rank],
         OpenCommunicator{id, static_cast<int>(rank), static_cast<int>(wanted.size())});
  }
  ReportDataPlane(false);
}

void Coordinator::Impl::CloseCommunicatorEverywhere() {
  if (!communicator.has_value()) return;
  const Communicator closed = std::move(*communicator);
  communicator.reset();
  for (const NodeId node : closed.ranks) Send(node, CloseCommunicator{closed.id});
}

void Coordinator::Impl::Opened(NodeId node, const CommunicatorOpened& r) {
  if (!communicator.has_value() || communicator->id != r.communicator) return;
  if (!communicator->has(node)) {
    return RefuseReport(
        node, fmt::format("it opened communicator {}, of which it is no rank", r.communicator));
  }
  if (communicator->connecting) return;
  if (!r.status.ok()) {
    return CommunicatorFailed({node}, {fmt::format("the data plane did not open on {}: {}",
                                                   Name(node), Message(r.status)),
                                       GiveUpClass::kTransfer, FailureOfNode(node, r.status)});
  }
  if (group.spec().encrypted_data) {
    // A daemon that can't encrypt was refused when it joined. The address of its end must say that
    // the end takes connections under TLS alone.
    const absl::StatusOr<AddressSecurity> security = SecurityOfAddress(r.address);
    if (!security.ok() || !security->encrypted) {
      Failure failure = Suspecting(std::array{node});
      failure.field = "spec.encrypted_data";
      return CommunicatorFailed(
          {node}, {fmt::format("spec.encrypted_data: the group demands it, and the data "
                               "plane of {} is in the clear",
                               Name(node)),
                   GiveUpClass::kTransfer, failure});
    }
  }
  communicator->addresses[node] = r.address;
  if (communicator->addresses.size() < communicator->ranks.size() || !spread.has_value()) return;
  communicator->connecting = true;
  communicator->limit = AttemptLimit();
  // Ranks report whom they waited for a little after their own time has passed.
  communicator->verdict = communicator->deadline =
      now + communicator->limit + std::min<Duration>(communicator->limit / 4, kLongestVerdict);
  PeerCommunicatorConnect connect;
  connect.communicator = communicator->id;
  connect.timeout = communicator->limit;
  // Every node gets all addresses, so the list is shared.
  auto addresses = std::make_shared<std::vector<std::string>>();
  for (const NodeId rank : communicator->ranks) {
    if (rank == kCoordinatorNode) connect.coordinator_rank = addresses->size();
    addresses->push_back(communicator->addresses.at(rank));
  }
  connect.addresses = std::move(addresses);
  const std::vector<NodeId> ranks = communicator->ranks;
  for (const NodeId rank : ranks) Send(rank, connect);
}

void Coordinator::Impl::CameUp(NodeId node, const CommunicatorUp& r) {
  if (!communicator.has_value() || communicator->id != r.communicator) return;
  if (!communicator->has(node)) {
    return RefuseReport(
        node, fmt::format("it connected communicator {}, of which it is no rank", r.communicator));
  }
  // A rank closed its end, which makes a communicator that was up useless. No daemon is to blame.
  if (communicator->ready && !r.status.ok()) {
    return CommunicatorFailed(
        {}, {fmt::format("the data plane broke on {}: {}", Name(node), Message(r.status)),
             GiveUpClass::kTransfer, FailureOfNode(node, r.status)});
  }
  if (!communicator->connecting || communicator->ready) return;
  if (r.status.ok()) {
    communicator->up.insert(node);
  } else {
    std::vector<NodeId> named = NodesNamed(r.status);
    std::erase(named, node);
    if (communicator->failed.empty()) communicator->first_failed = node;
    communicator->failed.insert_or_assign(node, Communicator::Failure{std::move(named), r.status});
    // The other ranks time out at about the same moment; together they say more.
    communicator->verdict = std::min(
        communicator->verdict, now + std::min<Duration>(communicator->limit / 4, kLongestVerdict));
  }
  if (communicator->up.size() == communicator->ranks.size()) {
    communicator->ready = true;
    if (!spread.has_value() || spread->abandoned) return;
    JudgeSearch();
    if (spread.has_value() && !spread->abandoned) SendCutPartsAgain();
    if (spread.has_value() && !spread->abandoned) ReportDataPlane(true);
  } else if (communicator->up.size() + communicator->failed.size() >= communicator->ranks.size()) {
    JudgeCommunicator();
  }
}

// ---- a data plane that does not come up ----

std::vector<NodeId> Coordinator::Impl::StillAwaited() const {
  std::vector<NodeId> awaited;
  for (const NodeId id : communicator->ranks) {
    const bool came = communicator->connecting
                          ? communicator->up.contains(id) || communicator->failed.contains(id)
                          : communicator->addresses.contains(id);
    if (!came) awaited.push_back(id);
  }
  return awaited;
}

// If two ranks could not reach each other, one of them must go: the rank that more of the others
// could not reach. Ranks with trainers stay, since no update can do without them.
std::optional<std::set<NodeId>> Coordinator::Impl::Unreachable(bool over) const {
  std::set<NodeId> suspects;
  if (over) {
    for (const NodeId id : StillAwaited()) suspects.insert(id);
  }
  std::vector<std::pair<NodeId, NodeId>> parted;  // ranks that could not reach each other
  for (const auto& [node, failure] : communicator->failed) {
    const bool waited = failure.status.code() == absl::StatusCode::kDeadlineExceeded;
    if (failure.named.empty()) {
      // A rank that names nobody is to blame if others came up while it timed out, or if it was the
      // first to fail for another reason.
      const bool own = waited ? !communicator->up.empty() : node == communicator->first_failed;
      if (own) suspects.insert(node);
    }
    for (const NodeId named : failure.named) {
      // A rank that is up has reached every other, so the rank that could not reach it is to blame.
      if (communicator->up.contains(named)) {
        suspects.insert(node);
      } else {
        parted.emplace_back(node, named);
      }
    }
  }
  while (true) {
    std::erase_if(parted, [&suspects](const auto& pair) {
      return suspects.contains(pair.first) || suspects.contains(pair.second);
    });
    if (parted.empty()) break;
    std::map<NodeId, int> times;
    for (const auto& [a, b] : parted) {
      ++times[a];
      ++times[b];
    }
    // `worst` failed more often than any other, or as often as a rank that has to stay.
    NodeId worst = times.begin()->first;
    for (const auto& [node, count] : times) {
      const int most = times.at(worst);
      if (count > most || (count == most && !group.SendsFrom(node))) worst = node;
    }
    if (group.SendsFrom(worst)) return std::set<NodeId>();
    suspects.insert(worst);
  }
  if (!suspects.empty()) return suspects;
  // No rank knows whom it waited for. If only one rank can be left out, that one is left out.
  suspects = Candidates(communicator->ranks);
  if (suspects.size() > 1 || search.active()) return std::nullopt;
  return suspects;
}

coordinator::CommunicatorFailure Coordinator::Impl::HowCommunicatorFailed(
    const std::set<NodeId>& suspects) const {
  if (communicator->failed.empty()) {
    std::string waits;
    const std::vector<NodeId> awaited = StillAwaited();
    for (const NodeId id : awaited) waits += (waits.empty() ? "" : ", ") + Name(id);
    return {fmt::format("the data plane did not come up within {}: waited for {}",
                        Seconds(communicator->limit), waits),
            GiveUpClass::kDeadline, Suspecting(awaited)};
  }
  // A rank that waited for a suspect says more than the suspect itself.
  auto word = std::find_if(
      communicator->failed.begin(), communicator->failed.end(), [&suspects](const auto& f) {
        return std::any_of(f.second.named.begin(), f.second.named.end(),
                           [&suspects](NodeId named) { return suspects.contains(named); });
      });
  if (word == communicator->failed.end()) word = communicator->failed.begin();
  const absl::Status& status = word->second.status;
  return {fmt::format("the data plane did not come up on {}: {}{}", Name(word->first),
                      Message(status), NamesOfRanks(status)),
          GiveUpClass::kTransfer,
          suspects.empty() ? FailureOfNode(word->first, status) : Suspecting(suspects)};
}

void Coordinator::Impl::JudgeCommunicator() {
  // An attempt that had too little time blames no daemon.
  const bool had_time =
      communicator->limit >= std::min<Duration>(kLeastAttempt, options.peer_limits.wire / 4);
  const std::optional<std::set<NodeId>> suspects =
      had_time ? Unreachable(now >= communicator->deadline) : std::set<NodeId>();
  if (!suspects.has_value()) return SearchOn();
  const coordinator::CommunicatorFailure how = HowCommunicatorFailed(*suspects);
  CommunicatorFailed(*suspects, how);
}

void Coordinator::Impl::CommunicatorFailed(const std::set<NodeId>& suspects,
                                           const coordinator::CommunicatorFailure& how) {
  CloseCommunicatorEverywhere();
  if (!spread.has_value() || spread->abandoned) return;
  const bool needed = std::any_of(suspects.begin(), suspects.end(),
                                  [this](NodeId node) { return group.SendsFrom(node); });
  if (suspects.empty() || needed || spread->data_began) {
    return Fail(how.reason, how.kind, how.failure);
  }
  spread->unreachable.insert(suspects.begin(), suspects.end());
  KeepOut(suspects, how);
  if (spread.has_value() && !spread->abandoned) EnsureCommunicator();
}

void Coordinator::Impl::KeepOut(const std::set<NodeId>& suspects,
                                const coordinator::CommunicatorFailure& how) {
  KeepNodesOut keep{spread->update, {}, how.reason, how.kind, false, how.failure};
  for (const NodeId node : suspects) {
    search.Forget(node);
    keep.nodes[node] =
        fmt::format("{} is kept out until it attaches anew: {}", Name(node), how.reason);
    Do(GroupAction(LogLine{LogLine::kWarning, keep.nodes[node]}));
  }
  Feed(std::move(keep));
}

// ---- a data plane that fails and names nobody ----

void Coordinator::Impl::SearchOn() {
  search_failure = HowCommunicatorFailed({});
  const std::set<NodeId> candidates = Candidates(communicator->ranks);
  CloseCommunicatorEverywhere();
  if (!spread.has_value() || spread->abandoned) return;
  if (candidates.empty() || spread->data_began || spread->catch_up) {
    return Fail(search_failure.reason, search_failure.kind, search_failure.failure);
  }
  const Sharing sharing = HowNodesShare();
  LeaveOutForTry(sharing.AllOf(search.Failed(sharing.FirstOf(candidates))));
  if (spread.has_value() && !spread->abandoned) EnsureCommunicator();
}

void Coordinator::Impl::LeaveOutForTry(const std::set<NodeId>& out) {
  KeepNodesOut leave{spread->update,      {},   search_failure.reason,
                     search_failure.kind, true, search_failure.failure};
  std::string names;
  for (const NodeId node : out) {
    if (!spread->nodes.contains(node) || !spread->unreachable.insert(node).second) continue;
    leave.nodes[node] = fmt::format("{} is left out of this update to find the daemon at fault: {}",
                                    Name(node), search_failure.reason);
    names += (names.empty() ? "" : ", ") + Name(node);
  }
  if (leave.nodes.empty()) return;
  Do(GroupAction(
      LogLine{LogLine::kWarning,
              fmt::format("the update to version {} leaves out {} to find the daemon at fault: {}",
                          spread->version, names, search_failure.reason)}));
  Feed(std::move(leave));
}

void Coordinator::Impl::JudgeSearch() {
  // A catch-up is over few nodes and is tried again, so the search goes on in updates of the
  // trainers only.
  if (!search.active() || (spread.has_value() && spread->catch_up)) return;
  const Sharing sharing = HowNodesShare();
  const std::set<NodeId> broken = search.CameUp(sharing.FirstOf(Candidates(communicator->ranks)));
  if (!broken.empty()) KeepOut(Candidates(sharing.AllOf(broken)), search_failure);
}

Coordinator::Impl::Sharing Coordinator::Impl::HowNodesShare() const {
  const GroupView view = group.View(now);
  std::map<std::string_view, std::set<NodeId>> nodes_of;
  for (const MemberView& member : view.members) {
    if (member.engine) nodes_of[member.instance].insert(NodeOf(member.id));
  }
  Sharing sharing;
  for (const auto& [instance, of_instance] : nodes_of) {
    // Nodes with trainers are never left out, so an instance with ranks there does not tie its
    // other nodes to them.
    const std::set<NodeId> joined = Candidates(of_instance);
    if (joined.empty()) continue;
    NodeId first = *joined.begin();
    for (const NodeId node : joined) {
      first = std::min(first, sharing.first.emplace(node, node).first->second);
    }
    // The sets that this instance joins become one set, which is known by its first node.
    std::set<NodeId> replaced;
    for (const NodeId node : joined) replaced.insert(sharing.first.at(node));
    for (auto& [node, of_node] : sharing.first) {
      if (replaced.contains(of_node)) of_node = first;
    }
  }
  for (const InstanceView& instance : view.instances) {
    if (!instance.preparing) continue;
    sharing.by_instance.push_back(nodes_of[instance.name]);
  }
  return sharing;
}

std::set<NodeId> Coordinator::Impl::Sharing::FirstOf(const std::set<NodeId>& nodes) const {
  std::set<NodeId> firsts;
  for (const NodeId node : nodes) {
    const auto at = first.find(node);
    firsts.insert(at == first.end() ? node : at->second);
  }
  return firsts;
}

std::set<NodeId> Coordinator::Impl::Sharing::AllOf(const std::set<NodeId>& firsts) const {
  std::set<NodeId> nodes = firsts;
  for (const auto& [node, of_node] : first) {
    if (firsts.contains(of_node)) nodes.insert(node);
  }
  return nodes;
}

bool Coordinator::Impl::Sharing::LeavesInstance(const std::set<NodeId>& out) const {
  return std::any_of(by_instance.begin(), by_instance.end(), [&out](const auto& nodes) {
    return std::none_of(nodes.begin(), nodes.end(), [&out](NodeId n) { return out.contains(n); });
  });
}

// If no instance would be left, the update tries all of them.
void Coordinator::Impl::LeaveOutSuspects() {
  const Sharing sharing = HowNodesShare();
  search.Restrict(sharing.FirstOf(Candidates(spread->nodes)));
  const std::set<NodeId> out = sharing.AllOf(search.LeftOut());
  if (sharing.LeavesInstance(out)) LeaveOutForTry(out);
}

// ---- nodes that hold the others back ----

std::string Coordinator::Impl::WhySlow(NodeId node) const {
  const auto it = slow.slow().find(node);
  if (it == slow.slow().end()) return "";
  return fmt::format(
      "it held the others back by {} (peers.relay_slow_ms {}): {}",
      Seconds(std::chrono::duration_cast<std::chrono::milliseconds>(it->second.held)),
      ToMillis(options.peer_limits.slow), SlowNodes::Describe(it->second));
}

bool Coordinator::Impl::CatchUpsReach(NodeId node) const {
  return node != kCoordinatorNode &&
         std::none_of(remotes.begin(), remotes.end(), [node](const auto& remote) {
           return remote.second.node == node && remote.second.engine && !remote.second.caught_up;
         });
}

// An instance that is left out was told to prepare, and resumes with the version that it holds. A
// catch-up brings it the new version after the others have it. If no instance would be left, the
// update takes all of them.
void Coordinator::Impl::LeaveOutSlow() {
  std::set<NodeId> nodes_slow;
  for (const auto& [node, how] : slow.slow()) nodes_slow.insert(node);
  const Sharing sharing = HowNodesShare();
  const std::set<NodeId> out = sharing.AllOf(sharing.FirstOf(Candidates(nodes_slow)));
  if (!sharing.LeavesInstance(out)) return;
  if (!std::all_of(out.begin(), out.end(), [this](NodeId node) { return CatchUpsReach(node); }))
    return;
  KeepNodesOut leave{spread->update,     {},   "every instance is on a slow daemon",
                     GiveUpClass::kSlow, true, Suspecting(nodes_slow)};
  for (const NodeId node : out) {
    if (!spread->nodes.contains(node) || !spread->unreachable.insert(node).second) continue;
    const std::string why = WhySlow(node);
    leave.nodes[node] = fmt::format(
        "{} is left out of this update, and catches up after it: {}", Name(node),
        why.empty() ? "it has ranks of an instance that has others on a slow daemon" : why);
  }
  if (!leave.nodes.empty()) Feed(std::move(leave));
}

void Coordinator::Impl::NoteLinks(NodeId node, const PeerRunDone& r) {
  ProgramJob& job = *spread->program;
  for (const PeerLinkUse& link : r.links) {
    if (link.peer >= job.use.nodes.size()) continue;
    job.uses.push_back({node, job.use.nodes[link.peer], link.bytes, link.busy});
  }
}

// Every run, even a catch-up that gave way to an update, shows whether a slow node is usual again.
// A catch-up makes no node slow, since there are no other receivers to compare its late instances
// with.
void Coordinator::Impl::JudgeSlow(const ProgramJob& job) {
  if (options.peer_limits.slow == Duration(0)) return;
  for (const NodeId node : slow.Review(job.uses)) {
    Do(GroupAction(
        LogLine{LogLine::kInfo, fmt::format("{} receives as fast as the others again: updates "
                                            "take its instances again",
                                            Name(node))}));
  }
  if (spread->catch_up || !job.status.ok()) return;
  std::set<NodeId> candidates = Candidates(spread->nodes);
  std::erase_if(candidates, [this](NodeId node) { return !CatchUpsReach(node); });
  for (const NodeId node : slow.Judge(job.uses, candidates)) {
    Do(GroupAction(
        LogLine{LogLine::kWarning,
                fmt::format("{} is slow, so updates leave its instances to catch-ups: {}",
                            Name(node), WhySlow(node))}));
  }
}

// ---- readiness ----

// Called at the end of each event. Joined daemons answer for all instances, so each is told of
// every change.
void Coordinator::Impl::SendReadiness() {
  std::vector<PeerReadiness> news;
  const bool version_changed = book.SetVersion(group.version());
  if (version_changed) news.push_back({.version = group.version(), .instances = {}});
  for (const InstanceStanding& standing : group.TakeStandings()) {
    if (!book.Set(standing)) continue;
    if (news.empty() || news.back().instances.size() >= kMaxStandings) {
      news.push_back({.version = group.version(), .instances = {}});
    }
    news.back().instances.push_back(standing);
  }
  for (const PeerReadiness& each : news) {
    for (auto& [id, node] : nodes) {
      if (node.has_readiness) Send(id, each);
    }
  }
  if (std::exchange(joined_anew, false)) SendJoined();
}

// Readiness is the example of what a version of the protocol adds: only daemons that agreed to that
// version get it.
void Coordinator::Impl::SendJoined() {
  for (auto& [id, node] : nodes) {
    if (node.has_readiness || !Speaks(id, Protocol::kV1)) continue;
    node.has_readiness = true;
    for (PeerReadiness& each : book.All()) Send(id, std::move(each));
  }
}

void Coordinator::Impl::SendOwner() {
  for (auto& [id, node] : nodes) {
    if (node.sent_owner == group.owner()) continue;
    node.sent_owner = group.owner();
    Send(id, PeerOwner{node.sent_owner});
  }
}

// ---- the wire locks ----

void Coordinator::Impl::AskLocks() {
  spread->lock_order.clear();
  spread->locks_held = 0;
  spread->yielding = false;
  spread->turn_taken = false;
  spread->lock_order.assign(spread->nodes.begin(), spread->nodes.end());
  std::sort(spread->lock_order.begin(), spread->lock_order.end(),
            [this](NodeId a, NodeId b) { return Name(a) < Name(b); });
  AskNextLock();
}

void Coordinator::Impl::AskNextLock() {
  if (spread->locks_held >= spread->lock_order.size()) return;
  spread->lock_holder.clear();
  spread->lock_deadline = now + options.peer_limits.wire;
  Send(spread->lock_order[spread->locks_held], PeerWireLock{spread->update});
}

void Coordinator::Impl::LockGranted(NodeId node, const PeerWireGranted& r) {
  if (!spread.has_value() || spread->update != r.update) return;
  if (spread->locks_held >= spread->lock_order.size() ||
      spread->lock_order[spread->locks_held] != node) {
    return;
  }
  ++spread->locks_held;
  AskNextLock();
}

void Coordinator::Impl::GiveLocksBack() {
  // The lock that comes next was asked for, and is given back too.
  const size_t asked = std::min(spread->locks_held + 1, spread->lock_order.size());
  const std::vector<NodeId> holders(spread->lock_order.begin(),
                                    spread->lock_order.begin() + static_cast<ptrdiff_t>(asked));
  spread->locks_held = 0;
  spread->lock_order.clear();
  for (const NodeId node : holders) Send(node, PeerWireUnlock{spread->update});
}

// Gives the wire locks back if another group wants them and no collective of this group runs. The
// group keeps the locks until it has issued a part, because otherwise two groups would hand the
// locks to each other and never use them. Exceptions: its update is abandoned, or the nodes have
// not agreed to its next part yet (the group asks for the locks again later). A group that holds
// only some of its locks keeps them: all coordinators take locks in one order, so waiting for the
// other locks is no deadlock.
void Coordinator::Impl::YieldIfQuiet() {
  if (!spread->yielding || WireInFlight()) return;
  if (spread->lock_order.empty() || spread->locks_held < spread->lock_order.size()) return;
  if (!spread->turn_taken && !spread->abandoned && !WaitsForAgreement()) return;
  spread->yielding = false;
  GiveLocksBack();
  IssueParts();
}

// ---- Coordinator ----

Coordinator::Coordinator(CoordinatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

Coordinator::~Coordinator() = default;

void Coordinator::Handle(MachineEvent& event, TimePoint now, MachineActions* actions) {
  impl_->now = now;
  impl_->actions = actions;
  impl_->Handle(event);
  impl_->SendOwner();
  impl_->SendReadiness();
  impl_->actions = nullptr;
  impl_->CheckState();
}

std::optional<TimePoint> Coordinator::NextDeadline() const {
  std::optional<TimePoint> next = impl_->group.NextDeadline();
  const auto consider = [&next](TimePoint due) {
    if (!next.has_value() || due < *next) next = due;
  };
  if (impl_->nodes_due.has_value() && !impl_->nodes.empty()) consider(*impl_->nodes_due);
  const auto& spread = impl_->spread;
  if (spread.has_value() && !spread->abandoned) {
    if (impl_->communicator.has_value() && !impl_->communicator->ready)
      consider(impl_->communicator->verdict);
    if (spread->locks_held < spread->lock_order.size()) consider(spread->lock_deadline);
    if (spread->wire_verdict.has_value()) consider(spread->wire_verdict->due);
  }
  return next;
}

const ReadinessBook* Coordinator::readiness() const { return &impl_->book; }
const std::string& Coordinator::name() const { return impl_->group.name(); }
uint64_t Coordinator::incarnation() const { return impl_->group.incarnation(); }
const GroupSpec& Coordinator::spec() const { return impl_->group.spec(); }
bool Coordinator::has_members() const { return impl_->group.has_members(); }
const std::string& Coordinator::owner() const { return impl_->group.owner(); }
bool Coordinator::has_trainers() const { return impl_->group.has_trainers(); }
bool Coordinator::update_running() const { return impl_->group.update_running(); }
bool Coordinator::catch_up_running() const { return impl_->group.catch_up_running(); }
std::optional<Version> Coordinator::version() const { return impl_->group.version(); }
UpdateStatistics Coordinator::Statistics() const { return impl_->group.Statistics(); }
PastUpdate Coordinator::Past(Version version) const { return impl_->group.Past(version); }
absl::Status Coordinator::CanRegisterLayout(MemberId member) const {
  return impl_->group.CanRegisterLayout(member);
}

std::optional<UpdateView> Coordinator::ViewUpdate(TimePoint now) const {
  return impl_->group.ViewUpdate(now);
}
std::optional<UpdateView> Coordinator::ViewLatest(TimePoint now) const {
  return impl_->group.ViewLatest(now);
}
std::optional<UpdateMark> Coordinator::MarkLatest() const { return impl_->group.MarkLatest(); }
size_t Coordinator::remote_members() const { return impl_->remotes.size(); }

absl::Status Coordinator::CanJoin(const std::string& daemon_id, const std::string& boot_id,
                                  const std::string& address) const {
  if (daemon_id == impl_->options.daemon_id) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "daemon_id: '{}' is this daemon's own: give each daemon its own id", daemon_id);
  }
  const auto same =
      std::find_if(impl_->nodes.begin(), impl_->nodes.end(),
                   [&daemon_id](const auto& n) { return n.second.daemon_id == daemon_id; });
  if (same != impl_->nodes.end()) {
    if (same->second.boot_id == boot_id) return absl::OkStatus();
    return Error(absl::StatusCode::kAlreadyExists,
                 "daemon_id: '{}' is that of the daemon at {}, which is linked; the one at {} is "
                 "another process with the same id: give each daemon its own, or, if it was "
                 "started anew, try again: the old link ends with its process, or after {} of "
                 "silence",
                 daemon_id, same->second.address, address,
                 Seconds(impl_->options.peer_limits.peer));
  }
  if (impl_->nodes.size() + 1 >= static_cast<size_t>(kMaxGroupDaemons)) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "daemon_id: '{}' would be daemon {} of group '{}', which can have {}", daemon_id,
                 impl_->nodes.size() + 2, impl_->options.name, kMaxGroupDaemons);
  }
  return absl::OkStatus();
}

std::shared_ptr<const Layout> Coordinator::KnownLayout(NodeId node,
                                                       const PeerLayout& report) const {
  const auto at = impl_->nodes.find(node);
  if (at == impl_->nodes.end() || !report.digest.has_value()) return nullptr;
  const auto member = at->second.members.find(report.member);
  if (member == at->second.members.end() || !impl_->remotes.at(member->second).engine) {
    return nullptr;
  }
  const auto known = impl_->shared_layouts.find(*report.digest);
  return known == impl_->shared_layouts.end() ? nullptr : known->second.lock();
}

int64_t Coordinator::layouts_compared() const { return impl_->layouts_compared; }

MachineView Coordinator::View(TimePoint now) const {
  MachineView view;
  view.group = impl_->group.View(now);
  for (InstanceView& instance : view.group.instances) {
    std::optional<Readiness> readiness = impl_->book.Of(instance.name, spec().max_lag);
    if (readiness.has_value()) instance.readiness = *std::move(readiness);
  }
  NodeView self;
  self.daemon_id = impl_->options.daemon_id;
  self.state = "self";
  for (const MemberView& member : view.group.members) {
    if (!impl_->remotes.contains(member.id)) ++self.members;
  }
  self.kept_out = impl_->group.KeptOut(kCoordinatorNode);
  self.slow = impl_->WhySlow(kCoordinatorNode);
  impl_->ShowRun(kCoordinatorNode, &self);
  view.nodes.push_back(std::move(self));
  for (const auto& [id, node] : impl_->nodes) {
    NodeView& v = view.nodes.emplace_back();
    v.node = id;
    v.daemon_id = node.daemon_id;
    v.address = node.address;
    v.state = "joined";
    v.members = static_cast<int>(node.members.size());
    v.silent = now - node.heard;
    v.kept_out = impl_->group.KeptOut(id);
    v.slow = impl_->WhySlow(id);
    v.protocol = node.protocol;
    impl_->ShowRun(id, &v);
  }
  if (impl_->communicator.has_value()) {
    view.communicator = impl_->communicator->id;
    view.communicator_state = impl_->communicator->ready
                                  ? "up"
                                  : (impl_->communicator->connecting ? "connecting" : "opening");
  }
  return view;
}

}  // namespace refitd
