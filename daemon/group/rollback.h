// The version before the group's: which shadowed instances still hold it in their backs, whether
// the next update has to wait for it, and whether the group can go back to it.
//
// A rollback is an update without trainers and without bytes: its participants are the instances
// that hold the version before, and they flip. Its number is the group's plus one. The other
// instances are behind when it has committed, and catch up. So it begins only where that leaves no
// instance with what was rolled back:
//
//   an instance serves the group's version    and its backs hold the version before: it flips
//                                             and they do not: it catches up, or it is in the way
//   it serves an earlier version              it is in the way
//   it is dirty, incomplete, or has brought   it is not ready anyway, and catches up if it can
//   a version of another incarnation
//
// It keeps P1 (backs that were written since, or registered since, are not put into place), P4 (a
// hold is named where an update waits for it) and P11 (no instance goes on in silence with what was
// rolled back). Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_ROLLBACK_H_
#define REFITD_DAEMON_GROUP_ROLLBACK_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "daemon/group/catch_up.h"
#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/versions.h"

namespace refitd::group {

class Rollback {
 public:
  Rollback(const Membership* members, const Versions* versions, const CatchUp* catch_up,
           const Outbox* out)
      : members_(*members), versions_(*versions), catch_up_(*catch_up), out_(*out) {}

  // Whether the instance serves the group's version and its backs hold the version before.
  bool HoldsPrevious(const Instance& instance) const;
  // OK: a rollback may begin now. FAILED_PRECONDITION names what is in the way.
  absl::Status Check() const;

  // ---- hold ----

  // A version was committed, by trainers or, if `rollback`, as a rollback. The next update waits
  // for as long as the spec says, after a rollback not at all, and if `until_released` until
  // Release.
  void NoteCommit(bool until_released, bool rollback);
  void Release() { held_ = false; }
  // Whether the next update has to wait. It does not where no instance holds the version before.
  bool Holds() const;
  // When the hold ends; nullopt: at Release alone.
  std::optional<TimePoint> held_until() const { return held_until_; }
  // Names the version that is held and for how long, for messages about an update that waits.
  std::string Describe(TimePoint now) const;

  // nullopt: no instance holds the version before. `running`: an update has begun, which a rollback
  // does not give up.
  std::optional<PreviousView> View(TimePoint now, bool running) const;
  void CheckInvariants() const;

 private:
  bool AnyHolds() const;
  bool HeldAt(TimePoint now) const {
    return held_ && (!held_until_.has_value() || now < *held_until_);
  }
  absl::Status CheckLeftBehind(const Instance& instance, bool gives) const;

  const Membership& members_;
  const Versions& versions_;
  const CatchUp& catch_up_;
  const Outbox& out_;
  bool held_ = false;
  std::optional<TimePoint> held_until_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_ROLLBACK_H_
