#include "daemon/group/participants.h"

#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd::group {

// ---- assembling ----

absl::Status UpdateParticipants::Assemble(const TakesIn& takes_in,
                                          const std::vector<MemberId>& others,
                                          std::shared_ptr<const Catalog>* kept) {
  std::vector<Catalog::Rank> ranks;
  std::vector<std::string> names;
  std::vector<Participant> participants;
  for (const auto& [instance_name, instance] : members_.instances()) {
    if (!takes_in(instance)) continue;
    Participant& participant = participants.emplace_back();
    participant.instance = instance_name;
    const auto index = static_cast<uint32_t>(names.size());
    names.push_back(instance_name);
    for (const auto& [rank, id] : instance.ranks) {
      const Member& member = *members_.Find(id);
      participant.members.push_back(id);
      participant.shadowed = participant.shadowed || member.shadowed;
      const DeliveryMode mode = member.delivery;
      ranks.push_back({id, member.label, index, mode, NeedsLayout(mode) ? member.layout : nullptr,
                       DeclaresManifest(mode) ? member.manifest : nullptr});
    }
    participant.unready = participant.members.size();
  }
  const size_t instances = names.size();
  if (*kept == nullptr || (*kept)->ranks() != ranks || (*kept)->instances() != names) {
    REFITD_ASSIGN_OR_RETURN(*kept,
                            Catalog::Make(std::move(ranks), std::move(names), members_.declared()));
  }
  catalog_ = *kept;
  evicted_ = std::vector<bool>(instances);
  skip_destination_.resize(catalog_->destinations().size());
  bytes_written_.resize(catalog_->destinations().size());
  all_ = std::move(participants);
  participant_of_.clear();
  std::set<NodeId> nodes;
  for (uint32_t i = 0; i < all_.size(); ++i) {
    for (const MemberId id : all_[i].members) {
      participant_of_.emplace(id, i);
      nodes.insert(members_.Find(id)->node);
    }
  }
  for (const MemberId id : others) nodes.insert(members_.Find(id)->node);
  nodes_.assign(nodes.begin(), nodes.end());
  return absl::OkStatus();
}

void UpdateParticipants::Clear() {
  all_.clear();
  participant_of_.clear();
}

void UpdateParticipants::Prepare() {
  const Duration remaining = update_.deadline - out_.now();
  for (Participant& participant : all_) {
    if (participant.shadowed) continue;
    BeginPrepare(&participant);
    for (const MemberId id : participant.members) {
      out_.Do(SendPrepare{id, update_.version, update_.id, remaining, update_.tensor_count});
    }
  }
  out_.Changed();
}

void UpdateParticipants::BeginPrepare(Participant* participant) {
  participant->prepared = true;
  participant->asked = out_.now();
  Step(&members_.FindInstance(participant->instance)->state, InstanceTrigger::kPrepare);
  members_.NoteChanged(participant->instance);
  for (const MemberId id : participant->members) {
    Step(&members_.Find(id)->state, MemberTrigger::kPrepare);
  }
}

void UpdateParticipants::MarkStageable() {
  for (Participant& participant : all_) {
    if (!participant.shadowed) continue;
    participant.unready = 0;
    participant.ready = true;
  }
}

bool UpdateParticipants::HasToFlip() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const Participant& p) { return p.shadowed && !p.evicted; });
}

bool UpdateParticipants::TellStaged() {
  const auto paused = [](const Participant& p) { return !p.shadowed && !p.evicted; };
  if (std::any_of(all_.begin(), all_.end(), paused)) return false;
  const Duration remaining = update_.ready_deadline - out_.now();
  for (Participant& participant : all_) {
    if (participant.evicted) continue;
    for (const MemberId id : participant.members) {
      if (!members_.Find(id)->wants_staged) continue;
      participant.told_staged = true;
      participant.processing.insert(id);
      out_.Do(SendStaged{id, update_.version, update_.id, remaining, update_.content});
    }
  }
  return AnyProcessing();
}

void UpdateParticipants::MarkProcessed(MemberId member) {
  all_[participant_of_.at(member)].processing.erase(member);
  out_.Changed();
}

bool UpdateParticipants::AnyProcessing() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const Participant& p) { return !p.evicted && !p.processing.empty(); });
}

void UpdateParticipants::Flip() {
  const Duration remaining = update_.ready_deadline - out_.now();
  for (Participant& participant : all_) {
    if (!participant.shadowed || participant.evicted) continue;
    participant.processing.clear();
    participant.unready = participant.members.size();
    participant.ready = false;
    BeginPrepare(&participant);
    for (const MemberId id : participant.members) {
      out_.Do(SendFlip{id, update_.version, update_.id, remaining, update_.content});
    }
  }
  out_.Changed();
}

