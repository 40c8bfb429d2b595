// Begin, Prepare and Ready: from the first call of a version to the first bucket.
#include <algorithm>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"
#include "transport/broadcast_method.h"

namespace refitd {
namespace {

BeginReply ReplyOf(const group::Update& update, const group::Slots& slots, TimePoint now) {
  BeginReply reply;
  reply.update = update.id;
  reply.remaining = update.deadline - now;
  reply.instances = static_cast<int>(update.participants.left());
  reply.leasable_slots = slots.leasable();
  return reply;
}

// Whether the rank may begin the running update as well.
absl::Status CheckJoins(const group::Update& u, const group::Member& member, const BeginEvent& e) {
  if (u.content.has_value()) {
    return Precondition(
        "a rollback to the content of version {} runs, as version {}: begin a greater version",
        *u.content, u.version);
  }
  if (u.state == UpdateState::kEnding) {
    if (u.version != e.version) {
      return Precondition("an update to version {} is being given up", u.version);
    }
    return Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}", u.version,
                 u.end.why().reason);
  }
  if (u.version != e.version) return Precondition("an update to version {} runs", u.version);
  // A rank that names no verification takes the update's.
  if (e.verification.has_value() && *e.verification != u.verification) {
    return Precondition("verification: {} differs from the first rank's {}",
                        static_cast<int>(*e.verification), static_cast<int>(u.verification));
  }
  if (e.evict_late != u.evict_late) {
    return Precondition("evict_late: {} differs from the first rank's {}", e.evict_late,
                        u.evict_late);
  }
  if (u.state != UpdateState::kOpening && !u.push.HasBegun(member)) {
    return Precondition("the update to version {} runs without trainer rank {}", u.version,
                        member.rank);
  }
  return absl::OkStatus();
}

// Why an instance leaves the update whose rank `late` has not answered Prepare, or SendFlip.
group::GiveUp WhyUnready(const group::Update& u, uint32_t participant, const std::string& late,
                         const GroupLimits& limits) {
  group::GiveUp why;
  if (u.state == UpdateState::kFlipping) {
    why.reason = fmt::format("{} did not flip within {} (limits.ready_ms)", late,
                             group::Seconds(limits.ready_limit));
    why.commit_code = absl::StatusCode::kDeadlineExceeded;
  } else {
    const Duration whole = u.deadline - u.started;
    why.reason =
        fmt::format("{} did not answer Ready within {} ({})", late,
                    group::Seconds(std::min(limits.ready_limit, whole)),
                    limits.ready_limit <= whole ? "limits.ready_ms" : "the update's duration");
    why.begin_code = absl::StatusCode::kDeadlineExceeded;
  }
  why.kind = GiveUpClass::kDeadline;
  u.participants.SuspectUnready(participant, &why.failure);
  return why;
}

}  // namespace

absl::Status Group::Impl::CheckBegin(const Member& member, const BeginEvent& e) const {
  if (e.version.value() < 0) {
    return InvalidField("version", "version: {} is negative", e.version);
  }
  if (e.duration < Duration(0) || e.duration > limits.max_duration) {
    return InvalidField("duration", "duration: {} is not in 0..{}", group::Seconds(e.duration),
                        group::Seconds(limits.max_duration));
  }
  // A catch-up gives way, so the call is checked as if none ran.
  const Update* const opened = updates.Opened();
  REFITD_RETURN_IF_ERROR(
      group::CheckTensors(e.tensor_count, opened == nullptr ? 0 : opened->push.TensorCount()));
  REFITD_RETURN_IF_ERROR(
      group::CheckCount("total_bytes", e.total_bytes, opened == nullptr ? 0 : opened->total_bytes));
  if (opened == nullptr) {
    if (updates.state() == GroupState::kDrained || (updates.CatchUpRuns() && updates.drains())) {
      return absl::UnavailableError("the daemon drains: no new update is opened");
    }
    return versions.CheckGreater(e.version);
  }
  return CheckJoins(*opened, member, e);
}

