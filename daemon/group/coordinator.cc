#include "daemon/group/coordinator.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "daemon/group/communicator.h"
#include "daemon/group/joined_nodes.h"
#include "daemon/group/left_out.h"
#include "daemon/group/on_nodes.h"
#include "daemon/group/remote_members.h"
#include "daemon/group/update_on_nodes.h"
#include "daemon/group/worker.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/sockets/address_security.h"

namespace refitd {
namespace {

using coordinator::FailureOfNode;
using coordinator::InSeconds;

// If moving could throw, an event that waits for its turn would be copied, and an event may have
// every tensor of a model.
static_assert(std::is_nothrow_move_constructible_v<GroupEvent>);

// The shortest attempt to bring a communicator up from which a daemon can be blamed: if a shorter
// attempt fails, no daemon is left out of the update. If a quarter of PeerLimits::wire is shorter
// than this constant, that quarter is the limit instead.
constexpr Duration kLeastAttempt = std::chrono::seconds(1);

}  // namespace

// Group decides, and this class carries events and actions between Group, this daemon's Worker, and
// the machines of the nodes.
//
// A machine returns what it wants done as Steps, which are carried out in order (Perform) when the
// machine has returned: so no machine is entered twice.
struct Coordinator::Impl {
  using Around = coordinator::Around;
  using NodeCommands = coordinator::NodeCommands;
  using RemoteMembers = coordinator::RemoteMembers;
  using Steps = coordinator::Steps;
  using UpdateOnNodes = coordinator::UpdateOnNodes;
  using WhyDown = coordinator::WhyDown;

  explicit Impl(CoordinatorOptions coordinator_options);

  // ---- events ----
  void Handle(MachineEvent& event);
  void On(GroupEvent& event);
  void On(const NodeJoined& e);
  void Tick();
  std::optional<TimePoint> NextDeadline() const;

  // ---- reports of a node (also of the coordinator's own worker) ----
  void Report(NodeId node, PeerReport& report);
  void On(NodeId node, const PeerAttach& r);
  void On(NodeId node, const MemberLost& r);
  void On(NodeId node, const PeerLayout& r);
  void Register(LayoutRegistered e);
  void On(NodeId node, PeerCall& r);
  void On(NodeId node, const CallGone& r);
  template <typename MemberEvent>
  void FeedOf(NodeId node, MemberEvent event);
  void Opened(NodeId node, const CommunicatorOpened& r);
  void CameUp(NodeId node, const CommunicatorUp& r);
  // Ends the node's link over a report that no correct daemon sends, and changes nothing else.
  void RefuseReport(NodeId node, const std::string& what);

  // ---- the group's actions ----
  void Feed(GroupEvent event);
  void Route(GroupAction action);
  bool RouteToNode(GroupAction* action);
  bool ReplyToNode(Reply* reply);
  bool RefuseOnNode(RefuseMember* refusal);
  void Announce();
  void End(const UpdateEnded& a);

  // ---- what machines ask for ----
  Around Surroundings(Steps* steps);
  // Calls `ask(surroundings)` and carries out the steps that it asks for.
  template <typename Ask>
  void Take(const Ask& ask) {
    Steps steps;
    ask(Surroundings(&steps));
    Perform(std::move(steps));
  }
  // Carries out the steps in order. A step may end the update that asked for them; then the steps
  // after it are left out, except lines of the log, and WireBroken, since the communicator outlives
  // the update.
  void Perform(Steps steps);
  void Do(SendCommand& step) { Send(step.node, std::move(step.command)); }
  void Do(GroupEvent& step);
  void Do(const LogLine& step) { Act(GroupAction(step)); }
  void Do(const coordinator::WireBroken&) { EndCommunicator(); }
  void Do(const coordinator::RanksChanged&) { EnsureCommunicator(); }
  void Do(const coordinator::DropSuspect& step);
  void Do(const coordinator::ProgramEnded& step);
  void Send(NodeId node, PeerCommand command);
  void Send(NodeCommands commands);
  void SendNews();

  // ---- the communicator ----
  // How long one attempt to bring it up may take.
  Duration AttemptLimit() const;
  void EnsureCommunicator();
  void EndCommunicator();
  void JudgeCommunicator();
  // Goes on without the suspects, or gives the update up.
  void CommunicatorFailed(const std::set<NodeId>& suspects, const WhyDown& why);
  void SearchOn(const std::set<NodeId>& candidates);
  void JudgeSearch();

  // ---- nodes that go ----
  void LoseNode(NodeId node, const std::string& reason);
  // Ends the nodes' links.
  template <typename Nodes>
  void Drop(const Nodes& gone, const absl::Status& why) {
    for (const NodeId node : gone) {
      Act(PeerAction(DropNode{node, why}));
      LoseNode(node, std::string(why.message()));
    }
  }
  void LeaveOut(NodeId node);
  // Called after the clean-up limit: nodes that have not ended their share of the update count as
  // lost.
  void DropOwing();

