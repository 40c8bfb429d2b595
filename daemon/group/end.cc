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

// The failure with these suspects before its own: a rank says more than the daemon that reported
// it.
Failure ThenThose(std::vector<Suspect> first, Failure failure) {
  const int64_t unnamed = failure.suspect_count - static_cast<int64_t>(failure.suspects.size());
  const std::vector<Suspect> own = std::exchange(failure.suspects, {});
  failure.suspect_count = 0;
  for (Suspect& suspect : first) failure.Add(std::move(suspect));
  for (const Suspect& suspect : own) failure.Add(suspect);
  failure.suspect_count += unnamed;
  return failure;
}

}  // namespace

// ---- commit ----

absl::Status Group::Impl::CheckCommit(const TrainerProgress& progress, const CommitEvent& e) const {
  const int64_t before = update->TensorCount();
  REFITD_RETURN_IF_ERROR(group::CheckTensorCount(e.tensor_count, before));
  if (progress.committed) {
    if (e.bucket_count == progress.bucket_count) return absl::OkStatus();
    return Precondition("bucket_count: {}, but the rank has committed with {} already",
                        e.bucket_count, progress.bucket_count);
  }
  if (progress.announced.has_value() && *progress.announced != e.bucket_count) {
    return Precondition("bucket_count: {}, but the rank commits with {} already", e.bucket_count,
                        *progress.announced);
  }
  const int64_t pushed = progress.next_seq + static_cast<int64_t>(progress.early.size());
  if (pushed > e.bucket_count) {
    return Precondition("bucket_count: {}, but {} buckets were pushed", e.bucket_count, pushed);
  }
  if (progress.next_seq == e.bucket_count) {
    return CheckCoverageIfLast(progress, std::max(before, e.tensor_count));
  }
  if (!e.pushes_under_way) {
    return Precondition("bucket_count: {}, but seq {} was never pushed", e.bucket_count,
                        progress.next_seq);
  }
  if (!progress.early.empty() && progress.early.rbegin()->first >= e.bucket_count) {
    return Precondition("bucket_count: {}, but seq {} was pushed", e.bucket_count,
                        progress.early.rbegin()->first);
  }
  if (e.bucket_count - progress.next_seq > limits.outstanding_buckets) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "bucket_count: {}, but {} comes next, and at most {} may be outstanding",
                 e.bucket_count, progress.next_seq, limits.outstanding_buckets);
  }
  return absl::OkStatus();
}

absl::Status Group::Impl::CheckCoverageIfLast(const TrainerProgress& progress, int64_t told) const {
  const bool last = std::all_of(
      update->trainers.begin(), update->trainers.end(),
      [&progress](const auto& t) { return t.second.committed || &t.second == &progress; });
  return last ? CheckCoverage(told) : absl::OkStatus();
}

// Whether every element of every tensor that came, or that an instance still in the update knows,
// came once (P1).
absl::Status Group::Impl::CheckCoverage(int64_t told) const {
  if (update->pushed_incomplete > 0) {
    const std::string* partial = nullptr;
    for (const auto& [tensor_name, tensor] : update->pushed) {
      if (tensor.complete()) continue;
      if (partial == nullptr || tensor_name < *partial) partial = &tensor_name;
    }
    REFITD_CHECK(partial != nullptr);
    const group::PushedTensor& tensor = update->pushed.at(*partial);
    return AboutTensor(
        Precondition("tensor '{}': element {} of {} was never pushed", *partial,
                     tensor.covered.FirstGap(tensor.elements).value_or(0), tensor.elements),
        *partial);
  }
  REFITD_RETURN_IF_ERROR(CheckAllPushed());
  return CheckTensorCount(told);
}

absl::Status Group::Impl::CheckTensorCount(int64_t told) const {
  const Catalog::Rank* const open = update->catalog->OpenRank(update->evicted);
  if (told == 0 && open != nullptr) {
    return Precondition(
        "tensor_count: 0, but {} takes {} delivery without a manifest: Begin or Commit has to tell "
        "how many tensors it must get",
        open->label, Name(open->delivery));
  }
  const int64_t moved = update->program.has_value() ? update->program->plan->content.tensors : 0;
  const int64_t pushed = static_cast<int64_t>(update->pushed.size()) + moved;
  // Trainers may count tensors that no instance wants, or leave them out of the count.
  if (told != 0 && (pushed > told || (pushed < told && pushed + UnwantedAndNotPushed() < told))) {
    return Precondition("{} tensors came, but tensor_count is {}", pushed, told);
  }
  return absl::OkStatus();
}

int64_t Group::Impl::UnwantedAndNotPushed() const {
  const std::vector<std::string>& unwanted = update->catalog->unwanted();
  return std::count_if(unwanted.begin(), unwanted.end(), [this](const std::string& tensor) {
    return !update->pushed.contains(tensor) && !Moves(tensor);
  });
}

