// Compiled refit: the trainers' registered layouts, the program, and the one call of a version.
//
// A rank with a registered layout ends an update with Refit, which names the layout's binding
// generation, instead of Commit. The program is compiled before engines are prepared, is kept while
// the layouts stay the same, and runs when every trainer rank has committed.
#include <algorithm>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "daemon/group/group_impl.h"

namespace refitd {
namespace {

BeginEvent BeginOf(const RefitEvent& e) {
  BeginEvent begin;
  begin.version = e.version;
  begin.duration = e.duration;
  begin.verification = e.verification;
  begin.evict_late = e.evict_late;
  return begin;
}

}  // namespace

// ---- the call ----

void Group::Impl::On(const RefitEvent& e) {
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  const std::string what =
      fmt::format("refit to version {} after {} buckets", e.version, e.bucket_count);
  if (Repeated(member, CallKind::kRefit, e.request_id, what, e.call)) return;
  const auto begun =
      update == nullptr ? decltype(update->trainers.end()){} : update->trainers.find(member->rank);
  // A call that names the update that it ends never opens an update.
  const bool joined = e.update != UpdateId() ||
                      (update != nullptr && update->version == e.version &&
                       begun != update->trainers.end() && member->state == MemberState::kReady);
  absl::Status status = CheckRefit(*member, e, joined);
  if (!status.ok()) {
    Refuse(e.call, std::move(status));
    return;
  }
  if (joined) {
    TrainerProgress& progress = begun->second;
    progress.commits.push_back(Track(member, CallKind::kRefit, e.request_id, what, e.call));
    if (!progress.committed) TakeCommit(member, &progress, e.bucket_count);
    return;
  }
  if (CatchUpRuns()) return Defer(e, e.duration);
  if (update == nullptr) Open(BeginOf(e));
  TrainerProgress& progress = Join(member);
  progress.one_call = progress.begins.empty();
  progress.announced = 0;  // the commit takes effect when the engines are ready
  progress.commits.push_back(Track(member, CallKind::kRefit, e.request_id, what, e.call));
  Changed();
}

absl::Status Group::Impl::CheckRefit(const Member& member, const RefitEvent& e, bool joined) {
  if (IsAnother(e.update)) return Gone(e.update, e.version);
  if (member.layout == nullptr) {
    return Precondition("{} has no layout: register it first", member.label);
  }
  if (joined) {
    const absl::StatusOr<TrainerProgress*> found = OpenFor(member, e.version, e.update);
    if (!found.ok()) return found.status();
    if ((*found)->without_layout) {
      return Precondition("{} has begun version {} without its layout: it ends it with Commit",
                          member.label, e.version);
    }
    CommitEvent commit;
    commit.version = e.version;
    commit.bucket_count = e.bucket_count;
    return CheckCommit(**found, commit);
  }
  if (e.bucket_count != 0) {
    return Precondition("bucket_count: {}, but {} has not begun version {}", e.bucket_count,
                        member.label, e.version);
  }
  return CheckBegin(member, BeginOf(e));
}

// An empty layout withdraws the layout before it. Its rank may still end an update with Refit,
// which then moves nothing of that rank.
bool Group::Impl::HasShards(const Member& member) {
  return !member.engine && member.layout != nullptr && !member.layout->pieces.empty();
}

// Takes the commits of ranks that began the update with Refit: no other call of theirs follows.
void Group::Impl::TakeOneCalls() {
  for (auto& [rank, progress] : update->trainers) {
    if (update->state != UpdateState::kData || !progress.announced.has_value()) continue;
    TakeAnnounced(Find(progress.member), &progress);
  }
}

// ---- the program ----

// True: the update has no shards to move, or its program is ready. False: the program is being
// compiled. Not OK: there can be no program.
absl::StatusOr<bool> Group::Impl::ProgramAtHand() {
  update->program.reset();
  std::vector<MemberId> sources;
  for (const auto& [rank, progress] : update->trainers) {
    const Member& member = *Find(progress.member);
    if (HasShardsIn(member, progress)) sources.push_back(member.id);
  }
  if (CatchUpRuns()) sources = update->catch_up->sources;
  if (sources.empty()) {
    if (std::all_of(update->trainers.begin(), update->trainers.end(),
                    [](const auto& trainer) { return trainer.second.one_call; })) {
      return Precondition("no trainer rank has a piece in its layout: nothing can be refitted");
    }
    return true;
  }
  if (!update->readers.empty()) {
    // The loader rank would be told committed without the tensors that the program moves (P1).
    const Member& reader = *Find(update->readers.begin()->first);
    return Precondition("{} takes {} delivery: it gets what is pushed, not what layouts bring",
                        reader.label, Name(reader.delivery));
  }
  group::ProgramKey key = KeyOf(sources);
  const std::shared_ptr<group::PlannedRefit>& kept = CatchUpRuns() ? catch_up_program : program;
  if (kept != nullptr && kept->key == key) {
    REFITD_RETURN_IF_ERROR(kept->status);
    update->compiled = kept;
    update->program = ProgramUse{kept->id, kept->plan, update->nodes, sources, CatchUpRuns()};
    return true;
  }
  // One program is compiled at a time: by the time the next can start, the update may need another.
  if (compiling == nullptr) Compile(std::move(key), sources);
  return false;
}

// The inputs of the program that moves the pieces of these ranks to the update's in-place ranks.
group::ProgramKey Group::Impl::KeyOf(const std::vector<MemberId>& sources) const {
  const std::vector<NodeId>& nodes = update->nodes;  // ascending
  const auto number = [&nodes](NodeId node) {
    return static_cast<uint32_t>(std::lower_bound(nodes.begin(), nodes.end(), node) -
                                 nodes.begin());
  };
  group::ProgramKey key;
  std::set<std::string> pushed;
  for (const MemberId id : sources) {
    const Member& member = *Find(id);
    key.sources.push_back({number(member.node), 0, member.layout_digest, {}});
    for (const uint32_t t : member.layout->pushed_tensors) {
      pushed.insert(member.layout->tensors[t].name);
    }
  }
  if (sources.size() < update->trainers.size()) AddUnheld(sources, &pushed);
  const Catalog& known = *update->catalog;
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    const Member& member = *Find(known.destinations()[d]);
    key.destinations.push_back(
        {number(member.node), known.instance_of(d), member.layout_digest, member.layout->ties});
  }
  key.pushed.assign(pushed.begin(), pushed.end());
  key.nodes = static_cast<uint32_t>(nodes.size());
  key.relay_lag = RelayLag();
  return key;
}