  RunProgress Progress() const {
    if (!update.has_value()) return {};
    return update->Progress(worker.ProgressOf(update->record().id));
  }
  bool update_runs() const { return update.has_value() && !update->record().abandoned; }
  Worker::Output Out() { return {actions, &own_reports}; }
  template <typename Action>
  void Act(Action action) {
    actions->push_back(std::move(action));
  }

  // ---- what must hold after every event ----
  // The part of the invariants that costs nothing, checked after every event.
  void CheckState() const;
  void CheckInvariants() const;

  const CoordinatorOptions options;
  Group group;
  Worker worker;
  ReadinessBook book;  // of all instances, between events
  coordinator::JoinedNodes nodes;
  RemoteMembers remotes;
  coordinator::MemberLayouts layouts;  // of all members that registered one
  std::map<CallId, std::shared_ptr<const CheckedBucket>>
      buckets;                        // of this daemon's trainers, until their reply
  std::map<NodeId, ProgramId> plans;  // the program whose plan the node has
  std::optional<UpdateOnNodes> update;
  std::optional<coordinator::Communicator> communicator;
  uint64_t next_communicator = 1;
  coordinator::LeftOut left_out;
  coordinator::LastRun last_run;

  // These are set only during one Handle.
  TimePoint now;
  MachineActions* actions = nullptr;
  std::vector<PeerReport> own_reports;
  std::deque<GroupEvent> events;
  bool feeding = false;
  bool overdue = false;  // CleanUpOverdue came
};

Coordinator::Impl::Impl(CoordinatorOptions coordinator_options)
    : options(std::move(coordinator_options)),
      group(options.name, options.incarnation, options.spec, options.limits, options.next_update,
            options.owner_rule),
      worker({.next_update = options.next_update,
              .layout = [this](MemberId member) { return layouts.Find(member); },
              .layout_digest = [this](MemberId member) { return layouts.DigestOf(member); },
              .bucket =
                  [this](CallId call) {
                    const auto it = buckets.find(call);
                    return it == buckets.end() ? nullptr : it->second;
                  },
              .attached = [this](MemberId member) { return group.Attached(member); }},
             options.peer_limits.wire),
      nodes(options.daemon_id, options.peer_limits.peer),
      left_out(options.peer_limits.slow) {}

// ---- events ----

void Coordinator::Impl::Handle(MachineEvent& event) {
  const auto handle = [this](auto& e) {
    using Event = std::decay_t<decltype(e)>;
    if constexpr (std::is_same_v<Event, NodeJoined>) {
      On(e);
    } else if constexpr (std::is_same_v<Event, NodeLost>) {
      LoseNode(e.node, e.reason);
    } else if constexpr (std::is_same_v<Event, ReportReceived>) {
      if (nodes.Heard(e.node, now)) Report(e.node, e.report);
    } else if constexpr (requires { worker.Handle(e, now, Out()); }) {
      worker.Handle(e, now, Out());
    }
  };
  if (auto* of_group = std::get_if<GroupEvent>(&event)) {
    On(*of_group);
  } else {
    std::visit(handle, std::get<PeerEvent>(event));
  }
  // Reports of the coordinator's own worker are handled like those of any node.
  do {
    for (PeerReport& report : std::exchange(own_reports, {})) Report(kCoordinatorNode, report);
    if (update.has_value() && own_reports.empty()) {
      Take([this](const Around& around) { update->IssueAndYield(around); });
    }
  } while (!own_reports.empty());
}

void Coordinator::Impl::On(GroupEvent& event) {
  if (const auto* lost = std::get_if<MemberLost>(&event)) {
    layouts.Erase(lost->member);
  } else if (const auto* layout = std::get_if<LayoutRegistered>(&event)) {
    LayoutRegistered with_digest = *layout;
    if (!with_digest.digest.has_value()) with_digest.digest = layout->layout->Digest();
    return Register(std::move(with_digest));
  } else if (const auto* bucket = std::get_if<BucketEvent>(&event)) {
    // The bucket as the trainer described it: this daemon compares the header with it (P5).
    buckets.emplace(bucket->call, bucket->bucket);
  } else if (std::holds_alternative<refitd::Tick>(event)) {
    Tick();
  }
  // If the group takes the new incarnation, the joined daemons get it.
  const auto* replace = std::get_if<ReplaceGroup>(&event);
  const std::optional<uint64_t> incarnation =
      replace == nullptr ? std::nullopt : std::optional(replace->incarnation);
  Feed(std::move(event));
  if (std::exchange(overdue, false)) DropOwing();
  if (incarnation.has_value() && group.incarnation() == *incarnation) {
    Send(nodes.SendIncarnation(*incarnation));
  }
}

void Coordinator::Impl::Tick() {
  NodeCommands pings;
  const std::vector<NodeId> silent = nodes.Ping(now, &pings);
  Send(std::move(pings));
  Drop(silent, absl::DeadlineExceededError(fmt::format("it was silent for {} (peers.silence_ms)",
                                                       InSeconds(options.peer_limits.peer))));
  if (!update_runs()) return;
  if (communicator.has_value() && !communicator->up() && now >= communicator->due()) {
    return JudgeCommunicator();
  }
  Take([this](const Around& around) { update->Tick(around); });
}

std::optional<TimePoint> Coordinator::Impl::NextDeadline() const {
  std::optional<TimePoint> next = group.NextDeadline();
  const auto consider = [&next](std::optional<TimePoint> due) {
    if (due.has_value()) next = std::min(next.value_or(*due), *due);
  };
  consider(nodes.due());
  if (!update_runs()) return next;
  consider(update->due());
  if (communicator.has_value() && !communicator->up()) consider(communicator->due());
  return next;
}

void Coordinator::Impl::On(const NodeJoined& e) {
  if (const std::optional<NodeId> old = nodes.Find(e.daemon_id); old.has_value()) {
    Act(PeerAction(DropNode{*old, absl::AbortedError("the daemon joined anew")}));
    LoseNode(*old, "it joined anew");
  }
  nodes.Join(e, now);
  std::string joined = fmt::format("daemon {} joined from {}", e.daemon_id, e.address);
  if (e.protocol != kProtocol) {
    joined += fmt::format(", with protocol version {}", static_cast<int>(e.protocol));
  }
  Act(GroupAction(LogLine{LogLine::kInfo, std::move(joined)}));
  Act(GroupAction(StateChanged{}));
}

// ---- reports ----

void Coordinator::Impl::Report(NodeId node, PeerReport& report) {
  std::visit(
      [this, node](auto& r) {
        using R = std::decay_t<decltype(r)>;
        if constexpr (requires(const Around& around) { update->On(node, r, around); }) {
          if (!update.has_value() || update->record().id != r.update) return;
          Take([&](const Around& around) { update->On(node, r, around); });
        } else if constexpr (std::is_same_v<R, CommunicatorOpened>) {
          Opened(node, r);
        } else if constexpr (std::is_same_v<R, CommunicatorUp>) {
          CameUp(node, r);
        } else if constexpr (kIsOneOf<R, std::variant<ReadyEvent, ProcessedEvent, EngineFailed,
                                                      AckEvent>>) {
          FeedOf(node, std::move(r));
        } else if constexpr (!std::is_same_v<R, PeerPong>) {
          // A pong shows only that the node is alive (JoinedNodes::Heard).
          if (node != kCoordinatorNode) On(node, r);
        }
      },
      report);
}

// Feeds an event of a member.
template <typename MemberEvent>
void Coordinator::Impl::FeedOf(NodeId node, MemberEvent event) {
  if (node != kCoordinatorNode) {
    const std::optional<MemberId> ours = remotes.OursOf(node, event.member);
    if (!ours.has_value()) return;
    event.member = *ours;
  }
  Feed(std::move(event));
}

void Coordinator::Impl::On(NodeId node, const PeerAttach& r) {
  if (remotes.OursOf(node, r.member).has_value()) return;
  if (!r.room.ok()) {
    Send(node, RefuseMember{r.member, r.room});
    return;
  }
  if (options.admit_remote != nullptr) {
    if (absl::Status status = options.admit_remote(); !status.ok()) {
      Send(node, RefuseMember{r.member, std::move(status)});
      return;
    }
  }
  const MemberId ours = options.next_member();
  const bool engine = std::holds_alternative<EngineIdentity>(r.identity);
  const auto* const rank = std::get_if<EngineIdentity>(&r.identity);
  const bool caught_up = engine && rank->catch_up && CatchesUp(rank->delivery);
  remotes.Attach(ours, {node, r.member, engine, caught_up});
  if (engine) {
    EngineAttached attached{ours, std::get<EngineIdentity>(r.identity)};
    attached.identity.node = node;
    attached.identity.daemon = nodes.DaemonId(node);
    Feed(std::move(attached));
  } else {
    TrainerAttached attached{ours, std::get<TrainerIdentity>(r.identity)};
    // Another daemon's rule does not count against a rule of this one (P9).
    TrainerIdentity& who = attached.identity;
    who.any_owner = who.any_owner && (options.owner_rule == nullptr ||
                                      options.owner_rule(who.identity) != OwnerRule::kOther);
    attached.identity.node = node;
    attached.identity.daemon = nodes.DaemonId(node);
    Feed(std::move(attached));
  }
}

void Coordinator::Impl::On(NodeId node, const MemberLost& r) {
  const std::optional<MemberId> ours = remotes.Detach(node, r.member);
  if (!ours.has_value()) return;
  layouts.Erase(*ours);
  Feed(MemberLost{*ours, r.reason});
}

void Coordinator::Impl::On(NodeId node, const PeerLayout& r) {
  const std::optional<MemberId> member = remotes.OursOf(node, r.member);
  if (!member.has_value()) {
    Send(node, Reply{r.call, absl::UnauthenticatedError("the member is not attached"), {}});
    return;
  }
  if (!r.room.ok()) {
    Send(node, Reply{r.call, r.room, {}});
    return;
  }
  const MemberId ours = *member;
  const bool engine = remotes.Find(ours)->engine;
  // The layout may have been sent before this coordinator's Prepare arrived there.
  if (absl::Status status = group.CanRegisterLayout(ours); !status.ok()) {
    Send(node, Reply{r.call, std::move(status), {}});
    return;
  }
  if (!r.destination.ok() && engine) {
    Send(node, Reply{r.call, r.destination, {}});
    return;
  }
  if (remotes.CallOf(node, r.call).has_value()) return;
  const CallId call = options.next_call();
  remotes.AddCall(call, {node, r.call});
  const uint64_t digest = r.digest.has_value() ? *r.digest : r.layout->Digest();
  const std::shared_ptr<const Layout> layout = engine ? layouts.Share(r.layout, digest) : r.layout;
  Register({ours, layout, call, digest, r.content, engine && r.shadowed, engine && r.backs_differ});
}

// Updates name the layouts to the joined daemons, also the update that the event lets begin.
void Coordinator::Impl::Register(LayoutRegistered e) {
  if (!e.backs_differ && group.CheckLayout(e).ok()) layouts.Set(e.member, e.layout, *e.digest);
  Feed(std::move(e));
}

void Coordinator::Impl::On(NodeId node, PeerCall& r) {
  std::visit(
      [this, node](auto& event) {
        const CallId theirs = event.call;
        const std::optional<MemberId> member = remotes.OursOf(node, event.member);
        if (!member.has_value()) {
          Send(node, Reply{theirs, absl::UnauthenticatedError("the member is not attached"), {}});
          return;
        }
        if (remotes.CallOf(node, theirs).has_value()) return;
        const CallId ours = options.next_call();
        remotes.AddCall(ours, {node, theirs});
        event.call = ours;
        event.member = *member;
        Feed(std::move(event));
      },
      r.event);
}

void Coordinator::Impl::On(NodeId node, const CallGone& r) {
  const std::optional<CallId> ours = remotes.CallOf(node, r.call);
  if (ours.has_value()) Feed(CallGone{*ours});
}

void Coordinator::Impl::RefuseReport(NodeId node, const std::string& what) {
  REFITD_CHECK(node != kCoordinatorNode);
  Drop(std::array{node}, absl::InvalidArgumentError(fmt::format("{}: {}", nodes.Name(node), what)));
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
    if (update.has_value() && !update->announced()) Announce();
  }
  feeding = false;
}

