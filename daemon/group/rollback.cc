#include "daemon/group/rollback.h"

#include <algorithm>

#include "transport/base/errors.h"

namespace refitd::group {

bool Rollback::HoldsPrevious(const Instance& instance) const {
  return versions_.previous().has_value() && instance.back == versions_.previous() &&
         instance.state == InstanceState::kClean && versions_.IsCurrent(instance) &&
         members_.Available(instance);
}

bool Rollback::AnyHolds() const {
  const auto& instances = members_.instances();
  return std::any_of(instances.begin(), instances.end(),
                     [this](const auto& i) { return HoldsPrevious(i.second); });
}

absl::Status Rollback::Check() const {
  if (!versions_.last().has_value()) return Precondition("no version was committed");
  if (versions_.content().has_value()) {
    return Precondition(
        "version {} is a rollback itself, to the content of version {}: what was rolled back is "
        "not served again",
        *versions_.last(), *versions_.content());
  }
  if (!versions_.previous().has_value()) {
    return Precondition("no version was committed before version {}", *versions_.last());
  }
  bool any = false;
  bool gives = false;
  for (const auto& [name, instance] : members_.instances()) {
    if (!HoldsPrevious(instance)) continue;
    any = true;
    gives = gives || catch_up_.MayCatchUp(instance);
  }
  if (!any) {
    return Precondition("no instance holds version {} in its arenas any more, beside version {}",
                        *versions_.previous(), *versions_.last());
  }
  for (const auto& [name, instance] : members_.instances()) {
    REFITD_RETURN_IF_ERROR(CheckLeftBehind(instance, gives));
  }
  return absl::OkStatus();
}

// `gives`: an instance that flips may give the version to others.
absl::Status Rollback::CheckLeftBehind(const Instance& instance, bool gives) const {
  const std::optional<HeldVersion> held = members_.VersionOf(instance);
  if (!held.has_value() || held->origin != versions_.incarnation()) return absl::OkStatus();
  if (held->version != *versions_.last()) {
    return Precondition("instance {} is behind: it holds version {}, and the group's is {}",
                        instance.name, held->version, *versions_.last());
  }
  if (HoldsPrevious(instance)) return absl::OkStatus();
  if (!catch_up_.MayCatchUp(instance)) {
    return Precondition(
        "instance {} does not hold version {} any more and takes part in no "
        "catch-up: it would go on with version {}",
        instance.name, *versions_.previous(), *versions_.last());
  }
  if (gives) return absl::OkStatus();
  return Precondition(
      "instance {} does not hold version {} any more, and no instance that does "
      "takes part in catch-ups",
      instance.name, *versions_.previous());
}

// ---- hold ----

void Rollback::NoteCommit(bool until_released, bool rollback) {
  const std::chrono::seconds time(members_.spec().hold_previous_seconds);
  held_ = until_released || (!rollback && time.count() > 0);
  held_until_ = until_released ? std::nullopt : std::optional(out_.now() + time);
}

bool Rollback::Holds() const { return HeldAt(out_.now()) && AnyHolds(); }

std::string Rollback::Describe(TimePoint now) const {
  return fmt::format("version {}, which is held for {}, to be released", *versions_.previous(),
                     held_until_.has_value()
                         ? Seconds(std::max(*held_until_ - now, Duration(0))) + " more"
                         : "a rollback");
}

std::optional<PreviousView> Rollback::View(TimePoint now, bool running) const {
  if (!AnyHolds()) return std::nullopt;
  PreviousView view;
  view.version = *versions_.previous();
  view.refused = running ? "an update runs" : Message(Check());
  view.held = HeldAt(now);
  if (view.held && held_until_.has_value()) view.held_for = *held_until_ - now;
  return view;
}

// P1: what counts as an earlier version was committed before the group's, and lies in backs.
void Rollback::CheckInvariants() const {
  for (const auto& [name, instance] : members_.instances()) {
    if (!instance.back.has_value()) continue;
    REFITD_CHECK(versions_.last().has_value() && *instance.back < *versions_.last());
    for (const auto& [rank, id] : instance.ranks) {
      const Member& member = *members_.Find(id);
      REFITD_CHECK(member.shadowed || member.layout->pieces.empty());
    }
  }
}

}  // namespace refitd::group
