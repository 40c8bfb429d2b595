// Begin, Prepare and Ready: from the first call of a version to the first bucket.
#include <algorithm>
#include <set>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"
#include "transport/broadcast_method.h"

namespace refitd {

absl::Status group::CheckCount(std::string_view field, int64_t told, int64_t before) {
  if (told < 0) {
    return InvalidField(field, "{}: {} is negative", field, told);
  }
  if (told != 0 && before != 0 && told != before) {
    return Precondition("{}: {} differs from the {} of the ranks before", field, told, before);
  }
  return absl::OkStatus();
}

absl::Status group::CheckTensorCount(int64_t told, int64_t before) {
  if (told > kMaxTensorsPerLayout) return TooManyTensors("tensor_count", told);
  return CheckCount("tensor_count", told, before);
}

// Versions grow within an incarnation (P3).
absl::Status Group::Impl::CheckGreater(Version wanted) const {
  if (!version.has_value() || wanted > *version) return absl::OkStatus();
  const auto holds = std::find_if(instances.begin(), instances.end(), [this](const auto& i) {
    return VersionOf(i.second) == group::HeldVersion{*version, incarnation};
  });
  return Precondition(
      "version: {} is not greater than the group's {} ({}): begin a greater version, or start a "
      "new incarnation with CreateGroup(replace), as `refitctl group replace` and on_older= do",
      wanted, *version,
      holds == instances.end() ? "no instance holds it any more"
                               : fmt::format("instance {} holds it", holds->first));
}

absl::Status Group::Impl::CheckBegin(const Member& member, const BeginEvent& e) const {
  if (e.version.value() < 0) {
    return InvalidField("version", "version: {} is negative", e.version);
  }
  if (e.duration < Duration(0) || e.duration > limits.max_duration) {
    return InvalidField("duration", "duration: {} is not in 0..{}", group::Seconds(e.duration),
                        group::Seconds(limits.max_duration));
  }
  // A catch-up gives way, so the call is checked as if none ran.
  const bool free = update == nullptr || CatchUpRuns();
  const Update none;
  const Update& u = free ? none : *update;
  REFITD_RETURN_IF_ERROR(group::CheckTensorCount(e.tensor_count, u.TensorCount()));
  REFITD_RETURN_IF_ERROR(group::CheckCount("total_bytes", e.total_bytes, u.total_bytes));
  if (free) {
    if (state == GroupState::kDrained || (CatchUpRuns() && state == GroupState::kDraining)) {
      return absl::UnavailableError("the daemon drains: no new update is opened");
    }
    return CheckGreater(e.version);
  }
  if (u.state == UpdateState::kEnding) {
    if (u.version != e.version) {
      return Precondition("an update to version {} is being given up", u.version);
    }
    return Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}", u.version,
                 u.give_up.reason);
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
  const auto it = u.trainers.find(member.rank);
  if (u.state != UpdateState::kOpening && it == u.trainers.end()) {
    return Precondition("the update to version {} runs without trainer rank {}", u.version,
                        member.rank);
  }
  return absl::OkStatus();
}

// Refit names no method: only ranks that call Begin decide it.
absl::Status Group::Impl::CheckBroadcast(const BeginEvent& e) const {
  if (update != nullptr && update->broadcast.has_value() && *update->broadcast != e.broadcast) {
    return Precondition("broadcast: {} differs from the first rank's {}",
                        BroadcastMethodName(e.broadcast), BroadcastMethodName(*update->broadcast));
  }
  if (NeedsSlots(e.broadcast) && !e.slots_on_devices) {
    return Precondition(
        "broadcast: {} goes through slots on the GPUs of one daemon, and there are none",
        BroadcastMethodName(e.broadcast));
  }
  return absl::OkStatus();
}

void Group::Impl::TakeBroadcast(const Member& member, const BeginEvent& e) {
  update->broadcast = e.broadcast;
  if (!e.slots_on_devices && update->lacks_slots.empty()) update->lacks_slots = member.label;
}

