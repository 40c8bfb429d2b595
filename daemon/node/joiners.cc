#include "daemon/node/joiners.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "daemon/node/group_spec.h"
#include "transport/base/status.h"

namespace refitd {

absl::Status Joiners::TakeHello(Peers::Waiting* peer, bool* created, Turn& turn) {
  const std::string group = peer->hello.group;
  REFITD_RETURN_IF_ERROR(CheckNotDrained(group));
  if (peer->hello.boot_id == state_.boot_id) {
    CoordinateOwn(peer->hello, turn);
    return absl::FailedPreconditionError("boot_id: the daemon joins itself");
  }
  if (state_.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(state_.peers.CheckLatest(peer->hello));
  peer->deadline = DaemonState::Now() + peer->hello.wait;
  REFITD_RETURN_IF_ERROR(CheckNotFollowing(peer->hello));
  REFITD_RETURN_IF_ERROR(TakeSpec(&peer->hello, created, turn));
  state_.peers.ForgetEarlier(*peer);
  if (state_.groups.Find(group) != nullptr) return absl::OkStatus();
  if (peer->hello.wait == Duration(0)) return NoGroup(group);
  return state_.peers.AdmitWaiting();
}

void Joiners::RefuseUntil(const std::string& group, TimePoint until) {
  std::erase_if(drained_, [](const auto& entry) { return entry.second <= DaemonState::Now(); });
  drained_[group] = until;
}

absl::Status Joiners::CheckNotDrained(const std::string& group) const {
  const auto it = drained_.find(group);
  if (it == drained_.end() || it->second <= DaemonState::Now()) return absl::OkStatus();
  return Error(absl::StatusCode::kUnavailable,
               "group '{}': it was drained here, and its coordinator's name has yet to lead "
               "elsewhere",
               group);
}

absl::Status Joiners::CheckNotFollowing(const PeerGreeting& hello) const {
  const GroupRecord* const group = state_.groups.Find(hello.group);
  if (group == nullptr || group->follower == nullptr) return absl::OkStatus();
  const JoinRecord& join = group->join;
  const bool linked = !join.joining && join.link != nullptr;
  if (linked && join.address != hello.coordinator) return Followed(*group);
  return Error(absl::StatusCode::kUnavailable,
               "group '{}': {}, under the same name, and does not coordinate it yet", hello.group,
               linked         ? "this daemon is linked to another one"
               : join.joining ? "this daemon joins it"
                              : "this daemon leaves another one");
}

absl::Status Joiners::TakeSpec(PeerGreeting* hello, bool* created, Turn& turn) {
  if (!hello->spec.has_value()) return absl::OkStatus();
  const bool exists = state_.groups.Find(hello->group) != nullptr;
  if (exists || identities_.MayMake(hello->group, hello->identity)) {
    return life_.Make(hello->group, *hello->spec, std::nullopt, /*creator=*/"", created, turn)
        .status();
  }
  hello->spec.reset();
  if (!hello->trainer) return absl::OkStatus();
  return Error(absl::StatusCode::kPermissionDenied,
               "{} may not make group '{}', whose owner a rule names", hello->identity,
               hello->group);
}

void Joiners::CoordinateOwn(const PeerGreeting& hello, Turn& turn) {
  GroupRecord* const joining = state_.groups.Find(hello.group);
  if (joining == nullptr || !joining->join.joining) return;
  const std::string named = joining->join.address;
  const std::string creator = joining->creator;
  std::vector<Waiters::OfGroup> waiting = state_.waiters.TakeAll(hello.group, named);
  joining_.Leave(joining, turn);
  for (Waiters::OfGroup& w : waiting) {
    const std::optional<GroupSpec>& spec = w.spec;
    const std::string identity = IdentityOf(w.record.peer);
    const bool exists = state_.groups.Find(hello.group) != nullptr;
    if (!spec.has_value() || (!exists && !identities_.MayMake(hello.group, identity))) continue;
    bool created = false;
    const auto* const trainer = std::get_if<TrainerAttached>(&w.attached);
    const auto trainers =
        trainer == nullptr ? std::nullopt : std::optional(trainer->identity.world_size);
    const auto made = life_.Make(hello.group, *spec, trainers, creator, &created, turn);
    if (!made.ok()) w.record.End(made.status());
  }
  const bool made = state_.groups.Find(hello.group) != nullptr;
  for (Waiters::OfGroup& w : waiting) {
    if (w.record.sink == nullptr) continue;
    w.coordinator.clear();
    w.named = named;
    if (made || w.waits) {
      state_.waiters.Wait(std::move(w));
    } else {
      w.record.End(NoGroup(hello.group));
    }
  }
  if (made) AdmitWaiting(hello.group, turn);
}

void Joiners::Hello(PeerGreeting hello, std::string peer_address,
                    std::shared_ptr<PeerSession> session) {
  Turn turn(state_.turns);
  Peers::Waiting peer{std::move(hello), std::move(peer_address), std::move(session),
                      DaemonState::Now()};
  const std::string group = peer.hello.group;
  bool created = false;
  if (absl::Status status = TakeHello(&peer, &created, turn); !status.ok()) {
    peer.session->End(std::move(status));
  } else if (state_.groups.Find(group) == nullptr) {
    state_.peers.Wait(std::move(peer));
    state_.timer.Wake();
  } else {
    Admit(std::move(peer), turn);
    // Members that wait for the group under another coordinator are refused, as new members would
    // be.
    if (created) AdmitWaiting(group, turn);
  }
}

absl::Status Joiners::CheckEncrypted(const GroupRecord& group) const {
  return CheckEncryption(group.name(), group.machine->spec(), state_.options.daemon_id,
                         state_.options.clear_wire);
}

void Joiners::Admit(Peers::Waiting peer, Turn& turn) {
  const std::string name = peer.hello.group;
  GroupRecord* group = state_.groups.Find(name);
  REFITD_CHECK(group != nullptr);
  if (group->coordinator == nullptr) return peer.session->End(Followed(*group));
  if (absl::Status status =
          group->coordinator->CanJoin(peer.hello.daemon_id, peer.hello.boot_id, peer.address);
      !status.ok()) {
    return peer.session->End(std::move(status));
  }
  if (absl::Status spanning = device_slots_.CheckSpanning(name, nullptr); !spanning.ok()) {
    return peer.session->End(std::move(spanning));
  }
  if (absl::Status encrypted = CheckEncrypted(*group); !encrypted.ok()) {
    return peer.session->End(std::move(encrypted));
  }
  LinkUp up;
  up.incarnation = group->machine->incarnation();
  up.spec = group->machine->spec();
  up.version = group->machine->version();
  up.coordinator_id = state_.options.daemon_id;
  up.protocol = peer.hello.protocol;
  peer.session->Accept(up);
  // A daemon of the group reached this one under that name, so members here may name it as well.
  if (!joining_.CoordinatorOf(peer.hello.coordinator).empty()) {
    group->named = peer.hello.coordinator;
  }
  const NodeId node = state_.peers.Join(peer.hello, std::move(peer.session));
  turn.Handle(
      name, NodeJoined{node, peer.hello.daemon_id, peer.address, up.protocol, peer.hello.boot_id});
}

void Joiners::AdmitWaiting(const std::string& group, Turn& turn) {
  for (Waiters::OfGroup& w : state_.waiters.TakeAll(group, "")) {
    GroupRecord* const made = state_.groups.Find(group);
    if (!w.named.empty()) made->named = w.named;
    absl::Status same = w.spec.has_value() ? CheckSameSpec(group, *w.spec, made->machine->spec(),
                                                           state_.spec_limits)
                                           : absl::OkStatus();
    if (same.ok()) {
      members_.Enter(std::move(w.record), made, std::move(w.attached), turn);
    } else {
      w.record.End(std::move(same));
    }
  }
  for (Peers::Waiting& peer : state_.peers.TakeWaiting(group)) Admit(std::move(peer), turn);
}

Room Joiners::RoomFor(const std::string& identity) {
  const auto hold = std::make_shared<ByteLedger::Hold>(state_.held.Empty(identity));
  return [hold](int64_t bytes) { return hold->GrowTo(bytes); };
}

void Joiners::ShareLayout(uint64_t session, PeerLayout* report) {
  std::shared_ptr<const Layout> known;
  {
    const Turn turn(state_.turns);
    const std::optional<Peers::Joined> joined = state_.peers.Find(session);
    if (!joined.has_value()) return;
    const GroupRecord* group = state_.groups.Find(joined->group);
    if (group == nullptr || group->coordinator == nullptr) return;
    known = group->coordinator->KnownLayout(joined->node, *report);
  }
  if (known != nullptr && report->layout != nullptr && SameStructure(*known, *report->layout))
    report->layout = known;
}

void Joiners::Report(uint64_t session, PeerReport report) {
  if (auto* layout = std::get_if<PeerLayout>(&report)) ShareLayout(session, layout);
  Turn turn(state_.turns, Turn::Order::kAhead);
  if (const std::optional<Peers::Joined> joined = state_.peers.Find(session); joined.has_value()) {
    turn.Handle(joined->group, ReportReceived{joined->node, std::move(report)});
  }
}

void Joiners::Gone(uint64_t session, std::string reason) {
  Turn turn(state_.turns);
  const std::optional<Peers::Joined> joined = state_.peers.Remove(session);
  if (joined.has_value()) turn.Handle(joined->group, NodeLost{joined->node, std::move(reason)});
}

}  // namespace refitd
