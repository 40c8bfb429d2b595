// How an update ends: commit, verification, eviction, giving up.
#include <algorithm>

#include "daemon/group/group_impl.h"
#include "transport/base/failure.h"

namespace refitd {
namespace {

// What an update that failed left of the weights, in words for people.
std::string Describe(const Failure& failure) {
  if (failure.dirty_count == 0) return "weights are whole";
  std::vector<std::string> names = failure.dirty_instances;
  names.resize(static_cast<size_t>(failure.dirty_count));
  return "weights are dirty: instance " + group::Few(names);
}

// The failure, with `first` before its own suspects: to name a rank says more than to name the
// daemon that reported it.
Failure WithSuspectsBefore(std::vector<Suspect> first, Failure failure) {
  const int64_t unnamed = failure.suspect_count - static_cast<int64_t>(failure.suspects.size());
  const std::vector<Suspect> own = std::exchange(failure.suspects, {});
  failure.suspect_count = 0;
  for (Suspect& suspect : first) failure.Add(std::move(suspect));
  for (const Suspect& suspect : own) failure.Add(suspect);
  failure.suspect_count += unnamed;
  return failure;
}

void LogCatchUpEnd(const group::Update& update, Outcome outcome, const std::string& reason,
                   group::Outbox* out) {
  if (outcome == Outcome::kCommitted) {
    std::vector<std::string> caught_up;
    for (const group::Participant& p : update.participants.all()) {
      if (!p.evicted) caught_up.push_back(p.instance);
    }
    return out->Log(
        LogLine::kInfo,
        fmt::format("catch-up committed: version {}, instance {}, {} bytes in {}", update.version,
                    group::Few(caught_up), update.participants.WrittenBytes(),
                    group::Seconds(out->now() - update.started)));
  }
  out->Log(update.catch_up->gave_way ? LogLine::kInfo : LogLine::kWarning,
           fmt::format("catch-up to version {} {}: {}", update.version,
                       update.catch_up->gave_way ? "given up" : "failed", reason));
}

void LogRollbackEnd(const group::Update& update, Outcome outcome, const std::string& reason,
                    group::Outbox* out) {
  if (outcome != Outcome::kCommitted) {
    return out->Log(
        LogLine::kWarning,
        fmt::format("rollback to the content of version {} aborted: {}", *update.content, reason));
  }
  out->Log(
      LogLine::kInfo,
      fmt::format("rollback to the content of version {} committed: version {}, in {}",
                  *update.content, update.version, group::Seconds(out->now() - update.started)));
}

void LogEnd(const group::Update& update, Outcome outcome, const std::string& reason,
            group::Outbox* out) {
  if (update.catch_up.has_value()) return LogCatchUpEnd(update, outcome, reason, out);
  if (update.content.has_value()) return LogRollbackEnd(update, outcome, reason, out);
  if (outcome != Outcome::kCommitted) {
    return out->Log(LogLine::kWarning,
                    fmt::format("update to version {} aborted: {}", update.version, reason));
  }
  out->Log(LogLine::kInfo,
           fmt::format("update committed: version {}, {} bytes in {}", update.version,
                       update.push.accepted_bytes(), group::Seconds(out->now() - update.started)));
  const LeftOut left_out = update.coverage.FindLeftOut();
  if (left_out.tensors == 0) return;
  std::vector<std::string> named = left_out.names;
  named.resize(static_cast<size_t>(left_out.tensors));  // Few prints the first ones, and counts
  out->Log(LogLine::kInfo,
           fmt::format("version {} leaves out {} tensors, {} bytes: {}", update.version,
                       left_out.tensors, left_out.bytes, group::Few(named)));
}

// Describes an update that ended at `now`.
UpdateEnded Ended(const group::Update& u, Outcome outcome, const std::string& reason,
                  const Failure& failure, const std::vector<InstanceOutcome>& instances,
                  TimePoint now) {
  UpdateEnded ended;
  ended.update = u.id;
  ended.version = u.version;
  ended.outcome = outcome;
  ended.reason = reason;
  ended.failure = failure;
  ended.catch_up = u.catch_up.has_value();
  ended.gave_way = ended.catch_up && u.catch_up->gave_way;
  ended.rollback = u.content.has_value();
  ended.instances = instances;
  ended.bytes = ended.catch_up ? u.participants.WrittenBytes() : u.push.accepted_bytes();
  ended.total = now - u.started;
  ended.give_up_class = outcome == Outcome::kCommitted ? GiveUpClass::kNone : u.end.why().kind;
  // A phase that was not reached took no time; a phase that did not end took until now.
  const TimePoint none;
  const auto until = [now, none](TimePoint end) { return end == none ? now : end; };
  ended.prepare = until(u.data_began) - u.started;
  if (u.data_began != none) ended.data = until(u.data_ended) - u.data_began;
  if (u.data_ended != none) ended.verify = until(u.staged_at) - u.data_ended;
  if (u.staged_at != none) ended.process = until(u.flips_began) - u.staged_at;
  if (u.flips_began != none) ended.flip = now - u.flips_began;
  return ended;
}

// The answer to the calls that wait for the commit.
CommitReply DoneOf(const group::Update& u, const std::vector<InstanceOutcome>& outcomes,
                   const group::BucketLog& buckets, TimePoint now) {
  CommitReply done{u.version,       outcomes,         u.push.accepted_bytes(),
                   now - u.started, buckets.Totals(), {}};
  done.left_out = u.coverage.FindLeftOut();
  done.content = u.content;
  return done;
}

// Why an update is given up when what was read back is wrong.
group::GiveUp FailedVerification(const group::UpdateParticipants& participants,
                                 const group::Membership& members, const VerifyDone& e) {
  const group::Catalog& known = participants.catalog();
  std::vector<std::string> labels;
  std::vector<Suspect> ranks;
  for (const uint32_t d : e.failed_destinations) {
    if (d >= known.destinations().size()) continue;
    labels.push_back(known.label(d));
    const group::Member* member = members.Find(known.destinations()[d]);
    if (member != nullptr) ranks.push_back(group::SuspectOf(*member));
  }
  return {fmt::format("verification{}{}: {}", labels.empty() ? "" : " of ", group::Few(labels),
                      Message(e.status)),
          GiveUpClass::kVerification, WithSuspectsBefore(std::move(ranks), FailureOf(e.status))};
}

}  // namespace

// Why an update is given up when a part or the program failed to move its bytes.
group::GiveUp group::FailedMove(const UpdateParticipants& participants, const Membership& members,
                                std::string_view what, const absl::Status& status,
                                int failed_destination) {
  const Catalog& known = participants.catalog();
  const auto d = static_cast<size_t>(std::max(failed_destination, 0));
  const bool to_known = failed_destination >= 0 && d < known.destinations().size();
  const bool lost = status.code() == absl::StatusCode::kDataLoss;
  std::vector<Suspect> ranks;
  const Member* member = to_known ? members.Find(known.destinations()[d]) : nullptr;
  if (member != nullptr) ranks.push_back(group::SuspectOf(*member));
  return {fmt::format("{} of {}{}{}: {}", lost ? "verification" : "transfer", what,
                      to_known ? " to " : "", to_known ? known.label(static_cast<uint32_t>(d)) : "",
                      Message(status)),
          lost ? GiveUpClass::kVerification : GiveUpClass::kTransfer,
          WithSuspectsBefore(std::move(ranks), FailureOf(status))};
}

// ---- commit ----

void Group::Impl::On(const CommitEvent& e) {
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  const group::Asked what{CallKind::kCommit, e.version, e.bucket_count};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  const absl::StatusOr<TrainerProgress*> found = updates.Find(*member, e.version, e.update);
  absl::Status status = found.status();
  if (status.ok() && group::HasShardsIn(*member, **found)) {
    // Commit can't name the binding generation that the rank means.
    status = Precondition(
        "{} has registered a layout: it ends an update with Refit, unless its Begin says "
        "without_layout",
        member->label);
  }
  if (status.ok()) status = update->push.CheckCommit(**found, e);
  if (!status.ok()) {
    out.Refuse(e.call, std::move(status));
    return;
  }
  TrainerProgress& progress = **found;
  progress.commits.push_back(requests.Track(e.member, what, e.request_id, e.call));
  if (progress.committed) return;
  progress.tensor_count = std::max(progress.tensor_count, e.tensor_count);
  if (progress.next_seq < e.bucket_count) {
    progress.awaited_buckets = e.bucket_count;
  } else {
    TakeCommit(member, &progress, e.bucket_count);
  }
}

// Called when a bucket was taken, and when the data phase begins: a Commit that has waited for this
// takes effect, or is refused if tensors are missing.
void Group::Impl::TakeCommitIfComplete(Member* member, TrainerProgress* progress) {
  if (progress->awaited_buckets != progress->next_seq) return;
  if (const absl::Status covered = update->push.CheckIfLast(*progress, update->push.TensorCount());
      !covered.ok()) {
    if (progress->one_call) {
      GiveUp why{Message(covered), GiveUpClass::kOther, FailureOf(covered)};
      why.commit_code = covered.code();
      return updates.Abandon(std::move(why));
    }
    update->push.WithdrawCommit(progress, covered);
    return;
  }
  TakeCommit(member, progress, *progress->awaited_buckets);
}

void Group::Impl::TakeCommit(Member* member, TrainerProgress* progress, int64_t bucket_count) {
  progress->committed = true;
  progress->bucket_count = bucket_count;
  if (slots.anyone_waits()) {
    slots.RefuseWaiting(
        member->id, Precondition("{} has committed version {}", member->label, update->version));
  }
  if (update->push.all_committed()) {
    Step(&update->state, UpdateTrigger::kAllCommitted);
    update->data_ended = out.now();
  }
  out.Changed();
}

void Group::Impl::SettleIfDone() {
  if (update->state != UpdateState::kSettling) return;
  if (update->program.exists() && !update->program.done()) return;
  if (!update->push.settled()) return;
  if (updates.RollbackRuns()) return Decide();
  if (const absl::Status written = update->participants.WrittenInFull(); !written.ok()) {
    updates.Abandon({Message(written), GiveUpClass::kVerification, FailureOf(written)});
    return;
  }
  if (const absl::Status tied = update->coverage.CheckTies(); !tied.ok()) {
    GiveUp why{Message(tied), GiveUpClass::kVerification};
    why.commit_code = tied.code();
    return updates.Abandon(std::move(why));
  }
  if (!update->readback.running()) return Decide();
  Step(&update->state, UpdateTrigger::kVerify);
  out.Changed();
}

void Group::Impl::Decide() {
  if (!update->participants.HasToFlip()) return Conclude(Outcome::kCommitted, "");
  update->staged_at = out.now();
  // Half of what remains is left for the flips.
  const Duration half = (update->deadline - out.now()) / 2;
  update->ready_deadline = out.now() + std::min(limits.processing_limit, half);
  // Begins wait behind a catch-up, which asks nobody.
  if (updates.CatchUpRuns() || !update->participants.TellStaged()) return Flip();
  Step(&update->state, UpdateTrigger::kStage);
  out.Changed();
}

void Group::Impl::Flip() {
  Step(&update->state, UpdateTrigger::kFlip);
  update->flips_began = out.now();
  update->ready_deadline = std::min(out.now() + limits.ready_limit, update->deadline);
  update->participants.Flip();
}

void Group::Impl::On(const VerifyDone& e) {
  if (update == nullptr || update->id != e.update || !update->readback.End()) return;
  if (update->state == UpdateState::kEnding) return;
  if (update->readback.Passes(e)) {
    if (update->state == UpdateState::kVerifying) Decide();
    return;
  }
  updates.Abandon(FailedVerification(update->participants, members, e));
}

// ---- eviction ----

void Group::Impl::On(const EngineFailed& e) {
  Member* member = members.Find(e.member);
  if (member == nullptr || member->state == MemberState::kLeaving) return;
  if (!e.refused.ok()) return RefuseDeclared(member, e.refused);
  if (update == nullptr || update->id != e.update) {
    // The rank failed when it was sent the commit: it does not have the version (P2).
    Instance* instance = members.FindInstance(member->instance);
    if (instance == nullptr || instance->installed != e.update) return;
    members.MarkDirty(instance, fmt::format("{} failed after its update had committed: {}",
                                            member->label, e.reason));
    return catch_up.Look();
  }
  const std::optional<uint32_t> index = update->participants.Of(e.member);
  if (!index.has_value()) return;
  if (update->state == UpdateState::kEnding) return;
  // A rank that can't flip may have backs of any content.
  if (update->staged()) members.FindInstance(member->instance)->back.reset();
  FailEngine(*index, {fmt::format("{} failed: {}", member->label, e.reason), GiveUpClass::kAborted,
                      members.Suspecting(e.member)});
}

void Group::Impl::FailEngine(uint32_t participant, const GiveUp& why) {
  if (update->evict_late) {
    Evict(participant, why);
  } else {
    updates.Abandon(why);
  }
}

void Group::Impl::Evict(uint32_t index, const GiveUp& why) {
  update->participants.Evict(index, why.reason, why.failure);
  const Participant& participant = update->participants.all()[index];
  for (const MemberId id : participant.members) {
    update->push.ForgetReader(id);
    // The rank may still load from a slot, but its weights are dirty already, and others must not
    // wait for the slot.
    slots.EndReads(id);
  }
  const bool here = members.FindInstance(participant.instance) != nullptr;
  if (here && updates.CatchUpRuns() && why.kind != GiveUpClass::kMemberLost) {
    catch_up.NoteFailure(participant.instance, why.reason);
  }
  out.Do(
      LogLine{LogLine::kWarning,
              fmt::format("instance {} is evicted from the {} version {}: {}", participant.instance,
                          updates.CatchUpRuns() ? "catch-up with" : "update to", update->version,
                          why.reason),
              participant.instance, update->version, why.kind});
  out.Changed();
  if (update->state != UpdateState::kEnding) {
    for (const NodeId node : update->participants.NodesLeftBy(index)) {
      if (!update->push.AreOn(node)) out.Do(NodeOutOfUpdate{update->id, node});
    }
  }
  if (update->participants.left() > 0) return;
  GiveUp none_left = why;
  none_left.reason = "no instance is left: " + why.reason;
  updates.Abandon(none_left);
}

// One daemon that the others can't reach must not keep every instance from every version. The
// coordinator sends this only before the data phase, or about nodes that the update has left out
// already.
void Group::Impl::On(const KeepNodesOut& e) {
  if (update == nullptr || update->id != e.update) return;
  if (update->state == UpdateState::kEnding) return;
  // By participant: why it is evicted; null: it stays.
  std::vector<const std::string*> why(update->participants.all().size());
  bool any_left = false;
  for (size_t i = 0; i < why.size(); ++i) {
    const Participant& p = update->participants.all()[i];
    for (const MemberId id : p.members) {
      const Member* member = members.Find(id);
      const auto kept = member == nullptr ? e.nodes.end() : e.nodes.find(member->node);
      if (kept != e.nodes.end()) why[i] = &kept->second;
    }
    any_left |= why[i] == nullptr && !p.evicted;
  }
  if (!any_left) return updates.Abandon({e.reason, e.kind, e.failure});
  for (const auto& [node, reason] : e.nodes) {
    if (e.for_now) break;
    members.KeepOut(node, reason);
  }
  for (uint32_t i = 0; i < why.size(); ++i) {
    if (why[i] != nullptr && !update->participants.all()[i].evicted)
      Evict(i, {*why[i], e.kind, e.failure});
  }
  out.Changed();
}

// ---- giving up ----

void Group::Impl::On(const AbortEvent& e) {
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  const group::Asked what{CallKind::kAbort, e.version};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  if (const std::set<Version> waiting = catch_up.DeferredOf(e.member);
      waiting.contains(e.version)) {
    catch_up.Refuse(e.version,
                    WithFailure(Error(absl::StatusCode::kAborted,
                                      "the update to version {} is lost: {} gave the update up: {}",
                                      e.version, member->label, e.reason),
                                group::Unwritten(e.version, *member)));
    requests.Finish(requests.Track(e.member, what, e.request_id, e.call), absl::OkStatus(),
                    EmptyReply{});
    return;
  }
  Update* const opened = updates.Opened();
  if (opened == nullptr || opened->version != e.version || updates.IsAnother(e.update) ||
      !opened->push.HasBegun(*member)) {
    out.Refuse(e.call,
               Precondition("no update to version {} is open for {}", e.version, member->label));
    return;
  }
  requests.Track(e.member, what, e.request_id, e.call);
  updates.Abandon(opened, {fmt::format("{} gave the update up: {}", member->label, e.reason),
                           GiveUpClass::kAborted, members.Suspecting(member->id)});
}

void Group::Impl::On(const OperatorAbort& e) {
  Update* const aborted = updates.waiting() != nullptr ? updates.waiting().get() : update.get();
  if (aborted == nullptr) {
    out.Refuse(e.call, Precondition("group {}: no update runs", name));
    return;
  }
  aborted->end.AddOperator(e.call);
  Failure failure;
  failure.Add({SuspectRole::kOperator, "", "", std::nullopt, 0});
  updates.Abandon(aborted, {fmt::format("an operator gave the update up: {}", e.reason),
                            GiveUpClass::kOperator, std::move(failure)});
}

void Group::Impl::On(const FailUpdate& e) {
  if (update == nullptr || update->id != e.update || update->staged()) return;
  updates.Abandon({e.reason, e.kind, e.failure});
}

// ---- the end ----

void Group::Impl::Conclude(Outcome outcome, const std::string& reason) {
  const bool committed = outcome == Outcome::kCommitted;
  Step(&update->state, committed ? UpdateTrigger::kDecide : UpdateTrigger::kQuiet);
  update->participants.AbortEvictedIfQuiet();
  Failure failure;
  if (committed) {
    update->program.NoteInstalled();
    update->participants.Commit(update->readback.content(), &versions);
    if (!updates.CatchUpRuns()) members.NoteCommit();
    catch_up.NoteCommit(updates.CatchUpRuns(), update->participants.Remaining());
    if (!updates.CatchUpRuns()) rollback.NoteCommit(update->hold, updates.RollbackRuns());
  } else {
    if (updates.CatchUpRuns()) {
      catch_up.NoteGivenUp(update->participants.all().empty(), update->participants.Remaining(),
                           update->end.why().kind == GiveUpClass::kVerification, reason,
                           &*update->catch_up);
    }
    update->participants.Abort(/*quiet=*/false, reason, update->end.why().failure);
    failure = update->end.FailureOf(update->participants);
  }
  update->push.SendOutcome(committed, reason, failure);
  if (committed && updates.RollbackRuns()) {
    // Trainers go on with the number after it.
    for (const auto& [rank, id] : members.trainers()) {
      out.Do(SendCommitted{id, update->version, 0, "", 0, versions.content()});
    }
  }
  const std::vector<InstanceOutcome> outcomes =
      update->participants.Outcomes(committed, update->end.why().reason, update->end.why().failure);
  const std::string text = committed ? reason : fmt::format("{} ({})", reason, Describe(failure));
  // No call waits for a catch-up, but some may for the update that waits. Calls whose callers went
  // away are answered too, since a repeat gets the stored answer.
  const CommitReply done = DoneOf(*update, outcomes, updates.buckets(), out.now());
  update->end.Answer(updates.CatchUpRuns() ? group::Requests::ByCall() : requests.unfinished(),
                     committed ? &done : nullptr, text, failure);
  UpdateView last = group::ViewOf(*update);
  last.outcome = outcome;
  last.failure = failure;
  last.instances = outcomes;
  last.elapsed = out.now() - update->started;
  UpdateEnded ended = Ended(*update, outcome, reason, failure, outcomes, out.now());
  if (!updates.CatchUpRuns()) ended.pushed = updates.buckets().Totals();
  LogEnd(*update, outcome, reason, &out);
  ended.remains = update->coverage.TakeRemains();
  out.Do(std::move(ended));
  // P8: the buckets' sources are let go before their calls are answered.
  updates.End(std::move(last), PastUpdate{outcome, text, failure});
  compiler.Cancel();
  // A slot that its holder keeps beyond the update must not end a later update by its lease limit.
  slots.EndLimits();
  catch_up.Look();
}

}  // namespace refitd