void UpdateParticipants::MarkReady(Member* member, std::optional<Duration> stopped,
                                   bool preparing) {
  Step(&member->state, MemberTrigger::kReady);
  Participant& participant = all_[participant_of_.at(member->id)];
  // No rank stops for this update before it is asked to (P10).
  const Duration longest = out_.now() - participant.asked;
  const TimePoint since = out_.now() - std::clamp(stopped.value_or(longest), Duration(0),
                                                  std::max(longest, Duration(0)));
  participant.stopped = std::min(participant.stopped.value_or(since), since);
  participant.ready = --participant.unready == 0;
  if (participant.ready && preparing) {
    Step(&members_.FindInstance(participant.instance)->state, InstanceTrigger::kAllReady);
  }
  out_.Changed();
}

bool UpdateParticipants::all_ready() const {
  return std::all_of(all_.begin(), all_.end(),
                     [](const Participant& p) { return p.evicted || p.ready; });
}

std::optional<MemberId> UpdateParticipants::FirstUnready(uint32_t index) const {
  const Participant& participant = all_[index];
  if (participant.evicted || participant.ready) return std::nullopt;
  for (const MemberId id : participant.members) {
    if (members_.Find(id)->state == MemberState::kPreparing) return id;
  }
  return std::nullopt;
}

std::vector<std::string> UpdateParticipants::Unready() const {
  std::vector<std::string> missing;
  for (const Participant& participant : all_) {
    if (participant.evicted) continue;
    for (const MemberId id : participant.members) {
      const Member& member = *members_.Find(id);
      if (member.state == MemberState::kPreparing) missing.push_back(member.label + " to be ready");
      if (participant.processing.contains(id)) missing.push_back(member.label + " to process it");
    }
  }
  return missing;
}

void UpdateParticipants::SuspectUnready(uint32_t index, Failure* failure) const {
  for (const MemberId id : all_[index].members) {
    const Member* member = members_.Find(id);
    if (member->state == MemberState::kPreparing || all_[index].processing.contains(id)) {
      failure->Add(SuspectOf(*member));
    }
  }
}

// ---- who takes part ----

std::vector<uint32_t> UpdateParticipants::Destinations() const {
  std::vector<uint32_t> destinations;
  for (uint32_t d = 0; d < skip_destination_.size(); ++d) {
    if (!skip_destination_[d]) destinations.push_back(d);
  }
  return destinations;
}

std::optional<uint32_t> UpdateParticipants::Of(MemberId member) const {
  const auto it = participant_of_.find(member);
  if (it == participant_of_.end() || all_[it->second].evicted) return std::nullopt;
  return it->second;
}

bool UpdateParticipants::Uses(MemberId member) const {
  const auto it = participant_of_.find(member);
  return it != participant_of_.end() &&
         (!all_[it->second].evicted || all_[it->second].touching > 0);
}

bool UpdateParticipants::HasInstance(const std::string& instance) const {
  return std::any_of(all_.begin(), all_.end(),
                     [&](const Participant& p) { return p.instance == instance && !p.evicted; });
}

std::vector<std::string> UpdateParticipants::Remaining() const {
  std::vector<std::string> remaining;
  for (const Participant& p : all_) {
    if (!p.evicted) remaining.push_back(p.instance);
  }
  return remaining;
}

std::set<NodeId> UpdateParticipants::NodesLeftBy(uint32_t index) const {
  std::set<NodeId> left;
  if (on_one_node()) return left;
  for (const MemberId id : all_[index].members) {
    const Member* member = members_.Find(id);
    if (member != nullptr && !AreOn(member->node)) left.insert(member->node);
  }
  return left;
}

bool UpdateParticipants::AreOn(NodeId node) const {
  const auto on_node = [this, node](MemberId id) {
    const Member* member = members_.Find(id);
    return member != nullptr && member->node == node;
  };
  return std::any_of(all_.begin(), all_.end(), [&](const Participant& p) {
    return !p.evicted && std::any_of(p.members.begin(), p.members.end(), on_node);
  });
}

// ---- writing ----

void UpdateParticipants::Touch(const std::vector<uint32_t>& destinations, int by) {
  for (const uint32_t d : destinations) {
    all_[catalog_->instance_of(d)].touching += by;
    members_.Touch(catalog_->destinations()[d], by);
  }
}