void Group::Impl::Compile(group::ProgramKey key, const std::vector<MemberId>& sources) {
  compiling = std::make_shared<group::PlannedRefit>();
  compiling->id = ProgramId(++next_program);
  PlanRefit compile;
  compile.program = compiling->id;
  const Catalog& known = *update->catalog;
  for (size_t i = 0; i < sources.size(); ++i) {
    const Member& member = *Find(sources[i]);
    compile.sources.push_back({member.layout, key.sources[i].node, 0, member.label});
  }
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    const Member& member = *Find(known.destinations()[d]);
    compile.destinations.push_back(
        {member.layout, key.destinations[d].node, key.destinations[d].instance, member.label});
  }
  compile.options.skip_tensors = key.pushed;
  compile.options.engine_only = declared->EngineOnlyNames();
  compile.options.unwanted_allowed = spec.unwanted_tensors;
  compile.options.relay_lag = key.relay_lag;
  compile.options.relay_slot_bytes = spec.slot_bytes;
  compile.options.cancelled = compiling->cancelled;
  compiling->catch_up = CatchUpRuns();
  // A source instance may hold what a late instance does not.
  if (CatchUpRuns()) compile.options.unwanted_allowed = {"*"};
  compiling->key = std::move(key);
  Do(std::move(compile));
  Changed();
}

// The lag of chains in the update's program is the number of pairs of slots that TakeProgramSlots
// takes. Only free slots count: a slot that is taken is kept by its holder beyond an earlier
// update, and the wait for it could last until the deadline (P4).
uint32_t Group::Impl::RelayLag() const {
  return static_cast<uint32_t>(std::min<int64_t>(ledger.free() / 2, kMaxRelayLag));
}

