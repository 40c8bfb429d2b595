// Attach, loss and release of members; instances.
#include <algorithm>
#include <map>
#include <utility>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"
#include "transport/base/identity.h"

namespace refitd {
namespace {

// Adds the place to a label, as in "trainer rank 0 (pid 17)" or "engine a rank 0 (pid 17 on
// node-b)".
template <typename Identity>
std::string WithPlace(std::string label, const Identity& who) {
  const std::string pid = who.pid == 0 ? "" : fmt::format("pid {}", who.pid);
  const std::string place = who.daemon.empty() ? "" : "on " + who.daemon;
  if (pid.empty() && place.empty()) return label;
  return fmt::format("{} ({}{}{})", label, pid, pid.empty() || place.empty() ? "" : " ", place);
}

absl::Status CheckRank(int rank, int world_size, int max_world_size) {
  if (world_size < 1 || world_size > max_world_size) {
    return InvalidField("world_size", "world_size: {} is not in 1..{}", world_size, max_world_size);
  }
  if (rank < 0 || rank >= world_size) {
    return InvalidField("rank", "rank: {} is not in 0..{}", rank, world_size - 1);
  }
  return absl::OkStatus();
}

}  // namespace

group::Member* Group::Impl::Find(MemberId id) {
  const auto it = members.find(id);
  return it == members.end() ? nullptr : &it->second;
}

const group::Member* Group::Impl::Find(MemberId id) const {
  const auto it = members.find(id);
  return it == members.end() ? nullptr : &it->second;
}

group::Member* Group::Impl::Trainer(MemberId id, CallId call) {
  Member* member = Find(id);
  if (member == nullptr || member->state == MemberState::kLeaving) {
    Refuse(call, Error(absl::StatusCode::kUnauthenticated, "member {} is not attached", id));
    return nullptr;
  }
  if (member->engine) {
    Refuse(call,
           Error(absl::StatusCode::kFailedPrecondition, "{} is not a trainer rank", member->label));
    return nullptr;
  }
  if (member->unwelcome) {
    Refuse(call, WhyUnwelcome(*member));
    return nullptr;
  }
  if (update != nullptr) update->last_call = now;
  return member;
}

std::string Group::Impl::Label(MemberId id) const {
  const Member* member = Find(id);
  return member == nullptr ? fmt::format("member {}", id) : member->label;
}

Failure Group::Impl::Suspecting(MemberId id) const {
  Failure failure;
  if (const Member* member = Find(id); member != nullptr) failure.Add(group::SuspectOf(*member));
  return failure;
}

Failure Group::Impl::Unwritten(Version wanted, MemberId suspect) const {
  Failure failure = Suspecting(suspect);
  failure.version = wanted.value();
  failure.weights = Weights::kClean;
  failure.may_be_retried = true;
  return failure;
}

// After all trainers have left, trainers of another world size may attach. No update can run then,
// since the loss of any of its trainer ranks gives it up.
absl::Status Group::Impl::CheckTrainer(const TrainerIdentity& who) const {
  REFITD_RETURN_IF_ERROR(ownership.CheckTrainer(who.identity, who.any_owner));
  // Engines that came after the owner were compared with it.
  if (ownership.WouldOwn(who.identity)) REFITD_RETURN_IF_ERROR(CheckEnginesTake(who.identity));
  REFITD_RETURN_IF_ERROR(CheckRank(who.rank, who.world_size, kMaxTrainerRanks));
  if (who.world_size != spec.trainer_ranks && !trainers.empty()) {
    std::vector<std::string> attached;
    for (const auto& [rank, id] : trainers) attached.push_back(Label(id));
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} differs from the {} trainer_ranks of group {} while {} still {} "
                 "attached",
                 who.world_size, spec.trainer_ranks, name, group::Few(attached),
                 attached.size() == 1 ? "is" : "are");
  }
  if (const auto it = trainers.find(who.rank); it != trainers.end()) {
    return WithFailure(Error(absl::StatusCode::kAlreadyExists, "{} is attached", Label(it->second)),
                       Suspecting(it->second));
  }
  return absl::OkStatus();
}