void UpdateParticipants::WriteFirst(uint32_t index) {
  Participant& participant = all_[index];
  if (participant.written) return;
  Instance& instance = *members_.FindInstance(participant.instance);
  instance.back.reset();
  // P2: what a shadowed instance serves is not touched.
  if (participant.shadowed) return;
  participant.written = true;
  Step(&instance.state, InstanceTrigger::kFirstWrite);
  members_.NoteChanged(participant.instance);
  instance.reason = fmt::format("version {} is being written", update_.version);
  for (const MemberId id : participant.members) members_.Find(id)->held.reset();
  out_.Changed();
}

void UpdateParticipants::AddWritten(const std::vector<int64_t>& bytes) {
  const size_t destinations = std::min(bytes.size(), bytes_written_.size());
  for (size_t d = 0; d < destinations; ++d) bytes_written_[d] += bytes[d];
}

absl::Status UpdateParticipants::WrittenInFull() const {
  for (const uint32_t d : Destinations()) {
    if (bytes_written_[d] == catalog_->expected_bytes(d)) continue;
    return WithFailure(Error(absl::StatusCode::kDataLoss,
                             "verification: {} bytes were written to {}, its layout has {}",
                             bytes_written_[d], catalog_->label(d), catalog_->expected_bytes(d)),
                       members_.Suspecting(catalog_->destinations()[d]));
  }
  return absl::OkStatus();
}

int64_t UpdateParticipants::WrittenBytes() const {
  int64_t bytes = 0;
  for (const uint32_t d : Destinations()) bytes += bytes_written_[d];
  return bytes;
}

int64_t UpdateParticipants::UnwrittenBytes() const {
  int64_t bytes = 0;
  for (const uint32_t d : Destinations()) bytes += catalog_->expected_bytes(d) - bytes_written_[d];
  return bytes;
}

// ---- the end ----

void UpdateParticipants::Evict(uint32_t index, const std::string& reason, const Failure& failure) {
  Participant& participant = all_[index];
  participant.evicted = true;
  participant.reason = reason;
  participant.failure = failure;
  evicted_[index] = true;
  for (uint32_t d = 0; d < skip_destination_.size(); ++d) {
    if (catalog_->instance_of(d) == index) skip_destination_[d] = true;
  }
  Instance* instance = members_.FindInstance(participant.instance);
  if (instance == nullptr) return;
  instance->reason = reason;
  const auto next = Next(instance->state, InstanceTrigger::kGiveUp);
  if (next.has_value()) instance->state = *next;
  members_.NoteChanged(participant.instance);
}

void UpdateParticipants::AbortEvictedIfQuiet() {
  for (Participant& participant : all_) {
    if (!participant.evicted || participant.informed || participant.touching > 0) continue;
    participant.informed = true;
    SendAborted(&participant, participant.reason, participant.failure);
  }
}

// Each member gets the outcome of its own instance, unless it was not sent the update.
void UpdateParticipants::SendAborted(Participant* participant, const std::string& reason,
                                     const Failure& failure) {
  if (!participant->prepared && !participant->told_staged) return;
  const Instance* instance = members_.FindInstance(participant->instance);
  const bool dirty = instance != nullptr && IsDirty(instance->state);
  Failure own = failure;
  own.version = update_.version.value();
  own.weights = Weights::kClean;
  if (dirty) own.AddDirty(participant->instance);
  for (const MemberId id : participant->members) {
    Member* member = members_.Find(id);
    if (member == nullptr || member->state == MemberState::kLeaving) continue;
    if (participant->prepared) {
      Step(&member->state, MemberTrigger::kOutcome);
      participant->flipped_back = participant->shadowed;
      participant->pause = out_.now() - PauseBegan(*participant);
    } else if (!member->wants_staged) {
      continue;
    }
    out_.Do(refitd::SendAborted{id, update_.version, reason, dirty, own});
  }
}

void UpdateParticipants::Abort(bool quiet, const std::string& reason, const Failure& failure) {
  for (Participant& participant : all_) {
    if (participant.evicted || participant.informed) continue;
    if (quiet && participant.touching > 0) continue;
    participant.informed = true;
    if (participant.prepared) {
      Instance& instance = *members_.FindInstance(participant.instance);
      Step(&instance.state, InstanceTrigger::kGiveUp);
      members_.NoteChanged(participant.instance);
      if (participant.written) instance.reason = reason;
    }
    SendAborted(&participant, reason, failure);
  }
}