// Ranks without shards push: tensors that no layout has are theirs to bring, and Commit checks that
// they came.
void Group::Impl::AddUnheld(const std::vector<MemberId>& sources,
                            std::set<std::string>* pushed) const {
  absl::flat_hash_set<std::string_view> held;
  absl::flat_hash_set<uint64_t> seen;  // ranks often have equal layouts
  for (const MemberId source : sources) {
    const Member& member = *Find(source);
    if (!seen.insert(member.layout_digest).second) continue;
    for (const TensorSpec& tensor : member.layout->tensors) held.insert(tensor.name);
  }
  update->catalog->AddLacking(held, pushed);
}

void Group::Impl::On(const RefitPlanned& e) {
  if (compiling == nullptr || compiling->id != e.program) return;
  if (e.status.code() == absl::StatusCode::kCancelled) {
    // The program was for an update that is over; an update that waits now asks for its own.
    compiling = nullptr;
    Changed();
    return;
  }
  std::shared_ptr<group::PlannedRefit>& kept = compiling->catch_up ? catch_up_program : program;
  kept = std::move(compiling);
  kept->status = e.status;
  kept->plan = e.plan;
  if (kept->status.ok() && kept->plan == nullptr) {
    kept->status = absl::InternalError("no plan came");
  }
}

// Whether the program of the running update brings the tensor.
bool Group::Impl::Moves(std::string_view tensor) const {
  return Lists(tensor) && !LeavesOut(*update->compiled, tensor);
}

// Whether the plan of the running update lists the tensor.
bool Group::Impl::Lists(std::string_view tensor) const {
  if (!update->program.has_value()) return false;
  const std::vector<TensorSpec>& tensors = update->program->plan->routes.tensors;
  const auto at =
      std::lower_bound(tensors.begin(), tensors.end(), tensor,
                       [](const TensorSpec& t, std::string_view n) { return t.name < n; });
  return at != tensors.end() && at->name == tensor;
}

// Whether the sources of the running update's program hold the tensor, even if it is moved nowhere.
bool Group::Impl::InProgram(std::string_view tensor) const {
  if (Moves(tensor)) return true;
  if (!update->program.has_value()) return false;
  const std::vector<std::string>& unwanted = update->program->plan->content.unwanted;
  return std::binary_search(unwanted.begin(), unwanted.end(), tensor);
}

// A plan also lists tensors that it does not move.
bool Group::Impl::LeavesOut(const group::PlannedRefit& compiled, std::string_view tensor) const {
  const auto in = [tensor](const std::vector<std::string>& names) {
    return std::binary_search(names.begin(), names.end(), tensor);
  };
  return in(compiled.key.pushed) || declared->engine_only(tensor) ||
         in(compiled.plan->content.unwanted);
}

// ---- running it ----

void Group::Impl::TouchSources(int by) {
  for (const MemberId source : update->program->sources) Touch(source, by);
}

// The program runs after every part, so that collectives have one order (P7). Before it runs, ranks
// that hold the same elements are compared: all such boxes on the first version after a
// registration, a share of them on each later version.
void Group::Impl::RunProgramIfDue() {
  if (!update->program.has_value() || update->state != UpdateState::kSettling) return;
  if (update->next_start < update->end_part()) return;
  if (update->refit == group::RefitPhase::kNone) {
    if (const std::optional<ReplicaFraction> part = PartToCompare(); !part.has_value()) {
      update->refit = group::RefitPhase::kCompared;
    } else {
      update->refit = group::RefitPhase::kComparing;
      ++update->in_flight;
      TouchSources(1);
      Do(StartCompare{update->id, *part});
      Changed();
    }
  }
  if (update->refit == group::RefitPhase::kCompared && update->data_plane_up) StartProgram();
}

std::vector<std::shared_ptr<const Layout>> Group::Impl::SourceLayouts() const {
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (const MemberId source : update->program->sources) layouts.push_back(Find(source)->layout);
  return layouts;
}

// The update's in-place ranks, each with the number of its layout.
std::vector<std::pair<MemberId, uint64_t>> Group::Impl::DestinationBindings() const {
  std::vector<std::pair<MemberId, uint64_t>> bindings;
  for (const MemberId member : update->catalog->destinations()) {
    const Member* const rank = Find(member);  // null: it was lost
    bindings.emplace_back(member, rank == nullptr ? 0 : rank->registrations);
  }
  return bindings;
}

