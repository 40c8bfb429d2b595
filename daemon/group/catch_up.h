// Catch-ups: an instance that lacks the group's version gets it from clean instances that hold it.
// This machine finds when the next catch-up is due, who gives and who catches up, and keeps the
// calls of trainers that wait until a catch-up has given way.
//
// A catch-up is an update of the group's own version. Its sources are ranks of clean instances,
// which give: they are not paused and get no event. Its participants are the late instances, which
// get Prepare and its outcome as in any update. A program moves the bytes, and every byte is read
// back (P1).
//
//   opened      catch_up_gather after a catch-up became possible, while no update runs
//   gives way   to the first call that would open an update, or a rollback; to a drain; when a
//               source instance left, registered another layout or is dirty (the next catch-up
//               then takes others)
//   fails       the late instances are left alone for catch_up_wait, doubled at each further
//               failure
//
// Such a call that comes while a catch-up runs is checked at once and waits, until its own
// deadline, for the copies of the catch-up to end (P4, P6). Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_CATCH_UP_H_
#define REFITD_DAEMON_GROUP_CATCH_UP_H_

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/versions.h"

namespace refitd::group {

// The part of an update that only a catch-up has: its sources are ranks of clean instances, and no
// trainer takes part.
struct UpdateCatchUp {
  std::vector<std::string> source_instances;  // instances; set when the catch-up is assembled
  std::vector<MemberId> sources;              // the source instances' ranks
  bool gave_way = false;                      // given up for a reason that is no failure of its own
};

// A call that opens an update and came while a catch-up was running: a trainer's, or a rollback. It
// is taken when the catch-up has given way.
using OpeningCall = std::variant<BeginEvent, RefitEvent, RollbackEvent>;
struct DeferredCall {
  OpeningCall event;
  TimePoint deadline;
};

class CatchUp {
 public:
  CatchUp(const GroupLimits& limits, const Membership* members, const Versions* versions,
          Outbox* out)
      : limits_(limits), members_(*members), versions_(*versions), out_(*out) {}

  // ---- who gives, and who catches up ----

  // Whether the instance takes part in catch-ups: every rank is registered, and says so.
  bool MayCatchUp(const Instance& instance) const;
  // Whether the instance holds the group's version, is clean, and may give it.
  bool Gives(const Instance& instance) const;
  bool Gives(const std::string& instance) const;
  // Whether an update takes the instance in if it is a catch-up that is assembled now.
  bool CatchesUp(const Instance& instance) const;
  // Finds source instances and their ranks; returns the names of the late instances.
  std::vector<std::string> Assemble(UpdateCatchUp* catch_up) const;

  // ---- when ----

  // A step may have made a catch-up possible or impossible.
  void Look() { look_ = true; }
  void LookIfDue() {
    if (due_.has_value() && *due_ <= out_.now()) look_ = true;
  }
  // Finds when the next catch-up is due, if a step may have changed that. `idle`: updates may
  // begin.
  void FindDue(bool idle);
  // Whether a catch-up begins now.
  bool TakeDue();
  // Only while no update runs; nullopt: no catch-up is possible.
  std::optional<TimePoint> due() const { return due_; }

  // ---- how catch-ups ended ----

  // The catch-up failed for the instance, which is left alone for a while.
  void NoteFailure(const std::string& instance, const std::string& reason);
  // The catch-up was given up. `remaining`: the late instances that were not evicted; `opening`: it
  // was not assembled yet. `verification`: its digests differed.
  void NoteGivenUp(bool opening, const std::vector<std::string>& remaining, bool verification,
                   const std::string& reason, UpdateCatchUp* part);
  // An update was committed in these instances; `catch_up`: it brought the group's own version.
  void NoteCommit(bool catch_up, const std::vector<std::string>& instances);
  // The instance is gone: earlier failures do not count.
  void Forget(const std::string& instance) { retries_.erase(instance); }
  // Tells what catch-ups do for the instance; empty: it does not lack the version. `running`: the
  // catch-up that runs; `taken_in`: the instance takes part in it.
  std::string Describe(const Instance& instance, const UpdateCatchUp* running, bool taken_in) const;

  // ---- calls that wait until a catch-up has given way ----

  void Defer(OpeningCall event, Duration duration);
  // The first call that waits, with what remains of its duration.
  OpeningCall TakeDeferred();
  // Refuses the calls that would open an update to `wanted`.
  void Refuse(Version wanted, const absl::Status& why);
  // Refuses those whose time is over.
  void RefuseOverdue(const absl::Status& why);
  // The caller went away. False: the call does not wait here.
  bool Leave(CallId call, const absl::Status& why);
  // The versions of the updates that waiting calls of the rank would open.
  std::set<Version> DeferredOf(MemberId member) const;
  bool anyone_waits() const { return !deferred_.empty(); }
  bool any_overdue() const;
  // When the next call's time is over; nullopt: none waits.
  std::optional<TimePoint> NextDeadline() const;

  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  // Catch-ups of the group's version that failed for an instance since it held a version.
  struct Retry {
    int failed = 0;
    TimePoint after;     // when the next may begin
    std::string reason;  // why the last of those catch-ups failed
  };

  bool LacksVersion(const Instance& instance) const;
  // When a catch-up of the instance may begin.
  TimePoint After(const std::string& instance) const;
  // The instances of which `test` is true, by name.
  template <typename Test>
  std::vector<std::string> InstancesThat(const Test& test) const {
    std::vector<std::string> found;
    for (const auto& [instance_name, instance] : members_.instances()) {
      if (test(instance)) found.push_back(instance_name);
    }
    return found;
  }
  bool AnyGives() const;
  std::vector<std::string> LateInstances() const;
  std::vector<std::string> ChooseSources(const std::vector<std::string>& late_instances) const;

  const GroupLimits& limits_;
  const Membership& members_;
  const Versions& versions_;
  Outbox& out_;
  std::deque<DeferredCall> deferred_;  // empty unless a catch-up runs
  std::optional<TimePoint> possible_;  // since when
  std::optional<TimePoint> due_;
  int failed_ = 0;  // catch-ups in a row, of this version
  std::map<std::string, Retry> retries_;
  bool look_ = false;
  uint64_t seen_changes_ = 0;  // Membership::changes when due_ was found
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_CATCH_UP_H_
