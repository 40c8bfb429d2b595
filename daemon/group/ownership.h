// Who owns a group: the identity that decides who else may be its trainers (P9). The coordinator
// keeps it for all daemons of the group.
//
//   nobody       --a trainer attaches--------------------------------> provisional
//   nobody       --an engine says whose version it holds-------------> settled
//   provisional  --a commit; an engine says that it holds its version> settled
//   provisional  --an engine says that it holds another's version----> settled: the other
//   any          --another identity replaces the group---------------> nobody
//
// So a group that is made again, by whoever comes first, goes back to the owner of what its engines
// hold, before a new trainer has committed anything. Whoever may be an engine of the group is
// believed in that, so a rule of the daemon's policy may name the owner instead. Where one does,
// only identities that it names own the group, whatever engines say and whoever owned it before.
//
// Invariants
//  1. A trainer that this class admitted and that owns nothing may stay only while Stays says so.
//  2. After a replacement by another identity, what engines say does not count.
//
// Pure. Not thread-safe.
#ifndef REFITD_DAEMON_GROUP_OWNERSHIP_H_
#define REFITD_DAEMON_GROUP_OWNERSHIP_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace refitd {

// What the daemon's policy says of an identity as trainer of a group.
enum class OwnerRule : uint8_t {
  kNone,    // no rule names the group's owner
  kNamed,   // a rule names this identity
  kExempt,  // a rule names another one, and another rule lets this one in all the same
  kOther,   // a rule names another one
};

class Ownership {
 public:
  using Rule = std::function<OwnerRule(const std::string& identity)>;

  // `rule` null: no rule names the owner.
  explicit Ownership(std::string group, Rule rule = nullptr)
      : group_(std::move(group)), rule_(std::move(rule)) {}

  // The identity that owns the group; empty: nobody does.
  const std::string& owner() const { return owner_; }

  // OK: the identity may be a trainer of the group. `any_owner`: a rule lets it in, whoever owns
  // the group and whomever a rule names as owner.
  absl::Status CheckTrainer(const std::string& identity, bool any_owner) const;
  // Whether the identity, which was checked, becomes the owner when it enters.
  bool WouldOwn(const std::string& identity) const;
  // The trainer, which was checked, enters. True: another owner lost the group by it.
  bool EnterTrainer(const std::string& identity);

  // OK: an engine may enter that takes weights of owners that match `pattern` (empty: of any), and
  // holds a version that was committed while `held` owned the group (empty: it does not say).
  absl::Status CheckEngine(const std::string& pattern, const std::string& held) const;
  // The engine, which was checked, enters. True: another owner lost the group by it.
  bool EnterEngine(const std::string& held);

  // Whether a trainer that is attached may stay.
  bool Stays(const std::string& identity, bool any_owner) const {
    return CheckTrainer(identity, any_owner).ok();
  }
  // A version of the owner was committed.
  void Committed() { settled_ = !owner_.empty(); }
  // `by` replaced the group. Another identity than the owner leaves it to the next trainer. Where
  // nobody owned it yet, engines are still asked.
  void Replaced(const std::string& by);

 private:
  OwnerRule RuleFor(const std::string& identity) const {
    return rule_ == nullptr ? OwnerRule::kNone : rule_(identity);
  }
  // Whether what an engine says about its version's owner counts.
  bool Counts(const std::string& held) const {
    return !held.empty() && !replaced_ && RuleFor(held) == OwnerRule::kNone;
  }
  // Whether the owner lacks the right that a rule gives to others.
  bool OwnsAgainstRule() const {
    const OwnerRule rule = RuleFor(owner_);
    return rule == OwnerRule::kOther || rule == OwnerRule::kExempt;
  }
  absl::Status Refusal(const std::string& identity) const;

  const std::string group_;
  const Rule rule_;
  std::string owner_;
  bool settled_ = false;
  bool replaced_ = false;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_OWNERSHIP_H_