// The share of the replicas to compare now; nullopt: there is nothing to compare. With layouts for
// which the program did not run before, daemons are asked even if there are no replicas: they look
// for sources and destinations that share memory before anything is written (P11).
std::optional<ReplicaFraction> Group::Impl::PartToCompare() const {
  const Replicas& replicas = update->program->plan->replicas;
  if (update->compiled->compared_layouts != SourceLayouts()) return ReplicaFraction();
  if (replicas.boxes.empty()) {
    const bool bound = update->compiled->destination_bindings == DestinationBindings();
    return bound ? std::nullopt : std::optional(ReplicaFraction());
  }
  return NextFraction(replicas, update->compiled->next_hash, limits.compare_every);
}

void Group::Impl::On(const CompareDone& e) {
  if (update == nullptr || update->id != e.update ||
      update->refit != group::RefitPhase::kComparing) {
    return;
  }
  update->refit = group::RefitPhase::kCompared;
  --update->in_flight;
  TouchSources(-1);
  if (update->state == UpdateState::kEnding) return;
  if (!e.status.ok()) {
    GiveUp why{Message(e.status), GiveUpClass::kTransfer, FailureOf(e.status)};
    if (e.status.code() == absl::StatusCode::kDataLoss) why.kind = GiveUpClass::kVerification;
    // What is wrong with the tensors will be wrong again.
    if (e.status.code() == absl::StatusCode::kFailedPrecondition) why.commit_code = e.status.code();
    return Abandon(std::move(why));
  }
  update->compared = true;
}

// Only a version that was installed counts: another attempt may bring other bytes.
void Group::Impl::CountCompared() {
  group::PlannedRefit& compiled = *update->compiled;
  std::vector<std::shared_ptr<const Layout>> layouts = SourceLayouts();
  compiled.destination_bindings = DestinationBindings();
  if (layouts == compiled.compared_layouts) {
    const ReplicaFraction part =
        NextFraction(update->program->plan->replicas, compiled.next_hash, limits.compare_every);
    compiled.next_hash = part.last + 1;  // after the greatest hash: 0
  } else if (update->compared) {
    compiled.compared_layouts = std::move(layouts);
  }
}

// Between daemons bytes pass through slots: one to send from and one to receive into; two of each
// if enough are free, so that one round is packed while another is on the wire. Chains are planned
// for a number of pairs, and wait for that many.
bool Group::Impl::TakeProgramSlots() {
  constexpr int kLeast = 2;
  constexpr int kMost = 4;
  if (update->program->plan->routes.wire_bytes == 0) return true;
  const int chains = 2 * static_cast<int>(update->program->plan->routes.relay.lag);
  if (ledger.free() < std::max(kLeast, chains)) return false;
  const int take = chains > 0 ? chains : ledger.free() >= kMost ? kMost : kLeast;
  for (int i = 0; i < take; ++i) update->program_slots.push_back(*ledger.Grant());
  return true;
}

void Group::Impl::StartProgram() {
  if (!TakeProgramSlots()) return;
  const Catalog& known = *update->catalog;
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    if (update->skip_destination[d]) continue;
    update->program_destinations.push_back(d);
    WriteFirst(known.instance_of(d));
  }
  TouchDestinations(update->program_destinations, 1);
  TouchSources(1);
  ++update->in_flight;
  update->refit = group::RefitPhase::kRunning;
  Do(StartRefit{update->id, update->version, PartSeq(update->end_part()), update->program_slots,
                update->skip_destination, update->verification});
  Changed();
}

void Group::Impl::On(const RefitDone& e) {
  if (update == nullptr || update->id != e.update || update->refit != group::RefitPhase::kRunning) {
    return;
  }
  update->refit = group::RefitPhase::kDone;
  --update->in_flight;
  TouchDestinations(update->program_destinations, -1);
  TouchSources(-1);
  for (const SlotGrant& slot : std::exchange(update->program_slots, {})) {
    (void)ledger.Release(slot);
  }
  if (update->state == UpdateState::kEnding) return;
  if (!e.status.ok()) {
    return Abandon(FailedMove("the refit", e.status, e.failed_destination));
  }
  const size_t destinations = std::min(e.bytes_written.size(), update->bytes_written.size());
  for (size_t d = 0; d < destinations; ++d) update->bytes_written[d] += e.bytes_written[d];
  update->moved_bytes += update->program->plan->content.bytes;
  Changed();
}

}  // namespace refitd
