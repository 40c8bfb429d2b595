// Where events meet the state machines and actions meet the world: replies, streams, copies,
// collectives.
#include <algorithm>
#include <utility>

#include "daemon/node/node.h"
#include "daemon/node/node_memory.h"
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

// Events of one group may bring events of others: they share the wire lock.
void Node::Handle(const std::string& name, MachineEvent event, Deferred* deferred) {
  Events events;
  events.emplace_back(name, std::move(event));
  while (!events.empty()) {
    const auto [group_name, next] = std::move(events.front());
    events.pop_front();
    GroupRecord* group = FindGroup(group_name);
    if (group == nullptr) continue;
    MachineActions actions;
    group->machine->Handle(next, Now(), &actions);
    for (MachineAction& action : actions) Perform(group, std::move(action), deferred, &events);
    if (group->follower != nullptr && group->follower->finished()) {
      DropFollower(group_name, deferred, &events);
    } else if (group->coordinator != nullptr) {
      NoteEmpty(group, deferred);
    }
  }
  WakeTimer();
  if (!AnyUpdateRuns()) idle_cond_.NotifyAll();
}

// Performs actions; runs under node->mutex_, as Perform does.
struct Node::Performer {
  Node* node;
  GroupRecord* group;
  Deferred* deferred;
  Events* more;

