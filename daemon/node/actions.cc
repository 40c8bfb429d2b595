#include "daemon/node/actions.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

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

}  // namespace

void Actions::Dispatch(Turn& turn, const std::string& name, MachineEvent& event) {
  GroupRecord* group = state_.groups.Find(name);
  if (group == nullptr) return;
  MachineActions actions;
  group->machine->Handle(event, DaemonState::Now(), &actions);
  for (MachineAction& action : actions) Perform(group, std::move(action), turn);
  if (group->follower != nullptr && group->follower->finished()) {
    life_.DropFollower(name, turn);
  } else if (group->coordinator != nullptr) {
    life_.NoteEmpty(group, turn);
  }
}

// Performs one action of the group's machine. The functions are called by std::visit, which the
// analysis of locks does not follow, so each names its lock itself.
struct Actions::Performer {
  Actions* own;
  GroupRecord* group;
  Turn& turn;

  MemberRecord* Find(MemberId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    return own->state_.leases.Find(id);
  }
  void Deliver(MemberId id, MemberNews news) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    MemberRecord* member = Find(id);
    if (member == nullptr || member->sink == nullptr) return;
    member->sink->Queue(std::move(news));
    turn.Flush(member->sink, member->engine);
  }

  void operator()(Reply& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    std::optional<Calls::Call> call = own->state_.calls.Take(a.call);
    if (!call.has_value()) return;
    if (call->layout.has_value()) {
      MemberRecord* member = Find(call->layout->member);
      if (a.status.ok() && member != nullptr) member->layout = std::move(call->layout->layout);
    }
    turn.Answer([reply = std::move(call->reply), status = std::move(a.status),
                 payload = std::move(a.payload)] { reply(status, payload); });
  }
  void operator()(SendPart& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    const MemberId member = a.member;
    Deliver(member, PartNews{std::move(a), group->machine->spec().slot_bytes});
  }
  void operator()(SendCommitted& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    a.incarnation = group->machine->incarnation();
    a.owner = group->machine->owner();
    Deliver(a.member, a);
  }
  // The action itself is the news that the member is told.
  template <typename Action>
  requires std::is_constructible_v<MemberNews, std::in_place_type_t<Action>, Action>
  void operator()(Action& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    const MemberId member = a.member;
    Deliver(member, std::move(a));
  }
  void operator()(StartTransfer& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Start(group, std::move(a), turn);
  }
  void operator()(StartVerify& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Start(group, a, turn);
  }
  void operator()(PlanRefit& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Compile(*group, std::move(a));
  }
  void operator()(MovePart&) {}      // the coordinator performs it
  void operator()(VerifyUpdate&) {}  // the coordinator performs it
  void operator()(StartCompare&) {}  // the coordinator performs it
  void operator()(StartRefit&) {}    // the coordinator performs it
  void operator()(BuildProgram& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Build(*group, std::move(a));
  }
  void operator()(StartMoves& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Start(group, a, turn);
  }
  void operator()(StartExchange& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Start(group, a, turn);
  }
  void operator()(ReleaseMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->members_.Erase(a.member, turn);
  }
  void operator()(UpdateAssembled&) {}
  void operator()(NodeOutOfUpdate&) {}  // the coordinator performs it
  void operator()(UpdateAbandoned&) {}
  void operator()(CleanUpOverdue&) {}  // the coordinator performs it
  void operator()(UpdateEnded& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    turn.Last([remains = std::move(a.remains)] {});
    own->data_plane_.Forget(a.update);
    own->device_slots_.DropWire(group);
    own->data_plane_.GiveUpCommunicators(*group, turn);
    // Unknown: this daemon had a share only; the coordinator counts the update.
    if (a.outcome == Outcome::kUnknown) return;
    if (a.catch_up) return own->CountCatchUp(*group, a);
    group->broadcasts = false;
    own->identities_.AuditUpdate(*group, a);
    own->Count(*group, a);
  }
  void operator()(RefuseMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    MemberRecord* member = Find(a.member);
    if (member == nullptr) return;
    member->End(a.status);
    own->members_.Erase(a.member, turn);
  }
  void operator()(WelcomeMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    MemberRecord* member = Find(a.member);
    if (member != nullptr) own->members_.Welcome(group, member);
  }
  void operator()(StateChanged&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    const TimePoint now = DaemonState::Now();
    own->state_.readiness.Changed(group->name(), now);
    if (own->state_.watchers.empty()) return;
    own->state_.watchers.Changed(*group->machine, own->state_.groups.machines(), now);
  }
  void operator()(LogLine& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    if (!a.evicted.empty()) {
      own->identities_.AuditEviction(*group, a);
      if (DaemonObserver* const observer = own->state_.options.observer; observer != nullptr) {
        observer->InstanceEvicted(group->name(), ReasonOf(a.cause, own->state_.aborts));
      }
    }
    const LogLevel level = a.level == LogLine::kInfo      ? LogLevel::kInfo
                           : a.level == LogLine::kWarning ? LogLevel::kWarning
                                                          : LogLevel::kError;
    if (!LogEnabled(level)) return;
    LogMessage(level, fmt::format("group {}: {}", group->name(), a.text));
  }

  // ---- other daemons ----
  void operator()(SendCommand& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->PerformSend(group, std::move(a), turn);
  }
  void operator()(DropNode& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->state_.peers.End(group->name(), a.node, a.status);
  }
  void operator()(SendReport& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->PerformSend(group, std::move(a), turn);
  }
  void operator()(CloseLink&) {
    if (group->join.link == nullptr) return;
    group->join.link->Close();
    group->join.link.reset();
  }
  void operator()(MakeSlots& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->members_.MakeSlotsFor(a.member, *group);
  }
  void operator()(OpenCommunicator& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Open(group, a, turn);
  }
  void operator()(ConnectCommunicator& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Connect(*group, std::move(a), turn);
  }
  void operator()(CloseCommunicator& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Close(*group, a);
  }
  void operator()(StartWire& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    own->data_plane_.Start(group, a, turn);
  }
  void operator()(AcquireWire&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    WireLock::Events events;
    own->state_.wire_lock.Acquire(group->name(), &events);
    for (auto& [name, event] : events) turn.Post(name, std::move(event));
  }
  void operator()(ReleaseWire&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) {
    WireLock::Events events;
    own->state_.wire_lock.Release(group->name(), &events);
    for (auto& [name, event] : events) turn.Post(name, std::move(event));
  }
};