// Decides whether the update's pushes go through staging slots on the GPUs. Called when the
// participants are known. Slots serve only an update within one daemon: bytes between daemons
// cross the data plane.
absl::Status Group::Impl::DecideBroadcast() {
  update->through_slots = false;
  const BroadcastMethod method = update->broadcast.value_or(BroadcastMethod::kDirect);
  if (method == BroadcastMethod::kDirect) return absl::OkStatus();
  const bool asked = NeedsSlots(method);
  if (update->nodes.size() > 1) {
    if (!asked) return absl::OkStatus();
    return Precondition("broadcast: {} moves bytes within one daemon, and the update is of {}",
                        BroadcastMethodName(method), update->nodes.size());
  }
  update->through_slots = update->lacks_slots.empty();
  if (!asked || update->through_slots) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted,
               "broadcast: {} needs staging slots, and the GPU of {} has none",
               BroadcastMethodName(method), update->lacks_slots);
}

// The first note that a rank gives becomes the update's note.
void Group::Impl::TakeNote(const std::string& note) {
  if (note.empty() || !update->note.empty()) return;
  update->note = note;
  Log(LogLine::kInfo, fmt::format("update to version {}: {}", update->version, note));
}

void Group::Impl::On(const BeginEvent& e) {
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  const std::string what = fmt::format("begin of version {}", e.version);
  if (Repeated(member, CallKind::kBegin, e.request_id, what, e.call)) return;
  absl::Status status = CheckBegin(*member, e);
  if (status.ok()) status = CheckBroadcast(e);
  if (!status.ok()) {
    Refuse(e.call, std::move(status));
    return;
  }
  if (CatchUpRuns()) return Defer(e, e.duration);
  if (update == nullptr) Open(e);
  if (update->state == UpdateState::kOpening) {
    TakeBroadcast(*member, e);
    update->tensor_count = std::max(update->tensor_count, e.tensor_count);
    update->total_bytes = std::max(update->total_bytes, e.total_bytes);
    TakeNote(e.note);
  }
  const std::shared_ptr<Request> request =
      Track(member, CallKind::kBegin, e.request_id, what, e.call);
  TrainerProgress& progress = Join(member);
  if (update->state == UpdateState::kOpening) progress.without_layout = e.without_layout;
  if (member->state == MemberState::kReady) {
    // The rank missed the answer to its first call.
    Finish(request, absl::OkStatus(), MakeBeginReply());
  } else {
    progress.begins.push_back(request);
  }
  Changed();
}

group::TrainerProgress& Group::Impl::Join(Member* member) {
  TrainerProgress& progress = update->trainers[member->rank];
  progress.member = member->id;
  if (member->state == MemberState::kAttached) Step(&member->state, MemberTrigger::kPrepare);
  return progress;
}

// The verification of an update whose first rank names none; it holds for all ranks. A default that
// the operator configured, other than kReadback, stays. With engines on GPUs, the copy itself
// compares what it stored; read-back is kept for updates in which an engine rank takes its first
// version. With members on other daemons it is unknown which memory is on GPUs: all is read back.
Verification Group::Impl::DefaultVerification() const {
  if (limits.default_verification != Verification::kReadback) return limits.default_verification;
  bool devices = false;
  for (const auto& [id, member] : members) {
    if (member.state == MemberState::kLeaving) continue;
    if (member.node != NodeId()) return Verification::kReadback;
    if (!member.engine) continue;
    if (!member.updated) return Verification::kReadback;
    devices = devices || member.on_device;
  }
  return devices ? Verification::kTransfer : Verification::kReadback;
}

void Group::Impl::Open(const BeginEvent& e) {
  update = std::make_unique<Update>();
  update->id = next_update();
  update->version = e.version;
  update->started = now;
  update->deadline =
      now + (e.duration == Duration(0) ? std::min(limits.default_duration, limits.max_duration)
                                       : e.duration);
  update->verification = e.verification.has_value() ? *e.verification : DefaultVerification();
  update->evict_late = e.evict_late;
  update->last_call = now;
  bucket_log.Clear();
  Step(&state, GroupTrigger::kOpen);
  Log(LogLine::kInfo, fmt::format("update to version {} opened", e.version));
}