absl::Status Group::Impl::CheckAllPushed() const {
  group::PlannedRefit* const compiled =
      update->program.has_value() ? update->compiled.get() : nullptr;
  // A program moves the same tensors in every update, so it is checked once for a catalog.
  if (compiled != nullptr && compiled->covers.lock() == update->catalog) return absl::OkStatus();
  const bool nobody_evicted =
      std::find(update->evicted.begin(), update->evicted.end(), true) == update->evicted.end();
  // CheckBucket lets no tensor be both pushed and moved by the program, and the program moves only
  // tensors that an instance wants. So equal numbers mean that every wanted tensor came.
  const int64_t moved = update->program.has_value() ? update->program->plan->content.tensors : 0;
  const bool all_came =
      nobody_evicted && update->pushed_wanted + moved == update->catalog->wanted_count();
  if (!all_came) {
    REFITD_RETURN_IF_ERROR(update->catalog->CheckAllPushed(
        [this](std::string_view tensor) {
          return update->pushed.contains(absl::string_view(tensor.data(), tensor.size())) ||
                 Moves(tensor);
        },
        update->evicted));
  }
  if (compiled != nullptr && update->pushed.empty() && nobody_evicted) {
    compiled->covers = update->catalog;
  }
  return absl::OkStatus();
}

void Group::Impl::On(const CommitEvent& e) {
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  const std::string what =
      fmt::format("commit of {} buckets of version {}", e.bucket_count, e.version);
  if (Repeated(member, CallKind::kCommit, e.request_id, what, e.call)) return;
  const absl::StatusOr<TrainerProgress*> found = OpenFor(*member, e.version, e.update);
  absl::Status status = found.status();
  if (status.ok() && HasShardsIn(*member, **found)) {
    // Commit can't name the binding generation that the rank means.
    status = Precondition(
        "{} has registered a layout: it ends an update with Refit, unless its Begin says "
        "without_layout",
        member->label);
  }
  if (status.ok()) status = CheckCommit(**found, e);
  if (!status.ok()) {
    Refuse(e.call, std::move(status));
    return;
  }
  TrainerProgress& progress = **found;
  progress.commits.push_back(Track(member, CallKind::kCommit, e.request_id, what, e.call));
  if (progress.committed) return;
  progress.tensor_count = std::max(progress.tensor_count, e.tensor_count);
  if (progress.next_seq < e.bucket_count) {
    progress.announced = e.bucket_count;
  } else {
    TakeCommit(member, &progress, e.bucket_count);
  }
}

// A bucket was taken: if it is the last that a Commit waits for, the Commit takes effect.
void Group::Impl::TakeAnnounced(Member* member, TrainerProgress* progress) {
  if (progress->announced != progress->next_seq) return;
  if (const absl::Status covered = CheckCoverageIfLast(*progress, update->TensorCount());
      !covered.ok()) {
    if (progress->one_call) {
      GiveUp why{Message(covered), GiveUpClass::kOther, FailureOf(covered)};
      why.commit_code = covered.code();
      return Abandon(std::move(why));
    }
    WithdrawAnnounced(progress, covered);
    return;
  }
  TakeCommit(member, progress, *progress->announced);
}

// Refuses the waiting Commit. The update stays open, as after any refused Commit.
void Group::Impl::WithdrawAnnounced(TrainerProgress* progress, const absl::Status& why) {
  progress->announced.reset();
  progress->tensor_count = 0;
  for (const auto& request : std::exchange(progress->commits, {})) {
    Finish(request, why, EmptyReply{});
  }
}

void Group::Impl::TakeCommit(Member* member, TrainerProgress* progress, int64_t bucket_count) {
  progress->committed = true;
  progress->bucket_count = bucket_count;
  std::erase_if(slot_waiters, [&](const SlotWaiter& waiter) {
    if (waiter.member != member->id) return false;
    Refuse(waiter.call,
           Precondition("{} has committed version {}", member->label, update->version));
    return true;
  });
  const bool all = std::all_of(update->trainers.begin(), update->trainers.end(),
                               [](const auto& t) { return t.second.committed; });
  if (all) {
    Step(&update->state, UpdateTrigger::kAllCommitted);
    update->data_ended = now;
  }
  Changed();
}

// DATA_LOSS: an in-place rank still in the update was not written in full.
absl::Status Group::Impl::WrittenInFull() const {
  const Catalog& known = *update->catalog;
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    if (update->skip_destination[d]) continue;
    if (update->bytes_written[d] == known.expected_bytes(d)) continue;
    return WithFailure(Error(absl::StatusCode::kDataLoss,
                             "verification: {} bytes were written to {}, its layout has {}",
                             update->bytes_written[d], known.label(d), known.expected_bytes(d)),
                       Suspecting(known.destinations()[d]));
  }
  return absl::OkStatus();
}

