#include "daemon/group/membership.h"

#include <algorithm>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/identity.h"

namespace refitd::group {
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

// Returns the owner that the rank names for its version; nobody, if the rank refuses that owner's
// weights by now.
std::string ClaimOf(const EngineIdentity& who) {
  const std::string& takes = who.trainer_identity;
  return takes.empty() || MatchesOwner(takes, who.held_owner) ? who.held_owner : "";
}

}  // namespace

std::string Seconds(Duration duration) {
  return fmt::format("{:g} s", std::chrono::duration<double>(duration).count());
}

std::string Few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

Suspect SuspectOf(const Member& member) {
  return {member.engine ? SuspectRole::kEngine : SuspectRole::kTrainer, member.daemon,
          member.instance, member.rank, member.pid};
}

Member MemberOf(const TrainerAttached& e) {
  const TrainerIdentity& who = e.identity;
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
  return member;
}

Member MemberOf(const EngineAttached& e) {
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
  member.delivery = who.delivery;
  member.on_device = who.on_device;
  member.catch_up = who.catch_up;
  member.wants_staged = who.wants_staged;
  member.takes_of = who.trainer_identity;
  return member;
}

Membership::Membership(std::string group, GroupSpec spec, Ownership::Rule owner_rule, Outbox* out,
                       Requests* requests)
    : out_(*out),
      requests_(*requests),
      group_(std::move(group)),
      spec_(std::move(spec)),
      ownership_(group_, std::move(owner_rule)),
      declared_(std::make_shared<TensorTable>(spec_.engine_only_tensors, spec_.unwanted_tensors)) {}

Member* Membership::Find(MemberId id) {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

const Member* Membership::Find(MemberId id) const {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

Instance* Membership::FindInstance(const std::string& name) {
  const auto it = instances_.find(name);
  return it == instances_.end() ? nullptr : &it->second;
}

const Instance* Membership::FindInstance(const std::string& name) const {
  const auto it = instances_.find(name);
  return it == instances_.end() ? nullptr : &it->second;
}

std::string Membership::Label(MemberId id) const {
  const Member* member = Find(id);
  return member == nullptr ? fmt::format("member {}", id) : member->label;
}

Failure Membership::Suspecting(MemberId id) const {
  Failure failure;
  if (const Member* member = Find(id); member != nullptr) failure.Add(SuspectOf(*member));
  return failure;
}

bool Membership::TrainsOn(NodeId node) const {
  return std::any_of(trainers_.begin(), trainers_.end(), [this, node](const auto& t) {
    const Member* member = Find(t.second);
    return member != nullptr && member->node == node;
  });
}

Member* Membership::Trainer(MemberId id, CallId call) {
  Member* member = Find(id);
  if (member == nullptr || member->state == MemberState::kLeaving) {
    out_.Refuse(call, Error(absl::StatusCode::kUnauthenticated, "member {} is not attached", id));
    return nullptr;
  }
  if (member->engine) {
    out_.Refuse(call, Error(absl::StatusCode::kFailedPrecondition, "{} is not a trainer rank",
                            member->label));
    return nullptr;
  }
  if (member->unwelcome) {
    out_.Refuse(call, WhyUnwelcome(*member));
    return nullptr;
  }
  requests_.NoteCall();
  return member;
}

// ---- attaching ----

// After all trainers have left, trainers of another world size may attach. No update can run then,
// since the loss of any of its trainer ranks gives it up.
absl::Status Membership::CheckTrainer(const TrainerIdentity& who) const {
  REFITD_RETURN_IF_ERROR(ownership_.CheckTrainer(who.identity, who.any_owner));
  // Engines that came after the owner were compared with it.
  if (ownership_.WouldOwn(who.identity)) REFITD_RETURN_IF_ERROR(CheckEnginesTake(who.identity));
  REFITD_RETURN_IF_ERROR(CheckRank(who.rank, who.world_size, kMaxTrainerRanks));
  if (who.world_size != spec_.trainer_ranks && !trainers_.empty()) {
    std::vector<std::string> attached;
    for (const auto& [rank, id] : trainers_) attached.push_back(Label(id));
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} differs from the {} trainer_ranks of group {} while {} still {} "
                 "attached",
                 who.world_size, spec_.trainer_ranks, group_, Few(attached),
                 attached.size() == 1 ? "is" : "are");
  }
  if (const auto it = trainers_.find(who.rank); it != trainers_.end()) {
    return WithFailure(Error(absl::StatusCode::kAlreadyExists, "{} is attached", Label(it->second)),
                       Suspecting(it->second));
  }
  return absl::OkStatus();
}

