#include "daemon/node/peer_server.h"

#include <optional>
#include <utility>

#include "daemon/node/group_spec.h"
#include "daemon/node/identities.h"
#include "daemon/node/life.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// OK: this daemon does not follow another one in the group. UNAVAILABLE: it will not, or may come
// to coordinate the group itself, as when the coordinator's name was pointed here.
absl::Status CheckNotFollowing(DaemonState& state, const PeerGreeting& hello)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  const GroupRecord* const group = state.groups.Find(hello.group);
  if (group == nullptr || group->follower == nullptr) return absl::OkStatus();
  const JoinRecord& join = group->join;
  const bool linked = !join.joining && join.link != nullptr;
  if (linked && join.address != hello.coordinator) return NotCoordinatedHere(*group);
  return Error(absl::StatusCode::kUnavailable,
               "group '{}': {}, under the same name, and does not coordinate it yet", hello.group,
               linked         ? "this daemon is linked to another one"
               : join.joining ? "this daemon joins it"
                              : "this daemon leaves another one");
}

// Makes the group that the hello's spec asks for, unless whoever brings it may not: a trainer is
// refused then, and an engine waits for the group.
absl::Status TakeSpec(DaemonState& state, PeerGreeting* hello, bool* created, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  if (!hello->spec.has_value()) return absl::OkStatus();
  const bool exists = state.groups.Find(hello->group) != nullptr;
  if (exists || MayMakeGroup(state, hello->group, hello->identity)) {
    return MakeGroup(state, hello->group, *hello->spec, std::nullopt, /*creator=*/"", created, lock)
        .status();
  }
  hello->spec.reset();
  if (!hello->trainer) return absl::OkStatus();
  return Error(absl::StatusCode::kPermissionDenied,
               "{} may not make group '{}', whose owner a rule names", hello->identity,
               hello->group);
}

}  // namespace