std::string Group::Impl::WaitedForToAssemble() const {
  if (CatchUpRuns()) return "the program to be compiled";
  std::vector<std::string> missing;
  for (int rank = 0; rank < spec.trainer_ranks; ++rank) {
    if (update->trainers.contains(rank)) continue;
    missing.push_back(fmt::format("trainer rank {} to begin", rank));
  }
  int complete = 0;
  std::vector<std::string> incomplete;
  for (const auto& [instance_name, instance] : instances) {
    if (Available(instance)) {
      ++complete;
      continue;
    }
    if (const std::string* why = WhyKeptOut(instance); why != nullptr) {
      incomplete.push_back(fmt::format("instance {} ({})", instance_name, *why));
      continue;
    }
    for (int rank = 0; rank < instance.world_size; ++rank) {
      const auto it = instance.ranks.find(rank);
      if (it == instance.ranks.end()) {
        incomplete.push_back(fmt::format("engine {} rank {}", instance_name, rank));
      } else if (const Member* member = Find(it->second);
                 NeedsLayout(member->delivery) && member->layout == nullptr) {
        incomplete.push_back(fmt::format("the layout of {}", member->label));
      }
    }
  }
  if (complete < spec.min_instances) {
    missing.push_back(fmt::format("{} of {} instances complete{}{}{}{}", complete,
                                  spec.min_instances, incomplete.empty() ? "" : ", missing ",
                                  group::Few(incomplete), last_refusal.ok() ? "" : ", and ",
                                  Message(last_refusal)));
  }
  if (missing.empty() && compiling != nullptr) missing.emplace_back("the program to be compiled");
  return group::Few(missing);
}

// Engines stop serving at Prepare, so Prepare waits until all trainer ranks have begun.
void Group::Impl::AssembleIfAllHere() {
  if (update->state != UpdateState::kOpening) return;
  if (CatchUpRuns()) return AssembleCatchUp();
  if (!last_refusal.ok()) FailIfRefused(absl::OkStatus());
  if (update->state != UpdateState::kOpening) return;
  if (static_cast<int>(update->trainers.size()) != spec.trainer_ranks) return;
  const auto complete = std::count_if(instances.begin(), instances.end(),
                                      [this](const auto& i) { return Available(i.second); });
  if (complete < std::max(spec.min_instances, 1)) return;
  last_refusal = absl::OkStatus();
  Assemble();
}

void Group::Impl::Assemble() {
  absl::Status status = MakeParticipants();
  if (status.ok()) status = DecideBroadcast();
  if (!status.ok()) {
    update->participants.clear();  // nobody takes part yet
    update->participant_of.clear();
    update->readers.clear();
    GiveUp why{Message(status), GiveUpClass::kOther, FailureOf(status)};
    why.begin_code = status.code();
    Abandon(why);
    return;
  }
  const absl::StatusOr<bool> at_hand = ProgramAtHand();
  if (!at_hand.ok() || !*at_hand) {
    // Participants are found anew when the program is there.
    update->participants.clear();
    update->participant_of.clear();
    update->readers.clear();
    update->program.reset();
    update->compiled.reset();
    if (at_hand.ok()) return;
    GiveUp why{Message(at_hand.status()), GiveUpClass::kOther, FailureOf(at_hand.status())};
    why.begin_code = at_hand.status().code();
    Abandon(std::move(why));
    return;
  }
  if (update->program.has_value()) {
    // The plan knows these numbers better than any rank.
    const RefitContent& content = update->program->plan->content;
    if (update->tensor_count == 0 && update->compiled->key.pushed.empty()) {
      update->tensor_count = content.tensors;
    }
    if (update->total_bytes == 0 && update->compiled->key.pushed.empty()) {
      update->total_bytes = content.bytes;
    }
    update->accepted_bytes += content.bytes;
  }
  AnnounceAssembled();
}

