#include "daemon/node/peer_client.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "daemon/node/group_spec.h"
#include "daemon/node/identities.h"
#include "daemon/node/life.h"
#include "daemon/process/log.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The pause between a refusal that may pass and the next try to join.
constexpr Duration kRejoinPause = std::chrono::milliseconds(250);
// How long joining may take after the wait of a member has ended, or of a member that does not wait
// (P4). Less than the time that clients give a daemon to answer (ConnectOptions::call_margin), so
// that members hear why the coordinator was not joined.
constexpr Duration kJoinGrace = std::chrono::seconds(4);

// OK: the group, which this daemon has joined, takes a member that names the coordinator as
// `named`.
absl::Status CheckJoined(DaemonState& state, const GroupRecord& group, const std::string& named,
                         const std::optional<GroupSpec>& spec)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (spec.has_value()) {
    REFITD_RETURN_IF_ERROR(
        CheckSameSpec(group.name(), *spec, group.machine->spec(), state.spec_limits));
  }
  if (group.join.link != nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kUnavailable,
               "group '{}': the link to {} is lost and being cleaned up: attach again",
               group.name(), named);
}

// Makes the record of a group that this daemon begins to join.
absl::StatusOr<GroupRecord*> Make(DaemonState& state, const std::string& name,
                                  const std::string& address, const std::string& creator,
                                  StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (state.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(AdmitGroup(state, creator, /*pool_bytes=*/0));
  REFITD_RETURN_IF_ERROR(MakeRoom(state, name, nullptr, lock));
  FollowerOptions options;
  options.name = name;
  options.coordinator_address = address;
  options.peer_limits = state.options.peers;
  options.next_update = [&state] { return state.NewUpdate(); };
  GroupRecord* const group = state.groups.Follow(std::move(options));
  group->creator = creator;
  return group;
}

void StopJoining(GroupRecord* group, const absl::Status& status, StateLock& lock) {
  REFITD_CHECK(group->follower != nullptr && !group->machine->has_members());
  group->join.joining = false;
  group->join.redial.reset();
  const std::string name = group->name();
  lock.Handle(name, LinkLost{status});  // drops the group, which has no member
}

// The time at which a member that waits is refused.
PendingAttaches::Expiry ExpiryOf(const Groups& groups) {
  return [&groups](const PendingAttaches::OfGroup& member) -> TimePoint {
    if (member.coordinator.empty()) return member.deadline;
    const GroupRecord* const group = groups.Find(member.record.group);
    const bool tries = group != nullptr && group->join.joining;
    // A member that does not wait for the group gets the time that joining takes.
    const TimePoint own = member.waits ? member.deadline : member.deadline + kJoinGrace;
    // A running try that waits no longer than the member may end meanwhile, and tell why.
    if (tries && !group->join.redial.has_value() && group->join.dialled_until <= own) {
      return member.deadline + kJoinGrace;
    }
    return own;
  };
}

// Why a member whose wait is over is refused.
absl::Status LateStatus(DaemonState& state, const PendingAttaches::OfGroup& member)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  const std::string& name = member.record.group;
  if (!member.coordinator.empty()) {
    const GroupRecord* const group = state.groups.Find(name);
    if (group != nullptr && !group->join.refusal.ok()) return group->join.refusal;
    if (member.spec.has_value()) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "group '{}': the coordinator at {} was not joined in time", name,
                   member.coordinator);
    }
  }
  return Error(absl::StatusCode::kNotFound,
               "group '{}' was not created in time (the wait of attaching; refitctl: --timeout)",
               name);
}

}  // namespace

std::string PeerClient::CoordinatorOf(const std::string& address) const {
  if (address.empty()) return "";
  for (const char* kind : {"tcp:", "peers:"}) {
    if (std::find(state_.listeners.begin(), state_.listeners.end(), kind + address) !=
        state_.listeners.end()) {
      return "";
    }
  }
  if (address == state_.options.advertise) return "";
  return address;
}

absl::Status PeerClient::CheckCanJoin(const std::string& named) const {
  if (dial_ != nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "coordinator: '{}': this daemon joins no others (a link takes tls, or "
               "listen.insecure)",
               named);
}