// Destinations are read back once all that was pushed is written. Other nodes are told as soon as
// no part follows; each begins when its own last part has ended.
void Group::Impl::ReadBackIfLast() {
  if (update->state != UpdateState::kSettling || update->readback != Readback::kNone) return;
  if (update->verification != Verification::kReadback) return;
  if (update->next_start < update->end_part()) return;
  if (update->program.has_value() && update->refit < group::RefitPhase::kRunning) return;
  const bool alone = update->nodes.size() == 1;
  if (alone && (update->in_flight > 0 || !WrittenInFull().ok())) return;
  const Catalog& known = *update->catalog;
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    if (update->skip_destination[d]) continue;
    update->verified_destinations.push_back(d);
  }
  TouchDestinations(update->verified_destinations, 1);
  if (update->verified_destinations.empty()) return;
  update->readback = Readback::kRunning;
  Do(VerifyUpdate{update->id, update->skip_destination});
  Changed();
}

void Group::Impl::SettleIfDone() {
  if (update->state != UpdateState::kSettling) return;
  if (!update->parts.empty() || update->in_flight > 0) return;
  if (update->program.has_value() && update->refit != group::RefitPhase::kDone) return;
  if (!update->acks.nobody_owes()) return;
  if (const absl::Status written = WrittenInFull(); !written.ok()) {
    Abandon({Message(written), GiveUpClass::kVerification, FailureOf(written)});
    return;
  }
  if (const absl::Status tied = CheckTies(); !tied.ok()) {
    GiveUp why{Message(tied), GiveUpClass::kVerification};
    why.commit_code = tied.code();
    return Abandon(std::move(why));
  }
  if (update->readback != Readback::kRunning) return Decide();
  Step(&update->state, UpdateTrigger::kVerify);
  Changed();
}

void Group::Impl::On(const VerifyDone& e) {
  if (update == nullptr || update->id != e.update || update->readback != Readback::kRunning) {
    return;
  }
  update->readback = Readback::kDone;
  const Catalog& known = *update->catalog;
  TouchDestinations(update->verified_destinations, -1);
  if (update->state == UpdateState::kEnding) return;
  // A failure counts only for instances still in the update.
  const bool only_evicted =
      !e.failed_destinations.empty() &&
      std::all_of(e.failed_destinations.begin(), e.failed_destinations.end(), [this](uint32_t d) {
        return d < update->skip_destination.size() && update->skip_destination[d];
      });
  if (e.status.ok() || only_evicted) {
    update->content = e.content;
    if (update->state == UpdateState::kVerifying) Decide();
    return;
  }
  std::vector<std::string> labels;
  std::vector<Suspect> ranks;
  for (const uint32_t d : e.failed_destinations) {
    if (d >= known.destinations().size()) continue;
    labels.push_back(known.label(d));
    const Member* member = Find(known.destinations()[d]);
    if (member != nullptr) ranks.push_back(group::SuspectOf(*member));
  }
  Abandon({fmt::format("verification{}{}: {}", labels.empty() ? "" : " of ", group::Few(labels),
                       Message(e.status)),
           GiveUpClass::kVerification, ThenThose(std::move(ranks), FailureOf(e.status))});
}

void Group::Impl::Decide() {
  Step(&update->state, UpdateTrigger::kDecide);
  Conclude(Outcome::kCommitted, "");
}

// ---- eviction ----

std::optional<uint32_t> Group::Impl::ParticipantOf(MemberId member) const {
  const auto it = update->participant_of.find(member);
  if (it == update->participant_of.end()) return std::nullopt;
  return it->second;
}

void Group::Impl::On(const EngineFailed& e) {
  Member* member = Find(e.member);
  if (member == nullptr || member->state == MemberState::kLeaving) return;
  if (!e.refused.ok()) return RefuseDeclared(member, e.refused);
  if (update == nullptr || update->id != e.update) return FailInstalled(*member, e);
  const std::optional<uint32_t> index = ParticipantOf(e.member);
  if (!index.has_value() || update->participants[*index].evicted) return;
  if (update->state == UpdateState::kEnding) return;
  FailEngine(*index, {fmt::format("{} failed: {}", member->label, e.reason), GiveUpClass::kAborted,
                      Suspecting(e.member)});
}

