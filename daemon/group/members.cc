// Attach, loss and release of members; instances.
#include <algorithm>

#include "daemon/group/group_impl.h"

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
    return Error(absl::StatusCode::kInvalidArgument, "world_size: {} is not in 1..{}", world_size,
                 max_world_size);
  }
  if (rank < 0 || rank >= world_size) {
    return Error(absl::StatusCode::kInvalidArgument, "rank: {} is not in 0..{}", rank,
                 world_size - 1);
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
  if (update != nullptr) update->last_call = now;
  return member;
}

std::string Group::Impl::Label(MemberId id) const {
  const Member* member = Find(id);
  return member == nullptr ? fmt::format("member {}", id) : member->label;
}

// After all trainers have left, trainers of another world size may attach. No update can run then,
// since the loss of any of its trainer ranks gives it up.
absl::Status Group::Impl::CheckTrainer(const TrainerIdentity& who) const {
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
    return Error(absl::StatusCode::kAlreadyExists, "{} is attached", Label(it->second));
  }
  return absl::OkStatus();
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
  member.relays = who.relays;
  member.label = WithPlace(fmt::format("trainer rank {}", who.rank), who);
  trainers[who.rank] = e.member;
  Admit(std::move(member));
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
  return Error(absl::StatusCode::kInvalidArgument,
               "held_version: {} of held_origin {:x}, but {} in that incarnation of group {}",
               *who.held_version, who.held_origin,
               version.has_value() ? fmt::format("no version above {} was committed", *version)
                                   : std::string("no version was committed"),
               name);
}

absl::Status Group::Impl::CheckEngine(const EngineIdentity& who) const {
  REFITD_RETURN_IF_ERROR(CheckRank(who.rank, who.world_size, kMaxEngineRanks));
  REFITD_RETURN_IF_ERROR(CheckHeld(who));
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
    return Error(absl::StatusCode::kAlreadyExists, "{} is attached", Label(rank->second));
  }
  return absl::OkStatus();
}

void Group::Impl::On(const EngineAttached& e) {
  const EngineIdentity& who = e.identity;
  if (absl::Status status = CheckEngine(who); !status.ok()) {
    Do(RefuseMember{e.member, std::move(status)});
    return;
  }
  Member member;
  member.id = e.member;
  member.engine = true;
  member.instance = who.instance;
  member.rank = who.rank;
  member.world_size = who.world_size;
  member.pid = who.pid;
  member.node = who.node;
  member.relays = who.relays;
  member.label = WithPlace(fmt::format("engine {} rank {}", who.instance, who.rank), who);
  member.delivery = who.delivery;
  member.on_device = who.on_device;
  member.fill = who.fill;
  if (who.manifest.has_value()) {
    member.manifest = declared->Shared(*who.manifest);
    declared->Add(member.manifest);
  }
  if (who.held_version.has_value()) {
    member.held = {*who.held_version, who.held_origin};
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
  if (member->engine) look_for_fill = true;
  member->layout = e.layout;
  ++member->registrations;
  member->verified = false;
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
  look_for_fill = true;
}

void Group::Impl::CompleteIfAllHere(Instance* instance) {
  const std::optional<InstanceState> next = Next(instance->state, InstanceTrigger::kComplete);
  if (!next.has_value() || !Complete(*instance)) return;
  instance->state = *next;
  look_for_fill = true;
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

InstanceStanding Group::Impl::StandingOf(const std::string& instance_name) const {
  InstanceStanding standing{.instance = instance_name, .version = std::nullopt};
  const auto it = instances.find(instance_name);
  if (it == instances.end()) return standing;
  const Instance& instance = it->second;
  if (group::IsDirty(instance.state)) {
    standing.standing = Standing::kDirty;
  } else if (instance.state == InstanceState::kForming) {
    standing.standing = Standing::kForming;
  } else {
    standing.standing =
        instance.state == InstanceState::kClean ? Standing::kClean : Standing::kUpdating;
  }
  // Versions of other incarnations can't be compared with the group's.
  const std::optional<group::HeldVersion> held = VersionOf(instance);
  const bool whole =
      standing.standing == Standing::kClean || standing.standing == Standing::kUpdating;
  if (whole && had_version && !held.has_value()) standing.standing = Standing::kEmpty;
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
  look_for_fill = true;
  Step(&it->second.state, last ? InstanceTrigger::kLastLost : InstanceTrigger::kRankLost);
  if (last) instances.erase(it);
  if (update == nullptr) return;
  const std::optional<uint32_t> participant = ParticipantOf(member->id);
  if (participant.has_value() && !update->participants[*participant].evicted) {
    Evict(*participant,
          {fmt::format("{} was lost: {}", member->label, reason), GiveUpClass::kMemberLost});
  }
}

void Group::Impl::LoseTrainer(Member* member, const std::string& reason) {
  trainers.erase(member->rank);
  if (FillRuns()) {
    // A call that waits for the fill is lost too, as an update that the rank has begun would be: no
    // other rank can complete it.
    for (const Version wanted : DeferredOf(member->id)) {
      RefuseDeferred(wanted, Error(absl::StatusCode::kAborted,
                                   "the update to version {} is lost: {} was lost: {}", wanted,
                                   member->label, reason));
    }
    return;
  }
  if (update == nullptr) return;
  Abandon({fmt::format("{} was lost: {}", member->label, reason), GiveUpClass::kMemberLost});
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