absl::StatusOr<GroupRecord*> PeerClient::Follow(const std::string& name, const std::string& address,
                                                const std::optional<GroupSpec>& spec,
                                                const std::string& creator, StateLock& lock) {
  REFITD_RETURN_IF_ERROR(CheckCanJoin(address));
  if (spec.has_value()) REFITD_RETURN_IF_ERROR(CheckSpec(*spec, state_.spec_limits).status());
  GroupRecord* const found = state_.groups.Find(name);
  if (found == nullptr) return Make(state_, name, address, creator, lock);
  if (found->coordinator != nullptr && found->named == address) {
    if (!state_.groups.Empty(*found)) return found;
    DropGroup(state_, name,
              "given up: it has no member, and its coordinator's name is resolved anew", lock);
    return Make(state_, name, address, creator, lock);
  }
  if (found->follower == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "coordinator: '{}', but group '{}' is coordinated by this daemon", address, name);
  }
  if (found->join.address != address) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "coordinator: '{}', but group '{}' is coordinated by {}", address, name,
                 found->join.address);
  }
  if (!found->join.joining) REFITD_RETURN_IF_ERROR(CheckJoined(state_, *found, address, spec));
  return found;
}

void PeerClient::Dial(GroupRecord* group) {
  const TimePoint now = DaemonState::Now();
  JoinRecord& join = group->join;
  REFITD_CHECK(join.joining && dial_ != nullptr);
  PendingAttaches::Request request = state_.pending.RequestOf(group->name(), join.address, now);
  PeerDial dial;
  dial.address = join.address;
  dial.group = group->name();
  dial.daemon_id = state_.options.daemon_id;
  dial.boot_id = state_.boot_id;
  dial.limits.message_bytes = state_.options.message_bytes;
  dial.spec = std::move(request.spec);
  dial.identity = request.identity;
  dial.trainer = request.trainer;
  dial.wait = request.wait;
  dial.number = ++dialled_;
  join.redial.reset();
  join.dialled_spec = dial.spec.has_value();
  join.dialled_identity = std::move(request.identity);
  join.dialled_trainer = request.trainer;
  join.dialled_until = now + dial.wait;
  const Try current{group->name(), group->id, ++join.dial};
  PeerLinkCallbacks callbacks;
  callbacks.on_up = [this, current](const LinkUp& up) { LinkIsUp(current, up); };
  callbacks.on_command = [this, current](PeerCommand command) {
    TakeCommand(current, std::move(command));
  };
  callbacks.on_lost = [this, current](absl::Status status) {
    LinkIsLost(current, std::move(status));
    MutexLock lock(state_.mutex.raw());
    --links_;
    links_cond_.NotifyAll();
  };
  ++links_;
  LogInfo("group {}: joining its coordinator at {}", group->name(), join.address);
  join.link = dial_(std::move(dial), std::move(callbacks));  // closes the previous try, if any
}

// The group's record if this is the group's newest try, else null.
GroupRecord* PeerClient::Current(const Try& attempt) {
  GroupRecord* const group = state_.groups.Find(attempt.group, attempt.id);
  return group != nullptr && group->join.dial == attempt.number ? group : nullptr;
}

void PeerClient::LinkIsUp(const Try& attempt, const LinkUp& up) {
  StateLock lock(&state_.mutex);
  GroupRecord* const group = Current(attempt);
  if (group == nullptr || !group->join.joining) return;
  absl::Status fits = CheckGivenSpec(up.spec, state_.spec_limits);
  if (fits.ok()) {
    fits = CheckEncryption(attempt.group, up.spec, state_.options.daemon_id,
                           state_.options.clear_wire);
  }
  if (fits.ok()) {
    fits = AdmitGroup(state_, group->creator, up.spec.slots * up.spec.slot_bytes, group);
  }
  if (fits.ok()) fits = MakeRoom(state_, attempt.group, &up.spec, lock);
  if (fits.ok()) {
    TakeJoined(group, up, lock);
  } else {
    Failed(group, fits, lock);
  }
}

void PeerClient::TakeJoined(GroupRecord* group, const LinkUp& up, StateLock& lock) {
  REFITD_CHECK(group->join.joining);
  const std::string name = group->name();
  group->join.joining = false;
  std::vector<PendingAttaches::OfGroup> admitted =
      state_.pending.TakeAll(name, group->join.address);
  lock.Handle(name, up);
  for (PendingAttaches::OfGroup& w : admitted) EnterWaiting(state_, std::move(w), lock);
  const GroupRecord* left = state_.groups.Find(name);
  const bool wanted =
      left == nullptr || left->machine->has_members() || state_.pending.AnyOfSlots(name);
  if (!wanted) {
    lock.Handle(name, LinkLost{absl::CancelledError("no member of this daemon is left")});
  }
}