// The rank failed while it was told of the commit: it does not have the version (P2).
void Group::Impl::FailInstalled(const Member& member, const EngineFailed& e) {
  const auto it = instances.find(member.instance);
  if (it == instances.end() || it->second.installed != e.update) return;
  Step(&it->second.state, InstanceTrigger::kMarkDirty);
  NoteStanding(member.instance);
  look_for_catch_up = true;
  it->second.reason =
      fmt::format("{} failed after its update had committed: {}", member.label, e.reason);
  Log(LogLine::kWarning, fmt::format("instance {} is dirty: {}", it->first, it->second.reason));
  Changed();
}

void Group::Impl::FailEngine(uint32_t participant, const GiveUp& why) {
  if (update->evict_late) {
    Evict(participant, why);
  } else {
    Abandon(why);
  }
}

void Group::Impl::Evict(uint32_t index, const GiveUp& why) {
  Participant& participant = update->participants[index];
  participant.evicted = true;
  participant.reason = why.reason;
  participant.failure = why.failure;
  update->evicted[index] = true;
  const Catalog& known = *update->catalog;
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    if (known.instance_of(d) == index) update->skip_destination[d] = true;
  }
  for (const MemberId id : participant.members) {
    update->readers.erase(id);
    update->acks.Set(id, std::nullopt);
    // The rank may still load from a slot, but its weights are dirty already, and others must not
    // wait for the slot.
    if (Member* member = Find(id); member != nullptr) EndReads(member);
  }
  if (const auto it = instances.find(participant.instance); it != instances.end()) {
    it->second.reason = why.reason;
    if (CatchUpRuns() && why.kind != GiveUpClass::kMemberLost)
      NoteFailedCatchUp(&it->second, why.reason);
    const auto next = Next(it->second.state, InstanceTrigger::kGiveUp);
    if (next.has_value()) it->second.state = *next;
    NoteStanding(participant.instance);
  }
  Do(LogLine{
      LogLine::kWarning,
      fmt::format("instance {} is evicted from the {} version {}: {}", participant.instance,
                  CatchUpRuns() ? "catch-up with" : "update to", update->version, why.reason),
      participant.instance, update->version, why.kind});
  Changed();
  EndNodesWithNobodyLeft(participant);
  if (std::find(update->evicted.begin(), update->evicted.end(), false) != update->evicted.end()) {
    return;
  }
  GiveUp none_left = why;
  none_left.reason = "no instance is left: " + why.reason;
  Abandon(none_left);
}

bool Group::Impl::TakesPart(NodeId node) const {
  const auto on_node = [this, node](MemberId id) {
    const Member* member = Find(id);
    return member != nullptr && member->node == node;
  };
  return std::any_of(update->trainers.begin(), update->trainers.end(),
                     [&](const auto& t) { return on_node(t.second.member); }) ||
         std::any_of(
             update->participants.begin(), update->participants.end(), [&](const Participant& p) {
               return !p.evicted && std::any_of(p.members.begin(), p.members.end(), on_node);
             });
}

void Group::Impl::EndNodesWithNobodyLeft(const Participant& evicted) {
  if (update->nodes.size() == 1 || update->state == UpdateState::kEnding) return;
  std::set<NodeId> left;
  for (const MemberId id : evicted.members) {
    if (const Member* member = Find(id); member != nullptr) left.insert(member->node);
  }
  for (const NodeId node : left) {
    if (!TakesPart(node)) Do(NodeOutOfUpdate{update->id, node});
  }
}

// One daemon that the others can't reach must not keep every instance from every version. The
// coordinator sends this only before the data phase, or about nodes that the update has left out
// already.
void Group::Impl::On(const KeepNodesOut& e) {
  if (update == nullptr || update->id != e.update) return;
  if (update->state == UpdateState::kEnding) return;
  // By participant: why it is evicted; null: it stays.
  std::vector<const std::string*> why(update->participants.size());
  bool any_left = false;
  for (size_t i = 0; i < why.size(); ++i) {
    const Participant& p = update->participants[i];
    for (const MemberId id : p.members) {
      const Member* member = Find(id);
      const auto out = member == nullptr ? e.nodes.end() : e.nodes.find(member->node);
      if (out != e.nodes.end()) why[i] = &out->second;
    }
    any_left |= why[i] == nullptr && !p.evicted;
  }
  if (!any_left) return Abandon({e.reason, e.kind, e.failure});
  for (const auto& [node, reason] : e.nodes) {
    if (e.for_now) break;
    kept_out[node] = reason;
    LetInIfEmpty(node);
  }
  for (uint32_t i = 0; i < why.size(); ++i) {
    if (why[i] != nullptr && !update->participants[i].evicted)
      Evict(i, {*why[i], e.kind, e.failure});
  }
  Changed();
}

// Ranks of evicted instances resume on Aborted, so they are told only when nothing touches their
// memory any more.
void Group::Impl::AbortEvictedIfQuiet() {
  for (Participant& participant : update->participants) {
    if (!participant.evicted || participant.told || participant.touching > 0) continue;
    participant.told = true;
    SendAbortedTo(participant, participant.reason, participant.failure);
  }
}

