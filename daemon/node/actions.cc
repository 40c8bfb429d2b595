#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "daemon/node/identities.h"
#include "daemon/node/life.h"
#include "daemon/node/restore.h"
#include "daemon/node/state.h"
#include "daemon/process/log.h"

namespace refitd {
namespace {

// The class of reasons as counters name it. `stops`: the daemon aborts what still runs.
std::string_view ReasonOf(GiveUpClass kind, bool stops) {
  switch (kind) {
    case GiveUpClass::kNone:
      return kReasonNone;
    case GiveUpClass::kDeadline:
      return kReasonDeadline;
    case GiveUpClass::kMemberLost:
      return kReasonMemberLost;
    case GiveUpClass::kPeerLost:
      return kReasonPeerLost;
    case GiveUpClass::kVerification:
      return kReasonVerification;
    case GiveUpClass::kAborted:
      return kReasonAborted;
    case GiveUpClass::kOperator:
      return stops ? kReasonDrain : kReasonOperator;
    case GiveUpClass::kTransfer:
      return kReasonTransfer;
    case GiveUpClass::kSlow:
      return kReasonSlow;
    case GiveUpClass::kOther:
      break;
  }
  return kReasonOther;
}

// Handles a report that can't be sent. A call or member that waits for an answer to the report gets
// the refusal that the coordinator would send. If none waits, the link counts as lost.
void ReportRefused(DaemonState& state, const std::string& name, const PeerLink* link,
                   PeerLink::Refused refused) {
  StateLock lock(&state.mutex, StateLock::Order::kAhead);
  const GroupRecord* group = state.groups.Find(name);
  if (group == nullptr || group->join.link.get() != link) return;
  absl::Status& status = refused.status;
  if (const auto* call = std::get_if<PeerCall>(&refused.report)) {
    const CallId id = std::visit([](const auto& event) { return event.call; }, call->event);
    lock.Handle(name, CommandReceived{Reply{id, std::move(status), EmptyReply{}}});
  } else if (const auto* attach = std::get_if<PeerAttach>(&refused.report)) {
    lock.Handle(name, CommandReceived{RefuseMember{attach->member, std::move(status)}});
  } else if (const auto* layout = std::get_if<PeerLayout>(&refused.report)) {
    lock.Handle(name, CommandReceived{Reply{layout->call, std::move(status), EmptyReply{}}});
  } else {
    lock.Handle(name, LinkLost{std::move(status)});
  }
}

// Encoding a command may take long (a plan), and every daemon gets one, so encoding waits until the
// mutex is released. A daemon to which a command can't be sent can't follow any more: its session
// ends, and Gone follows.
void PerformSend(DaemonState& state, GroupRecord* group, SendCommand a, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  const std::shared_ptr<PeerSession> session = state.sessions.SessionOf(group->name(), a.node);
  if (session == nullptr) return;
  if (session->Queue(std::move(a.command)).ok()) lock.Flush(session);
}

// Encoding a report may take long too: an engine's layout has every tensor of its model.
void PerformSend(DaemonState& state, GroupRecord* group, SendReport a, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (group->join.link == nullptr) return;
  if (!group->join.link->Queue(std::move(a.report)).ok()) return;  // on_lost follows
  lock.Flush(group->join.link, [&state, name = group->name(),
                                link = group->join.link.get()](PeerLink::Refused refused) {
    ReportRefused(state, name, link, std::move(refused));
  });
}

void CountReleased(const DaemonState& state, const GroupRecord& group, const UpdateEnded& ended)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (state.options.observer == nullptr) return;
  for (const InstanceOutcome& instance : ended.instances) {
    if (!instance.pause.has_value()) continue;
    const FlipEnd flip = instance.flipped_back                     ? FlipEnd::kBack
                         : instance.shadowed && instance.committed ? FlipEnd::kCommitted
                                                                   : FlipEnd::kNone;
    state.options.observer->InstanceReleased(group.name(), instance.instance, *instance.pause,
                                             flip);
  }
}

void CountCatchUp(const DaemonState& state, const GroupRecord& group, const UpdateEnded& ended)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (state.options.observer == nullptr) return;
  const CatchUpEnd end = ended.outcome == Outcome::kCommitted ? CatchUpEnd::kCommitted
                         : ended.gave_way                     ? CatchUpEnd::kGaveWay
                                                              : CatchUpEnd::kFailed;
  state.options.observer->CatchUpEnded(
      group.name(), end, end == CatchUpEnd::kCommitted ? ended.bytes : 0, ended.total);
  if (ended.give_up_class == GiveUpClass::kVerification) {
    state.options.observer->IntegrityFailure(group.name());
  }
}