// OK: no engine of the group says that it takes the weights of others alone (P9).
absl::Status Group::Impl::CheckEnginesTake(const std::string& identity) const {
  for (const auto& [id, member] : members) {
    if (member.takes_of.empty() || MatchesOwner(member.takes_of, identity)) continue;
    return Error(absl::StatusCode::kPermissionDenied,
                 "{} may not own group '{}': {} takes weights of {} alone (trainer_identity)",
                 identity, name, member.label, member.takes_of);
  }
  return absl::OkStatus();
}

// What the rank says of its version's owner, unless it does not take that owner's weights any more.
std::string Group::Impl::ClaimOf(const EngineIdentity& who) const {
  const std::string& takes = who.trainer_identity;
  return takes.empty() || MatchesOwner(takes, who.held_owner) ? who.held_owner : "";
}

// The owner has changed: trainers of the owner before leave the group once the update is over that
// they had begun. Copies of theirs may run until then (P6).
void Group::Impl::FindUnwelcome() {
  for (const auto& [rank, id] : trainers) {
    Member* const member = Find(id);
    member->unwelcome = !ownership.Stays(member->identity, member->any_owner);
    any_unwelcome = any_unwelcome || member->unwelcome;
  }
  if (!any_unwelcome) return;
  Log(LogLine::kWarning, fmt::format("{} owns the group now: trainers of another identity leave it",
                                     ownership.owner()));
  if (update == nullptr || CatchUpRuns() || update->state == UpdateState::kEnding) return;
  Abandon({fmt::format("another identity owns group '{}'", name), GiveUpClass::kOther});
}

absl::Status Group::Impl::WhyUnwelcome(const Member& member) const {
  absl::Status why = ownership.CheckTrainer(member.identity, member.any_owner);
  if (!why.ok()) return why;
  return absl::AbortedError("the group's owner has changed: attach again");
}

void Group::Impl::ExpelUnwelcome() {
  if (!any_unwelcome || (update != nullptr && !CatchUpRuns())) return;
  any_unwelcome = false;
  const std::map<int, MemberId> before = trainers;
  for (const auto& [rank, id] : before) {
    Member* const member = Find(id);
    if (!member->unwelcome) continue;
    absl::Status why = WhyUnwelcome(*member);
    if (member->touching > 0) {  // P6
      any_unwelcome = true;
      continue;
    }
    ledger.Forget(id);
    const NodeId node = member->node;
    LoseTrainer(member, Message(why));
    members.erase(id);
    LetInIfEmpty(node);
    Do(RefuseMember{id, std::move(why)});
  }
  Changed();
}

void Group::Impl::On(const TrainerAttached& e) {
  const TrainerIdentity& who = e.identity;
  if (absl::Status status = CheckTrainer(who); !status.ok()) {
    Do(RefuseMember{e.member, std::move(status)});
    return;
  }
  if (who.world_size != spec.trainer_ranks) {
    Log(LogLine::kInfo, fmt::format("trainers are {} ranks from now on, after {}", who.world_size,
                                    spec.trainer_ranks));
    spec.trainer_ranks = who.world_size;
  }
  Member member;
  member.id = e.member;
  member.rank = who.rank;
  member.world_size = who.world_size;
  member.pid = who.pid;
  member.node = who.node;
  member.daemon = who.daemon;
  member.label = WithPlace(fmt::format("trainer rank {}", who.rank), who);
  member.identity = who.identity;
  member.any_owner = who.any_owner;
  const bool displaces = ownership.EnterTrainer(who.identity);
  trainers[who.rank] = e.member;
  Admit(std::move(member));
  if (displaces) FindUnwelcome();
}

void Group::Impl::Admit(Member member) {
  const MemberId id = member.id;
  Log(LogLine::kInfo, fmt::format("{} attached", member.label));
  members.emplace(id, std::move(member));
  Do(WelcomeMember{id});
  if (state == GroupState::kDraining || state == GroupState::kDrained) Do(SendDraining{id});
  Changed();
}

// A rank may claim a version of this incarnation only if the group committed it. Claims about other
// incarnations can't be checked; they are believed, since all that they decide is that instances
// which hold no version are not ready.
absl::Status Group::Impl::CheckHeld(const EngineIdentity& who) const {
  if (!who.held_version.has_value() || who.held_origin != incarnation) return absl::OkStatus();
  if (version.has_value() && *who.held_version <= *version) return absl::OkStatus();
  return InvalidField(
      "held_version",
      "held_version: {} of held_origin {:x}, but {} in that incarnation of group {}",
      *who.held_version, who.held_origin,
      version.has_value() ? fmt::format("no version above {} was committed", *version)
                          : std::string("no version was committed"),
      name);
}

