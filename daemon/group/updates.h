// The updates of a group: the one that runs, the one that waits beside it, and those that have
// ended.
//
// Trainers' updates, rollbacks and catch-ups are all updates, and one runs at a time (P3). A
// trainers' update that waits for a hold to end, and has asked no engine for anything, lets
// catch-ups run before it: it waits then, and runs again when the catch-up is over. A call that
// opens an update, or belongs to an open one, means the update that waits while there is one
// (Opened); a catch-up gives way.
//
// It keeps P3 (one update at a time, versions grow) and P4 (WaitedFor names what an update waits
// for; a trainer rank that is silent for too long ends its update). Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_UPDATES_H_
#define REFITD_DAEMON_GROUP_UPDATES_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/group/catch_up.h"
#include "daemon/group/group.h"
#include "daemon/group/group_state.h"
#include "daemon/group/history.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/push.h"
#include "daemon/group/refit_program.h"
#include "daemon/group/requests.h"
#include "daemon/group/rollback.h"
#include "daemon/group/slots.h"
#include "daemon/group/update.h"
#include "daemon/group/versions.h"

namespace refitd::group {

class Updates {
 public:
  // The machines of the group on which updates stand.
  struct Machines {
    const GroupLimits& limits;
    Membership* members;
    Versions* versions;
    Requests* requests;
    Slots* slots;
    const CatchUp* catch_up;
    const RefitCompiler* compiler;
    const Rollback* rollback;
    Outbox* out;
  };

  Updates(std::function<UpdateId()> next_update, const Machines& below);

  // ---- which update ----

  GroupState state() const { return state_; }
  bool drains() const { return state_ == GroupState::kDraining || state_ == GroupState::kDrained; }
  // Null: no update runs.
  const std::shared_ptr<Update>& running() const { return running_; }
  // The update that waits while a catch-up runs; null: none does.
  const std::shared_ptr<Update>& waiting() const { return waiting_; }
  bool CatchUpRuns() const { return running_ != nullptr && running_->catch_up.has_value(); }
  bool RollbackRuns() const { return running_ != nullptr && running_->content.has_value(); }
  // The update that a call has opened; null: there is none. It runs, unless a catch-up does.
  Update* Opened() const { return CatchUpRuns() ? waiting_.get() : running_.get(); }
  // Whether a call names an update other than the open one.
  bool IsAnother(UpdateId wanted) const {
    return wanted != UpdateId() && (Opened() == nullptr || Opened()->id != wanted);
  }
  // Whether the running update has asked no engine for anything, and may not before a hold ends.
  bool WaitsForHold() const;
  // The progress of the rank in the open update, or why its data calls are refused.
  // `wanted_update`: the update that the call names; 0: none.
  absl::StatusOr<TrainerProgress*> Find(const Member& member, Version wanted,
                                        UpdateId wanted_update) const;
  const UpdateHistory& history() const { return history_; }
  // How the buckets of the running update went, or else those of the last.
  const BucketLog& buckets() const { return buckets_; }

  // ---- begin ----

  // These open an update, which runs from now on. While it runs, only a catch-up may be opened, if
  // WaitsForHold.
  void Open(const BeginEvent& e);
  void OpenRollback(const RollbackEvent& e);
  void OpenCatchUp();
  // If no update runs and one waits, that one runs again, under a new number; returns whether so.
  bool Resume();

  // ---- give up ----

  // An update that is ending already is not given up again. One that waits ends after the catch-up,
  // which gives way to that.
  void Abandon(Update* given_up, GiveUp why);
  void Abandon(GiveUp why) { Abandon(running_.get(), std::move(why)); }
  // The catch-up is given up for a reason that is no failure of its own.
  void GiveWay(std::string reason);
  // The operator who gave an update up does not wait any more. False: none with that call did.
  bool Leave(CallId operator_call);

  // ---- end ----

  // The running update is over, as `view` and `what` say.
  void End(UpdateView view, PastUpdate what);
  // A new incarnation of the group begins. False: an update runs. A catch-up gives way.
  bool Replace();
  // No update is opened from now on.
  void Drain();

  // ---- time ----

  // When the running update is given up because no trainer rank calls; nullopt: a rank waits for an
  // answer, or the update waits for no rank.
  std::optional<TimePoint> IdleDeadline() const;
  // Names what the running update waits for at `now`, for messages.
  std::string WaitedFor(TimePoint now) const;
  // A failure whose suspects are those that WaitedFor names.
  Failure SuspectAwaited() const;

  // The part of the invariants that costs nothing, checked after every event.
  void CheckState() const;
  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  // An update runs from now on. `duration`: the longest that it may take; 0: the default.
  Update* Run(Version version, Duration duration);
  void CheckCatchUp() const;
  void CheckRollback() const;

  const std::function<UpdateId()> next_update_;
  const Machines on_;
  GroupState state_ = GroupState::kIdle;
  BucketLog buckets_;
  std::shared_ptr<Update> running_;
  std::shared_ptr<Update> waiting_;
  UpdateHistory history_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_UPDATES_H_
