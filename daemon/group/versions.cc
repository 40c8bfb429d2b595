#include "daemon/group/versions.h"

#include <algorithm>
#include <utility>

#include "transport/base/errors.h"

namespace refitd::group {
namespace {

// Whether what is held was committed between a rollback and the content to which that went back.
bool Undoes(const HeldVersion& rollback, Version content, const HeldVersion& held) {
  return held.origin != 0 && held.origin == rollback.origin && content < held.version &&
         held.version < rollback.version;
}

}  // namespace

// Versions grow within an incarnation (P3).
absl::Status Versions::CheckGreater(Version wanted) const {
  if (!last_.has_value() || wanted > *last_) return absl::OkStatus();
  const auto& instances = members_.instances();
  const auto holds = std::find_if(instances.begin(), instances.end(),
                                  [this](const auto& i) { return IsCurrent(i.second); });
  return Precondition(
      "version: {} is not greater than the group's {} ({}): begin a greater version, such as a "
      "trainer's next_version, or start a new incarnation with CreateGroup(replace), as `refitctl "
      "group replace` and on_older= do",
      wanted, *last_,
      holds == instances.end() ? "no instance holds it any more"
                               : fmt::format("instance {} holds it", holds->first));
}

// A rank may claim a version of this incarnation only if the group committed it. Claims about other
// incarnations can't be checked; they are believed, since all that they decide is that instances
// which hold no version are not ready.
absl::Status Versions::CheckHeld(const EngineIdentity& who) const {
  if (!who.held_version.has_value() || who.held_origin != incarnation_) return absl::OkStatus();
  if (last_.has_value() && *who.held_version <= *last_) return absl::OkStatus();
  return InvalidField(
      "held_version",
      "held_version: {} of held_origin {:x}, but {} in that incarnation of group {}",
      *who.held_version, who.held_origin,
      last_.has_value() ? fmt::format("no version above {} was committed", *last_)
                        : std::string("no version was committed"),
      group_);
}

void Versions::Bring(const EngineIdentity& who, Member* member) {
  if (!who.held_version.has_value()) return;
  if (Believed(who)) member->held = {*who.held_version, who.held_origin};
  member->held_digest = who.held_digest;
  member->held_content = who.held_content;
  if (who.held_origin == incarnation_ || had_version_) return;
  // Instances without a version were ready until now, as in a group that never had one.
  had_version_ = true;
  members_.NoteAllChanged();
}

// Whether the rank may hold the version that it says. The group knows what it committed to whom in
// its own incarnation; a replacement makes every instance dirty, also those that were away.
bool Versions::Believed(const EngineIdentity& who) const {
  if (replaced_.contains(who.held_origin)) return false;
  if (who.held_origin != incarnation_) return true;
  const auto it = committed_to_.find({who.instance, who.rank});
  if (it == committed_to_.end() || it->second.first < *who.held_version) return false;
  const auto& [last, digest] = it->second;
  const bool known = last == *who.held_version && digest != 0 && who.held_digest != 0;
  return !known || digest == who.held_digest;
}

// The rank's daemon has read the memory that the rank registers: the version that the rank claims
// must be there (P11).
void Versions::CheckContent(Member* member, uint64_t content) {
  if (content == 0 || !member->held.has_value() || content == member->held_digest) return;
  out_.Log(
      LogLine::kWarning,
      fmt::format("{} claims version {}, but its memory holds something else: it holds no version",
                  member->label, member->held->version));
  member->held.reset();
}

std::optional<Version> Versions::VerifiedOf(const Instance& instance) const {
  const std::optional<HeldVersion> held = members_.VersionOf(instance);
  if (!held.has_value() || held->origin != incarnation_) return std::nullopt;
  for (const auto& [rank, id] : instance.ranks) {
    if (!members_.Find(id)->verified) return std::nullopt;
  }
  return held->version;
}

void Versions::Commit(Version version) {
  if (version == last_) return;  // a catch-up
  previous_ = last_;
  previous_content_ = content_;
  content_.reset();
  rolled_back_.reset();
  last_ = version;
}

void Versions::RollBack(Version version) {
  undone_.insert(*last_);
  if (undone_.size() > kRememberedUpdates) undone_.erase(undone_.begin());
  rolled_back_ = last_;
  content_ = previous_content();
  last_ = version;
  previous_.reset();
  previous_content_.reset();
  members_.NoteAllChanged();
}

void Versions::Install(Member* member, uint64_t digest) {
  member->held = {*last_, incarnation_};
  member->held_digest = digest;
  member->updated = member->verified = true;
  committed_to_[{member->instance, member->rank}] = {*last_, digest};
  if (committed_to_.size() > static_cast<size_t>(kMaxEngineRanks)) {
    committed_to_.erase(committed_to_.begin());
  }
}

void Versions::Replace(uint64_t incarnation) {
  committed_to_.clear();
  replaced_.insert(incarnation_);
  if (replaced_.size() > kRememberedIncarnations) replaced_.erase(replaced_.begin());
  incarnation_ = incarnation;
  had_version_ = had_version_ || last_.has_value();
  last_.reset();
  content_.reset();
  rolled_back_.reset();
  previous_.reset();
  previous_content_.reset();
  undone_.clear();
}

// ---- standings ----

std::vector<InstanceStanding> Versions::TakeStandings() {
  if (members_.any_instance_changed()) FindLineage();
  std::vector<InstanceStanding> standings;
  for (const std::string& name : members_.TakeChangedInstances())
    standings.push_back(StandingOf(name));
  return standings;
}

std::vector<InstanceStanding> Versions::Standings() const {
  std::vector<InstanceStanding> standings;
  for (const auto& [name, instance] : members_.instances()) standings.push_back(StandingOf(name));
  return standings;
}

InstanceStanding Versions::StandingOf(const std::string& instance_name) const {
  InstanceStanding standing{.instance = instance_name, .version = std::nullopt};
  const auto it = members_.instances().find(instance_name);
  if (it == members_.instances().end()) return standing;
  const Instance& instance = it->second;
  if (instance.state == InstanceState::kForming || instance.state == InstanceState::kFormingDirty) {
    standing.standing = Standing::kForming;
  } else if (IsDirty(instance.state)) {
    standing.standing = Standing::kDirty;
  } else {
    standing.standing =
        instance.state == InstanceState::kClean ? Standing::kClean : Standing::kUpdating;
  }
  // Versions of other incarnations can't be compared with the group's.
  const std::optional<HeldVersion> held = members_.VersionOf(instance);
  const bool whole =
      standing.standing == Standing::kClean || standing.standing == Standing::kUpdating;
  if (whole && had_version_ && !held.has_value()) standing.standing = Standing::kEmpty;
  if (whole && held.has_value() && !OfLineage(instance, *held))
    standing.standing = Standing::kStray;
  if (held.has_value() && held->origin == incarnation_) standing.version = held->version;
  if (whole && standing.version.has_value() && undone_.contains(*standing.version)) {
    standing.standing = Standing::kUndone;
  }
  return standing;
}

// The version whose content the instance says that its rollback has.
std::optional<Version> Versions::BroughtContent(const Instance& instance) const {
  for (const auto& [rank, id] : instance.ranks) {
    const std::optional<Version>& content = members_.Find(id)->held_content;
    if (content.has_value()) return content;
  }
  return std::nullopt;
}

// Returns the content that the instance claims to hold; nullopt: it holds no version, or a rank
// brought no digest with it.
std::optional<Versions::Claim> Versions::ClaimOf(const Instance& instance) const {
  const std::optional<HeldVersion> held = members_.VersionOf(instance);
  if (!held.has_value()) return std::nullopt;
  HashChain layouts(0);
  HashChain content(0);
  for (const auto& [rank, id] : instance.ranks) {
    const Member& member = *members_.Find(id);
    if (member.held_digest == 0) return std::nullopt;
    layouts.Add(member.layout_digest);
    content.Add(member.held_digest);
  }
  return Claim{*held, layouts.hash(), content.hash()};
}

// Ranks with equal layouts hold equal bytes of one version. Where claims of one version differ,
// most of them decide; of equal numbers the smaller digest, so that the choice does not change with
// the order of events.
Versions::Contents Versions::FindContents() const {
  std::map<Contents::key_type, std::map<uint64_t, int>> claims;
  for (const auto& [instance_name, instance] : members_.instances()) {
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
//
// A rollback outweighs what it rolled back, however many hold that: of one incarnation the greater
// version was committed later, and every version between the rollback and its content was undone.
void Versions::FindLineage() {
  std::map<HeldVersion, int> holders;
  std::map<HeldVersion, Version> rollbacks;
  if (!last_.has_value()) {
    for (const auto& [instance_name, instance] : members_.instances()) {
      const std::optional<HeldVersion> held = members_.VersionOf(instance);
      if (!held.has_value()) continue;
      ++holders[*held];
      const std::optional<Version> content = BroughtContent(instance);
      if (content.has_value()) rollbacks.emplace(*held, *content);
    }
  }
  std::optional<HeldVersion> most;
  int count = 0;
  for (const auto& [held, instances_of_it] : holders) {
    const bool stays = instances_of_it == count && most != lineage_;
    if (instances_of_it > count || stays) {
      most = held;
      count = instances_of_it;
    }
  }
  for (const auto& [rollback, content] : rollbacks) {
    if (most.has_value() && Undoes(rollback, content, *most)) most = rollback;
  }
  Contents brought = last_.has_value() ? Contents() : FindContents();
  const bool same = lineage_ == most && contents_ == brought && rollbacks_ == rollbacks;
  lineage_ = most;
  contents_ = std::move(brought);
  rollbacks_ = std::move(rollbacks);
  if (same) return;
  members_.NoteAllChanged();
}

// Whether the version, of an earlier incarnation, may be served beside what the others hold.
bool Versions::OfLineage(const Instance& instance, const HeldVersion& held) const {
  if (held.origin == incarnation_ || last_.has_value() || !lineage_.has_value()) return true;
  if (const std::optional<Claim> claim = ClaimOf(instance); claim.has_value()) {
    const auto most = contents_.find({claim->held, claim->layouts});
    if (most != contents_.end() && most->second != claim->content) return false;
  }
  if (held.origin != lineage_->origin || held.version > lineage_->version) return false;
  const Version content = BroughtContent(instance).value_or(held.version);
  for (const auto& [rollback, kept] : rollbacks_) {
    if (content != kept && Undoes(rollback, kept, held)) return false;
  }
  return lineage_->version.value() - held.version.value() <= members_.spec().max_lag;
}

void Versions::CheckInvariants() const {
  REFITD_CHECK(committed_to_.size() <= static_cast<size_t>(kMaxEngineRanks));
  REFITD_CHECK(replaced_.size() <= kRememberedIncarnations && !replaced_.contains(incarnation_));
  REFITD_CHECK(undone_.size() <= kRememberedUpdates);
  REFITD_CHECK(!previous_.has_value() || (last_.has_value() && *previous_ < *last_));
  REFITD_CHECK(content_.has_value() == rolled_back_.has_value());
  // A rollback leaves no version to go back to.
  REFITD_CHECK(!content_.has_value() || (!previous_.has_value() && !undone_.contains(*content_)));
  for (const auto& [rank, installed] : committed_to_) {
    REFITD_CHECK(last_.has_value() && installed.first <= *last_);
  }
  // P3: no rank holds a version of this incarnation that was not committed.
  for (const auto& [id, member] : members_.members()) {
    if (!member.held.has_value() || member.held->origin != incarnation_) continue;
    REFITD_CHECK(last_.has_value() && member.held->version <= *last_);
  }
}

}  // namespace refitd::group
