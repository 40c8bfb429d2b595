#include "daemon/group/ownership.h"

#include <utility>

#include "transport/base/identity.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr auto kDenied = absl::StatusCode::kPermissionDenied;

}  // namespace

absl::Status Ownership::Refusal(const std::string& identity) const {
  return Error(kDenied, "{} may not be trainer of group '{}', which another identity owns",
               identity.empty() ? "an unknown identity" : identity, group_);
}

absl::Status Ownership::CheckTrainer(const std::string& identity, bool any_owner) const {
  const OwnerRule rule = RuleFor(identity);
  if (any_owner || rule == OwnerRule::kExempt) return absl::OkStatus();
  if (rule == OwnerRule::kOther) {
    return Error(kDenied, "{} may not be trainer of group '{}', whose owner a rule names", identity,
                 group_);
  }
  if (owner_.empty() || owner_ == identity) return absl::OkStatus();
  if (rule == OwnerRule::kNamed && OwnsAgainstRule()) return absl::OkStatus();
  return Refusal(identity);
}

bool Ownership::WouldOwn(const std::string& identity) const {
  const OwnerRule rule = RuleFor(identity);
  if (identity.empty() || rule == OwnerRule::kExempt || rule == OwnerRule::kOther) return false;
  return owner_.empty() || (rule == OwnerRule::kNamed && OwnsAgainstRule());
}

bool Ownership::EnterTrainer(const std::string& identity) {
  if (!WouldOwn(identity)) return false;
  settled_ = RuleFor(identity) == OwnerRule::kNamed;
  return !std::exchange(owner_, identity).empty();
}

absl::Status Ownership::CheckEngine(const std::string& pattern, const std::string& held) const {
  const bool counts = Counts(held);
  const std::string& owner = counts && !settled_ ? held : owner_;
  if (!owner.empty() && !pattern.empty() && !MatchesOwner(pattern, owner)) {
    return Error(kDenied, "trainer_identity: '{}' is not who owns group '{}'", pattern, group_);
  }
  if (!settled_ || held == owner_ || !counts) return absl::OkStatus();
  return Error(kDenied,
               "held_owner: the engine holds a version of {}, but another identity owns group '{}'",
               held, group_);
}

bool Ownership::EnterEngine(const std::string& held) {
  if (!Counts(held) || (settled_ && held != owner_)) return false;
  settled_ = true;
  const std::string before = std::exchange(owner_, held);
  return !before.empty() && before != held;
}

void Ownership::Replaced(const std::string& by) {
  if (owner_.empty() || owner_ == by) return;
  owner_.clear();
  settled_ = false;
  replaced_ = true;
}

}  // namespace refitd
