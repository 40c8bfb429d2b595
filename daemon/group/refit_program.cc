#include "daemon/group/refit_program.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"

namespace refitd::group {

// ---- UpdateProgram ----

void UpdateProgram::Use(const std::shared_ptr<PlannedRefit>& compiled,
                        std::vector<MemberId> sources) {
  compiled_ = compiled;
  update_.use = ProgramUse{compiled->id, compiled->plan, participants_.nodes(), std::move(sources),
                           compiled->catch_up};
}

void UpdateProgram::Clear() {
  update_.use.reset();
  compiled_.reset();
}

bool UpdateProgram::Moves(std::string_view tensor) const {
  if (!exists()) return false;
  const std::vector<TensorSpec>& tensors = update_.use->plan->routes.tensors;
  const auto at =
      std::lower_bound(tensors.begin(), tensors.end(), tensor,
                       [](const TensorSpec& t, std::string_view n) { return t.name < n; });
  return at != tensors.end() && at->name == tensor && !LeavesOut(tensor);
}

bool UpdateProgram::Contains(std::string_view tensor) const {
  if (!exists()) return false;
  const std::vector<std::string>& unwanted = content().unwanted;
  return Moves(tensor) || std::binary_search(unwanted.begin(), unwanted.end(), tensor);
}

// Whether the plan lists the tensor and does not move it: trainers push it, only engines have it,
// or no engine wants it.
bool UpdateProgram::LeavesOut(std::string_view tensor) const {
  const auto in = [tensor](const std::vector<std::string>& names) {
    return std::binary_search(names.begin(), names.end(), tensor);
  };
  return in(compiled_->key.pushed) || members_.declared()->engine_only(tensor) ||
         in(content().unwanted);
}

void UpdateProgram::TouchSources(int by) {
  for (const MemberId source : update_.use->sources) members_.Touch(source, by);
}

// Before the program runs, ranks that hold the same elements are compared: all such boxes on the
// first version after a registration, a share of them on each later version.
void UpdateProgram::Compare(const std::optional<ReplicaFraction>& part) {
  if (!part.has_value()) {
    phase_ = Phase::kCompared;
  } else {
    phase_ = Phase::kComparing;
    TouchSources(1);
    out_.Do(StartCompare{update_.id, *part});
    out_.Changed();
  }
}

void UpdateProgram::CompareEarly() {
  if (!exists() || phase_ != Phase::kNone) return;
  const std::optional<ReplicaFraction> part = PartToCompare();
  if (part != std::optional(ReplicaFraction())) Compare(part);
}

// The program runs after every part, so that collectives have one order (P7).
void UpdateProgram::RunIfDue(PartSeq last, bool data_plane_up) {
  if (phase_ == Phase::kNone) Compare(PartToCompare());
  if (phase_ != Phase::kCompared || !data_plane_up || !TakeSlots()) return;
  destinations_ = participants_.Destinations();
  for (const uint32_t d : destinations_) {
    participants_.WriteFirst(participants_.catalog().instance_of(d));
  }
  participants_.Touch(destinations_, 1);
  TouchSources(1);
  phase_ = Phase::kRunning;
  out_.Do(StartRefit{update_.id, last, taken_, participants_.skip_destination()});
  out_.Changed();
}

std::vector<std::shared_ptr<const Layout>> UpdateProgram::SourceLayouts() const {
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (const MemberId source : update_.use->sources) {
    const Member* const rank = members_.Find(source);  // null: it was lost after its bytes had gone
    layouts.push_back(rank == nullptr ? nullptr : rank->layout);
  }
  return layouts;
}

// The update's in-place ranks, each with the number of its layout.
std::vector<std::pair<MemberId, uint64_t>> UpdateProgram::DestinationBindings() const {
  std::vector<std::pair<MemberId, uint64_t>> bindings;
  for (const MemberId member : participants_.catalog().destinations()) {
    const Member* const rank = members_.Find(member);  // null: it was lost
    bindings.emplace_back(member, rank == nullptr ? 0 : rank->registrations);
  }
  return bindings;
}

// The share of the replicas to compare now; nullopt: there is nothing to compare. With layouts for
// which the program did not run before, daemons are asked even if there are no replicas: they look
// for sources and destinations that share memory before anything is written (P11).
std::optional<ReplicaFraction> UpdateProgram::PartToCompare() const {
  const Replicas& replicas = update_.use->plan->replicas;
  if (compiled_->compared_layouts != SourceLayouts()) return ReplicaFraction();
  if (replicas.boxes.empty()) {
    const bool bound = compiled_->destination_bindings == DestinationBindings();
    return bound ? std::nullopt : std::optional(ReplicaFraction());
  }
  return NextFraction(replicas, compiled_->next_hash, limits_.compare_every);
}

bool UpdateProgram::EndCompare() {
  if (!comparing()) return false;
  phase_ = Phase::kCompared;
  TouchSources(-1);
  return true;
}

void UpdateProgram::NoteInstalled() {
  if (!exists()) return;
  std::vector<std::shared_ptr<const Layout>> layouts = SourceLayouts();
  compiled_->destination_bindings = DestinationBindings();
  if (layouts == compiled_->compared_layouts) {
    const ReplicaFraction part =
        NextFraction(update_.use->plan->replicas, compiled_->next_hash, limits_.compare_every);
    compiled_->next_hash = part.last + 1;  // after the greatest hash: 0
  } else if (compared_) {
    compiled_->compared_layouts = std::move(layouts);
  }
}

// Between daemons bytes pass through slots: one to send from and one to receive into; two of each
// if enough are free, so that one round is packed while another is on the wire. Chains are planned
// for a number of pairs, and wait for that many.
bool UpdateProgram::TakeSlots() {
  constexpr int kLeast = 2;
  constexpr int kMost = 4;
  if (update_.use->plan->routes.wire_bytes == 0) return true;
  const int chains = 2 * static_cast<int>(update_.use->plan->routes.relay.lag);
  if (slots_.free() < std::max(kLeast, chains)) return false;
  const int take = chains > 0 ? chains : slots_.free() >= kMost ? kMost : kLeast;
  for (int i = 0; i < take; ++i) taken_.push_back(*slots_.Grant());
  return true;
}

int64_t UpdateProgram::waits_for_slots() const {
  if (phase_ != Phase::kCompared) return 0;
  return std::max<int64_t>(2, 2 * update_.use->plan->routes.relay.lag);
}

bool UpdateProgram::EndRun() {
  if (!running()) return false;
  phase_ = Phase::kDone;
  participants_.Touch(destinations_, -1);
  TouchSources(-1);
  for (const SlotGrant& slot : std::exchange(taken_, {})) slots_.Release(slot);
  return true;
}

void UpdateProgram::CheckInvariants() const {
  REFITD_CHECK(exists() ? compiled_ != nullptr && update_.use->plan != nullptr
                        : phase_ == Phase::kNone);
  REFITD_CHECK(taken_.empty() || running());
  for (const SlotGrant& grant : taken_) REFITD_CHECK(slots_.IsStaging(grant));
  // P1: no source takes part in the update that writes, unless it is a trainer's.
  if (!update_.from_engines()) return;
  for (const MemberId source : update_.use->sources) REFITD_CHECK(!participants_.Has(source));
}

// ---- RefitCompiler ----

absl::StatusOr<bool> RefitCompiler::Find(const Sources& sources,
                                         const UpdateParticipants& participants,
                                         UpdateProgram* program) {
  ProgramKey key = KeyOf(sources, participants);
  const std::shared_ptr<PlannedRefit>& kept = sources.catch_up ? catch_up_ : trainers_;
  if (kept != nullptr && kept->key == key) {
    REFITD_RETURN_IF_ERROR(kept->status);
    program->Use(kept, sources.members);
    return true;
  }
  // One program is compiled at a time: by the time the next can start, the update may need another.
  if (compiling_ == nullptr) Compile(std::move(key), sources, participants.catalog());
  return false;
}

// The inputs of the program that moves the pieces of these ranks to the update's in-place ranks.
ProgramKey RefitCompiler::KeyOf(const Sources& sources,
                                const UpdateParticipants& participants) const {
  const std::vector<NodeId>& nodes = participants.nodes();  // ascending
  const auto number = [&nodes](NodeId node) {
    return static_cast<uint32_t>(std::lower_bound(nodes.begin(), nodes.end(), node) -
                                 nodes.begin());
  };
  ProgramKey key;
  std::set<std::string> pushed;
  for (const MemberId id : sources.members) {
    const Member& member = *members_.Find(id);
    key.sources.push_back({number(member.node), 0, member.layout_digest, {}});
    for (const uint32_t t : member.layout->pushed_tensors) {
      pushed.insert(member.layout->tensors[t].name);
    }
  }
  const Catalog& catalog = participants.catalog();
  if (sources.some_push) AddLacking(sources, catalog, &pushed);
  // P11: what is pushed is not what the trainers' registered memory has, so nothing is derived from
  // that.
  if (!pushed.empty()) catalog.AddDerived(&pushed);
  for (uint32_t d = 0; d < catalog.destinations().size(); ++d) {
    const Member& member = *members_.Find(catalog.destinations()[d]);
    key.destinations.push_back(
        {number(member.node), catalog.instance_of(d), member.layout_digest, member.layout->ties});
  }
  key.pushed.assign(pushed.begin(), pushed.end());
  key.nodes = static_cast<uint32_t>(nodes.size());
  key.relay_lag = RelayLag();
  return key;
}

void RefitCompiler::Compile(ProgramKey key, const Sources& sources, const Catalog& catalog) {
  compiling_ = std::make_shared<PlannedRefit>();
  compiling_->id = ProgramId(++next_program_);
  PlanRefit compile;
  compile.program = compiling_->id;
  for (size_t i = 0; i < sources.members.size(); ++i) {
    const Member& member = *members_.Find(sources.members[i]);
    compile.sources.push_back({member.layout, key.sources[i].node, 0, member.label});
  }
  for (uint32_t d = 0; d < catalog.destinations().size(); ++d) {
    const Member& member = *members_.Find(catalog.destinations()[d]);
    compile.destinations.push_back(
        {member.layout, key.destinations[d].node, key.destinations[d].instance, member.label});
  }
  const GroupSpec& spec = members_.spec();
  compile.options.skip_tensors = key.pushed;
  compile.options.engine_only = members_.declared()->EngineOnlyNames();
  compile.options.unwanted_allowed = spec.unwanted_tensors;
  compile.options.relay_lag = key.relay_lag;
  compile.options.relay_slot_bytes = spec.slot_bytes;
  compile.options.cancelled = compiling_->cancelled;
  compiling_->catch_up = sources.catch_up;
  // A source instance may hold what a late instance does not.
  if (sources.catch_up) compile.options.unwanted_allowed = {"*"};
  compiling_->key = std::move(key);
  out_.Do(std::move(compile));
  out_.Changed();
}

// The lag of chains in the update's program is the number of pairs of slots that its run takes.
// Only free slots count: a slot that is taken is kept by its holder beyond an earlier update, and
// the wait for it could last until the deadline (P4).
uint32_t RefitCompiler::RelayLag() const {
  return static_cast<uint32_t>(std::min<int64_t>(slots_.free() / 2, kMaxRelayLag));
}

// Ranks without shards push: tensors that no layout has are theirs to bring, and Commit checks that
// they came.
void RefitCompiler::AddLacking(const Sources& sources, const Catalog& catalog,
                               std::set<std::string>* pushed) const {
  absl::flat_hash_set<std::string_view> in_layouts;
  absl::flat_hash_set<uint64_t> seen;  // ranks often have equal layouts
  for (const MemberId source : sources.members) {
    const Member& member = *members_.Find(source);
    if (!seen.insert(member.layout_digest).second) continue;
    for (const TensorSpec& tensor : member.layout->tensors) in_layouts.insert(tensor.name);
  }
  catalog.AddLacking(in_layouts, pushed);
}

void RefitCompiler::Take(const RefitPlanned& e) {
  if (compiling_ == nullptr || compiling_->id != e.program) return;
  if (e.status.code() == absl::StatusCode::kCancelled) {
    // The program was for an update that is over; an update that waits now asks for its own.
    compiling_ = nullptr;
    out_.Changed();
    return;
  }
  std::shared_ptr<PlannedRefit>& kept = compiling_->catch_up ? catch_up_ : trainers_;
  kept = std::move(compiling_);
  kept->status = e.status;
  kept->plan = e.plan;
  if (kept->status.ok() && kept->plan == nullptr) {
    kept->status = absl::InternalError("no plan came");
  }
}

uint32_t RefitCompiler::chain_daemons() const {
  if (trainers_ == nullptr || trainers_->plan == nullptr) return 0;
  const RelayShape& relay = trainers_->plan->routes.relay;
  return relay.lag == 0 ? 0 : relay.longest;
}

void RefitCompiler::CheckInvariants() const {
  for (const auto& kept : {trainers_, catch_up_}) {
    if (kept == nullptr) continue;
    REFITD_CHECK(kept->id.value() <= next_program_);
    REFITD_CHECK(!kept->status.ok() || kept->plan != nullptr);
  }
  REFITD_CHECK(trainers_ == nullptr || !trainers_->catch_up);
  REFITD_CHECK(catch_up_ == nullptr || catch_up_->catch_up);
}

}  // namespace refitd::group
