// Hands events to the state machines and performs their actions: replies, streams, copies,
// collectives.
#include <algorithm>
#include <utility>

#include "daemon/node/group_memory.h"
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

void Node::Dispatch(Turn& turn, const std::string& name, const MachineEvent& event) {
  mutex_.AssertHeld();
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
  mutex_.AssertHeld();
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
    node->PerformTransfer(group, std::move(a), turn);
  }
  void operator()(StartVerify& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformVerify(group, a, turn);
  }
  void operator()(CompileProgram& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformCompile(*group, std::move(a));
  }
  void operator()(StartCompare&) {}  // the coordinator performs it
  void operator()(StartRefit&) {}    // the coordinator performs it
  void operator()(BuildProgram& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformBuild(*group, std::move(a));
  }
  void operator()(StartMoves& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformMoves(group, a, turn);
  }
  void operator()(StartExchange& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformExchange(group, a, turn);
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
    node->executor_.Forget(a.update);
    node->DropWirePool(group);
    node->GiveUpEpochs(*group, turn);
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
    node->PerformOpen(group, a, turn);
  }
  void operator()(ConnectEpoch& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformConnect(group, std::move(a), turn);
  }
  void operator()(CloseEpoch& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformClose(group, a);
  }
  void operator()(StartWire& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(node->mutex_) {
    node->PerformWire(group, a, turn);
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

// Slots that another daemon's member packed or will read lie in host memory here.
bool Node::UsesHostPool(const StartTransfer& start) const {
  const auto on_host = [this](MemberId id) {
    mutex_.AssertHeld();
    const MemberRecord* const member = leases_.Find(id);
    return member == nullptr || !member->ordinal.has_value();
  };
  if (start.wired || (start.source_slot.has_value() && on_host(start.trainer))) return true;
  const bool broadcasts = start.broadcast != BroadcastMethod::kDirect;
  if (start.fill_slot.has_value() && start.staged.empty() && !broadcasts) return true;
  const bool slot = start.source_slot.has_value() || start.fill_slot.has_value();
  return slot && std::any_of(start.staged.begin(), start.staged.end(), on_host);
}

// A joined daemon erases members at once, so a transfer that was put off may still name one.
StartTransfer Node::WithoutTheGone(StartTransfer start) const {
  const auto gone = [this](MemberId id) {
    mutex_.AssertHeld();
    return !leases_.Contains(id);
  };
  start.skip_destination.resize(start.destinations.size());
  for (size_t d = 0; d < start.destinations.size(); ++d) {
    if (gone(start.destinations[d])) start.skip_destination[d] = true;
  }
  std::erase_if(start.staged, gone);
  return start;
}

void Node::PerformTransfer(GroupRecord* group, StartTransfer start, Turn& turn) {
  // The root packs as soon as it has a bucket, perhaps before an epoch was opened.
  if (UsesHostPool(start) && LacksWirePool(*group)) {
    return MakeWirePool(*group,
                        [this, start](GroupRecord* found, const absl::Status& made, Turn& turn) {
                          mutex_.AssertHeld();
                          PerformTransfer(found, WithoutTheGone(start), made, turn);
                        });
  }
  PerformTransfer(group, std::move(start), absl::OkStatus(), turn);
}

void Node::PerformTransfer(GroupRecord* group, StartTransfer start, absl::Status status,
                           Turn& turn) {
  const std::string name = group->name();
  if (status.ok() && UsesHostPool(start)) status = EnsureWirePool(group);
  if (status.ok()) {
    const auto done = [this, name](const Executor::Done& d) {
      Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
      executor_.Finished(d);
      if (options_.observer != nullptr && d.status.ok()) {
        int64_t bytes = d.slot_bytes;
        for (const int64_t written : d.bytes_written) bytes += written;
        options_.observer->BytesMoved(name, MoveKind::kCopy, bytes);
      }
      turn.Handle(name, TransferDone{d.update, d.part, d.status, d.bytes_written,
                                     d.failed_destination, d.source_digests, d.broadcast});
    };
    const GroupMemory memory(leases_, *group);
    // A call of 0: another daemon sent the part, which is in the slot.
    if (start.bucket_call == CallId()) {
      status = executor_.Start(start, Executor::SlotBucket(start), memory, done);
    } else if (const CheckedBucket* bucket = calls_.BucketOf(start.bucket_call);
               bucket != nullptr) {
      status = executor_.Start(start, *bucket, memory, done);
    } else {
      status = absl::InternalError("the bucket is gone");
    }
  }
  if (!status.ok()) {
    turn.Post(name, TransferDone{start.update, start.part, status, {}, -1, {}});
  }
}

void Node::PerformVerify(GroupRecord* group, const StartVerify& verify, Turn& turn) {
  const std::string name = group->name();
  const auto done = [this, name](const VerifyDone& d) {
    Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
    turn.Handle(name, d);
  };
  if (!executor_.AnyWritten(verify.update)) {
    // A refit had nothing to move, so no thread is woken.
    turn.Post(name, VerifyDone{verify.update, absl::OkStatus(), {}});
    return;
  }
  const absl::Status status = executor_.Start(verify, GroupMemory(leases_, *group), done);
  if (!status.ok()) turn.Post(name, VerifyDone{verify.update, status, {}});
}

void Node::Count(const GroupRecord& group, const UpdateEnded& ended) {
  if (options_.observer == nullptr) return;
  const auto reason = [&]() -> std::string_view {
    mutex_.AssertHeld();
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
        return stops_ ? kReasonDrain : kReasonOperator;
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