void Coordinator::Impl::Route(GroupAction action) {
  if (RouteToNode(&action)) return;
  if (auto* a = std::get_if<UpdateAssembled>(&action)) {
    update.emplace(a->update, group.spec(), Surroundings(nullptr));
  } else if (auto* a = std::get_if<MovePart>(&action)) {
    return Take([&](const Around& around) { update->Start(std::move(*a), around); });
  } else if (auto* a = std::get_if<VerifyUpdate>(&action)) {
    return Take([&](const Around& around) { update->ReadBack(*a, around); });
  } else if (auto* a = std::get_if<StartCompare>(&action)) {
    return Take([&](const Around& around) { update->Compare(*a, around); });
  } else if (auto* a = std::get_if<StartRefit>(&action)) {
    return Take([&](const Around& around) { update->Run(std::move(*a), around); });
  } else if (auto* a = std::get_if<NodeOutOfUpdate>(&action)) {
    return LeaveOut(a->node);
  } else if (std::holds_alternative<CleanUpOverdue>(action)) {
    overdue = true;
    return;
  } else if (std::holds_alternative<UpdateAbandoned>(action) && update.has_value()) {
    Take([&](const Around& around) { update->Abandon(around); });
  } else if (auto* a = std::get_if<UpdateEnded>(&action); a != nullptr && update.has_value()) {
    End(*a);
  }
  Act(std::move(action));
}