void Group::Impl::AnnounceAssembled() {
  Step(&update->state, UpdateTrigger::kAssembled);
  const Duration remaining = update->deadline - now;
  update->ready_deadline = now + std::min(limits.ready_limit, remaining);
  Do(UpdateAssembled{update->id, update->version, remaining, update->tensor_count,
                     update->verification, update->nodes, update->catalog->destinations(),
                     OnThisDaemon() ? update->catalog->index() : nullptr, update->program});
  for (const Participant& participant : update->participants) {
    Step(&instances.at(participant.instance).state, InstanceTrigger::kPrepare);
    NoteStanding(participant.instance);
    for (const MemberId id : participant.members) {
      Step(&Find(id)->state, MemberTrigger::kPrepare);
      Do(SendPrepare{id, update->version, update->id, remaining, update->tensor_count});
    }
  }
  Changed();
}

absl::Status Group::Impl::MakeParticipants() {
  std::vector<Catalog::Rank> ranks;
  std::vector<std::string> names;
  std::vector<Participant> participants;
  for (const auto& [instance_name, instance] : instances) {
    if (!TakenIn(instance)) continue;
    Participant& participant = participants.emplace_back();
    participant.instance = instance_name;
    const auto index = static_cast<uint32_t>(names.size());
    names.push_back(instance_name);
    for (const auto& [rank, id] : instance.ranks) {
      const Member& member = *Find(id);
      participant.members.push_back(id);
      const DeliveryMode mode = member.delivery;
      ranks.push_back({id, member.label, index, mode, NeedsLayout(mode) ? member.layout : nullptr,
                       DeclaresManifest(mode) ? member.manifest : nullptr});
    }
  }
  const std::vector<bool> evicted(names.size());
  if (CatchUpRuns()) {
    // The catalog of the trainers' updates is kept: the next of those updates will need it again.
    REFITD_ASSIGN_OR_RETURN(update->catalog,
                            Catalog::Make(std::move(ranks), std::move(names), declared));
  } else {
    if (catalog == nullptr || catalog->ranks() != ranks || catalog->instances() != names) {
      REFITD_ASSIGN_OR_RETURN(catalog, Catalog::Make(std::move(ranks), std::move(names), declared));
    }
    update->catalog = catalog;
  }
  const Catalog& known = *update->catalog;
  // Space is reserved before any bucket comes: growing the map later would hold up other calls of
  // the group.
  if (update->broadcast.has_value()) update->pushed.reserve(known.tensor_count());
  update->evicted = evicted;
  update->skip_destination.resize(known.destinations().size());
  update->bytes_written.resize(known.destinations().size());
  update->readers.clear();
  for (const Catalog::Rank& rank : known.ranks()) {
    if (!ReadsSlots(rank.delivery)) continue;
    update->readers[rank.member].participant = rank.instance;
  }
  update->participants = std::move(participants);
  update->participant_of.clear();
  for (uint32_t i = 0; i < update->participants.size(); ++i) {
    Participant& participant = update->participants[i];
    participant.unready = participant.members.size();
    for (const MemberId id : participant.members) update->participant_of.emplace(id, i);
  }
  std::set<NodeId> nodes;
  for (const Participant& participant : update->participants) {
    for (const MemberId id : participant.members) nodes.insert(Find(id)->node);
  }
  for (const auto& [rank, progress] : update->trainers) nodes.insert(Find(progress.member)->node);
  if (CatchUpRuns()) {
    for (const MemberId source : update->catch_up->sources) nodes.insert(Find(source)->node);
  }
  update->nodes.assign(nodes.begin(), nodes.end());
  return absl::OkStatus();
}

void Group::Impl::On(const ReadyEvent& e) {
  Member* member = Find(e.member);
  if (member == nullptr || !member->engine || update == nullptr || update->id != e.update) {
    return;
  }
  const std::optional<uint32_t> index = ParticipantOf(e.member);
  if (!index.has_value() || update->participants[*index].evicted) return;
  const std::optional<MemberState> next = Next(member->state, MemberTrigger::kReady);
  if (!next.has_value()) return;
  member->state = *next;
  // A rank that is ready for this update reads no slot of earlier updates.
  EndReads(member);
  Participant& participant = update->participants[*index];
  participant.ready = --participant.unready == 0;
  if (participant.ready && update->state == UpdateState::kPreparing) {
    Step(&instances.at(participant.instance).state, InstanceTrigger::kAllReady);
  }
  Changed();
}