void UpdateParticipants::Commit(const std::vector<uint64_t>& read_back, Versions* versions) {
  std::map<MemberId, uint64_t> digests;
  const std::vector<MemberId>& destinations = catalog_->destinations();
  for (size_t d = 0; d < std::min(destinations.size(), read_back.size()); ++d) {
    digests[destinations[d]] = read_back[d];
  }
  for (const Participant& participant : all_) {
    if (participant.evicted) continue;
    Instance& instance = *members_.FindInstance(participant.instance);
    instance.back = participant.shadowed ? versions->VerifiedOf(instance) : std::nullopt;
  }
  if (update_.content.has_value()) {
    versions->RollBack(update_.version);
  } else {
    versions->Commit(update_.version);
  }
  for (Participant& participant : all_) {
    if (!participant.evicted) CommitRanks(&participant, digests, versions);
  }
}

void UpdateParticipants::CommitRanks(Participant* participant,
                                     const std::map<MemberId, uint64_t>& digests,
                                     Versions* versions) {
  participant->pause = out_.now() - PauseBegan(*participant);
  Instance& instance = *members_.FindInstance(participant->instance);
  Step(&instance.state, InstanceTrigger::kCommit);
  members_.NoteChanged(participant->instance);
  instance.reason.clear();
  instance.installed = update_.id;
  for (const MemberId id : participant->members) {
    Member* member = members_.Find(id);
    const auto read = digests.find(id);
    const uint64_t digest = update_.content.has_value() ? member->back_digest
                            : read == digests.end()     ? 0
                                                        : read->second;
    member->back_digest = member->held_digest;
    versions->Install(member, digest);
    Step(&member->state, MemberTrigger::kOutcome);
    out_.Do(SendCommitted{id, update_.version, 0, "", member->held_digest, versions->content()});
  }
}

std::vector<InstanceOutcome> UpdateParticipants::Outcomes(bool committed, const std::string& reason,
                                                          const Failure& failure) const {
  std::vector<InstanceOutcome> outcomes = OutcomesSoFar();
  for (InstanceOutcome& outcome : outcomes) {
    const Participant& p = all_[static_cast<size_t>(&outcome - outcomes.data())];
    outcome.committed = committed && !p.evicted;
    outcome.failure = p.failure;
    if (outcome.committed || p.evicted) continue;
    outcome.reason = reason;
    outcome.failure = failure;
  }
  return outcomes;
}

std::vector<InstanceOutcome> UpdateParticipants::OutcomesSoFar() const {
  std::vector<InstanceOutcome> outcomes;
  for (const Participant& p : all_) {
    outcomes.push_back({.instance = p.instance,
                        .reason = p.reason,
                        .shadowed = p.shadowed,
                        .flipped_back = p.flipped_back,
                        .pause = p.pause});
  }
  return outcomes;
}

void UpdateParticipants::AddDirty(Failure* failure) const {
  for (const Participant& participant : all_) {
    const Instance* instance = members_.FindInstance(participant.instance);
    if (instance != nullptr && IsDirty(instance->state)) failure->AddDirty(participant.instance);
  }
}

void UpdateParticipants::CheckInvariants(UpdateState state) const {
  REFITD_CHECK(std::is_sorted(nodes_.begin(), nodes_.end()));
  REFITD_CHECK(all_.empty() || (catalog_ != nullptr && evicted_.size() == all_.size()));
  // Whether every rank has answered Ready and the outcome is not decided yet.
  const bool has_data = state == UpdateState::kData || state == UpdateState::kSettling ||
                        state == UpdateState::kVerifying || state == UpdateState::kStaged;
  const bool flips = state == UpdateState::kFlipping;
  for (size_t i = 0; i < all_.size(); ++i) {
    const Participant& participant = all_[i];
    REFITD_CHECK(evicted_[i] == participant.evicted);
    REFITD_CHECK(participant.touching >= 0 && participant.unready <= participant.members.size());
    REFITD_CHECK(!participant.ready || participant.unready == 0);
    REFITD_CHECK(participant.processing.empty() ||
                 (participant.told_staged && !participant.prepared));
    for (const MemberId member : participant.members) {
      const auto of = participant_of_.find(member);
      REFITD_CHECK(of != participant_of_.end() && of->second == i);
    }
    if (participant.evicted || !(has_data || flips)) continue;
    // P1: only ranks that are ready, and attached, are still in.
    REFITD_CHECK(participant.ready || (flips && participant.shadowed));
    const Instance* instance = members_.FindInstance(participant.instance);
    REFITD_CHECK(instance != nullptr);
    REFITD_CHECK(participant.prepared == (flips || !participant.shadowed));
    REFITD_CHECK(participant.prepared == InUpdate(instance->state));
    // P2: dirty from the first byte on.
    if (participant.written) REFITD_CHECK(IsDirty(instance->state));
  }
}

}  // namespace refitd::group
