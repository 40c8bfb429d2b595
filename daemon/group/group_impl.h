// The conductor: it hands events to the group's machines, and takes the steps that these make
// possible. Only group/*.cc includes it.
//
//   group.cc       events to steps; the data phase: slots, buckets, acknowledgements; the clock,
//                  catch-ups, invariants
//   view.cc        what status shows
//   members.cc     attach, loss
//   begin.cc       Begin, Prepare, Ready; rollbacks
//   refit.cc       the one call of a compiled refit
//   end.cc         Commit, verification, eviction, giving up
//
// Every event ends in Pump(), which takes all steps that have become possible. Not thread-safe.
#ifndef REFITD_DAEMON_GROUP_GROUP_IMPL_H_
#define REFITD_DAEMON_GROUP_GROUP_IMPL_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/group/catch_up.h"
#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/requests.h"
#include "daemon/group/rollback.h"
#include "daemon/group/slots.h"
#include "daemon/group/update.h"
#include "daemon/group/updates.h"
#include "daemon/group/versions.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd {

namespace group {

// Whether the rank has shards that the update moves.
bool HasShardsIn(const Member& member, const TrainerProgress& progress);
// The failure of an update to `wanted` that was never opened, and whom that is due to.
Failure Unwritten(Version wanted, const Member& suspect);
// Why an update is given up when a part or the program failed to move its bytes.
GiveUp FailedMove(const UpdateParticipants& participants, const Membership& members,
                  std::string_view what, const absl::Status& status, int failed_destination);
// True: the update has no shards to move, or its program is ready. False: the program is being
// compiled. Not OK: there can be no program.
absl::StatusOr<bool> FindProgram(const Membership& members, RefitCompiler* compiler,
                                 Update* update);
UpdateView ViewOf(const Update& u);

}  // namespace group

struct Group::Impl {
  using CallKind = group::CallKind;
  using Catalog = group::Catalog;
  using GiveUp = group::GiveUp;
  using Instance = group::Instance;
  using Member = group::Member;
  using Part = group::Part;
  using Participant = group::Participant;
  using Request = group::Request;
  using TrainerProgress = group::TrainerProgress;
  using Update = group::Update;

  Impl(std::string name, uint64_t incarnation, GroupSpec spec, GroupLimits limits,
       std::function<UpdateId()> next_update, Ownership::Rule owner_rule);

  // ---- group.cc ----
  void On(const TrainerAttached& e);
  void On(const EngineAttached& e);
  void On(const MemberLost& e);
  void On(const LayoutRegistered& e);
  void On(const BeginEvent& e);
  void On(const ReadyEvent& e);
  void On(const ProcessedEvent& e);
  void On(const EngineFailed& e);
  void On(const LeaseSlotEvent& e);
  void On(const ReleaseSlotEvent& e);
  void On(const BucketEvent& e);
  void On(const TransferDone& e);
  void On(const AckEvent& e);
  void On(const CommitEvent& e);
  void On(const RefitEvent& e);
  void On(const RefitPlanned& e);
  void On(const CompareDone& e);
  void On(const RefitDone& e);
  void On(const AbortEvent& e);
  void On(const RollbackEvent& e);
  void On(const ReleasePreviousEvent& e);
  void On(const VerifyDone& e);
  void On(const OperatorAbort& e);
  void On(const ReplaceGroup& e);
  void On(const DrainEvent& e);
  void On(const FailUpdate& e);
  void On(const UpdateAnnounced& e);
  void On(const DataPlaneState& e);
  void On(const KeepNodesOut& e);
  void On(const Tick& e);
  void On(const CallGone& e);
  // Takes all steps that the event made possible.
  void Pump();
  void PumpUpdate();

  void TickUpdate();
  void CheckInvariants() const;

  // ---- members.cc ----
  absl::Status CheckLayout(const LayoutRegistered& e) const;
  void GiveUpOfFormerOwner();
  void ExpelUnwelcome();
  void RefuseDeclared(Member* member, const absl::Status& why);
  // Gives an update up that waits for instances, if too few are attached that were not refused.
  void FailIfRefused(const absl::Status& refused);
  void LoseTrainer(const Member& member, const std::string& reason);

  // ---- begin.cc ----
  absl::Status CheckBegin(const Member& member, const BeginEvent& e) const;
  void AssembleIfAllHere();
  void Assemble();
  void OpenDataIfReady();
  // The ranks that have not answered Prepare, or SendFlip, are late.
  void FailUnready();

  // ---- refit.cc ----
  absl::Status CheckRefit(const Member& member, const RefitEvent& e, bool joined);

  // ---- catch-ups and rollbacks, in group.cc and begin.cc ----
  void OpenCatchUpIfDue();
  // The call is checked already, so that a call which is refused does not end the catch-up (P10).
  template <typename Event>
  void Defer(const Event& e, std::string_view to) {
    catch_up.Defer(e, e.duration);
    updates.GiveWay(fmt::format("it gives way to {}", to));
  }
  absl::Status CheckRollback(const RollbackEvent& e) const;

  // ---- end.cc ----
  void TakeCommit(Member* member, TrainerProgress* progress, int64_t bucket_count);
  void TakeCommitIfComplete(Member* member, TrainerProgress* progress);
  void SettleIfDone();
  // Everything is written and verified: commits, unless shadowed instances have to flip; their
  // ranks that asked for it process the version before that.
  void Decide();
  void Flip();
  void Evict(uint32_t participant, const GiveUp& why);
  // A live rank is late or failed: evicts its instance, or gives the update up.
  void FailEngine(uint32_t participant, const GiveUp& why);
  void Conclude(Outcome outcome, const std::string& reason);

  group::Outbox out;
  // Constant after construction.
  const std::string name;
  const GroupLimits limits;

  // The machines, each on those above it.
  group::Requests requests{&out};
  group::Membership members;
  group::Versions versions;
  group::Slots slots{limits, &members, &requests, &out};
  group::CatchUp catch_up{limits, &members, &versions, &out};
  group::RefitCompiler compiler{&members, &slots, &out};
  group::Rollback rollback{&members, &versions, &catch_up, &out};

  group::Updates updates;
  const std::shared_ptr<Update>& update = updates.running();  // null: no update runs
  std::shared_ptr<const Catalog> catalog;                     // of the last update of trainers
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_GROUP_IMPL_H_