  MemberRecord* Find(MemberId id) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = node->members_.find(id);
    return it == node->members_.end() ? nullptr : &it->second;
  }
  void SendEngine(MemberId id, v1::EngineEvent event) {
    MemberRecord* member = Find(id);
    if (member == nullptr || member->engine_sink == nullptr) return;
    member->engine_sink->Queue(std::move(event));
    deferred->Flush(member->engine_sink);
  }
  void SendTrainer(MemberId id, v1::TrainerEvent event) {
    MemberRecord* member = Find(id);
    if (member == nullptr || member->trainer_sink == nullptr) return;
    member->trainer_sink->Queue(std::move(event));
    deferred->Flush(member->trainer_sink);
  }
  // Committed, Aborted and Draining mean the same to both roles.
  template <typename Fill>
  void SendEither(MemberId id, Fill fill) {
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

  void operator()(Reply& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = node->calls_.find(a.call);
    if (it == node->calls_.end()) return;
    node->buckets_.erase(a.call);
    if (const auto layout = node->layouts_.find(a.call); layout != node->layouts_.end()) {
      MemberRecord* member = Find(layout->second.member);
      if (a.status.ok() && member != nullptr) member->layout = std::move(layout->second.layout);
      node->layouts_.erase(layout);
    }
    deferred->Add([reply = std::move(it->second.reply), status = std::move(a.status),
                   payload = std::move(a.payload)] { reply(status, payload); });
    node->calls_.erase(it);
  }
  void operator()(SendPrepare& a) {
    v1::EngineEvent event;
    event.mutable_prepare()->set_version(a.version.value());
    event.mutable_prepare()->set_update_id(a.update.value());
    event.mutable_prepare()->set_remaining_ms(ToMillis(a.remaining));
    event.mutable_prepare()->set_tensor_count(a.tensor_count);
    SendEngine(a.member, std::move(event));
  }
  void operator()(SendPart& a) {
    SendEngine(a.member, PartEvent(a, group->machine->spec().slot_bytes));
  }
  void operator()(SendCommitted& a) {
    SendEither(a.member, [&](auto* event) {
      event->mutable_committed()->set_version(a.version.value());
      event->mutable_committed()->set_incarnation(group->machine->incarnation());
    });
  }
  void operator()(SendAborted& a) {
    SendEither(a.member, [&](auto* event) {
      event->mutable_aborted()->set_version(a.version.value());
      event->mutable_aborted()->set_reason(a.reason);
      event->mutable_aborted()->set_dirty(a.dirty);
    });
  }
  void operator()(SendDraining& a) {
    SendEither(a.member, [](auto* event) { event->mutable_draining(); });
  }
  void operator()(StartTransfer& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformTransfer(group, std::move(a), more);
  }
  void operator()(StartVerify& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformVerify(group, a, more);
  }
  void operator()(CompileProgram& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformCompile(*group, std::move(a));
  }
  void operator()(StartCompare&) {}  // the coordinator's
  void operator()(StartRefit&) {}    // the coordinator's
  void operator()(BuildProgram& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformBuild(*group, std::move(a));
  }
  void operator()(StartMoves& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformMoves(group, a, more);
  }
  void operator()(StartExchange& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformExchange(group, a, more);
  }
  void operator()(ReleaseMember& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->Erase(a.member, deferred, more);
  }
  void operator()(UpdateAssembled&) {}
  void operator()(NodeOutOfUpdate&) {}  // the coordinator's
  void operator()(UpdateAbandoned&) {}
  void operator()(CleanUpOverdue&) {}  // the coordinator's
  void operator()(UpdateEnded& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->executor_.Forget(a.update);
    node->DropWirePool(group);
    node->GiveUpEpochs(*group, more);
    // Unknown: this daemon's share of an update, which its coordinator counts.
    if (a.outcome == Outcome::kUnknown) return;
    group->broadcasts = false;
    node->Count(*group, a);
  }
  void operator()(RefuseMember& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    MemberRecord* member = Find(a.member);
    if (member == nullptr) return;
    member->End(a.status);
    node->Erase(a.member, deferred, more);
  }
  void operator()(WelcomeMember& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    MemberRecord* member = Find(a.member);
    if (member != nullptr) node->SendWelcome(group, member);
  }
  void operator()(StateChanged&) ABSL_NO_THREAD_SAFETY_ANALYSIS { node->TellWatchers(*group); }
  void operator()(LogLine& a) {
    const LogLevel level = a.level == LogLine::kInfo      ? LogLevel::kInfo
                           : a.level == LogLine::kWarning ? LogLevel::kWarning
                                                          : LogLevel::kError;
    if (!LogEnabled(level)) return;
    node->log_->Add(level, fmt::format("group {}: {}", group->machine->name(), a.text));
    deferred->Write(node->log_);
  }

  // ---- other daemons ----
  void operator()(SendCommand& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformSend(group, std::move(a), deferred, more);
  }
  void operator()(DropNode& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->EndSession(group, a.node, std::move(a.status));
  }
  void operator()(SendReport& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformSend(group, a, more);
  }
  void operator()(CloseLink&) {
    if (group->link == nullptr) return;
    group->link->Close();
    group->link.reset();
  }
  void operator()(MakeSlots& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformMakeSlots(*group, a);
  }
  void operator()(OpenEpoch& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformOpen(group, a, more);
  }
  void operator()(ConnectEpoch& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformConnect(group, std::move(a), more);
  }
  void operator()(CloseEpoch& a) ABSL_NO_THREAD_SAFETY_ANALYSIS { node->PerformClose(group, a); }
  void operator()(StartWire& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformWire(group, a, more);
  }
  void operator()(AcquireWire&) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    WireLock::Events events;
    node->wire_lock_.Acquire(group->machine->name(), &events);
    for (auto& [name, event] : events) more->emplace_back(name, std::move(event));
  }
  void operator()(ReleaseWire&) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    WireLock::Events events;
    node->wire_lock_.Release(group->machine->name(), &events);
    for (auto& [name, event] : events) more->emplace_back(name, std::move(event));
  }
};

void Node::Perform(GroupRecord* group, MachineAction action, Deferred* deferred, Events* more) {
  Performer performer{this, group, deferred, more};
  std::visit([&performer](auto& kind) { std::visit(performer, kind); }, action);
}

// What another daemon's member packed or will read lies in host memory here.
bool Node::UsesHostPool(const StartTransfer& start) const {
  const auto on_host = [this](MemberId id) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = members_.find(id);
    return it == members_.end() || !it->second.ordinal.has_value();
  };
  if (start.wired || (start.source_slot.has_value() && on_host(start.trainer))) return true;
  const bool broadcasts = start.broadcast != BroadcastMethod::kDirect;
  if (start.fill_slot.has_value() && start.staged.empty() && !broadcasts) return true;
  const bool slot = start.source_slot.has_value() || start.fill_slot.has_value();
  return slot && std::any_of(start.staged.begin(), start.staged.end(), on_host);
}