void Group::Impl::On(const BeginEvent& e) {
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  const group::Asked what{CallKind::kBegin, e.version};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  absl::Status status = CheckBegin(*member, e);
  // Refit names no method: only ranks that call Begin decide it.
  Update* opened = updates.Opened();
  if (status.ok() && opened != nullptr) status = opened->push.CheckBroadcast(e.broadcast);
  if (status.ok() && NeedsSlots(e.broadcast) && !e.slots_on_devices) {
    status = Precondition(
        "broadcast: {} goes through slots on the GPUs of one daemon, and there are none",
        BroadcastMethodName(e.broadcast));
  }
  if (!status.ok()) {
    out.Refuse(e.call, std::move(status));
    return;
  }
  if (opened == nullptr) {
    if (updates.CatchUpRuns()) return Defer(e, fmt::format("the update to version {}", e.version));
    updates.Open(e);
    opened = update.get();
  }
  if (opened->state == UpdateState::kOpening) {
    opened->push.TakeBroadcast(e.broadcast, e.slots_on_devices, member->label);
    opened->tensor_count = std::max(opened->tensor_count, e.tensor_count);
    opened->total_bytes = std::max(opened->total_bytes, e.total_bytes);
    opened->hold = opened->hold || e.hold;
    if (!e.note.empty() && opened->note.empty()) {
      opened->note = e.note;
      out.Log(LogLine::kInfo, fmt::format("update to version {}: {}", opened->version, e.note));
    }
  }
  const std::shared_ptr<Request> request = requests.Track(e.member, what, e.request_id, e.call);
  TrainerProgress& progress = opened->push.Join(member);
  if (opened->state == UpdateState::kOpening) progress.without_layout = e.without_layout;
  if (member->state == MemberState::kReady) {
    // The rank missed the answer to its first call.
    requests.Finish(request, absl::OkStatus(), ReplyOf(*opened, slots, out.now()));
  } else {
    progress.begins.push_back(request);
  }
  out.Changed();
}

// Engines stop serving at Prepare, so Prepare waits until all trainer ranks have begun.
void Group::Impl::AssembleIfAllHere() {
  if (update->state != UpdateState::kOpening) return;
  if (updates.CatchUpRuns()) {
    group::UpdateCatchUp& part = *update->catch_up;
    const std::vector<std::string> late_instances = catch_up.Assemble(&part);
    if (late_instances.empty()) return updates.GiveWay("no instance lacks the version any more");
    if (part.source_instances.empty()) return updates.GiveWay("no instance is left that gives");
    Assemble();
    if (update->state != UpdateState::kPreparing) return;
    return out.Log(
        LogLine::kInfo,
        fmt::format("catch-up to version {}: instance {} from instance {}", update->version,
                    group::Few(late_instances), group::Few(part.source_instances)));
  }
  if (updates.RollbackRuns()) return Assemble();
  if (!members.last_refusal().ok()) FailIfRefused(absl::OkStatus());
  if (update->state != UpdateState::kOpening) return;
  if (static_cast<int>(update->push.trainers().size()) != members.spec().trainer_ranks) return;
  if (members.AvailableInstances() < std::max(members.spec().min_instances, 1)) return;
  if (rollback.Holds()) return;
  members.ForgetRefusal();
  Assemble();
}

// ---- rollbacks ----

absl::Status Group::Impl::CheckRollback(const RollbackEvent& e) const {
  if (updates.drains()) {
    return absl::UnavailableError("the daemon drains: no rollback begins");
  }
  if (e.version.has_value() && e.version != versions.last()) {
    return Precondition("version: {}, and the group's is {}", *e.version,
                        versions.last().has_value() ? fmt::format("{}", *versions.last()) : "none");
  }
  // A catch-up gives way, and so does an update that has asked no engine for anything yet.
  if (update != nullptr && !updates.CatchUpRuns() && update->state != UpdateState::kOpening) {
    return Precondition("an update to version {} runs ({})", update->version, Name(update->state));
  }
  return rollback.Check();
}

