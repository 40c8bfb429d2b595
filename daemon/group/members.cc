// Members that attach, register layouts and are lost.
#include <utility>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"

namespace refitd {

Failure group::Unwritten(Version wanted, const Member& suspect) {
  Failure failure;
  failure.Add(SuspectOf(suspect));
  failure.version = wanted.value();
  failure.weights = Weights::kClean;
  failure.may_be_retried = true;
  return failure;
}

void Group::Impl::On(const TrainerAttached& e) {
  if (absl::Status status = members.CheckTrainer(e.identity); !status.ok()) {
    out.Do(RefuseMember{e.member, std::move(status)});
    return;
  }
  if (members.EnterTrainer(group::MemberOf(e), updates.drains())) GiveUpOfFormerOwner();
}

void Group::Impl::On(const EngineAttached& e) {
  const EngineIdentity& who = e.identity;
  Member member = group::MemberOf(e);
  absl::Status status = members.CheckEngine(who, versions.CheckHeld(who));
  if (status.ok() && !who.refused.ok()) {
    RefuseDeclared(&member, who.refused);
    status = who.refused;
  }
  if (!status.ok()) {
    out.Do(RefuseMember{e.member, std::move(status)});
    return;
  }
  versions.Bring(who, &member);
  if (Update* const opened = updates.Opened();
      e.lacks_slots && opened != nullptr && opened->state == UpdateState::kOpening) {
    opened->push.NoteLacksSlots(member.label);
  }
  if (members.EnterEngine(std::move(member), who, updates.drains())) GiveUpOfFormerOwner();
}

// Trainers of another identity have to leave. Copies of theirs may run until the update is over
// that they had begun (P6).
void Group::Impl::GiveUpOfFormerOwner() {
  Update* const opened = updates.Opened();
  if (opened == nullptr || opened->state == UpdateState::kEnding) return;
  updates.Abandon(opened,
                  {fmt::format("another identity owns group '{}'", name), GiveUpClass::kOther});
}

void Group::Impl::ExpelUnwelcome() {
  if (!members.any_unwelcome() || updates.Opened() != nullptr) return;
  for (const MemberId id : members.TakeUnwelcome()) {
    slots.Forget(id);
    const Member& member = *members.Find(id);
    LoseTrainer(member, Message(members.WhyUnwelcome(member)));
    members.Expel(id);
  }
  out.Changed();
}

// Calls that wait for the instance of a rank that was refused fail at once, since waiting does
// not help (P4).
void Group::Impl::RefuseDeclared(Member* member, const absl::Status& why) {
  members.RefuseDeclared(member, why);
  FailIfRefused(members.last_refusal());
}

void Group::Impl::FailIfRefused(const absl::Status& refused) {
  Update* const opened = updates.Opened();
  if (opened == nullptr || opened->state != UpdateState::kOpening) return;
  const absl::Status why = members.TooFewLeft(refused);
  if (why.ok()) return;
  GiveUp give_up{Message(why), GiveUpClass::kOther, FailureOf(why)};
  give_up.begin_code = why.code();
  updates.Abandon(opened, std::move(give_up));
}

absl::Status Group::Impl::CheckLayout(const LayoutRegistered& e) const {
  const Member* member = members.Find(e.member);
  if (member == nullptr || member->state == MemberState::kLeaving) {
    return Precondition("member {} is not attached", e.member);
  }
  return members.CheckShadowed(*member, e);
}

void Group::Impl::On(const LayoutRegistered& e) {
  if (absl::Status status = CheckLayout(e); !status.ok()) {
    if (e.call != CallId()) out.Refuse(e.call, std::move(status));
    return;
  }
  Member* const member = members.Find(e.member);
  // A new layout binds other memory, and nobody has said that this memory holds the version.
  if (member->layout != nullptr) member->held.reset();
  versions.CheckContent(member, e.content);
  if (e.backs_differ) {
    members.Withdraw(member);
  } else {
    members.Register(member, e);
  }
  if (e.call != CallId()) out.Do(Reply{e.call, absl::OkStatus(), EmptyReply{}});
}

void Group::Impl::On(const MemberLost& e) {
  Member* member = members.Find(e.member);
  if (member == nullptr || member->state == MemberState::kLeaving) return;
  out.Log(LogLine::kInfo, fmt::format("{} left: {}", member->label, e.reason));
  // The member's slots are freed first, since steps that follow may need them.
  slots.Forget(e.member);
  members.Lose(member);
  if (!member->engine) {
    LoseTrainer(*member, e.reason);
  } else if (members.FindInstance(member->instance) == nullptr) {
    catch_up.Forget(member->instance);
  }
  if (update != nullptr) {
    const std::optional<uint32_t> index = update->participants.Of(e.member);
    if (index.has_value()) {
      Evict(*index, {fmt::format("{} was lost: {}", member->label, e.reason),
                     GiveUpClass::kMemberLost, members.Suspecting(e.member)});
    }
  }
  members.ReleaseIfQuiet(e.member);
}

void Group::Impl::LoseTrainer(const Member& member, const std::string& reason) {
  if (updates.CatchUpRuns()) {
    // A call that waits for the catch-up is lost too, as an update that the rank has begun would
    // be: no other rank can complete it.
    for (const Version wanted : catch_up.DeferredOf(member.id)) {
      catch_up.Refuse(wanted, WithFailure(Error(absl::StatusCode::kAborted,
                                                "the update to version {} is lost: {} was lost: {}",
                                                wanted, member.label, reason),
                                          group::Unwritten(wanted, member)));
    }
  }
  Update* const opened = updates.Opened();
  if (opened == nullptr || opened->staged() || updates.RollbackRuns()) return;
  updates.Abandon(opened, {fmt::format("{} was lost: {}", member.label, reason),
                           GiveUpClass::kMemberLost, members.Suspecting(member.id)});
}

}  // namespace refitd