// Sends an action for another daemon's member or call there. False: the action is for this daemon.
bool Coordinator::Impl::RouteToNode(GroupAction* action) {
  if (auto* a = std::get_if<Reply>(action)) return ReplyToNode(a);
  if (auto* a = std::get_if<RefuseMember>(action)) return RefuseOnNode(a);
  // Members of other daemons have no memory here.
  if (auto* a = std::get_if<ReleaseMember>(action)) return remotes.Release(a->member).has_value();
  const auto send = [this](MemberId member, auto command_for) {
    const RemoteMembers::Member* const remote = remotes.Find(member);
    if (remote == nullptr) return false;
    Send(remote->node, command_for(remote->id));
    return true;
  };
  if (auto* a = std::get_if<SendPrepare>(action)) {
    const RemoteMembers::Member* const remote = remotes.Find(a->member);
    if (remote == nullptr) return false;
    update->AddEngine(remote->node, remote->id);
    return true;
  }
  if (auto* a = std::get_if<SendPart>(action)) {
    return send(a->member, [a](MemberId id) {
      a->member = id;
      return std::move(*a);
    });
  }
  if (auto* a = std::get_if<WelcomeMember>(action)) {
    // P9: its daemon knows by then who owns the group, and lets the owner see it.
    Send(nodes.SendOwner(group.owner()));
    return send(a->member, [this](MemberId id) {
      return PeerWelcome{id, group.version(), group.spec().trainer_ranks, group.content()};
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
  const std::optional<RemoteMembers::Call> call = remotes.TakeCall(reply->call);
  if (!call.has_value()) return false;
  Send(call->node, Reply{call->id, std::move(reply->status), std::move(reply->payload)});
  return true;
}

bool Coordinator::Impl::RefuseOnNode(RefuseMember* refusal) {
  layouts.Erase(refusal->member);
  const std::optional<RemoteMembers::Member> refused = remotes.Release(refusal->member);
  if (!refused.has_value()) return false;
  Send(refused->node, RefuseMember{refused->id, std::move(refusal->status)});
  return true;
}

// Called after the group's actions, when the engines of each node are known.
void Coordinator::Impl::Announce() {
  Take([this](const Around& around) { update->Announce(around); });
  if (left_out.searching() && update->record().from_trainers()) {
    Take([this](const Around& around) {
      left_out.LeaveOutUntried(group.View(now), &*update, around);
    });
  }
  if (left_out.any_slow() && update->record().from_trainers()) {
    Take(
        [this](const Around& around) { left_out.LeaveOutSlow(group.View(now), &*update, around); });
  }
  EnsureCommunicator();
  // A communicator that came up while the update before was being given up has not been judged yet.
  if (update_runs() && communicator.has_value() && communicator->up()) JudgeSearch();
  if (update.has_value()) Feed(UpdateAnnounced{update->record().id});
}

void Coordinator::Impl::End(const UpdateEnded& a) {
  Steps steps;
  update->End(a, Surroundings(&steps));
  update.reset();
  Perform(std::move(steps));
  // The next update starts with a new communicator.
  if (communicator.has_value() && !communicator->up()) EndCommunicator();
}

// ---- what machines ask for ----

coordinator::Around Coordinator::Impl::Surroundings(Steps* steps) {
  return {.now = now,
          .nodes = nodes,
          .members = remotes,
          .layouts = layouts,
          .communicator = communicator.has_value() ? &*communicator : nullptr,
          .plans = &plans,
          .needed = [this](NodeId node) { return group.SendsFrom(node); },
          .limits = options.peer_limits,
          .slot_bytes = options.spec.slot_bytes,
          .steps = steps};
}

void Coordinator::Impl::Perform(Steps steps) {
  const auto running = [this] {
    return update.has_value() ? std::optional(update->record().id) : std::nullopt;
  };
  const std::optional<UpdateId> asker = running();
  for (coordinator::Step& step : steps) {
    const bool over = asker.has_value() && running() != asker;
    if (over && !std::holds_alternative<LogLine>(step) &&
        !std::holds_alternative<coordinator::WireBroken>(step)) {
      continue;
    }
    std::visit([this](auto& each) { Do(each); }, step);
  }
}

void Coordinator::Impl::Do(GroupEvent& step) {
  // An update fails once.
  if (std::holds_alternative<FailUpdate>(step) && !update_runs()) return;
  Feed(std::move(step));
}

void Coordinator::Impl::Do(const coordinator::DropSuspect& step) {
  Drop(std::array{step.node}, absl::UnavailableError(step.reason));
}

void Coordinator::Impl::Do(const coordinator::ProgramEnded& step) {
  if (step.ok) last_run.Set(*update->record().use, step.took);
  Take([&](const Around& around) { left_out.Judge(step, *update, around); });
}

void Coordinator::Impl::Send(NodeId node, PeerCommand command) {
  if (node != kCoordinatorNode) {
    if (nodes.contains(node)) Act(PeerAction(SendCommand{node, std::move(command)}));
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

void Coordinator::Impl::Send(NodeCommands commands) {
  for (SendCommand& each : commands) Send(each.node, std::move(each.command));
}

// Called at the end of each event. Joined daemons answer for all instances, so each gets every
// change.
void Coordinator::Impl::SendNews() {
  const bool version_changed = book.SetVersion(group.version());
  std::vector<InstanceStanding> changed = group.TakeStandings();
  std::erase_if(changed, [this](const InstanceStanding& standing) { return !book.Set(standing); });
  std::vector<PeerReadiness> news = book.NewsOf(std::move(changed));
  if (news.empty() && version_changed) news.push_back({.version = group.version()});
  Send(nodes.SendOwner(group.owner()));
  Send(nodes.SendReadiness(news, book));
}

// ---- the communicator ----

// An attempt gets half of the remaining time, so that an update that loses this half to an
// unreachable daemon still has the other half for a communicator without that daemon, and for its
// data.
Duration Coordinator::Impl::AttemptLimit() const {
  const Duration half = (update->record().deadline - now) / 2;
  return std::min(std::max<Duration>(half, std::chrono::milliseconds(1)), options.peer_limits.wire);
}

void Coordinator::Impl::EnsureCommunicator() {
  if (!update_runs() || update->record().content.has_value()) return;
  std::vector<NodeId> ranks = update->Ranks();
  bool up = true;
  if (ranks.size() >= 2 && communicator.has_value() && communicator->ranks() == ranks) {
    up = communicator->up();
  } else if (ranks.size() >= 2) {
    if (!update->NeedsWire()) return;
    EndCommunicator();
    communicator.emplace(CommunicatorId(next_communicator++), std::move(ranks), AttemptLimit(),
                         now);
    Send(communicator->Open());
    up = false;
  }
  Take([&](const Around& around) { update->ShowWire(up, around); });
}

void Coordinator::Impl::EndCommunicator() {
  if (!communicator.has_value()) return;
  NodeCommands commands = communicator->Close();
  communicator.reset();
  Send(std::move(commands));
}

void Coordinator::Impl::Opened(NodeId node, const CommunicatorOpened& r) {
  if (!communicator.has_value() || communicator->id() != r.communicator) return;
  if (!communicator->has(node)) {
    return RefuseReport(
        node, fmt::format("it opened communicator {}, of which it is no rank", r.communicator));
  }
  if (communicator->connecting()) return;
  if (!r.status.ok()) {
    return CommunicatorFailed(
        {node},
        {fmt::format("the data plane did not open on {}: {}", nodes.Name(node), Message(r.status)),
         GiveUpClass::kTransfer, FailureOfNode(node, r.status, nodes, &*communicator)});
  }
  if (group.spec().encrypted_data) {
    // A daemon that can't encrypt was refused when it joined. The address of its end must say that
    // the end takes connections under TLS alone.
    const absl::StatusOr<AddressSecurity> security = SecurityOfAddress(r.address);
    if (!security.ok() || !security->encrypted) {
      Failure failure = nodes.Suspecting(std::array{node});
      failure.field = "spec.encrypted_data";
      return CommunicatorFailed(
          {node}, {fmt::format("spec.encrypted_data: the group demands it, and the data plane of "
                               "{} is in the clear",
                               nodes.Name(node)),
                   GiveUpClass::kTransfer, failure});
    }
  }
  if (!communicator->Opened(node, r.address) || !update.has_value()) return;
  Send(communicator->Connect(AttemptLimit(), now));
}

void Coordinator::Impl::CameUp(NodeId node, const CommunicatorUp& r) {
  if (!communicator.has_value() || communicator->id() != r.communicator) return;
  if (!communicator->has(node)) {
    return RefuseReport(
        node, fmt::format("it connected communicator {}, of which it is no rank", r.communicator));
  }
  // A rank closed its end, which makes a communicator that was up useless. No daemon is to blame.
  if (communicator->up() && !r.status.ok()) {
    return CommunicatorFailed(
        {}, {fmt::format("the data plane broke on {}: {}", nodes.Name(node), Message(r.status)),
             GiveUpClass::kTransfer, FailureOfNode(node, r.status, nodes, &*communicator)});
  }
  if (!communicator->connecting() || communicator->up()) return;
  if (!communicator->Answered(node, r.status, now)) return;
  if (!communicator->up()) return JudgeCommunicator();
  if (!update_runs()) return;
  JudgeSearch();
  if (!update_runs()) return;
  Take([this](const Around& around) { update->GoOn(around); });
  if (!update_runs()) return;
  Take([this](const Around& around) { update->ShowWire(true, around); });
}

void Coordinator::Impl::JudgeCommunicator() {
  const Duration least = std::min<Duration>(kLeastAttempt, options.peer_limits.wire / 4);
  const Around around = Surroundings(nullptr);
  std::optional<std::set<NodeId>> suspects = std::set<NodeId>();
  if (communicator->had_time(least)) suspects = communicator->Suspects(around.needed, now);
  if (!suspects.has_value()) {
    // No rank knows whom it waited for. If only one rank can be left out, that one is left out.
    suspects = coordinator::Dispensable(communicator->ranks(), around);
    if (suspects->size() > 1 || left_out.searching()) return SearchOn(*suspects);
  }
  CommunicatorFailed(*suspects, communicator->Why(*suspects, nodes));
}

void Coordinator::Impl::CommunicatorFailed(const std::set<NodeId>& suspects, const WhyDown& why) {
  EndCommunicator();
  if (!update_runs()) return;
  const bool needed = std::any_of(suspects.begin(), suspects.end(),
                                  [this](NodeId node) { return group.SendsFrom(node); });
  if (suspects.empty() || needed || update->data_began()) {
    return Feed(FailUpdate{update->record().id, why.reason, why.kind, why.failure});
  }
  for (const NodeId node : suspects) update->KeepOffWire(node);
  Take([&](const Around& around) { left_out.KeepOut(suspects, why, *update, around); });
  EnsureCommunicator();
}

void Coordinator::Impl::SearchOn(const std::set<NodeId>& candidates) {
  const WhyDown why = communicator->Why({}, nodes);
  EndCommunicator();
  if (!update_runs()) return;
  if (candidates.empty() || update->data_began() || !update->record().from_trainers()) {
    return Feed(FailUpdate{update->record().id, why.reason, why.kind, why.failure});
  }
  Take([&](const Around& around) {
    left_out.SearchOn(candidates, why, group.View(now), &*update, around);
  });
  EnsureCommunicator();
}

// A catch-up is over few nodes and is tried again, and a rollback uses no wire, so the search goes
// on in updates of the trainers only.
void Coordinator::Impl::JudgeSearch() {
  if (!left_out.searching() || !update->record().from_trainers()) return;
  Take([this](const Around& around) { left_out.CameUp(*update, around); });
}

// ---- nodes that go ----

void Coordinator::Impl::LoseNode(NodeId id, const std::string& reason) {
  if (!nodes.contains(id)) return;
  const std::string lost = fmt::format("{} was lost: {}", nodes.Name(id), reason);
  Failure loss = nodes.Suspecting(std::array{id});
  loss.may_be_retried = true;
  Act(GroupAction(LogLine{LogLine::kWarning, fmt::format("{} left: {}", nodes.Name(id), reason)}));
  nodes.Leave(id);
  const std::vector<MemberId> members = remotes.DetachAll(id);
  plans.erase(id);
  left_out.Forget(id);
  if (update.has_value() && update->Remove(id) && update->data_began()) {
    Take([&](const Around& around) { update->GoOnWithout(id, lost, loss, around); });
  }
  if (communicator.has_value() && communicator->has(id)) EndCommunicator();
  // The remaining nodes get a new communicator before the steps that follow open the data phase, or
  // go on with it.
  EnsureCommunicator();
  // The lost node's calls and members stay known as another daemon's until the group is done with
  // them.
  for (const CallId call : remotes.CallsOf(id)) Feed(CallGone{call});
  for (const MemberId ours : members) {
    layouts.Erase(ours);
    Feed(MemberLost{ours, lost});
  }
  if (update.has_value() && update->Remove(id)) {
    // The loss of one member of the node may have assembled an update with its other members, which
    // are lost by now as well. The node was not sent that update.
    if (update->data_began() && update_runs()) {
      Feed(FailUpdate{update->record().id, lost, GiveUpClass::kPeerLost, loss});
    }
    EndCommunicator();
  }
  if (update.has_value()) {
    const absl::Status why = WithFailure(Error(absl::StatusCode::kUnavailable, "{}", lost), loss);
    Take([&](const Around& around) { update->LoseNode(id, why, around); });
  }
  EnsureCommunicator();
  Act(GroupAction(StateChanged{}));
}

void Coordinator::Impl::LeaveOut(NodeId node) {
  if (!update.has_value()) return;
  bool left = false;
  Take([&](const Around& around) { left = update->LeaveOut(node, around); });
  if (left) EnsureCommunicator();
}

// A daemon that answers pings and never says that its share has ended would keep every engine of
// the update paused (P4). That daemon keeps its members' memory mapped itself (P6). The share of
// this daemon's own worker is still waited for.
void Coordinator::Impl::DropOwing() {
  if (!update.has_value()) return;
  const std::string reason =
      fmt::format("it did not end its share of the update to version {} within {} of its end",
                  update->record().version, InSeconds(options.limits.cleanup_limit));
  Drop(update->Owing(), absl::DeadlineExceededError(reason));
}

// ---- what must hold after every event ----

void Coordinator::Impl::CheckState() const {
  REFITD_CHECK(own_reports.empty() && events.empty() && !feeding && !overdue);
  REFITD_CHECK(!update.has_value() || group.update_running());
}

void Coordinator::Impl::CheckInvariants() const {
  CheckState();
  group.CheckInvariants();
  worker.CheckInvariants();
  // The book has every change.
  ReadinessBook all;
  all.SetVersion(group.version());
  for (const InstanceStanding& standing : group.Standings()) all.Set(standing);
  REFITD_CHECK(book.instances() == all.instances() && book.version() == all.version());
  nodes.CheckInvariants();
  remotes.CheckInvariants(nodes);
  layouts.CheckInvariants([this](MemberId member) { return group.Attached(member); });
  for (const auto& [node, program] : plans) REFITD_CHECK(nodes.exists(node));
  if (communicator.has_value()) {
    communicator->CheckInvariants();
    REFITD_CHECK(communicator->id().value() < next_communicator);
    for (const NodeId node : communicator->ranks()) REFITD_CHECK(nodes.exists(node));
  }
  if (update.has_value()) update->CheckInvariants(nodes);
}

// ---- Coordinator ----

Coordinator::Coordinator(CoordinatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

Coordinator::~Coordinator() = default;

void Coordinator::Handle(MachineEvent& event, TimePoint now, MachineActions* actions) {
  impl_->now = now;
  impl_->actions = actions;
  impl_->Handle(event);
  impl_->SendNews();
  impl_->actions = nullptr;
  impl_->CheckState();
}

std::optional<TimePoint> Coordinator::NextDeadline() const { return impl_->NextDeadline(); }
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
std::optional<Version> Coordinator::content() const { return impl_->group.content(); }
UpdateStatistics Coordinator::Statistics() const { return impl_->group.Statistics(); }
PastUpdate Coordinator::Past(Version version) const { return impl_->group.Past(version); }
absl::Status Coordinator::CanRegisterLayout(MemberId member) const {
  return impl_->group.CanRegisterLayout(member);
}

std::optional<UpdateView> Coordinator::ViewUpdate(TimePoint now) const {
  return impl_->group.ViewUpdate(now, impl_->Progress());
}
std::optional<UpdateView> Coordinator::ViewLatest(TimePoint now) const {
  return impl_->group.ViewLatest(now, impl_->Progress());
}
std::optional<UpdateMark> Coordinator::MarkLatest() const { return impl_->group.MarkLatest(); }
size_t Coordinator::remote_members() const { return impl_->remotes.size(); }

absl::Status Coordinator::CanJoin(const std::string& daemon_id, const std::string& boot_id,
                                  const std::string& address) const {
  return impl_->nodes.CanJoin(impl_->options.name, daemon_id, boot_id, address);
}

std::shared_ptr<const Layout> Coordinator::KnownLayout(NodeId node,
                                                       const PeerLayout& report) const {
  if (!report.digest.has_value()) return nullptr;
  const std::optional<MemberId> member = impl_->remotes.OursOf(node, report.member);
  if (!member.has_value() || !impl_->remotes.Find(*member)->engine) return nullptr;
  return impl_->layouts.SharedWith(*report.digest);
}

void Coordinator::CheckInvariants() const { impl_->CheckInvariants(); }

int64_t Coordinator::layouts_compared() const { return impl_->layouts.compared(); }

MachineView Coordinator::View(TimePoint now) const {
  MachineView view;
  view.group = impl_->group.View(now, impl_->Progress());
  for (InstanceView& instance : view.group.instances) {
    std::optional<Readiness> readiness = impl_->book.Of(instance.name, spec().max_lag);
    if (readiness.has_value()) instance.readiness = *std::move(readiness);
  }
  NodeView self;
  self.daemon_id = impl_->options.daemon_id;
  self.state = "self";
  for (const MemberView& member : view.group.members) {
    if (impl_->remotes.Find(member.id) == nullptr) ++self.members;
  }
  view.nodes = impl_->nodes.View(now);
  for (NodeView& node : view.nodes) {
    node.members = static_cast<int>(impl_->remotes.CountOn(node.node));
  }
  view.nodes.insert(view.nodes.begin(), std::move(self));
  for (NodeView& node : view.nodes) {
    node.kept_out = impl_->group.KeptOut(node.node);
    node.slow = impl_->left_out.WhySlow(node.node);
    impl_->last_run.Show(node.node, impl_->nodes, &node);
  }
  if (impl_->communicator.has_value()) {
    view.communicator = impl_->communicator->id();
    view.communicator_state = impl_->communicator->state();
  }
  return view;
}

}  // namespace refitd
