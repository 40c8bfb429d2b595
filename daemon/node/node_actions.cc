// Hands events to the state machines and performs their actions: replies and streams here, what
// touches memory through the data plane.
#include <algorithm>
#include <utility>

#include "daemon/node/node.h"
#include "daemon/process/log.h"

namespace refitd {
namespace {

v1::EngineEvent PartEvent(const SendPart& part, int64_t slot_bytes) {
  v1::EngineEvent event;
  v1::BucketReady& bucket = *event.mutable_bucket();
  const PartContent& content = *part.content;
  bucket.set_version(part.version.value());
  bucket.set_update_id(part.update.value());
  bucket.set_part(part.part.value());
  bucket.set_slot(part.slot.slot.value());
  bucket.set_slot_byte_offset(int64_t{part.slot.slot.value()} * slot_bytes);
  bucket.set_bytes(content.bytes);
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorSpec& tensor = content.tensors[content.ranges[i].tensor];
    bucket.add_names(tensor.name);
    bucket.add_dtypes(ToWire(tensor.dtype));
    *bucket.add_shapes() = ToWire(tensor.shape);
    bucket.add_starts(content.ranges[i].start);
    bucket.add_sizes(content.ranges[i].count);
    bucket.add_byte_offsets(content.byte_offsets[i]);
  }
  return event;
}

}  // namespace

void Node::Dispatch(Turn& turn, const std::string& name, MachineEvent& event) {
  GroupRecord* group = groups_.Find(name);
  if (group == nullptr) return;
  MachineActions actions;
  group->machine->Handle(event, Now(), &actions);
  for (MachineAction& action : actions) Perform(group, std::move(action), turn);
  if (group->follower != nullptr && group->follower->finished()) {
    DropFollower(name, turn);
  } else if (group->coordinator != nullptr) {
    NoteEmpty(group, turn);
  }
}

void Node::Drained() {
  timer_.Wake();
  if (!groups_.any_running()) idle_cond_.NotifyAll();
}

// Performs one action of the group's machine. The functions are called by std::visit, which the
// analysis of locks does not follow, so each names its lock itself.
struct Node::Performer {
  Node* node;
  GroupRecord* group;
  Turn& turn;