void Group::Impl::On(const RollbackEvent& e) {
  const bool of_operator = e.member == MemberId();
  if (!of_operator && members.Trainer(e.member, e.call) == nullptr) return;
  const group::Asked what{CallKind::kRollback, e.version.value_or(Version())};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  const bool joins = updates.RollbackRuns() && update->state != UpdateState::kEnding &&
                     (!e.version.has_value() || e.version == versions.last());
  if (joins) {
    requests.Track(e.member, what, e.request_id, e.call);
    return;
  }
  if (e.version.has_value() && e.version == versions.rolled_back()) {
    CommitReply done{*versions.last(), {}, 0, {}, {}, {}};
    done.content = versions.content();
    return out.Do(Reply{e.call, absl::OkStatus(), std::move(done)});
  }
  if (absl::Status status = CheckRollback(e); !status.ok()) {
    return out.Refuse(e.call, std::move(status));
  }
  if (updates.CatchUpRuns()) return Defer(e, "a rollback");
  if (update != nullptr) {
    Failure failure;
    if (of_operator) {
      failure.Add({SuspectRole::kOperator, "", "", std::nullopt, 0});
    } else {
      failure = members.Suspecting(e.member);
    }
    updates.Abandon({fmt::format("version {} is rolled back", *versions.last()),
                     GiveUpClass::kOperator, std::move(failure)});
    PumpUpdate();
    REFITD_CHECK(update == nullptr);  // nothing of it ran
  }
  requests.Track(e.member, what, e.request_id, e.call);
  updates.OpenRollback(e);
}

void Group::Impl::On(const ReleasePreviousEvent& e) {
  if (e.member != MemberId() && members.Trainer(e.member, e.call) == nullptr) return;
  rollback.Release();
  out.Do(Reply{e.call, absl::OkStatus(), EmptyReply{}});
  out.Changed();
}

void Group::Impl::Assemble() {
  std::vector<MemberId> others;
  for (const auto& [rank, progress] : update->push.trainers()) others.push_back(progress.member);
  if (updates.CatchUpRuns()) others = update->catch_up->sources;
  // The catalog of the trainers' updates is kept: the next of those updates will need it again, and
  // a rollback of the same instances.
  std::shared_ptr<const Catalog> own;
  if (updates.RollbackRuns()) own = catalog;
  absl::Status status = update->participants.Assemble(
      [this](const Instance& instance) {
        return updates.CatchUpRuns()    ? catch_up.CatchesUp(instance)
               : updates.RollbackRuns() ? rollback.HoldsPrevious(instance)
                                        : members.Available(instance);
      },
      others, updates.CatchUpRuns() || updates.RollbackRuns() ? &own : &catalog);
  if (status.ok()) {
    update->push.Assemble();
    status = update->push.DecideBroadcast();
  }
  absl::StatusOr<bool> ready = false;
  if (status.ok()) {
    ready = group::FindProgram(members, &compiler, update.get());
  } else {
    ready = status;
  }
  if (!ready.ok() || !*ready) {
    // The update waits for its program. Participants are found anew when the program is there.
    update->participants.Clear();
    update->push.Clear();
    update->program.Clear();
    if (ready.ok()) return;
    GiveUp why{Message(ready.status()), GiveUpClass::kOther, FailureOf(ready.status())};
    why.begin_code = ready.status().code();
    return updates.Abandon(std::move(why));
  }
  if (update->program.exists()) {
    // The plan knows these numbers better than any rank.
    const RefitContent& content = update->program.content();
    if (update->program.brings_all()) {
      if (update->tensor_count == 0) update->tensor_count = content.tensors;
      if (update->total_bytes == 0) update->total_bytes = content.bytes;
    }
    update->push.AddAccepted(content.bytes);
  }
  Step(&update->state, UpdateTrigger::kAssembled);
  update->ready_deadline = std::min(out.now() + limits.ready_limit, update->deadline);
  group::UpdateParticipants& in = update->participants;
  update->nodes.insert(in.nodes().begin(), in.nodes().end());
  // Nothing is written in a rollback: it has no destinations.
  for (const MemberId rank : in.catalog().destinations()) {
    if (!updates.RollbackRuns()) update->destinations.Add(members.Find(rank)->node, rank);
  }
  if (in.on_this_daemon() && !updates.RollbackRuns()) update->index = in.catalog().index();
  out.Do(UpdateAssembled{update});
  in.Prepare();
}