void Group::Impl::NoteInstalled(const Member& member) {
  committed_to[{member.instance, member.rank}] = {update->version, member.held_digest};
  if (committed_to.size() > static_cast<size_t>(kMaxEngineRanks))
    committed_to.erase(committed_to.begin());
}

// Whether the rank may hold the version that it says. The group knows what it committed to whom in
// its own incarnation; a replacement makes every instance dirty, also those that were away.
bool Group::Impl::Believed(const EngineIdentity& who) const {
  if (replaced.contains(who.held_origin)) return false;
  if (who.held_origin != incarnation) return true;
  const auto it = committed_to.find({who.instance, who.rank});
  if (it == committed_to.end() || it->second.first < *who.held_version) return false;
  const auto& [last, digest] = it->second;
  const bool known = last == *who.held_version && digest != 0 && who.held_digest != 0;
  return !known || digest == who.held_digest;
}

// The rank's daemon has read the memory that the rank registers: the version that the rank claims
// must be there (P11).
void Group::Impl::CheckContent(Member* member, uint64_t content) {
  if (content == 0 || !member->held.has_value() || content == member->held_digest) return;
  Log(LogLine::kWarning,
      fmt::format("{} claims version {}, but its memory holds something else: it holds no version",
                  member->label, member->held->version));
  member->held.reset();
}

absl::Status Group::Impl::CheckEngine(const EngineIdentity& who) const {
  REFITD_RETURN_IF_ERROR(CheckRank(who.rank, who.world_size, kMaxEngineRanks));
  REFITD_RETURN_IF_ERROR(CheckHeld(who));
  REFITD_RETURN_IF_ERROR(ownership.CheckEngine(who.trainer_identity, ClaimOf(who)));
  if (members.size() >= static_cast<size_t>(kMaxEngineRanks) + kMaxTrainerRanks) {
    return Error(absl::StatusCode::kResourceExhausted, "group {} has {} members already", name,
                 members.size());
  }
  const auto it = instances.find(who.instance);
  if (it == instances.end()) return absl::OkStatus();
  if (it->second.world_size != who.world_size) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} differs from the {} of the other ranks of instance {}",
                 who.world_size, it->second.world_size, who.instance);
  }
  if (const auto rank = it->second.ranks.find(who.rank); rank != it->second.ranks.end()) {
    return WithFailure(
        Error(absl::StatusCode::kAlreadyExists, "{} is attached", Label(rank->second)),
        Suspecting(rank->second));
  }
  return absl::OkStatus();
}

// A limit refuses what the rank declares: its layout, or a manifest, with which it was not taken
// in. Whoever waits for its instance hears that at once, since waiting does not help (P4).
void Group::Impl::RefuseDeclared(Member* member, const absl::Status& why) {
  member->refused =
      AboutSuspect(Prefixed(why, "{} is refused", member->label), group::SuspectOf(*member));
  last_refusal = member->refused;
  Log(LogLine::kWarning, Message(last_refusal));
  FailIfRefused(last_refusal);
  Changed();
}

// The first rank whose layout was refused, if the instance takes part in no update for that.
const group::Member* Group::Impl::RefusedRank(const Instance& instance) const {
  if (Available(instance)) return nullptr;
  for (const auto& [rank, id] : instance.ranks) {
    const Member* member = Find(id);
    if (!member->refused.ok()) return member;
  }
  return nullptr;
}

// Gives an update up that waits for instances, if too few are attached that were not refused.
// `why` OK: for the reason of which an attached rank was refused, if one was.
void Group::Impl::FailIfRefused(absl::Status why) {
  if (update == nullptr || update->state != UpdateState::kOpening || CatchUpRuns()) return;
  int left = 0;
  for (const auto& [instance_name, instance] : instances) {
    const Member* refused = RefusedRank(instance);
    if (refused == nullptr) ++left;
    if (refused != nullptr && why.ok()) why = refused->refused;
  }
  if (why.ok() || left >= std::max(spec.min_instances, 1)) return;
  GiveUp give_up{Message(why), GiveUpClass::kOther, FailureOf(why)};
  give_up.begin_code = why.code();
  Abandon(std::move(give_up));
}