// A joined daemon erases members at once; a transfer that was put off may name some of them still.
StartTransfer Node::WithoutTheGone(StartTransfer start) const {
  const auto gone = [this](MemberId id)
                        ABSL_NO_THREAD_SAFETY_ANALYSIS { return !members_.contains(id); };
  start.skip_destination.resize(start.destinations.size());
  for (size_t d = 0; d < start.destinations.size(); ++d) {
    if (gone(start.destinations[d])) start.skip_destination[d] = true;
  }
  std::erase_if(start.staged, gone);
  return start;
}

void Node::PerformTransfer(GroupRecord* group, StartTransfer start, Events* more) {
  // The root packs as soon as it has a bucket, perhaps before an epoch was opened.
  if (UsesHostPool(start) && LacksWirePool(*group)) {
    return MakeWirePool(
        *group, [this, start](GroupRecord* found, const absl::Status& made, Events* events) {
          mutex_.AssertHeld();
          PerformTransfer(found, WithoutTheGone(start), made, events);
        });
  }
  PerformTransfer(group, std::move(start), absl::OkStatus(), more);
}

void Node::PerformTransfer(GroupRecord* group, StartTransfer start, absl::Status status,
                           Events* more) {
  const std::string name = group->machine->name();
  if (status.ok() && UsesHostPool(start)) status = EnsureWirePool(group);
  if (status.ok()) {
    const auto done = [this, name](const Executor::Done& d) {
      Deferred deferred;
      {
        const PushTurns::Ahead lock(&pushes_, &mutex_);
        executor_.Finished(d);
        if (options_.observer != nullptr && d.status.ok()) {
          int64_t bytes = d.slot_bytes;
          for (const int64_t written : d.bytes_written) bytes += written;
          options_.observer->BytesMoved(name, MoveKind::kCopy, bytes);
        }
        Handle(name,
               TransferDone{d.update, d.part, d.status, d.bytes_written, d.failed_destination,
                            d.source_digests, d.broadcast},
               &deferred);
      }
      deferred.Run();
    };
    const Memory memory(members_, *group);
    // A call of 0: the part came from another daemon into the slot.
    if (start.bucket_call == CallId()) {
      status = executor_.Start(start, Executor::SlotBucket(start), memory, done);
    } else if (const auto bucket = buckets_.find(start.bucket_call); bucket != buckets_.end()) {
      status = executor_.Start(start, bucket->second, memory, done);
    } else {
      status = absl::InternalError("the bucket is gone");
    }
  }
  if (!status.ok()) {
    more->emplace_back(name, TransferDone{start.update, start.part, status, {}, -1, {}});
  }
}

void Node::PerformVerify(GroupRecord* group, const StartVerify& verify, Events* more) {
  const std::string name = group->machine->name();
  const auto done = [this, name](const VerifyDone& d) {
    Deferred deferred;
    {
      const PushTurns::Ahead lock(&pushes_, &mutex_);
      Handle(name, d, &deferred);
    }
    deferred.Run();
  };
  if (!executor_.AnyWritten(verify.update)) {
    // A refit with nothing to move: no thread is woken for it.
    more->emplace_back(name, VerifyDone{verify.update, absl::OkStatus(), {}});
    return;
  }
  const absl::Status status = executor_.Start(verify, Memory(members_, *group), done);
  if (!status.ok()) more->emplace_back(name, VerifyDone{verify.update, status, {}});
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
  report.group = group.machine->name();
  report.committed = ended.outcome == Outcome::kCommitted;
  report.reason = reason();
  report.prepare = ended.prepare;
  report.data = ended.data;
  report.verify = ended.verify;
  report.total = ended.total;
  report.bytes = ended.bytes;
  for (const BroadcastTotals& totals : ended.pushed) {
    // kAuto is before the first: what is used is known.
    const size_t at = static_cast<size_t>(totals.method) - 1;
    if (at < report.pushed_bytes.size()) report.pushed_bytes[at] = totals.bytes;
  }
  options_.observer->UpdateEnded(report);
  if (ended.give_up_class == GiveUpClass::kVerification) {
    options_.observer->IntegrityFailure(report.group);
  }
}

}  // namespace refitd
