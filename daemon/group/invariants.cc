// The invariants of a group, after every event. CheckState is always on; CheckInvariants costs as
// much as the group has members, calls and parts, and is for tests, simulation and fuzzing.

#include "daemon/group/group_impl.h"

namespace refitd {
namespace {

// P1: while a catch-up copies, every source belongs to a clean instance that holds the version, and
// none takes part in the update that writes.
void CheckCatchUp(const group::Update& u, const group::CatchUp& catch_up) {
  REFITD_CHECK(u.push.trainers().empty() && u.push.settled() && u.coverage.tensors() == 0);
  REFITD_CHECK(u.verification == Verification::kReadback);
  if (u.state == UpdateState::kEnding) return;
  REFITD_CHECK(!catch_up.anyone_waits());
  for (const std::string& source_instance : u.catch_up->source_instances) {
    REFITD_CHECK(catch_up.Gives(source_instance));
  }
  // Only a program moves bytes in a catch-up, and the catch-up stays opening until the program is
  // there.
  if (u.state != UpdateState::kOpening) {
    REFITD_CHECK(u.program.exists() && u.use->sources == u.catch_up->sources);
  }
}

// P1: a rollback moves nothing, and only instances with backs are in it.
void CheckRollbackRuns(const group::Update& u) {
  REFITD_CHECK(u.push.trainers().empty() && u.push.settled() && u.coverage.tensors() == 0);
  REFITD_CHECK(!u.program.exists() && !u.readback.started() && u.destinations.size() == 0);
  for (const group::Participant& p : u.participants.all()) REFITD_CHECK(p.shadowed && !p.written);
}

}  // namespace

void Group::Impl::CheckState() const {
  // P3: one update at a time.
  const bool updating = state == GroupState::kUpdating || state == GroupState::kDraining;
  REFITD_CHECK(updating == (update != nullptr));
  // An update waits for a hold beside a catch-up alone, before it has asked engines for anything.
  if (waiting != nullptr) {
    REFITD_CHECK(CatchUpRuns() && *versions.last() < waiting->version);
    REFITD_CHECK(waiting->state == UpdateState::kOpening || waiting->state == UpdateState::kEnding);
    REFITD_CHECK(waiting->participants.all().empty());
  }
  if (update == nullptr) return;
  REFITD_CHECK(update->state != UpdateState::kCommitted && update->state != UpdateState::kAborted);
  // P3: versions grow; a catch-up installs the group's own.
  REFITD_CHECK(!versions.last().has_value() || *versions.last() < update->version ||
               (CatchUpRuns() && *versions.last() == update->version));
}

void Group::Impl::CheckInvariants() const {
  CheckState();
  members.CheckInvariants();
  versions.CheckInvariants();
  slots.CheckInvariants();
  catch_up.CheckInvariants();
  compiler.CheckInvariants();
  rollback.CheckInvariants();
  requests.CheckInvariants();
  REFITD_CHECK(!catch_up.anyone_waits() || CatchUpRuns());
  if (CatchUpRuns()) {
    CheckCatchUp(*update, catch_up);
    const bool ends = update->state == UpdateState::kEnding;
    REFITD_CHECK(ends || (limits.catch_ups && versions.last() == update->version));
  }
  if (update == nullptr) {
    // P3: no member, instance or call takes part in an update that does not run.
    REFITD_CHECK(!slots.anyone_waits());
    for (const auto& [id, member] : members.members()) REFITD_CHECK(!group::InUpdate(member.state));
    for (const auto& [instance_name, instance] : members.instances()) {
      REFITD_CHECK(!group::InUpdate(instance.state));
    }
    return;
  }
  const Update& u = *update;
  const bool decided =
      u.state == UpdateState::kSettling || u.state == UpdateState::kVerifying || u.staged();
  u.participants.CheckInvariants(u.state);
  u.program.CheckInvariants();
  u.push.CheckInvariants(decided);
  u.readback.CheckInvariants();
  // P1: nothing is settled before every trainer rank has committed.
  if (RollbackRuns()) return CheckRollbackRuns(u);
  if (CatchUpRuns() || !decided) return;
  REFITD_CHECK(static_cast<int>(u.push.trainers().size()) == members.spec().trainer_ranks);
}

// ---- Group ----

void Group::CheckInvariants() const { impl_->CheckInvariants(); }

}  // namespace refitd