void PeerClient::IndexDestinations(const Try& attempt, PeerPrepare* prepare) {
  std::vector<std::shared_ptr<const Layout>> layouts;
  {
    const StateLock lock(&state_.mutex);
    const GroupRecord* group = state_.groups.Find(attempt.group, attempt.id);
    if (group == nullptr || group->follower == nullptr) return;
    layouts = group->follower->LayoutsToIndex(*prepare);
  }
  if (layouts.empty()) return;
  auto index = Follower::MakeIndex(prepare->destinations, std::move(layouts));
  // If the index can't be made, the worker tries again and reports the error.
  if (index.ok()) prepare->index = *std::move(index);
}

void PeerClient::TakeCommand(const Try& attempt, PeerCommand command) {
  if (auto* prepare = std::get_if<PeerPrepare>(&command)) IndexDestinations(attempt, prepare);
  StateLock lock(&state_.mutex, StateLock::Order::kAhead);
  if (Current(attempt) == nullptr) return;
  lock.Handle(attempt.group, CommandReceived{std::move(command)});
}

void PeerClient::LinkIsLost(const Try& attempt, absl::Status status) {
  StateLock lock(&state_.mutex, StateLock::Order::kAhead);
  GroupRecord* const group = Current(attempt);
  if (group == nullptr) return;
  if (group->join.joining) {
    Failed(group, status, lock);
  } else {
    lock.Handle(attempt.group, LinkLost{std::move(status)});
  }
}

// The reason of a failed try decides which members go on waiting:
//   a group that does not exist yet, another process with this daemon's id that has just ended, or
//   a daemon at the coordinator's name that is not the coordinator yet: members whose wait goes on
//   a refused spec: members that brought none
//   a member that brought the spec and may not make the group: the other members
bool PeerClient::TakeFailure(GroupRecord* group, const absl::Status& status) {
  const bool goes_on = !state_.draining && !state_.stopping;
  const TimePoint now = DaemonState::Now();
  JoinRecord& join = group->join;
  const bool pause = absl::IsAlreadyExists(status) || absl::IsUnavailable(status);
  const bool of_spec =
      join.dialled_spec && (absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status));
  const bool of_right = join.dialled_trainer && absl::IsPermissionDenied(status);
  const bool of_time = pause || absl::IsNotFound(status);
  const absl::Status refusal = AboutSuspect(
      Prefixed(absl::Status(status.code(), Message(status)),
               "group {}: the coordinator at {} could not be joined", group->name(), join.address),
      {SuspectRole::kDaemon, join.address, "", std::nullopt, 0});
  const bool waited_for = state_.pending.Refuse(
      group->name(), join.address,
      [&](const PendingAttaches::OfGroup& w) {
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
    Dial(group);
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

void PeerClient::Failed(GroupRecord* group, const absl::Status& status, StateLock& lock) {
  if (!TakeFailure(group, status)) return StopJoining(group, status, lock);
  lock.DeadlineMoved();
}

void PeerClient::Leave(GroupRecord* group, StateLock& lock) {
  StopJoining(group, absl::CancelledError("this daemon answers to that name itself"), lock);
}

void PeerClient::StopIfUnwanted(const std::string& name, StateLock& lock) {
  GroupRecord* group = state_.groups.Find(name);
  if (group == nullptr || !group->join.joining) return;
  const bool wanted = state_.pending.Any(name, group->join.address);
  if (!wanted) StopJoining(group, absl::CancelledError("no member waits for it"), lock);
}

void PeerClient::RefuseLateMembers(TimePoint now, StateLock& lock) {
  std::vector<PendingAttaches::OfGroup> late =
      state_.pending.TakeLate(now, ExpiryOf(state_.groups));
  for (PendingAttaches::OfGroup& w : late) w.record.End(LateStatus(state_, w));
  for (const PendingAttaches::OfGroup& w : late) {
    if (!w.coordinator.empty()) StopIfUnwanted(w.record.group, lock);
  }
}

std::optional<TimePoint> PeerClient::NextExpiry() const {
  return state_.pending.NextExpiry(ExpiryOf(state_.groups));
}

void PeerClient::RedialIfDue(TimePoint now) {
  for (const auto& [name, group] : state_.groups.all()) {
    if (group->join.redial.has_value() && *group->join.redial <= now) Dial(group.get());
  }
}

void PeerClient::AwaitLinks(Mutex* mutex) {
  REFITD_CHECK(mutex == state_.mutex.raw());
  while (links_ > 0) links_cond_.Wait(mutex);
}

}  // namespace refitd