void Count(const DaemonState& state, const GroupRecord& group, const UpdateEnded& ended)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (state.options.observer == nullptr) return;
  UpdateReport report;
  report.group = group.name();
  report.committed = ended.outcome == Outcome::kCommitted;
  report.reason = ReasonOf(ended.give_up_class, state.aborts);
  report.prepare = ended.prepare;
  report.data = ended.data;
  report.verify = ended.verify;
  report.process = ended.process;
  report.flip = ended.flip;
  report.total = ended.total;
  report.bytes = ended.bytes;
  report.rollback = ended.rollback;
  for (const BroadcastTotals& totals : ended.pushed) {
    // kAuto, the first value, is left out: the used method is always known.
    const size_t at = static_cast<size_t>(totals.method) - 1;
    if (at < report.pushed_bytes.size()) report.pushed_bytes[at] = totals.bytes;
  }
  state.options.observer->UpdateEnded(report);
  if (ended.give_up_class == GiveUpClass::kVerification) {
    state.options.observer->IntegrityFailure(report.group);
  }
}

// Performs one action of the group's machine. The functions are called by std::visit, which the
// analysis of locks does not follow, so each names its lock itself.
struct Performer {
  DaemonState& state;
  GroupRecord* group;
  StateLock& lock;

  MemberRecord* Find(MemberId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    return state.members.Find(id);
  }
  void Deliver(MemberId id, MemberNews news) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    MemberRecord* member = Find(id);
    if (member == nullptr || member->sink == nullptr) return;
    member->sink->Queue(std::move(news));
    lock.Flush(member->sink, member->engine);
  }

  void operator()(Reply& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    std::optional<Calls::Call> call = state.calls.Take(a.call);
    if (!call.has_value()) return;
    if (call->layout.has_value()) {
      MemberRecord* member = Find(call->layout->member);
      if (a.status.ok() && member != nullptr && !call->layout->layout->backs_differ) {
        member->Register(std::move(call->layout->layout), call->layout->digest,
                         call->layout->content, std::move(call->layout->outside));
        EndRestore(state, member, /*differs=*/"", lock);
      }
    }
    lock.Answer([reply = std::move(call->reply), status = std::move(a.status),
                 payload = std::move(a.payload)] { reply(status, payload); });
  }
  void operator()(SendPart& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    const MemberId member = a.member;
    Deliver(member, PartNews{std::move(a), group->machine->spec().slot_bytes});
  }
  void operator()(SendCommitted& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    a.incarnation = group->machine->incarnation();
    a.owner = group->machine->owner();
    MemberRecord* const member = Find(a.member);
    // Only ranks that have flipped are committed, so that backs have taken the regions' places.
    if (member != nullptr && member->layout != nullptr && !member->layout->backs.empty()) {
      ++member->flips;
    }
    if (member != nullptr && member->engine) {
      member->holds.reset();
      if (a.digest != 0) member->holds = {a.version, a.incarnation, a.owner, a.digest};
    }
    Deliver(a.member, a);
  }
  void operator()(SendAborted& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    MemberRecord* const member = Find(a.member);
    if (member != nullptr && a.dirty) member->holds.reset();
    Deliver(a.member, a);
  }
  // The action itself is the news that is sent to the member.
  template <typename Action>
  requires std::is_constructible_v<MemberNews, std::in_place_type_t<Action>, Action>
  void operator()(Action& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    const MemberId member = a.member;
    Deliver(member, std::move(a));
  }
  void operator()(StartTransfer& a) { state.data_plane->Start(group, std::move(a), lock); }
  void operator()(StartVerify& a) { state.data_plane->Start(group, a, lock); }
  void operator()(PlanRefit& a) { state.data_plane->Compile(*group, std::move(a)); }
  void operator()(MovePart&) {}      // the coordinator performs it
  void operator()(VerifyUpdate&) {}  // the coordinator performs it
  void operator()(StartCompare&) {}  // the coordinator performs it
  void operator()(StartRefit&) {}    // the coordinator performs it
  void operator()(BuildProgram& a) { state.data_plane->Build(*group, std::move(a)); }
  void operator()(StartMoves& a) { state.data_plane->Start(group, a, lock); }
  void operator()(StartExchange& a) { state.data_plane->Start(group, a, lock); }
  void operator()(ReleaseMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    EraseMember(state, a.member, lock);
  }
  void operator()(UpdateAssembled&) {}
  void operator()(NodeOutOfUpdate&) {}  // the coordinator performs it
  void operator()(UpdateAbandoned&) {}
  void operator()(CleanUpOverdue&) {}  // the coordinator performs it
  void operator()(UpdateEnded& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    lock.Last([remains = std::move(a.remains)] {});
    state.data_plane->Forget(a.update);
    state.pools.DropWire(*group);
    state.data_plane->GiveUpCommunicators(*group, lock);
    // Unknown: this daemon had a share only; the coordinator counts the update.
    if (a.outcome == Outcome::kUnknown) return;
    CountReleased(state, *group, a);
    if (a.catch_up) return CountCatchUp(state, *group, a);
    group->broadcasts = false;
    AuditUpdate(state, *group, a);
    Count(state, *group, a);
  }
  void operator()(RefuseMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    MemberRecord* member = Find(a.member);
    if (member == nullptr) return;
    if (member->engine) KeepArenas(state, member, lock);
    member->End(a.status);
    EraseMember(state, a.member, lock);
  }
  void operator()(WelcomeMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    MemberRecord* member = Find(a.member);
    if (member != nullptr) SendWelcome(state, group, member, lock);
  }
  void operator()(StateChanged&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    const TimePoint now = DaemonState::Now();
    state.watchers.ReadinessChanged(group->name(), now);
    if (state.watchers.empty()) return;
    state.watchers.Changed(*group->machine, state.groups.machines(), now);
  }
  void operator()(LogLine& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    if (!a.evicted.empty()) {
      AuditEviction(state, *group, a);
      if (DaemonObserver* const observer = state.options.observer; observer != nullptr) {
        observer->InstanceEvicted(group->name(), ReasonOf(a.cause, state.aborts));
      }
    }
    const LogLevel level = a.level == LogLine::kInfo      ? LogLevel::kInfo
                           : a.level == LogLine::kWarning ? LogLevel::kWarning
                                                          : LogLevel::kError;
    if (!LogEnabled(level)) return;
    LogMessage(level, fmt::format("group {}: {}", group->name(), a.text));
  }

  // ---- other daemons ----
  void operator()(SendCommand& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    PerformSend(state, group, std::move(a), lock);
  }
  void operator()(DropNode& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    state.sessions.End(group->name(), a.node, a.status);
  }
  void operator()(SendReport& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    PerformSend(state, group, std::move(a), lock);
  }
  void operator()(CloseLink&) {
    if (group->join.link == nullptr) return;
    group->join.link->Close();
    group->join.link.reset();
  }
  void operator()(MakeSlots& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    MakeSlotsFor(state, a.member, *group);
  }
  void operator()(OpenCommunicator& a) { state.data_plane->Open(group, a, lock); }
  void operator()(ConnectCommunicator& a) { state.data_plane->Connect(*group, std::move(a), lock); }
  void operator()(CloseCommunicator& a) { state.data_plane->Close(*group, a); }
  void operator()(StartWire& a) { state.data_plane->Start(group, a, lock); }
  void operator()(AcquireWire&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    WireLock::Events events;
    state.wire_lock.Acquire(group->name(), &events);
    for (auto& [name, event] : events) lock.Post(name, std::move(event));
  }
  void operator()(ReleaseWire&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    WireLock::Events events;
    state.wire_lock.Release(group->name(), &events);
    for (auto& [name, event] : events) lock.Post(name, std::move(event));
  }
};

}  // namespace

void DispatchEvent(DaemonState& state, const std::string& name, MachineEvent& event,
                   StateLock& lock) {
  GroupRecord* group = state.groups.Find(name);
  if (group == nullptr) return;
  MachineActions actions;
  group->machine->Handle(event, DaemonState::Now(), &actions);
  Performer performer{state, group, lock};
  for (MachineAction& action : actions) {
    std::visit([&performer](auto& kind) { std::visit(performer, kind); }, action);
  }
  if (group->follower != nullptr && group->follower->finished()) {
    DropFollower(state, name, lock);
  } else if (group->coordinator != nullptr) {
    NoteEmptyGroup(state, group, lock);
  }
}

}  // namespace refitd