void Group::Impl::On(const ReadyEvent& e) {
  Member* member = members.Find(e.member);
  if (member == nullptr || !member->engine || update == nullptr || update->id != e.update) {
    return;
  }
  if (!update->participants.Of(e.member).has_value()) return;
  if (!Next(member->state, MemberTrigger::kReady).has_value()) return;
  // A rank that is ready for this update reads no slot of earlier updates.
  slots.EndReads(e.member);
  update->participants.MarkReady(member, e.stopped, update->awaits_ranks());
}

void Group::Impl::On(const ProcessedEvent& e) {
  if (update == nullptr || update->id != e.update || update->state != UpdateState::kStaged) return;
  if (update->participants.Of(e.member).has_value()) update->participants.MarkProcessed(e.member);
}

void Group::Impl::FailUnready() {
  const bool flips = update->state == UpdateState::kFlipping;
  for (uint32_t i = 0; i < update->participants.all().size(); ++i) {
    const std::optional<MemberId> late = update->participants.FirstUnready(i);
    if (!late.has_value()) continue;
    if (update->state == UpdateState::kEnding) return;
    const GiveUp why = WhyUnready(*update, i, members.Label(*late), limits);
    // A rank that is silent when it has to flip costs its own instance alone: the others have the
    // version.
    if (flips) {
      Evict(i, why);
    } else {
      FailEngine(i, why);
    }
  }
}

void Group::Impl::On(const UpdateAnnounced& e) {
  if (update == nullptr || update->id != e.update) return;
  if (update->state == UpdateState::kPreparing) update->participants.MarkStageable();
}

void Group::Impl::On(const DataPlaneState& e) {
  if (update != nullptr && update->id == e.update) update->data_plane_up = e.up;
}

void Group::Impl::OpenDataIfReady() {
  if (update->state != UpdateState::kPreparing) return;
  if (!update->participants.all_ready()) return;
  if (!update->data_plane_up) {
    // Every rank is ready, so no rank can be late. The coordinator limits the time in which the
    // data plane must come up.
    update->ready_deadline = update->deadline;
    return;
  }
  Step(&update->state, UpdateTrigger::kAllReady);
  update->data_began = out.now();
  for (auto& [rank, progress] : update->push.trainers()) {
    Step(&members.Find(progress.member)->state, MemberTrigger::kReady);
    for (const auto& request : std::exchange(progress.begins, {})) {
      requests.Finish(request, absl::OkStatus(), ReplyOf(*update, slots, out.now()));
    }
  }
  if (updates.CatchUpRuns() || updates.RollbackRuns()) {
    // Nothing is pushed, and no trainer has to commit.
    Step(&update->state, UpdateTrigger::kAllCommitted);
    update->data_ended = out.now();
  }
  out.Changed();
  // Takes the commits of ranks that began the update with Refit: no other call of theirs follows.
  for (auto& [rank, progress] : update->push.trainers()) {
    if (update->state != UpdateState::kData || !progress.awaited_buckets.has_value()) continue;
    TakeCommitIfComplete(members.Find(progress.member), &progress);
  }
}

}  // namespace refitd