void Actions::Perform(GroupRecord* group, MachineAction action, Turn& turn) {
  Performer performer{this, group, turn};
  std::visit([&performer](auto& kind) { std::visit(performer, kind); }, action);
}

// Encoding a command may take long (a plan), and every daemon gets one, so encoding waits until the
// mutex is released. A daemon to which a command can't be sent can't follow any more: its session
// ends, and Gone follows.
void Actions::PerformSend(GroupRecord* group, SendCommand a, Turn& turn) {
  const std::shared_ptr<PeerSession> session = state_.peers.SessionOf(group->name(), a.node);
  if (session == nullptr) return;
  if (session->Queue(std::move(a.command)).ok()) turn.Flush(session);
}

// Encoding a report may take long too: an engine's layout has every tensor of its model.
void Actions::PerformSend(GroupRecord* group, SendReport a, Turn& turn) {
  if (group->join.link == nullptr) return;
  if (!group->join.link->Queue(std::move(a.report)).ok()) return;  // on_lost follows
  turn.Flush(group->join.link,
             [this, name = group->name(), link = group->join.link.get()](
                 PeerLink::Refused refused) { ReportRefused(name, link, std::move(refused)); });
}

// Handles a report that can't be sent. If a call or a member waits for an answer to the report, it
// gets the refusal that the coordinator would send. Otherwise the link counts as lost.
void Actions::ReportRefused(const std::string& name, const PeerLink* link,
                            PeerLink::Refused refused) {
  Turn turn(state_.turns, Turn::Order::kAhead);
  const GroupRecord* group = state_.groups.Find(name);
  if (group == nullptr || group->join.link.get() != link) return;
  absl::Status& status = refused.status;
  if (const auto* call = std::get_if<PeerCall>(&refused.report)) {
    const CallId id = std::visit([](const auto& event) { return event.call; }, call->event);
    turn.Handle(name, CommandReceived{Reply{id, std::move(status), EmptyReply{}}});
  } else if (const auto* attach = std::get_if<PeerAttach>(&refused.report)) {
    turn.Handle(name, CommandReceived{RefuseMember{attach->member, std::move(status)}});
  } else if (const auto* layout = std::get_if<PeerLayout>(&refused.report)) {
    turn.Handle(name, CommandReceived{Reply{layout->call, std::move(status), EmptyReply{}}});
  } else {
    turn.Handle(name, LinkLost{std::move(status)});
  }
}

void Actions::CountCatchUp(const GroupRecord& group, const UpdateEnded& ended) const {
  if (state_.options.observer == nullptr) return;
  const CatchUpEnd end = ended.outcome == Outcome::kCommitted ? CatchUpEnd::kCommitted
                         : ended.gave_way                     ? CatchUpEnd::kGaveWay
                                                              : CatchUpEnd::kFailed;
  state_.options.observer->CatchUpEnded(
      group.name(), end, end == CatchUpEnd::kCommitted ? ended.bytes : 0, ended.total);
  if (ended.give_up_class == GiveUpClass::kVerification) {
    state_.options.observer->IntegrityFailure(group.name());
  }
}

void Actions::Count(const GroupRecord& group, const UpdateEnded& ended) const {
  if (state_.options.observer == nullptr) return;
  UpdateReport report;
  report.group = group.name();
  report.committed = ended.outcome == Outcome::kCommitted;
  report.reason = ReasonOf(ended.give_up_class, state_.aborts);
  report.prepare = ended.prepare;
  report.data = ended.data;
  report.verify = ended.verify;
  report.total = ended.total;
  report.bytes = ended.bytes;
  for (const BroadcastTotals& totals : ended.pushed) {
    // kAuto, the first value, is left out: the used method is always known.
    const size_t at = static_cast<size_t>(totals.method) - 1;
    if (at < report.pushed_bytes.size()) report.pushed_bytes[at] = totals.bytes;
  }
  state_.options.observer->UpdateEnded(report);
  if (ended.give_up_class == GiveUpClass::kVerification) {
    state_.options.observer->IntegrityFailure(report.group);
  }
}

}  // namespace refitd