void Group::Impl::On(const EngineAttached& e) {
  const EngineIdentity& who = e.identity;
  Member member;
  member.id = e.member;
  member.engine = true;
  member.instance = who.instance;
  member.rank = who.rank;
  member.world_size = who.world_size;
  member.pid = who.pid;
  member.node = who.node;
  member.daemon = who.daemon;
  member.label = WithPlace(fmt::format("engine {} rank {}", who.instance, who.rank), who);
  absl::Status status = CheckEngine(who);
  if (status.ok() && !who.refused.ok()) {
    RefuseDeclared(&member, who.refused);
    status = who.refused;
  }
  if (!status.ok()) {
    Do(RefuseMember{e.member, std::move(status)});
    return;
  }
  member.delivery = who.delivery;
  member.on_device = who.on_device;
  member.catch_up = who.catch_up;
  member.takes_of = who.trainer_identity;
  if (who.manifest.has_value()) {
    member.manifest = declared->Shared(*who.manifest);
    declared->Add(member.manifest);
    member.manifest_counted = who.counted;
  }
  if (who.held_version.has_value()) {
    if (Believed(who)) member.held = {*who.held_version, who.held_origin};
    member.held_digest = who.held_digest;
    if (who.held_origin != incarnation) NoteEarlierVersion();
  }
  Instance& instance = instances[who.instance];
  instance.name = who.instance;
  instance.world_size = who.world_size;
  instance.ranks[who.rank] = e.member;
  NoteStanding(who.instance);
  if (who.dirty) {
    // One rank with dirty weights makes the whole instance dirty (P2).
    const auto dirty = Next(instance.state, InstanceTrigger::kMarkDirty);
    if (dirty.has_value()) instance.state = *dirty;
    instance.reason = fmt::format("{} attached with dirty weights", member.label);
  }
  if (e.lacks_slots && update != nullptr && update->state == UpdateState::kOpening &&
      update->lacks_slots.empty()) {
    update->lacks_slots = member.label;
  }
  Admit(std::move(member));
  const std::string claim = ClaimOf(who);
  if (CheckEnginesTake(claim).ok() && ownership.EnterEngine(claim)) FindUnwelcome();
  CompleteIfAllHere(&instance);
}

void Group::Impl::On(const LayoutRegistered& e) {
  Member* member = Find(e.member);
  if (member == nullptr || member->state == MemberState::kLeaving) {
    if (e.call != CallId()) {
      Refuse(e.call,
             Error(absl::StatusCode::kFailedPrecondition, "member {} is not attached", e.member));
    }
    return;
  }
  // A new layout binds other memory, and nobody has said that this memory holds the version.
  if (member->layout != nullptr) member->held.reset();
  CheckContent(member, e.content);
  if (member->engine) look_for_catch_up = true;
  member->layout = e.layout;
  ++member->registrations;
  member->verified = false;
  member->refused = absl::OkStatus();
  member->layout_digest = e.digest.has_value() ? *e.digest : e.layout->Digest();
  if (e.call != CallId()) Do(Reply{e.call, absl::OkStatus(), EmptyReply{}});
  Changed();
  if (!member->engine) return;
  NoteStanding(member->instance);
  declared->Add(member->layout);
  const auto it = instances.find(member->instance);
  if (it != instances.end()) CompleteIfAllHere(&it->second);
}

// Instances without a version were ready until now, as in a group that never had one.
void Group::Impl::NoteEarlierVersion() {
  if (had_version) return;
  had_version = true;
  for (const auto& [instance_name, instance] : instances) NoteStanding(instance_name);
}

bool Group::Impl::Complete(const Instance& instance) const {
  if (static_cast<int>(instance.ranks.size()) != instance.world_size) return false;
  return std::all_of(instance.ranks.begin(), instance.ranks.end(), [this](const auto& rank) {
    const Member& member = *Find(rank.second);
    return !NeedsLayout(member.delivery) || member.layout != nullptr;
  });
}

const std::string* Group::Impl::WhyKeptOut(const Instance& instance) const {
  if (kept_out.empty()) return nullptr;
  for (const auto& [rank, id] : instance.ranks) {
    if (const auto it = kept_out.find(Find(id)->node); it != kept_out.end()) return &it->second;
  }
  return nullptr;
}

bool Group::Impl::Available(const Instance& instance) const {
  return Next(instance.state, InstanceTrigger::kPrepare).has_value() &&
         WhyKeptOut(instance) == nullptr;
}