// OK: no engine of the group excludes the weights of this identity (P9).
absl::Status Membership::CheckEnginesTake(const std::string& identity) const {
  for (const auto& [id, member] : members_) {
    if (member.takes_of.empty() || MatchesOwner(member.takes_of, identity)) continue;
    return Error(absl::StatusCode::kPermissionDenied,
                 "{} may not own group '{}': {} takes weights of {} alone (trainer_identity)",
                 identity, group_, member.label, member.takes_of);
  }
  return absl::OkStatus();
}

absl::Status Membership::CheckEngine(const EngineIdentity& who, const absl::Status& held) const {
  REFITD_RETURN_IF_ERROR(CheckRank(who.rank, who.world_size, kMaxEngineRanks));
  REFITD_RETURN_IF_ERROR(held);
  REFITD_RETURN_IF_ERROR(ownership_.CheckEngine(who.trainer_identity, ClaimOf(who)));
  if (members_.size() >= static_cast<size_t>(kMaxEngineRanks) + kMaxTrainerRanks) {
    return Error(absl::StatusCode::kResourceExhausted, "group {} has {} members already", group_,
                 members_.size());
  }
  const auto it = instances_.find(who.instance);
  if (it == instances_.end()) return absl::OkStatus();
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

bool Membership::EnterTrainer(Member member, bool draining) {
  if (member.world_size != spec_.trainer_ranks) {
    out_.Log(LogLine::kInfo, fmt::format("trainers are {} ranks from now on, after {}",
                                         member.world_size, spec_.trainer_ranks));
    spec_.trainer_ranks = member.world_size;
  }
  const bool displaces = ownership_.EnterTrainer(member.identity);
  trainers_[member.rank] = member.id;
  Admit(std::move(member), draining);
  return displaces && FindUnwelcome();
}

bool Membership::EnterEngine(Member member, const EngineIdentity& who, bool draining) {
  if (who.manifest.has_value()) {
    member.manifest = declared_->Shared(*who.manifest);
    declared_->Add(member.manifest);
    member.manifest_counted = who.counted;
  }
  Instance& instance = instances_[who.instance];
  instance.name = who.instance;
  instance.world_size = who.world_size;
  instance.ranks[who.rank] = member.id;
  NoteChanged(who.instance);
  if (who.dirty) {
    // One rank with dirty weights makes the whole instance dirty (P2).
    const auto dirty = Next(instance.state, InstanceTrigger::kMarkDirty);
    if (dirty.has_value()) instance.state = *dirty;
    instance.reason = fmt::format("{} attached with dirty weights", member.label);
  }
  Admit(std::move(member), draining);
  CompleteIfAllHere(&instance);
  const std::string claim = ClaimOf(who);
  if (claim.empty() || !CheckEnginesTake(claim).ok()) return false;
  return ownership_.EnterEngine(claim) && FindUnwelcome();
}

void Membership::Admit(Member member, bool draining) {
  const MemberId id = member.id;
  out_.Log(LogLine::kInfo, fmt::format("{} attached", member.label));
  members_.emplace(id, std::move(member));
  out_.Do(WelcomeMember{id});
  if (draining) out_.Do(SendDraining{id});
  out_.Changed();
}

// The owner has changed: trainers of the owner before leave the group once the update is over that
// they had begun. Copies of theirs may run until then (P6).
bool Membership::FindUnwelcome() {
  for (const auto& [rank, id] : trainers_) {
    Member* const member = Find(id);
    member->unwelcome = !ownership_.Stays(member->identity, member->any_owner);
    any_unwelcome_ = any_unwelcome_ || member->unwelcome;
  }
  if (!any_unwelcome_) return false;
  out_.Log(LogLine::kWarning,
           fmt::format("{} owns the group now: trainers of another identity leave it", owner()));
  return true;
}

absl::Status Membership::WhyUnwelcome(const Member& member) const {
  absl::Status why = ownership_.CheckTrainer(member.identity, member.any_owner);
  if (!why.ok()) return why;
  return absl::AbortedError("the group's owner has changed: attach again");
}

// An instance flips as a whole.
absl::Status Membership::CheckShadowed(const Member& member, const LayoutRegistered& e) const {
  if (!member.engine || e.layout->pieces.empty()) return absl::OkStatus();
  for (const auto& [rank, id] : instances_.at(member.instance).ranks) {
    const Member& other = *Find(id);
    if (id == member.id || other.layout == nullptr || other.layout->pieces.empty()) continue;
    // The ranks that have a layout agree, so comparing with the first is enough.
    if (other.shadowed == e.shadowed) return absl::OkStatus();
    return InvalidField("layout.backs", "layout.backs: {} has {}, and {} has {}", member.label,
                        e.shadowed ? "backs" : "none", other.label, e.shadowed ? "none" : "backs");
  }
  return absl::OkStatus();
}

void Membership::Register(Member* member, const LayoutRegistered& e) {
  if (member->engine) ++changes_;
  member->shadowed = e.shadowed;
  member->layout = e.layout;
  ++member->registrations;
  member->verified = false;
  member->refused = absl::OkStatus();
  member->layout_digest = e.digest.has_value() ? *e.digest : e.layout->Digest();
  out_.Changed();
  if (!member->engine) return;
  NoteChanged(member->instance);
  declared_->Add(member->layout);
  Instance* const instance = FindInstance(member->instance);
  if (instance == nullptr) return;
  instance->back.reset();
  CompleteIfAllHere(instance);
}

void Membership::Withdraw(Member* member) {
  if (member->layout == nullptr) return;
  ++changes_;
  member->layout.reset();
  member->verified = false;
  Instance& instance = instances_.at(member->instance);
  instance.back.reset();
  Step(&instance.state, InstanceTrigger::kRankLost);
  NoteChanged(member->instance);
  out_.Changed();
}

void Membership::CompleteIfAllHere(Instance* instance) {
  const std::optional<InstanceState> next = Next(instance->state, InstanceTrigger::kComplete);
  if (!next.has_value() || !Complete(*instance)) return;
  instance->state = *next;
  ++changes_;
  if (!IsDirty(instance->state)) instance->reason.clear();
  out_.Changed();
}

void Membership::RefuseDeclared(Member* member, const absl::Status& why) {
  member->refused = AboutSuspect(Prefixed(why, "{} is refused", member->label), SuspectOf(*member));
  last_refusal_ = member->refused;
  out_.Log(LogLine::kWarning, Message(last_refusal_));
  out_.Changed();
}

// The first rank whose layout was refused, if the instance takes part in no update for that.
const Member* Membership::RefusedRank(const Instance& instance) const {
  if (Available(instance)) return nullptr;
  for (const auto& [rank, id] : instance.ranks) {
    const Member* member = Find(id);
    if (!member->refused.ok()) return member;
  }
  return nullptr;
}

absl::Status Membership::TooFewLeft(absl::Status why) const {
  int left = 0;
  for (const auto& [instance_name, instance] : instances_) {
    const Member* refused = RefusedRank(instance);
    if (refused == nullptr) ++left;
    if (refused != nullptr && why.ok()) why = refused->refused;
  }
  return left >= std::max(spec_.min_instances, 1) ? absl::OkStatus() : why;
}

// ---- leaving ----

void Membership::Lose(Member* member) {
  Step(&member->state, MemberTrigger::kLost);
  LetInIfEmpty(member->node);
  out_.Changed();
  if (!member->engine) {
    trainers_.erase(member->rank);
    return;
  }
  const auto it = instances_.find(member->instance);
  it->second.ranks.erase(member->rank);
  it->second.back.reset();
  NoteChanged(member->instance);
  const bool last = it->second.ranks.empty();
  ++changes_;
  Step(&it->second.state, last ? InstanceTrigger::kLastLost : InstanceTrigger::kRankLost);
  if (last) instances_.erase(it);
}

void Membership::Touch(MemberId id, int by) {
  Member* member = Find(id);
  REFITD_CHECK(member != nullptr && member->touching + by >= 0);
  member->touching += by;
  ReleaseIfQuiet(id);
}

void Membership::ReleaseIfQuiet(MemberId id) {
  Member* member = Find(id);
  if (member->state != MemberState::kLeaving || member->touching > 0) return;
  Step(&member->state, MemberTrigger::kQuiet);
  members_.erase(id);
  requests_.Forget(id);
  out_.Do(ReleaseMember{id});
  out_.Changed();
}

std::vector<MemberId> Membership::TakeUnwelcome() {
  any_unwelcome_ = false;
  std::vector<MemberId> leaving;
  for (const auto& [rank, id] : trainers_) {
    const Member& member = *Find(id);
    if (!member.unwelcome) continue;
    if (member.touching > 0) {  // P6
      any_unwelcome_ = true;
    } else {
      leaving.push_back(id);
    }
  }
  return leaving;
}

void Membership::Expel(MemberId id) {
  const Member& member = *Find(id);
  absl::Status why = WhyUnwelcome(member);
  const NodeId node = member.node;
  trainers_.erase(member.rank);
  members_.erase(id);
  requests_.Forget(id);
  LetInIfEmpty(node);
  out_.Do(RefuseMember{id, std::move(why)});
}

void Membership::Replace(const std::string& by) {
  ownership_.Replaced(by);
  for (auto& [id, member] : members_) member.held.reset();
  for (auto& [instance_name, instance] : instances_) {
    Step(&instance.state, InstanceTrigger::kMarkDirty);
    NoteChanged(instance_name);
    instance.back.reset();
    instance.reason = "the group was replaced";
  }
}

// ---- instances ----

bool Membership::Complete(const Instance& instance) const {
  if (static_cast<int>(instance.ranks.size()) != instance.world_size) return false;
  return std::all_of(instance.ranks.begin(), instance.ranks.end(), [this](const auto& rank) {
    const Member& member = *Find(rank.second);
    return !NeedsLayout(member.delivery) || member.layout != nullptr;
  });
}

bool Membership::Available(const Instance& instance) const {
  return Next(instance.state, InstanceTrigger::kPrepare).has_value() &&
         WhyKeptOut(instance) == nullptr;
}

int64_t Membership::AvailableInstances() const {
  return std::count_if(instances_.begin(), instances_.end(),
                       [this](const auto& i) { return Available(i.second); });
}

// The version that all ranks of the instance hold, of the same incarnation.
std::optional<HeldVersion> Membership::VersionOf(const Instance& instance) const {
  if (IsDirty(instance.state) || instance.state == InstanceState::kForming) {
    return std::nullopt;
  }
  std::optional<HeldVersion> common;
  for (const auto& [rank, id] : instance.ranks) {
    const std::optional<HeldVersion>& held = Find(id)->held;
    if (!held.has_value() || (common.has_value() && *common != *held)) return std::nullopt;
    common = held;
  }
  return common;
}

void Membership::NoteAllChanged() {
  for (const auto& [instance_name, instance] : instances_) NoteChanged(instance_name);
}

void Membership::MarkDirty(Instance* instance, std::string reason) {
  Step(&instance->state, InstanceTrigger::kMarkDirty);
  NoteChanged(instance->name);
  instance->reason = std::move(reason);
  out_.Log(LogLine::kWarning,
           fmt::format("instance {} is dirty: {}", instance->name, instance->reason));
  out_.Changed();
}

void Membership::KeepOut(NodeId node, const std::string& why) {
  kept_out_[node] = why;
  LetInIfEmpty(node);
}

// A node that has no member left is no longer kept out: members that attach later attach anew.
void Membership::LetInIfEmpty(NodeId node) {
  if (!kept_out_.contains(node)) return;
  const bool has_members = std::any_of(members_.begin(), members_.end(), [node](const auto& m) {
    return m.second.node == node && m.second.state != MemberState::kLeaving;
  });
  if (has_members) return;
  kept_out_.erase(node);
  ++changes_;
}

const std::string* Membership::WhyKeptOut(const Instance& instance) const {
  if (kept_out_.empty()) return nullptr;
  for (const auto& [rank, id] : instance.ranks) {
    if (const auto it = kept_out_.find(Find(id)->node); it != kept_out_.end()) return &it->second;
  }
  return nullptr;
}

std::string Membership::WhyKeptOut(NodeId node) const {
  const auto it = kept_out_.find(node);
  return it == kept_out_.end() ? "" : it->second;
}

// ---- what an update that is being opened needs ----

// The verification of an update whose first rank names none; it holds for all ranks. A default that
// the operator configured, other than kReadback, stays. With engines on GPUs that are written in
// place, the copy itself compares what it stored, because read-back would lengthen their pause. All
// is read back while an engine rank has no version yet, and where all memory on GPUs is shadowed:
// no pause waits for it, and a rank that restores needs the digest. With members on other daemons
// it is unknown which memory is on GPUs: all is read back.
Verification Membership::DefaultVerification(Verification configured) const {
  if (configured != Verification::kReadback) return configured;
  bool devices = false;
  for (const auto& [id, member] : members_) {
    if (member.state == MemberState::kLeaving) continue;
    if (member.node != NodeId()) return Verification::kReadback;
    if (!member.engine) continue;
    if (!member.updated) return Verification::kReadback;
    const bool empty = member.layout != nullptr && member.layout->pieces.empty();
    devices = devices || (member.on_device && !member.shadowed && !empty);
  }
  return devices ? Verification::kTransfer : Verification::kReadback;
}

std::vector<std::string> Membership::Missing(const HasBegun& begun) const {
  std::vector<std::string> missing;
  for (int rank = 0; rank < spec_.trainer_ranks; ++rank) {
    if (begun(rank)) continue;
    missing.push_back(fmt::format("trainer rank {} to begin", rank));
  }
  int complete = 0;
  std::vector<std::string> incomplete;
  for (const auto& [instance_name, instance] : instances_) {
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
  if (complete < spec_.min_instances) {
    missing.push_back(fmt::format("{} of {} instances complete{}{}{}{}", complete,
                                  spec_.min_instances, incomplete.empty() ? "" : ", missing ",
                                  Few(incomplete), last_refusal_.ok() ? "" : ", and ",
                                  Message(last_refusal_)));
  }
  return missing;
}

// The ranks that Missing names, and an engine without a name where instances have yet to attach.
void Membership::SuspectMissing(const HasBegun& begun, Failure* failure) const {
  for (int rank = 0; rank < spec_.trainer_ranks; ++rank) {
    if (!begun(rank)) failure->Add({SuspectRole::kTrainer, "", "", rank, 0});
  }
  for (const auto& [instance_name, instance] : instances_) {
    if (Available(instance)) continue;
    for (int rank = 0; rank < instance.world_size; ++rank) {
      const auto it = instance.ranks.find(rank);
      if (it == instance.ranks.end()) {
        failure->Add({SuspectRole::kEngine, "", instance_name, rank, 0});
      } else if (const Member* member = Find(it->second);
                 NeedsLayout(member->delivery) && member->layout == nullptr) {
        failure->Add(SuspectOf(*member));
      }
    }
  }
  if (static_cast<int>(instances_.size()) < spec_.min_instances) {
    failure->Add({SuspectRole::kEngine, "", "", std::nullopt, 0});
  }
}

// ---- invariants ----

void Membership::CheckInvariants() const {
  CheckMembers();
  CheckInstances();
}

void Membership::CheckMembers() const {
  size_t trainer_ranks = 0;
  for (const auto& [id, member] : members_) {
    REFITD_CHECK(member.id == id && id != MemberId());
    REFITD_CHECK(member.rank >= 0 && member.rank < member.world_size);
    REFITD_CHECK(member.touching >= 0);
    REFITD_CHECK(member.state != MemberState::kGone);
    if (member.state == MemberState::kLeaving) {
      // P6: a record outlives its lease only while copies touch the member's memory.
      REFITD_CHECK(member.touching > 0);
    } else if (member.engine) {
      const auto instance = instances_.find(member.instance);
      REFITD_CHECK(instance != instances_.end());
      const auto rank = instance->second.ranks.find(member.rank);
      REFITD_CHECK(rank != instance->second.ranks.end() && rank->second == id);
    } else {
      const auto rank = trainers_.find(member.rank);
      REFITD_CHECK(rank != trainers_.end() && rank->second == id);
      REFITD_CHECK(member.world_size == spec_.trainer_ranks);
      ++trainer_ranks;
    }
  }
  REFITD_CHECK(trainer_ranks == trainers_.size());
}

void Membership::CheckInstances() const {
  for (const auto& [instance_name, instance] : instances_) {
    REFITD_CHECK(instance.name == instance_name && instance.state != InstanceState::kGone);
    REFITD_CHECK(!instance.ranks.empty());
    REFITD_CHECK(static_cast<int>(instance.ranks.size()) <= instance.world_size);
    for (const auto& [rank, id] : instance.ranks) {
      const Member* const member = Find(id);
      REFITD_CHECK(member != nullptr && member->state != MemberState::kLeaving);
      REFITD_CHECK(member->engine && member->instance == instance_name && member->rank == rank);
    }
    const bool forming =
        instance.state == InstanceState::kForming || instance.state == InstanceState::kFormingDirty;
    REFITD_CHECK(forming != Complete(instance));
    // P2: a dirty instance has no version, and says why.
    if (IsDirty(instance.state)) {
      REFITD_CHECK(!VersionOf(instance).has_value() && !instance.reason.empty());
    }
  }
}

}  // namespace refitd::group