// A member hears what became of its own instance.
void Group::Impl::SendAbortedTo(const Participant& participant, const std::string& reason,
                                const Failure& failure) {
  const auto it = instances.find(participant.instance);
  const bool dirty = group::IsDirty(it->second.state);
  Failure told = failure;
  told.version = update->version.value();
  told.weights = Weights::kClean;
  if (dirty) told.AddDirty(participant.instance);
  for (const MemberId id : participant.members) {
    Member* member = Find(id);
    if (member == nullptr || member->state == MemberState::kLeaving) continue;
    Step(&member->state, MemberTrigger::kOutcome);
    Do(SendAborted{id, update->version, reason, dirty, told});
  }
}

// ---- giving up ----

// Why an update is given up when a part or the program failed to move its bytes.
group::GiveUp Group::Impl::FailedMove(std::string_view what, const absl::Status& status,
                                      int failed_destination) const {
  const Catalog& known = *update->catalog;
  const auto d = static_cast<size_t>(std::max(failed_destination, 0));
  const bool to_known = failed_destination >= 0 && d < known.destinations().size();
  const bool lost = status.code() == absl::StatusCode::kDataLoss;
  std::vector<Suspect> ranks;
  const Member* member = to_known ? Find(known.destinations()[d]) : nullptr;
  if (member != nullptr) ranks.push_back(group::SuspectOf(*member));
  return {fmt::format("{} of {}{}{}: {}", lost ? "verification" : "transfer", what,
                      to_known ? " to " : "", to_known ? known.label(static_cast<uint32_t>(d)) : "",
                      Message(status)),
          lost ? GiveUpClass::kVerification : GiveUpClass::kTransfer,
          ThenThose(std::move(ranks), FailureOf(status))};
}

void Group::Impl::Abandon(GiveUp why) {
  if (update->state == UpdateState::kEnding) return;
  Step(&update->state, UpdateTrigger::kGiveUp);
  update->give_up = std::move(why);
  update->cleanup_deadline = now + limits.cleanup_limit;
  Do(UpdateAbandoned{update->id});
  DropUnstarted();
  Changed();
}

// Slots of parts that are in flight are given back when those parts end.
void Group::Impl::DropUnstarted() {
  for (const Part& part : update->parts) {
    if (part.started && !part.done) continue;
    if (part.slot.has_value()) (void)ledger.Release(*part.slot);
  }
  update->parts.resize(static_cast<size_t>(update->next_start - update->first_part));
  for (auto& [rank, progress] : update->trainers) {
    for (const auto& [seq, bucket] : progress.early) {
      if (bucket->content->slot.has_value()) (void)ledger.Release(*bucket->content->slot);
    }
    progress.early.clear();
  }
}

void Group::Impl::EndIfQuiet() {
  if (update->state != UpdateState::kEnding) return;
  if (update->in_flight > 0 || update->readback == Readback::kRunning) return;
  Step(&update->state, UpdateTrigger::kQuiet);
  Conclude(Outcome::kAborted, update->give_up.reason);
}

void Group::Impl::On(const AbortEvent& e) {
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  const std::string what = fmt::format("abort of version {}", e.version);
  if (Repeated(member, CallKind::kAbort, e.request_id, what, e.call)) return;
  if (const std::set<Version> waiting = DeferredOf(e.member); waiting.contains(e.version)) {
    RefuseDeferred(e.version,
                   WithFailure(Error(absl::StatusCode::kAborted,
                                     "the update to version {} is lost: {} gave the update up: {}",
                                     e.version, member->label, e.reason),
                               Unwritten(e.version, member->id)));
    Finish(Track(member, CallKind::kAbort, e.request_id, what, e.call), absl::OkStatus(),
           EmptyReply{});
    return;
  }
  if (update == nullptr || update->version != e.version || IsAnother(e.update) ||
      !update->trainers.contains(member->rank)) {
    Refuse(e.call,
           Precondition("no update to version {} is open for {}", e.version, member->label));
    return;
  }
  Track(member, CallKind::kAbort, e.request_id, what, e.call);
  Abandon({fmt::format("{} gave the update up: {}", member->label, e.reason), GiveUpClass::kAborted,
           Suspecting(member->id)});
}

void Group::Impl::On(const OperatorAbort& e) {
  if (update == nullptr) {
    Refuse(e.call, Precondition("group {}: no update runs", name));
    return;
  }
  update->operator_calls.push_back(e.call);
  Failure failure;
  failure.Add({SuspectRole::kOperator, "", "", std::nullopt, 0});
  Abandon({fmt::format("an operator gave the update up: {}", e.reason), GiveUpClass::kOperator,
           std::move(failure)});
}