std::string Group::Impl::WaitedForReady() const {
  std::vector<std::string> missing;
  for (const Participant& participant : update->participants) {
    if (participant.evicted) continue;
    for (const MemberId id : participant.members) {
      if (Find(id)->state == MemberState::kPreparing) missing.push_back(Label(id) + " to be ready");
    }
  }
  if (!update->data_plane_up) missing.emplace_back("the data plane between its daemons");
  return group::Few(missing);
}

// The ranks that WaitedForToAssemble names.
void Group::Impl::SuspectMissing(Failure* failure) const {
  if (CatchUpRuns()) return;
  for (int rank = 0; rank < spec.trainer_ranks; ++rank) {
    if (!update->trainers.contains(rank)) failure->Add({SuspectRole::kTrainer, "", "", rank, 0});
  }
  for (const auto& [instance_name, instance] : instances) {
    if (Available(instance)) continue;
    for (int rank = 0; rank < instance.world_size; ++rank) {
      const auto it = instance.ranks.find(rank);
      if (it == instance.ranks.end()) {
        failure->Add({SuspectRole::kEngine, "", instance_name, rank, 0});
      } else if (const Member* member = Find(it->second);
                 NeedsLayout(member->delivery) && member->layout == nullptr) {
        failure->Add(group::SuspectOf(*member));
      }
    }
  }
}

void Group::Impl::SuspectUnready(const Participant& participant, Failure* failure) const {
  for (const MemberId id : participant.members) {
    const Member* member = Find(id);
    if (member->state == MemberState::kPreparing) failure->Add(group::SuspectOf(*member));
  }
}

void Group::Impl::FailUnready() {
  for (uint32_t i = 0; i < update->participants.size(); ++i) {
    Participant& participant = update->participants[i];
    if (participant.evicted || participant.ready) continue;
    if (update->state == UpdateState::kEnding) return;
    const auto late =
        std::find_if(participant.members.begin(), participant.members.end(),
                     [this](MemberId id) { return Find(id)->state == MemberState::kPreparing; });
    GiveUp why{fmt::format(
        "{} did not answer Ready within {}", Label(*late),
        group::Seconds(std::min(limits.ready_limit, update->deadline - update->started)))};
    why.kind = GiveUpClass::kDeadline;
    SuspectUnready(participant, &why.failure);
    why.begin_code = absl::StatusCode::kDeadlineExceeded;
    FailEngine(i, why);
  }
}

BeginReply Group::Impl::MakeBeginReply() const {
  BeginReply reply;
  reply.update = update->id;
  reply.remaining = update->deadline - now;
  reply.instances =
      static_cast<int>(std::count(update->evicted.begin(), update->evicted.end(), false));
  reply.leasable_slots = ledger.LeasableBy(spec.trainer_ranks);
  return reply;
}

void Group::Impl::On(const DataPlaneState& e) {
  if (update != nullptr && update->id == e.update) update->data_plane_up = e.up;
}

void Group::Impl::OpenDataIfReady() {
  if (update->state != UpdateState::kPreparing) return;
  if (std::any_of(update->participants.begin(), update->participants.end(),
                  [](const Participant& p) { return !p.evicted && !p.ready; })) {
    return;
  }
  if (!update->data_plane_up) {
    // Every rank is ready, so no rank can be late. The coordinator limits the time in which the
    // data plane must come up.
    update->ready_deadline = update->deadline;
    return;
  }
  Step(&update->state, UpdateTrigger::kAllReady);
  update->data_began = now;
  for (auto& [rank, progress] : update->trainers) {
    Step(&Find(progress.member)->state, MemberTrigger::kReady);
    for (const auto& request : std::exchange(progress.begins, {})) {
      Finish(request, absl::OkStatus(), MakeBeginReply());
    }
  }
  if (CatchUpRuns()) {
    // In a catch-up nothing is pushed, and no trainer has to commit.
    Step(&update->state, UpdateTrigger::kAllCommitted);
    update->data_ended = now;
  }
  Changed();
  TakeOneCalls();
}

}  // namespace refitd
