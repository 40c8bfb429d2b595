#include "daemon/node/dialler.h"

#include <algorithm>
#include <optional>

#include "daemon/link/hello.h"
#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The pause between a refusal that may pass and the next try to join.
constexpr Duration kRejoinPause = std::chrono::milliseconds(250);
// How long a member that does not wait for its group may take to hear whether the group exists,
// while others wait for it.
constexpr Duration kJoinGrace = std::chrono::seconds(10);
// How long a try to join may run on after the wait of a member has ended, if the try waits no
// longer than that member: the time that joining takes, and the time to report the end of the link
// (P4).
constexpr Duration kTryGrace = PeerLinkLimits().join + kPeerEndLimit;

}  // namespace

void Dialler::Dial(GroupRecord* group, const Waiters& waiters, TimePoint now) {
  JoinRecord& join = group->join;
  REFITD_CHECK(join.joining && dial_ != nullptr);
  Waiters::Wish wish = waiters.WishOf(group->name(), join.address, now);
  PeerDial dial;
  dial.address = join.address;
  dial.group = group->name();
  dial.daemon_id = options_.daemon_id;
  dial.boot_id = options_.boot_id;
  dial.limits.message_bytes = options_.message_bytes;
  dial.spec = std::move(wish.spec);
  dial.identity = wish.identity;
  dial.trainer = wish.trainer;
  dial.wait = wish.wait;
  dial.number = ++dialled_;
  join.redial.reset();
  join.dialled_spec = dial.spec.has_value();
  join.dialled_identity = std::move(wish.identity);
  join.dialled_trainer = wish.trainer;
  join.dialled_until = now + dial.wait;
  const DialTry current{group->name(), group->id, ++join.dial};
  PeerLinkCallbacks callbacks;
  callbacks.on_up = [this, current](const LinkUp& up) { host_->LinkIsUp(current, up); };
  callbacks.on_command = [this, current](PeerCommand command) {
    host_->LinkSays(current, std::move(command));
  };
  callbacks.on_lost = [this, current](absl::Status status) {
    host_->LinkIsLost(current, std::move(status));
    MutexLock lock(mutex_);
    --links_;
    links_cond_.NotifyAll();
  };
  ++links_;
  LogInfo("group {}: joining its coordinator at {}", group->name(), join.address);
  join.link = dial_(std::move(dial), std::move(callbacks));  // closes the previous try, if any
}

GroupRecord* Dialler::Current(const DialTry& of, Groups* groups) {
  GroupRecord* const group = groups->Find(of.group, of.id);
  return group != nullptr && group->join.dial == of.number ? group : nullptr;
}

// These members go on waiting after a failed try: if the group does not exist yet, another process
// with this daemon's id has just ended, or the daemon that answers to the coordinator's name is not
// the coordinator yet, every member whose own wait goes on; if a spec was refused, the members that
// brought none; if the member that brought the spec may not make the group, the others.
bool Dialler::TakeFailure(GroupRecord* group, const absl::Status& status, bool goes_on,
                          TimePoint now, Waiters* waiters) {
  JoinRecord& join = group->join;
  const bool pause = absl::IsAlreadyExists(status) || absl::IsUnavailable(status);
  const bool of_spec =
      join.dialled_spec && (absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status));
  const bool of_right = join.dialled_trainer && absl::IsPermissionDenied(status);
  const bool of_time = pause || absl::IsNotFound(status);
  const absl::Status refusal(status.code(),
                             fmt::format("group {}: the coordinator at {} could not be joined: {}",
                                         group->name(), join.address, Message(status)));
  const bool waited_for = waiters->Refuse(
      group->name(), join.address,
      [&](const Waiters::OfGroup& w) {
        return goes_on &&
               ((of_spec && !w.spec.has_value()) || (of_time && w.waits && w.deadline > now) ||
                (of_right && (w.record.engine || !w.spec.has_value() ||
                              IdentityOf(w.record.peer) != join.dialled_identity)));
      },
      refusal);
  if (join.link != nullptr) join.link->Close();
  join.link.reset();
  if (!waited_for) return false;
  if (!pause) {
    join.refusal = absl::OkStatus();
    Dial(group, *waiters, now);
    return true;
  }
  if (join.refusal.ok()) {
    LogWarning("group {}: its coordinator at {} does not take this daemon in yet: {}",
               group->name(), join.address, Message(status));
  }
  join.refusal = refusal;
  join.redial = now + kRejoinPause;
  return true;
}

void Dialler::RedialIfDue(const Groups& groups, const Waiters& waiters, TimePoint now) {
  for (const auto& [name, group] : groups.all()) {
    if (group->join.redial.has_value() && *group->join.redial <= now) {
      Dial(group.get(), waiters, now);
    }
  }
}

Waiters::Expiry Dialler::ExpiryOf(const Groups& groups) {
  return [&groups](const Waiters::OfGroup& member) -> TimePoint {
    if (member.coordinator.empty()) return member.deadline;
    const GroupRecord* const group = groups.Find(member.record.group);
    const bool tries = group != nullptr && group->join.joining;
    // A member that does not wait for the group gets the time that joining takes.
    const TimePoint own = member.waits ? member.deadline : member.deadline + kJoinGrace;
    // A running try that waits no longer than the member ends by itself, and then tells the member
    // why.
    if (tries && !group->join.redial.has_value() && group->join.dialled_until <= own) {
      return member.deadline + kTryGrace;
    }
    return own;
  };
}

absl::Status Dialler::LateStatus(const Waiters::OfGroup& member, const Groups& groups) {
  const std::string& name = member.record.group;
  if (!member.coordinator.empty()) {
    const GroupRecord* const group = groups.Find(name);
    if (group != nullptr && !group->join.refusal.ok()) return group->join.refusal;
    if (member.spec.has_value()) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "group '{}': the coordinator at {} was not joined in time", name,
                   member.coordinator);
    }
  }
  return Error(absl::StatusCode::kNotFound, "group '{}' was not created in time", name);
}

void Dialler::AwaitLinks(Mutex* mutex) {
  REFITD_CHECK(mutex == mutex_);
  while (links_ > 0) links_cond_.Wait(mutex);
}

}  // namespace refitd