// A node that has no member left is no longer kept out: members that attach later attach anew.
void Group::Impl::LetInIfEmpty(NodeId node) {
  if (!kept_out.contains(node)) return;
  const bool has_members = std::any_of(members.begin(), members.end(), [node](const auto& m) {
    return m.second.node == node && m.second.state != MemberState::kLeaving;
  });
  if (has_members) return;
  kept_out.erase(node);
  look_for_catch_up = true;
}

void Group::Impl::CompleteIfAllHere(Instance* instance) {
  const std::optional<InstanceState> next = Next(instance->state, InstanceTrigger::kComplete);
  if (!next.has_value() || !Complete(*instance)) return;
  instance->state = *next;
  look_for_catch_up = true;
  if (!group::IsDirty(instance->state)) instance->reason.clear();
  Changed();
}

// The version that all ranks of the instance hold, of the same incarnation.
std::optional<group::HeldVersion> Group::Impl::VersionOf(const Instance& instance) const {
  if (group::IsDirty(instance.state) || instance.state == InstanceState::kForming) {
    return std::nullopt;
  }
  std::optional<group::HeldVersion> common;
  for (const auto& [rank, id] : instance.ranks) {
    const std::optional<group::HeldVersion>& held = Find(id)->held;
    if (!held.has_value() || (common.has_value() && *common != *held)) return std::nullopt;
    common = held;
  }
  return common;
}

// Returns the content that the instance claims to hold; nullopt: it holds no version, or a rank
// brought no digest with it.
std::optional<Group::Impl::Claim> Group::Impl::ClaimOf(const Instance& instance) const {
  const std::optional<group::HeldVersion> held = VersionOf(instance);
  if (!held.has_value()) return std::nullopt;
  HashChain layouts(0);
  HashChain content(0);
  for (const auto& [rank, id] : instance.ranks) {
    const Member& member = *Find(id);
    if (member.held_digest == 0) return std::nullopt;
    layouts.Add(member.layout_digest);
    content.Add(member.held_digest);
  }
  return Claim{*held, layouts.hash(), content.hash()};
}

// Ranks with equal layouts hold equal bytes of one version. Where claims of one version differ,
// most of them decide; of equal numbers the smaller digest, so that the choice does not change with
// the order of events.
Group::Impl::Contents Group::Impl::FindContents() const {
  std::map<Contents::key_type, std::map<uint64_t, int>> claims;
  for (const auto& [instance_name, instance] : instances) {
    const std::optional<Claim> claim = ClaimOf(instance);
    if (claim.has_value()) ++claims[{claim->held, claim->layouts}][claim->content];
  }
  Contents most;
  for (const auto& [of, counts] : claims) {
    most[of] = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
                 return a.second < b.second;
               })->first;
  }
  return most;
}

// Versions of two incarnations can't be compared, so the number of instances decides: one that says
// too much does not make the others unready. Of equal numbers what was chosen before stays, and
// then the greater version counts.
void Group::Impl::FindLineage() {
  std::map<group::HeldVersion, int> holders;
  if (!version.has_value()) {
    for (const auto& [instance_name, instance] : instances) {
      if (const auto held = VersionOf(instance); held.has_value()) ++holders[*held];
    }
  }
  std::optional<group::HeldVersion> most;
  int count = 0;
  for (const auto& [held, instances_of_it] : holders) {
    const bool stays = instances_of_it == count && most != lineage;
    if (instances_of_it > count || stays) {
      most = held;
      count = instances_of_it;
    }
  }
  Contents brought = version.has_value() ? Contents() : FindContents();
  const bool same = lineage == most && contents == brought;
  lineage = most;
  contents = std::move(brought);
  if (same) return;
  for (const auto& [instance_name, instance] : instances) NoteStanding(instance_name);
}

// Whether the version, of an earlier incarnation, may be served beside what the others hold.
bool Group::Impl::OfLineage(const Instance& instance, const group::HeldVersion& held) const {
  if (held.origin == incarnation || version.has_value() || !lineage.has_value()) return true;
  if (const std::optional<Claim> claim = ClaimOf(instance); claim.has_value()) {
    const auto most = contents.find({claim->held, claim->layouts});
    if (most != contents.end() && most->second != claim->content) return false;
  }
  if (held.origin != lineage->origin || held.version > lineage->version) return false;
  return lineage->version.value() - held.version.value() <= spec.max_lag;
}