void Group::Impl::On(const FailUpdate& e) {
  if (update == nullptr || update->id != e.update) return;
  Abandon({e.reason, e.kind, e.failure});
}

// ---- the end ----

std::vector<InstanceOutcome> Group::Impl::Outcomes(bool committed) const {
  std::vector<InstanceOutcome> outcomes;
  for (const Participant& p : update->participants) {
    const bool installed = committed && !p.evicted;
    const bool own = installed || p.evicted;
    outcomes.push_back({p.instance, installed, own ? p.reason : update->give_up.reason,
                        own ? p.failure : update->give_up.failure});
  }
  return outcomes;
}

// The digests of what was read back of each engine rank.
std::map<MemberId, uint64_t> Group::Impl::ReadBack() const {
  std::map<MemberId, uint64_t> digests;
  const std::vector<MemberId>& destinations = update->catalog->destinations();
  for (size_t d = 0; d < std::min(destinations.size(), update->content.size()); ++d) {
    digests[destinations[d]] = update->content[d];
  }
  return digests;
}

void Group::Impl::InstallVersion() {
  version = update->version;
  const std::map<MemberId, uint64_t> read_back = ReadBack();
  if (CatchUpRuns()) {
    failed_catch_ups = 0;
  } else {
    ownership.Committed();
    ++committed_updates;
    ForgetFailedCatchUps();
  }
  for (const Participant& participant : update->participants) {
    if (participant.evicted) continue;
    Instance& instance = instances.at(participant.instance);
    Step(&instance.state, InstanceTrigger::kCommit);
    NoteStanding(participant.instance);
    instance.reason.clear();
    instance.installed = update->id;
    instance.failed_catch_ups = 0;
    instance.catch_up_failure.clear();
    for (const MemberId id : participant.members) {
      Member* member = Find(id);
      member->held = {update->version, incarnation};
      const auto digest = read_back.find(id);
      member->held_digest = digest == read_back.end() ? 0 : digest->second;
      NoteInstalled(*member);
      member->updated = member->verified = true;
      Step(&member->state, MemberTrigger::kOutcome);
      Do(SendCommitted{id, update->version, 0, "", member->held_digest});
    }
  }
}

void Group::Impl::TearDown() {
  if (CatchUpRuns()) {
    NoteFailedCatchUps();
  } else {
    ++aborted_updates;
  }
  for (Participant& participant : update->participants) {
    if (!participant.evicted && !participant.told) AbortGivenUp(&participant);
  }
}

void Group::Impl::AbortGivenUp(Participant* participant) {
  const std::string& reason = update->give_up.reason;
  participant->told = true;
  Instance& instance = instances.at(participant->instance);
  Step(&instance.state, InstanceTrigger::kGiveUp);
  NoteStanding(participant->instance);
  if (participant->written) instance.reason = reason;
  SendAbortedTo(*participant, reason, update->give_up.failure);
}

void Group::Impl::NoteQuiet() {
  for (Participant& participant : update->participants) {
    if (participant.evicted || participant.told || participant.touching > 0) continue;
    AbortGivenUp(&participant);
  }
}

// The transfers that still run may touch one instance only, or belong to a daemon that is silent.
// The other members need not stay paused for them.
void Group::Impl::ReportOverdueCleanUp() {
  update->cleanup_logged = true;
  Log(LogLine::kError,
      fmt::format("update to version {}: clean-up takes longer than {}: waiting for {}",
                  update->version, group::Seconds(limits.cleanup_limit), WaitedFor()));
  NoteQuiet();
  Do(CleanUpOverdue{update->id});
  Changed();
}

void Group::Impl::Conclude(Outcome outcome, const std::string& reason) {
  const bool committed = outcome == Outcome::kCommitted;
  AbortEvictedIfQuiet();
  if (committed) {
    if (update->program.has_value()) CountCompared();
    InstallVersion();
  } else {
    TearDown();
  }
  const Failure failure = committed ? Failure() : FailureAfterGivingUp();
  for (const auto& [rank, progress] : update->trainers) {
    Member* member = Find(progress.member);
    if (member == nullptr || member->state == MemberState::kLeaving) continue;
    Step(&member->state, MemberTrigger::kOutcome);
    if (committed) {
      Do(SendCommitted{member->id, update->version});
    } else {
      Do(SendAborted{member->id, update->version, reason, false, failure});
    }
  }
  const std::vector<InstanceOutcome> outcomes = Outcomes(committed);
  const std::string told = committed ? reason : fmt::format("{} ({})", reason, Describe(failure));
  AnswerAll(committed, told, failure, outcomes);
  last_was_catch_up = CatchUpRuns();
  std::optional<UpdateView>& last = last_was_catch_up ? last_catch_up : last_update;
  last = ViewOf(*update);
  last->outcome = outcome;
  last->failure = failure;
  last->instances = outcomes;
  last->elapsed = now - update->started;
  if (!last_was_catch_up) {
    past.push_back({update->id, update->version, PastUpdate{outcome, told, failure}});
    if (past.size() > kRememberedUpdates) past.pop_front();
  }
  UpdateEnded ended = Ended(outcome, reason, failure);
  ended.remains = std::make_shared<decltype(update->pushed)>(std::move(update->pushed));
  Do(std::move(ended));
  LogEnd(outcome, reason);
  update.reset();
  if (compiling != nullptr) compiling->cancelled->store(true);
  // A slot that its holder keeps beyond the update must not end a later update by its lease limit.
  ledger.EndLimits();
  look_for_catch_up = true;
  Step(&state, GroupTrigger::kEnd);
  Changed();
}