  MemberRecord* Find(MemberId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    return node->leases_.Find(id);
  }
  void SendEngine(MemberId id, v1::EngineEvent event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    MemberRecord* member = Find(id);
    if (member == nullptr || member->engine_sink == nullptr) return;
    member->engine_sink->Queue(std::move(event));
    turn.Flush(member->engine_sink);
  }
  void SendTrainer(MemberId id, v1::TrainerEvent event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    MemberRecord* member = Find(id);
    if (member == nullptr || member->trainer_sink == nullptr) return;
    member->trainer_sink->Queue(std::move(event));
    turn.Flush(member->trainer_sink);
  }
  // Committed, Aborted and Draining have the same fields for both roles.
  template <typename Fill>
  void SendEither(MemberId id, Fill fill) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    MemberRecord* member = Find(id);
    if (member == nullptr) return;
    if (member->engine) {
      v1::EngineEvent event;
      fill(&event);
      SendEngine(id, std::move(event));
    } else {
      v1::TrainerEvent event;
      fill(&event);
      SendTrainer(id, std::move(event));
    }
  }

  void operator()(Reply& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    std::optional<Calls::Call> call = node->calls_.Take(a.call);
    if (!call.has_value()) return;
    if (call->layout.has_value()) {
      MemberRecord* member = Find(call->layout->member);
      if (a.status.ok() && member != nullptr) member->layout = std::move(call->layout->layout);
    }
    turn.Answer([reply = std::move(call->reply), status = std::move(a.status),
                 payload = std::move(a.payload)] { reply(status, payload); });
  }
  void operator()(SendPrepare& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    v1::EngineEvent event;
    event.mutable_prepare()->set_version(a.version.value());
    event.mutable_prepare()->set_update_id(a.update.value());
    event.mutable_prepare()->set_remaining_ms(ToMillis(a.remaining));
    event.mutable_prepare()->set_tensor_count(a.tensor_count);
    SendEngine(a.member, std::move(event));
  }
  void operator()(SendPart& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    SendEngine(a.member, PartEvent(a, group->machine->spec().slot_bytes));
  }
  void operator()(SendCommitted& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    SendEither(a.member, [&](auto* event) {
      event->mutable_committed()->set_version(a.version.value());
      event->mutable_committed()->set_incarnation(group->machine->incarnation());
    });
  }
  void operator()(SendAborted& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    SendEither(a.member, [&](auto* event) {
      event->mutable_aborted()->set_version(a.version.value());
      event->mutable_aborted()->set_reason(a.reason);
      event->mutable_aborted()->set_dirty(a.dirty);
    });
  }
  void operator()(SendDraining& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    SendEither(a.member, [](auto* event) { event->mutable_draining(); });
  }
  void operator()(StartTransfer& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Start(group, std::move(a), turn);
  }
  void operator()(StartVerify& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Start(group, a, turn);
  }
  void operator()(CompileProgram& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Compile(*group, std::move(a));
  }
  void operator()(StartCompare&) {}  // the coordinator performs it
  void operator()(StartRefit&) {}    // the coordinator performs it
  void operator()(BuildProgram& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Build(*group, std::move(a));
  }
  void operator()(StartMoves& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Start(group, a, turn);
  }
  void operator()(StartExchange& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Start(group, a, turn);
  }
  void operator()(ReleaseMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->Erase(a.member, turn);
  }
  void operator()(UpdateAssembled&) {}
  void operator()(NodeOutOfUpdate&) {}  // the coordinator performs it
  void operator()(UpdateAbandoned&) {}
  void operator()(CleanUpOverdue&) {}  // the coordinator performs it
  void operator()(UpdateEnded& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    turn.Last([remains = std::move(a.remains)] {});
    node->data_plane_.Forget(a.update);
    node->device_slots_.DropWire(group);
    node->data_plane_.GiveUpEpochs(*group, turn);
    // Unknown: this daemon had a share only; the coordinator counts the update.
    if (a.outcome == Outcome::kUnknown) return;
    group->broadcasts = false;
    node->Count(*group, a);
  }
  void operator()(RefuseMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    MemberRecord* member = Find(a.member);
    if (member == nullptr) return;
    member->End(a.status);
    node->Erase(a.member, turn);
  }
  void operator()(WelcomeMember& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    MemberRecord* member = Find(a.member);
    if (member != nullptr) node->SendWelcome(group, member);
  }
  void operator()(StateChanged&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    if (node->watchers_.empty()) return;
    node->watchers_.Changed(*group->machine, node->groups_.machines(), Now());
  }
  void operator()(LogLine& a) {
    const LogLevel level = a.level == LogLine::kInfo      ? LogLevel::kInfo
                           : a.level == LogLine::kWarning ? LogLevel::kWarning
                                                          : LogLevel::kError;
    if (!LogEnabled(level)) return;
    node->log_->Add(level, fmt::format("group {}: {}", group->name(), a.text));
    turn.Write(node->log_);
  }

  // ---- other daemons ----
  void operator()(SendCommand& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformSend(group, std::move(a), turn);
  }
  void operator()(DropNode& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->peers_.End(group->name(), a.node, a.status);
  }
  void operator()(SendReport& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformSend(group, std::move(a), turn);
  }
  void operator()(CloseLink&) {
    if (group->join.link == nullptr) return;
    group->join.link->Close();
    group->join.link.reset();
  }
  void operator()(MakeSlots& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformMakeSlots(*group, a);
  }
  void operator()(OpenEpoch& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Open(group, a, turn);
  }
  void operator()(ConnectEpoch& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Connect(*group, std::move(a), turn);
  }
  void operator()(CloseEpoch& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Close(*group, a);
  }
  void operator()(StartWire& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->data_plane_.Start(group, a, turn);
  }
  void operator()(AcquireWire&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    WireLock::Events events;
    node->wire_lock_.Acquire(group->name(), &events);
    for (auto& [name, event] : events) turn.Post(name, std::move(event));
  }
  void operator()(ReleaseWire&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    WireLock::Events events;
    node->wire_lock_.Release(group->name(), &events);
    for (auto& [name, event] : events) turn.Post(name, std::move(event));
  }
};

void Node::Perform(GroupRecord* group, MachineAction action, Turn& turn) {
  Performer performer{this, group, turn};
  std::visit([&performer](auto& kind) { std::visit(performer, kind); }, action);
}

void Node::Count(const GroupRecord& group, const UpdateEnded& ended) {
  if (options_.observer == nullptr) return;
  const auto reason = [&ended, stops = stops_]() -> std::string_view {
    switch (ended.give_up_class) {
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
      case GiveUpClass::kOther:
        break;
    }
    return kReasonOther;
  };
  UpdateReport report;
  report.group = group.name();
  report.committed = ended.outcome == Outcome::kCommitted;
  report.reason = reason();
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
  options_.observer->UpdateEnded(report);
  if (ended.give_up_class == GiveUpClass::kVerification) {
    options_.observer->IntegrityFailure(report.group);
  }
}

}  // namespace refitd