InstanceStanding Group::Impl::StandingOf(const std::string& instance_name) const {
  InstanceStanding standing{.instance = instance_name, .version = std::nullopt};
  const auto it = instances.find(instance_name);
  if (it == instances.end()) return standing;
  const Instance& instance = it->second;
  if (instance.state == InstanceState::kForming || instance.state == InstanceState::kFormingDirty) {
    standing.standing = Standing::kForming;
  } else if (group::IsDirty(instance.state)) {
    standing.standing = Standing::kDirty;
  } else {
    standing.standing =
        instance.state == InstanceState::kClean ? Standing::kClean : Standing::kUpdating;
  }
  // Versions of other incarnations can't be compared with the group's.
  const std::optional<group::HeldVersion> held = VersionOf(instance);
  const bool whole =
      standing.standing == Standing::kClean || standing.standing == Standing::kUpdating;
  if (whole && had_version && !held.has_value()) standing.standing = Standing::kEmpty;
  if (whole && held.has_value() && !OfLineage(instance, *held))
    standing.standing = Standing::kStray;
  if (held.has_value() && held->origin == incarnation) standing.version = held->version;
  return standing;
}

void Group::Impl::On(const MemberLost& e) {
  Member* member = Find(e.member);
  if (member == nullptr || member->state == MemberState::kLeaving) return;
  Log(LogLine::kInfo, fmt::format("{} left: {}", member->label, e.reason));
  Step(&member->state, MemberTrigger::kLost);
  // The member's slots are freed first, since steps that follow may need them.
  ledger.Forget(e.member);
  member->reads.clear();
  LetInIfEmpty(member->node);
  if (member->engine) {
    LoseEngine(member, e.reason);
  } else {
    LoseTrainer(member, e.reason);
  }
  ReleaseIfQuiet(e.member);
  Changed();
}

void Group::Impl::LoseEngine(Member* member, const std::string& reason) {
  const auto it = instances.find(member->instance);
  it->second.ranks.erase(member->rank);
  NoteStanding(member->instance);
  const bool last = it->second.ranks.empty();
  look_for_catch_up = true;
  Step(&it->second.state, last ? InstanceTrigger::kLastLost : InstanceTrigger::kRankLost);
  if (last) instances.erase(it);
  if (update == nullptr) return;
  const std::optional<uint32_t> participant = ParticipantOf(member->id);
  if (participant.has_value() && !update->participants[*participant].evicted) {
    Evict(*participant, {fmt::format("{} was lost: {}", member->label, reason),
                         GiveUpClass::kMemberLost, Suspecting(member->id)});
  }
}

void Group::Impl::LoseTrainer(Member* member, const std::string& reason) {
  trainers.erase(member->rank);
  if (CatchUpRuns()) {
    // A call that waits for the catch-up is lost too, as an update that the rank has begun would
    // be: no other rank can complete it.
    for (const Version wanted : DeferredOf(member->id)) {
      RefuseDeferred(wanted, WithFailure(Error(absl::StatusCode::kAborted,
                                               "the update to version {} is lost: {} was lost: {}",
                                               wanted, member->label, reason),
                                         Unwritten(wanted, member->id)));
    }
    return;
  }
  if (update == nullptr) return;
  Abandon({fmt::format("{} was lost: {}", member->label, reason), GiveUpClass::kMemberLost,
           Suspecting(member->id)});
}

void Group::Impl::Touch(MemberId id, int by) {
  Member* member = Find(id);
  REFITD_CHECK(member != nullptr && member->touching + by >= 0);
  member->touching += by;
  ReleaseIfQuiet(id);
}

void Group::Impl::TouchDestinations(const std::vector<uint32_t>& destinations, int by) {
  const Catalog& known = *update->catalog;
  for (const uint32_t d : destinations) {
    update->participants[known.instance_of(d)].touching += by;
    Touch(known.destinations()[d], by);
  }
}

void Group::Impl::ReleaseIfQuiet(MemberId id) {
  Member* member = Find(id);
  if (member->state != MemberState::kLeaving || member->touching > 0) return;
  Step(&member->state, MemberTrigger::kQuiet);
  members.erase(id);
  Do(ReleaseMember{id});
  Changed();
}

}  // namespace refitd