void Group::Impl::LogEnd(Outcome outcome, const std::string& reason) {
  if (CatchUpRuns()) return LogCatchUpEnd(outcome, reason);
  if (outcome != Outcome::kCommitted) {
    return Log(LogLine::kWarning,
               fmt::format("update to version {} aborted: {}", update->version, reason));
  }
  Log(LogLine::kInfo, fmt::format("update committed: version {}, {} bytes in {}", update->version,
                                  update->accepted_bytes, group::Seconds(now - update->started)));
  const LeftOut left_out = LeftOutOf(*update);
  if (left_out.tensors == 0) return;
  std::vector<std::string> named = left_out.names;
  named.resize(static_cast<size_t>(left_out.tensors));  // Few prints the first ones, and counts
  Log(LogLine::kInfo, fmt::format("version {} leaves out {} tensors, {} bytes: {}", update->version,
                                  left_out.tensors, left_out.bytes, group::Few(named)));
}

UpdateEnded Group::Impl::Ended(Outcome outcome, const std::string& reason,
                               const Failure& failure) const {
  const Update& u = *update;
  UpdateEnded ended;
  ended.update = u.id;
  ended.version = u.version;
  ended.outcome = outcome;
  ended.reason = reason;
  ended.failure = failure;
  ended.catch_up = u.catch_up.has_value();
  ended.gave_way = ended.catch_up && u.catch_up->gave_way;
  ended.bytes = ended.catch_up ? CaughtUpBytes() : u.accepted_bytes;
  if (!ended.catch_up) ended.pushed = bucket_log.Totals();
  ended.total = now - u.started;
  ended.give_up_class = outcome == Outcome::kCommitted ? GiveUpClass::kNone : u.give_up.kind;
  // A phase that was not reached took no time; a phase that did not end took until now.
  const TimePoint none;
  const auto until = [this, none](TimePoint end) { return end == none ? now : end; };
  ended.prepare = until(u.data_began) - u.started;
  if (u.data_began != none) ended.data = until(u.data_ended) - u.data_began;
  if (u.data_ended != none) ended.verify = now - u.data_ended;
  return ended;
}

Failure Group::Impl::FailureAfterGivingUp() const {
  Failure failure = update->give_up.failure;
  failure.version = update->version.value();
  failure.may_be_retried = group::MayPass(update->give_up.kind);
  failure.weights = Weights::kClean;
  for (const Participant& participant : update->participants) {
    const auto it = instances.find(participant.instance);
    if (it == instances.end() || !group::IsDirty(it->second.state)) continue;
    failure.AddDirty(participant.instance);
  }
  return failure;
}

// Whoever pushes says by that alone that the tensors are to be delivered, so that those which no
// instance stores are named. A rank without a manifest takes them all.
LeftOut Group::Impl::LeftOutOf(const Update& u) {
  LeftOut left_out;
  if (u.catch_up.has_value() || u.catalog == nullptr) return left_out;
  std::vector<std::string> names;
  if (u.program.has_value()) {
    names = u.program->plan->content.unwanted;
    left_out.bytes = u.program->plan->content.unwanted_bytes;
  }
  const bool any = static_cast<int64_t>(u.pushed.size()) > u.pushed_wanted;
  if (any && u.catalog->OpenRank(u.evicted) == nullptr) {
    for (const auto& [tensor_name, tensor] : u.pushed) {
      if (tensor.wanted) continue;
      names.push_back(tensor_name);
      left_out.bytes += tensor.elements * ElementBytes(tensor.dtype);
    }
  }
  std::sort(names.begin(), names.end());
  left_out.tensors = static_cast<int64_t>(names.size());
  if (names.size() > kMaxNamedLeftOut) names.resize(kMaxNamedLeftOut);
  left_out.names = std::move(names);
  return left_out;
}

