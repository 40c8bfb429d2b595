// The data phase: leased slots, buckets in order, their parts, acknowledgements.
#include <algorithm>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd {
absl::StatusOr<group::TrainerProgress*> Group::Impl::OpenFor(const Member& member, Version wanted,
                                                             UpdateId wanted_update) {
  if (group::IsAnother(wanted_update, update.get())) return history.Refuse(wanted_update, wanted);
  const bool open = update != nullptr && !CatchUpRuns();
  if (!open || update->version != wanted) {
    REFITD_RETURN_IF_ERROR(history.Refuse(wanted));
    if (!open) return Precondition("no update to version {} is open: begin it first", wanted);
    return Precondition("version: {}, but the update that runs is to version {}", wanted,
                        update->version);
  }
  if (update->state == UpdateState::kEnding) {
    Failure failure = update->give_up.failure;
    failure.version = wanted.value();
    return WithFailure(Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}",
                             wanted, update->give_up.reason),
                       failure);
  }
  const auto it = update->push.trainers().find(member.rank);
  if (member.state != MemberState::kReady || it == update->push.trainers().end()) {
    return Precondition("the Begin of version {} by {} was not answered yet", wanted, member.label);
  }
  return &it->second;
}

// ---- slots ----

void Group::Impl::On(const LeaseSlotEvent& e) {
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  if (e.wait < Duration(0)) {
    out.Refuse(e.call, InvalidField("wait", "wait: {} is negative", group::Seconds(e.wait)));
    return;
  }
  const absl::StatusOr<TrainerProgress*> progress = OpenFor(*member, e.version, e.update);
  if (!progress.ok()) {
    out.Refuse(e.call, progress.status());
    return;
  }
  if ((*progress)->committed) {
    out.Refuse(e.call,
               Precondition("{} has committed version {} already", member->label, e.version));
    return;
  }
  const auto early =
      std::count_if((*progress)->early.begin(), (*progress)->early.end(),
                    [](const auto& bucket) { return bucket.second->content->slot.has_value(); });
  slots.Wait(e, early, (*progress)->next_seq, update->deadline);
}

void Group::Impl::On(const ReleaseSlotEvent& e) {
  if (members.Trainer(e.member, e.call) != nullptr) slots.GiveBack(e);
}

// ---- buckets ----

void Group::Impl::On(const BucketEvent& e) {
  REFITD_CHECK(e.bucket != nullptr);
  const int64_t seq = e.bucket->seq;
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  const group::Asked what{CallKind::kBucket, e.version, seq};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  const absl::StatusOr<TrainerProgress*> progress = OpenFor(*member, e.version, e.update);
  absl::Status status = progress.status();
  if (status.ok()) status = update->push.CheckBucket(**progress, e);
  if (status.ok()) status = update->push.Reserve(e);
  if (!status.ok()) {
    // The rank's Commit would wait forever for the refused bucket, so it is refused as well.
    if (progress.ok() && seq >= (*progress)->next_seq &&
        seq < (*progress)->awaited_buckets.value_or(0) && !(*progress)->early.contains(seq)) {
      update->push.WithdrawCommit(
          *progress,
          WithFailureOf(status, Precondition("seq {} was refused: {}", seq, Message(status))));
    }
    out.Refuse(e.call, std::move(status));
    return;
  }
  update->push.Take(e, requests.Track(e.member, what, e.request_id, e.call), *progress);
  TakeCommitIfComplete(member, *progress);
}

void Group::Impl::On(const TransferDone& e) {
  if (update == nullptr || update->id != e.update) return;
  Part* const part = update->push.EndTransfer(e.part);
  if (part == nullptr) return;
  if (update->state == UpdateState::kEnding) {
    if (part->slot.has_value()) slots.Release(*part->slot);
    return;
  }
  if (!e.status.ok()) {
    return Abandon(group::FailedMove(update->participants, members, fmt::format("part {}", e.part),
                                     e.status, e.failed_destination));
  }
  update->push.TakeResult(e, part);
}

void Group::Impl::On(const AckEvent& e) {
  if (!slots.Acknowledge(e)) return;
  if (update != nullptr && update->id == e.update) update->push.Acknowledge(e);
}

}  // namespace refitd
