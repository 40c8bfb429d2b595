#include "daemon/node/joining.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "daemon/node/group_spec.h"
#include "transport/base/status.h"

namespace refitd {

Joining::Joining(DaemonState* state, PeerDialer dial, const Identities* identities, GroupLife* life,
                 Members* members)
    : state_(*state),
      identities_(*identities),
      life_(*life),
      members_(*members),
      dialler_({.daemon_id = state_.options.daemon_id,
                .boot_id = state_.boot_id,
                .message_bytes = state_.options.message_bytes},
               std::move(dial), this, &state_.mutex) {}

std::string Joining::CoordinatorOf(const std::string& address) const {
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

absl::Status Joining::CheckCanJoin(const std::string& named) const {
  if (dialler_.can_join()) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "coordinator: '{}': this daemon joins no others (a link takes tls, or "
               "listen.insecure)",
               named);
}

absl::Status Joining::CheckJoined(const GroupRecord& group, const std::string& named,
                                  const std::optional<GroupSpec>& spec) const {
  if (spec.has_value()) {
    REFITD_RETURN_IF_ERROR(
        CheckSameSpec(group.name(), *spec, group.machine->spec(), state_.spec_limits));
  }
  if (group.join.link != nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kUnavailable,
               "group '{}': the link to {} is lost and being cleaned up: attach again",
               group.name(), named);
}

absl::StatusOr<GroupRecord*> Joining::Follow(const std::string& name, const std::string& address,
                                             const std::optional<GroupSpec>& spec,
                                             const std::string& creator, Turn& turn) {
  REFITD_RETURN_IF_ERROR(CheckCanJoin(address));
  if (spec.has_value()) REFITD_RETURN_IF_ERROR(CheckSpec(*spec, state_.spec_limits).status());
  GroupRecord* const found = state_.groups.Find(name);
  if (found == nullptr) return Make(name, address, creator, turn);
  if (found->coordinator != nullptr && found->named == address) {
    if (!state_.groups.Empty(*found)) return found;
    life_.Drop(name, "given up: it has no member, and its coordinator's name is resolved anew",
               turn);
    return Make(name, address, creator, turn);
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
  if (!found->join.joining) REFITD_RETURN_IF_ERROR(CheckJoined(*found, address, spec));
  return found;
}

absl::StatusOr<GroupRecord*> Joining::Make(const std::string& name, const std::string& address,
                                           const std::string& creator, Turn& turn) {
  if (state_.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(identities_.AdmitGroup(creator, /*pool_bytes=*/0));
  REFITD_RETURN_IF_ERROR(life_.MakeRoom(name, nullptr, turn));
  FollowerOptions options;
  options.name = name;
  options.coordinator_address = address;
  options.peer_limits = state_.options.peers;
  options.next_update = [this] { return state_.NewUpdate(); };
  GroupRecord* const group = state_.groups.Follow(std::move(options));
  group->creator = creator;
  return group;
}

void Joining::LinkIsUp(const DialTry& of, const LinkUp& up) {
  Turn turn(state_.turns);
  GroupRecord* const group = Dialler::Current(of, &state_.groups);
  if (group == nullptr || !group->join.joining) return;
  absl::Status fits = CheckGivenSpec(up.spec, state_.spec_limits);
  if (fits.ok()) {
    fits = CheckEncryption(of.group, up.spec, state_.options.daemon_id, state_.options.clear_wire);
  }
  if (fits.ok()) fits = identities_.AdmitJoinedPool(*group, up.spec);
  if (fits.ok()) fits = life_.MakeRoom(of.group, &up.spec, turn);
  if (fits.ok()) {
    TakeJoined(group, up, turn);
  } else {
    Failed(group, fits, turn);
  }
}

void Joining::TakeJoined(GroupRecord* group, const LinkUp& up, Turn& turn) {
  REFITD_CHECK(group->join.joining);
  const std::string name = group->name();
  group->join.joining = false;
  std::vector<Waiters::OfGroup> admitted = state_.waiters.TakeAll(name, group->join.address);
  turn.Handle(name, up);
  for (Waiters::OfGroup& w : admitted) {
    GroupRecord* joined = state_.groups.Find(name);
    absl::Status status = joined == nullptr
                              ? absl::UnavailableError("the coordinator is lost: attach again")
                              : absl::OkStatus();
    if (status.ok() && w.spec.has_value())
      status = CheckSameSpec(name, *w.spec, up.spec, state_.spec_limits);
    if (status.ok()) {
      members_.Enter(std::move(w.record), joined, std::move(w.attached), turn);
    } else {
      w.record.End(std::move(status));
    }
  }
  const GroupRecord* left = state_.groups.Find(name);
  const bool wanted =
      left == nullptr || left->machine->has_members() || state_.waiters.AnyOfSlots(name);
  if (!wanted) {
    turn.Handle(name, LinkLost{absl::CancelledError("no member of this daemon is left")});
  }
}

void Joining::IndexDestinations(const DialTry& of, PeerPrepare* prepare) {
  std::vector<std::shared_ptr<const Layout>> layouts;
  {
    const Turn turn(state_.turns);
    const GroupRecord* group = state_.groups.Find(of.group, of.id);
    if (group == nullptr || group->follower == nullptr) return;
    layouts = group->follower->LayoutsToIndex(*prepare);
  }
  if (layouts.empty()) return;
  auto index = Follower::MakeIndex(prepare->destinations, std::move(layouts));
  // If the index can't be made, the worker tries again and reports the error.
  if (index.ok()) prepare->index = *std::move(index);
}

void Joining::LinkSays(const DialTry& of, PeerCommand command) {
  if (auto* prepare = std::get_if<PeerPrepare>(&command)) IndexDestinations(of, prepare);
  Turn turn(state_.turns, Turn::Order::kAhead);
  if (Dialler::Current(of, &state_.groups) == nullptr) return;
  turn.Handle(of.group, CommandReceived{std::move(command)});
}

void Joining::LinkIsLost(const DialTry& of, absl::Status status) {
  Turn turn(state_.turns, Turn::Order::kAhead);
  GroupRecord* const group = Dialler::Current(of, &state_.groups);
  if (group == nullptr) return;
  if (group->join.joining) {
    Failed(group, status, turn);
  } else {
    turn.Handle(of.group, LinkLost{std::move(status)});
  }
}

void Joining::Failed(GroupRecord* group, const absl::Status& status, Turn& turn) {
  const bool goes_on = !state_.draining && !state_.stopping;
  if (!dialler_.TakeFailure(group, status, goes_on, DaemonState::Now(), &state_.waiters)) {
    return Stop(group, status, turn);
  }
  state_.timer.Wake();
}

void Joining::Stop(GroupRecord* group, const absl::Status& status, Turn& turn) {
  REFITD_CHECK(group->follower != nullptr && !group->machine->has_members());
  group->join.joining = false;
  group->join.redial.reset();
  const std::string name = group->name();
  turn.Handle(name, LinkLost{status});  // drops the group, which has no member
}

void Joining::Leave(GroupRecord* group, Turn& turn) {
  Stop(group, absl::CancelledError("this daemon answers to that name itself"), turn);
}

void Joining::StopIfUnwanted(const std::string& name, Turn& turn) {
  GroupRecord* group = state_.groups.Find(name);
  if (group == nullptr || !group->join.joining) return;
  const bool wanted = state_.waiters.Any(name, group->join.address);
  if (!wanted) Stop(group, absl::CancelledError("no member waits for it"), turn);
}

void Joining::RefuseLateMembers(TimePoint now, Turn& turn) {
  std::vector<Waiters::OfGroup> late =
      state_.waiters.TakeLate(now, Dialler::ExpiryOf(state_.groups));
  for (Waiters::OfGroup& w : late) w.record.End(Dialler::LateStatus(w, state_.groups));
  for (const Waiters::OfGroup& w : late) {
    if (!w.coordinator.empty()) StopIfUnwanted(w.record.group, turn);
  }
}

void Joining::Dial(GroupRecord* group) { dialler_.Dial(group, state_.waiters, DaemonState::Now()); }

void Joining::RedialIfDue(TimePoint now) {
  dialler_.RedialIfDue(state_.groups, state_.waiters, now);
}

}  // namespace refitd