// Answers every call that waits, once.
void Group::Impl::AnswerAll(bool committed, const std::string& reason, const Failure& failure,
                            const std::vector<InstanceOutcome>& outcomes) {
  const GiveUp& why = update->give_up;
  const auto lost = [this, &reason, &failure](absl::StatusCode code) {
    return WithFailure(Error(code, "the update to version {} is lost: {}", update->version, reason),
                       failure);
  };
  // Includes calls whose callers went away, since a repeat gets the stored answer.
  const std::map<CallId, std::shared_ptr<Request>> waiting = unfinished;
  CommitReply done{update->version,     outcomes, update->accepted_bytes, now - update->started,
                   bucket_log.Totals(), {}};
  done.left_out = LeftOutOf(*update);
  for (const auto& [call, request] : waiting) {
    if (committed) {
      REFITD_CHECK(request->kind == CallKind::kCommit || request->kind == CallKind::kRefit);
      Finish(request, absl::OkStatus(), done);
      continue;
    }
    switch (request->kind) {
      case CallKind::kBegin:
        Finish(request, lost(why.begin_code), EmptyReply{});
        break;
      case CallKind::kBucket:
        Finish(request, lost(why.bucket_code), EmptyReply{});
        break;
      case CallKind::kCommit:
        Finish(request, lost(why.commit_code), EmptyReply{});
        break;
      case CallKind::kRefit: {
        const bool began = update->data_began != TimePoint();
        Finish(request, lost(began ? why.commit_code : why.begin_code), EmptyReply{});
        break;
      }
      case CallKind::kAbort:
        Finish(request, absl::OkStatus(), EmptyReply{});
        break;
    }
  }
  for (const SlotWaiter& waiter : std::exchange(slot_waiters, {})) {
    Refuse(waiter.call, lost(why.lease_code));
  }
  for (const CallId call : update->operator_calls) {
    Do(Reply{call, absl::OkStatus(), EmptyReply{}});
  }
}

Failure Group::Impl::SuspectAwaited() const {
  Failure failure;
  if (update->state == UpdateState::kOpening) SuspectMissing(&failure);
  if (update->state == UpdateState::kPreparing) {
    for (const Participant& participant : update->participants) {
      if (!participant.evicted) SuspectUnready(participant, &failure);
    }
  }
  if (update->state != UpdateState::kData && update->state != UpdateState::kSettling) {
    return failure;
  }
  for (const auto& [id, reader] : update->readers) {
    const Member* member = Find(id);
    if (!reader.outstanding.empty() && member != nullptr) failure.Add(group::SuspectOf(*member));
  }
  for (const auto& [rank, progress] : update->trainers) {
    const Member* member = progress.committed ? nullptr : Find(progress.member);
    if (member != nullptr) failure.Add(group::SuspectOf(*member));
  }
  return failure;
}

// Names who is waited for now, for messages (P4).
std::string Group::Impl::WaitedFor() const {
  switch (update->state) {
    case UpdateState::kOpening:
      return WaitedForToAssemble();
    case UpdateState::kPreparing:
      return WaitedForReady();
    case UpdateState::kVerifying:
      return "the verification of what was written";
    default:
      break;
  }
  std::vector<std::string> waits;
  for (const auto& [id, reader] : update->readers) {
    if (reader.outstanding.empty()) continue;
    waits.push_back(
        fmt::format("{} to acknowledge part {}", Label(id), reader.outstanding.front().part));
  }
  const bool comparing = update->refit == group::RefitPhase::kComparing;
  const bool running = update->refit == group::RefitPhase::kRunning;
  if (comparing) waits.emplace_back("the comparison of replicas");
  if (running) waits.emplace_back("the program");
  if (const int64_t transfers = update->in_flight - (comparing || running); transfers > 0) {
    waits.push_back(fmt::format("{} transfers", transfers));
  }
  if (update->state == UpdateState::kEnding) {
    if (update->readback == Readback::kRunning)
      waits.emplace_back("the verification of what was written");
    return group::Few(waits);
  }
  if (update->next_start < update->end_part()) {
    waits.push_back(fmt::format("a slot for part {} ({})", update->next_start, HoldersOfSlots()));
  }
  if (update->refit == group::RefitPhase::kCompared) {
    const int64_t slots = std::max<int64_t>(2, 2 * update->program->plan->routes.relay.lag);
    waits.push_back(fmt::format("{} slots for the program ({})", slots, HoldersOfSlots()));
  }
  for (const auto& [rank, progress] : update->trainers) {
    if (progress.committed) continue;
    waits.push_back(
        progress.early.empty() && !progress.announced.has_value()
            ? fmt::format("{} to commit", Label(progress.member))
            : fmt::format("{} to push seq {}", Label(progress.member), progress.next_seq));
  }
  return group::Few(waits);
}

}  // namespace refitd
