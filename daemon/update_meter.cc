#include "daemon/update_meter.h"

#include <algorithm>
#include <numeric>
#include <variant>

#include "daemon/group/update_state.h"

namespace refitd {
namespace {

std::string_view CauseOf(const absl::Status& status) {
  if (status.ok()) return kReasonNone;
  return absl::IsDataLoss(status) ? kReasonVerification : kReasonTransfer;
}

template <typename Action>
const Action* Find(const GroupActions& actions) {
  for (const GroupAction& action : actions) {
    if (const auto* found = std::get_if<Action>(&action)) return found;
  }
  return nullptr;
}

bool Refused(const GroupActions& actions, CallId call) {
  return std::any_of(actions.begin(), actions.end(), [call](const GroupAction& action) {
    const auto* reply = std::get_if<Reply>(&action);
    return reply != nullptr && reply->call == call && !reply->status.ok();
  });
}

bool BegunNow(const GroupActions& actions) {
  return std::any_of(actions.begin(), actions.end(), [](const GroupAction& action) {
    const auto* reply = std::get_if<Reply>(&action);
    return reply != nullptr && reply->status.ok() &&
           std::holds_alternative<BeginReply>(reply->payload);
  });
}

}  // namespace

// What the event would be the cause of, if the update was given up in it.
std::string_view UpdateMeter::CauseIn(const GroupEvent& event) const {
  if (std::holds_alternative<MemberLost>(event)) return kReasonMemberLost;
  if (std::holds_alternative<EngineFailed>(event)) return kReasonAborted;
  if (std::holds_alternative<AbortEvent>(event)) return kReasonAborted;
  if (std::holds_alternative<OperatorAbort>(event)) return stops_ ? kReasonDrain : kReasonOperator;
  if (std::holds_alternative<Tick>(event)) return kReasonDeadline;
  if (const auto* done = std::get_if<TransferDone>(&event)) return CauseOf(done->status);
  if (const auto* done = std::get_if<VerifyDone>(&event)) return CauseOf(done->status);
  return kReasonNone;
}

void UpdateMeter::Handled(const GroupEvent& event, const GroupActions& actions, const Group& group,
                          TimePoint now) {
  if (observer_ == nullptr) return;
  const bool ended = Find<UpdateEnded>(actions) != nullptr;
  if (!running_.has_value()) {
    if (!ended && !group.update_running()) return;
    running_.emplace().begun = now;
  }
  Look(event, actions, group, now);
  if (ended) End(group, now);
}

void UpdateMeter::Look(const GroupEvent& event, const GroupActions& actions, const Group& group,
                       TimePoint now) {
  if (!running_->ready.has_value() && BegunNow(actions)) running_->ready = now;
  if (const auto* commit = std::get_if<CommitEvent>(&event)) {
    if (!Refused(actions, commit->call)) running_->committed = now;
  }
  if (std::holds_alternative<VerifyDone>(event)) running_->verified = now;
  if (const auto* done = std::get_if<TransferDone>(&event)) Moved(*done, group);
  for (const GroupAction& action : actions) {
    const auto* start = std::get_if<StartTransfer>(&action);
    if (start == nullptr || !start->fill_slot.has_value()) continue;
    running_->slot_bytes[start->part] = start->content->bytes;
  }
  const std::string_view cause = CauseIn(event);
  if (cause.empty() || !running_->reason.empty()) return;
  const std::optional<UpdateView> update = group.View(now).update;
  if (!update.has_value()) return;
  const bool given_up =
      update->outcome == Outcome::kAborted || update->state == Name(UpdateState::kDraining);
  if (!given_up) return;
  running_->reason = cause;
  if (cause == kReasonVerification) observer_->IntegrityFailure(group.name());
}

void UpdateMeter::Moved(const TransferDone& done, const Group& group) {
  int64_t bytes = std::accumulate(done.bytes_written.begin(), done.bytes_written.end(), int64_t{0});
  const auto slot = running_->slot_bytes.find(done.part);
  if (slot != running_->slot_bytes.end()) {
    if (done.status.ok()) bytes += slot->second;
    running_->slot_bytes.erase(slot);
  }
  if (bytes > 0) observer_->BytesMoved(group.name(), MoveKind::kCopy, bytes);
}

void UpdateMeter::End(const Group& group, TimePoint now) {
  const Running ended = *running_;
  running_.reset();
  const std::optional<UpdateView> update = group.View(now).update;
  if (!update.has_value()) return;
  UpdateReport report;
  report.group = group.name();
  report.committed = update->outcome == Outcome::kCommitted;
  report.reason = report.committed       ? kReasonNone
                  : ended.reason.empty() ? kReasonOther
                                         : ended.reason;
  // A phase in which the update was lost took until the end.
  report.prepare = ended.ready.value_or(now) - ended.begun;
  if (ended.ready.has_value()) report.data = ended.committed.value_or(now) - *ended.ready;
  if (ended.committed.has_value()) report.verify = ended.verified.value_or(now) - *ended.committed;
  if (ended.verified.has_value()) report.decide = now - *ended.verified;
  report.total = now - ended.begun;
  report.bytes = update->bytes;
  observer_->UpdateEnded(report);
}

}  // namespace refitd