absl::Status PeerServer::TakeHello(PeerSessions::Waiting* peer, bool* created, StateLock& lock) {
  const std::string group = peer->hello.group;
  REFITD_RETURN_IF_ERROR(CheckNotDrained(group));
  if (peer->hello.boot_id == state_.boot_id) {
    CoordinateOwn(peer->hello, lock);
    return absl::FailedPreconditionError("boot_id: the daemon joins itself");
  }
  if (state_.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(state_.sessions.CheckLatest(peer->hello));
  peer->deadline = DaemonState::Now() + peer->hello.wait;
  REFITD_RETURN_IF_ERROR(CheckNotFollowing(state_, peer->hello));
  REFITD_RETURN_IF_ERROR(TakeSpec(state_, &peer->hello, created, lock));
  state_.sessions.ForgetEarlier(*peer);
  if (state_.groups.Find(group) != nullptr) return absl::OkStatus();
  if (peer->hello.wait == Duration(0)) return NoGroup(group);
  return state_.sessions.AdmitWaiting();
}

void PeerServer::RefuseUntil(const std::string& group, TimePoint until) {
  std::erase_if(drained_, [](const auto& entry) { return entry.second <= DaemonState::Now(); });
  drained_[group] = until;
}

absl::Status PeerServer::CheckNotDrained(const std::string& group) const {
  const auto it = drained_.find(group);
  if (it == drained_.end() || it->second <= DaemonState::Now()) return absl::OkStatus();
  return Error(absl::StatusCode::kUnavailable,
               "group '{}': it was drained here, and its coordinator's name has yet to lead "
               "elsewhere",
               group);
}

void PeerServer::CoordinateOwn(const PeerGreeting& hello, StateLock& lock) {
  GroupRecord* const joining = state_.groups.Find(hello.group);
  if (joining == nullptr || !joining->join.joining) return;
  const std::string named = joining->join.address;
  const std::string creator = joining->creator;
  std::vector<PendingAttaches::OfGroup> waiting = state_.pending.TakeAll(hello.group, named);
  peer_client_.Leave(joining, lock);
  for (PendingAttaches::OfGroup& w : waiting) {
    const std::optional<GroupSpec>& spec = w.spec;
    const std::string identity = IdentityOf(w.record.peer);
    const bool exists = state_.groups.Find(hello.group) != nullptr;
    if (!spec.has_value() || (!exists && !MayMakeGroup(state_, hello.group, identity))) continue;
    bool created = false;
    const auto* const trainer = std::get_if<TrainerAttached>(&w.attached);
    const auto trainers =
        trainer == nullptr ? std::nullopt : std::optional(trainer->identity.world_size);
    const auto made = MakeGroup(state_, hello.group, *spec, trainers, creator, &created, lock);
    if (!made.ok()) w.record.End(made.status());
  }
  const bool made = state_.groups.Find(hello.group) != nullptr;
  for (PendingAttaches::OfGroup& w : waiting) {
    if (w.record.sink == nullptr) continue;
    w.coordinator.clear();
    w.named = named;
    if (made || w.waits) {
      state_.pending.Wait(std::move(w));
    } else {
      w.record.End(NoGroup(hello.group));
    }
  }
  if (made) AdmitWaiting(hello.group, lock);
}

void PeerServer::Hello(PeerGreeting hello, std::string peer_address,
                       std::shared_ptr<PeerSession> session) {
  StateLock lock(&state_.mutex);
  PeerSessions::Waiting peer{std::move(hello), std::move(peer_address), std::move(session),
                             DaemonState::Now()};
  const std::string group = peer.hello.group;
  bool created = false;
  if (absl::Status status = TakeHello(&peer, &created, lock); !status.ok()) {
    peer.session->End(std::move(status));
  } else if (state_.groups.Find(group) == nullptr) {
    state_.sessions.Wait(std::move(peer));
    lock.DeadlineMoved();
  } else {
    Admit(std::move(peer), lock);
    // Members that wait for the group under another coordinator are refused, as new members would
    // be.
    if (created) AdmitWaiting(group, lock);
  }
}

void PeerServer::Admit(PeerSessions::Waiting peer, StateLock& lock) {
  const std::string name = peer.hello.group;
  GroupRecord* group = state_.groups.Find(name);
  REFITD_CHECK(group != nullptr);
  if (group->coordinator == nullptr) return peer.session->End(NotCoordinatedHere(*group));
  if (absl::Status status =
          group->coordinator->CanJoin(peer.hello.daemon_id, peer.hello.boot_id, peer.address);
      !status.ok()) {
    return peer.session->End(std::move(status));
  }
  if (absl::Status spanning = state_.pools.CheckSpanning(name, nullptr); !spanning.ok()) {
    return peer.session->End(std::move(spanning));
  }
  if (absl::Status encrypted = CheckEncryption(name, group->machine->spec(),
                                               state_.options.daemon_id, state_.options.clear_wire);
      !encrypted.ok()) {
    return peer.session->End(std::move(encrypted));
  }
  LinkUp up;
  up.incarnation = group->machine->incarnation();
  up.spec = group->machine->spec();
  up.version = group->machine->version();
  up.coordinator_id = state_.options.daemon_id;
  up.protocol = peer.hello.protocol;
  peer.session->Accept(up);
  // The peer reached this daemon under the name peer.hello.coordinator. If members of this daemon
  // name their coordinator so too, they mean this daemon.
  if (!peer_client_.CoordinatorOf(peer.hello.coordinator).empty()) {
    group->named = peer.hello.coordinator;
  }
  const NodeId node = state_.sessions.Join(peer.hello, std::move(peer.session));
  lock.Handle(
      name, NodeJoined{node, peer.hello.daemon_id, peer.address, up.protocol, peer.hello.boot_id});
}

void PeerServer::AdmitWaiting(const std::string& group, StateLock& lock) {
  for (PendingAttaches::OfGroup& w : state_.pending.TakeAll(group, "")) {
    if (!w.named.empty()) state_.groups.Find(group)->named = w.named;
    EnterWaiting(state_, std::move(w), lock);
  }
  for (PeerSessions::Waiting& peer : state_.sessions.TakeWaiting(group))
    Admit(std::move(peer), lock);
}

Room PeerServer::RoomFor(const std::string& identity) {
  const auto hold = std::make_shared<ByteLedger::Hold>(state_.held.Empty(identity));
  return [hold](int64_t bytes) { return hold->GrowTo(bytes); };
}

void PeerServer::ShareLayout(uint64_t session, PeerLayout* report) {
  std::shared_ptr<const Layout> known;
  {
    const StateLock lock(&state_.mutex);
    const std::optional<PeerSessions::Joined> joined = state_.sessions.Find(session);
    if (!joined.has_value()) return;
    const GroupRecord* group = state_.groups.Find(joined->group);
    if (group == nullptr || group->coordinator == nullptr) return;
    known = group->coordinator->KnownLayout(joined->node, *report);
  }
  if (known != nullptr && report->layout != nullptr && SameStructure(*known, *report->layout))
    report->layout = known;
}

void PeerServer::Report(uint64_t session, PeerReport report) {
  if (auto* layout = std::get_if<PeerLayout>(&report)) ShareLayout(session, layout);
  StateLock lock(&state_.mutex, StateLock::Order::kAhead);
  if (const std::optional<PeerSessions::Joined> joined = state_.sessions.Find(session);
      joined.has_value()) {
    lock.Handle(joined->group, ReportReceived{joined->node, std::move(report)});
  }
}

void PeerServer::Gone(uint64_t session, std::string reason) {
  StateLock lock(&state_.mutex);
  const std::optional<PeerSessions::Joined> joined = state_.sessions.Remove(session);
  if (joined.has_value()) lock.Handle(joined->group, NodeLost{joined->node, std::move(reason)});
}

}  // namespace refitd
