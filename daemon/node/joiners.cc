#include "daemon/node/joiners.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "daemon/checks/candidates.h"
#include "daemon/node/coordinator_search.h"
#include "daemon/node/group_spec.h"
#include "transport/base/status.h"

namespace refitd {

absl::Status Joiners::TakeHello(Peers::Waiting* peer, bool* created, Turn& turn) {
  const std::string group = peer->hello.group;
  if (peer->hello.boot_id == state_.boot_id) {
    return absl::FailedPreconditionError(
        "boot_id: the daemon joins itself: members must name it as it listens, or as its "
        "`advertise` says");
  }
  if (state_.draining) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(state_.peers.CheckLatest(peer->hello));
  peer->deadline = DaemonState::Now() + peer->hello.wait;
  if (HasSeveral(peer->hello.candidates)) {
    REFITD_RETURN_IF_ERROR(TakeCandidatesHello(*peer));
  } else if (peer->hello.spec.has_value()) {
    REFITD_RETURN_IF_ERROR(
        life_.Make(group, *peer->hello.spec, std::nullopt, /*creator=*/"", created, turn).status());
  }
  state_.peers.ForgetEarlier(*peer);
  if (state_.groups.Find(group) != nullptr) return absl::OkStatus();
  if (peer->hello.wait == Duration(0)) return NoGroup(group);
  return state_.peers.AdmitWaiting();
}

absl::Status Joiners::TakeCandidatesHello(const Peers::Waiting& peer) {
  const std::string& candidates = peer.hello.candidates;
  if (peer.hello.spec.has_value()) {
    REFITD_RETURN_IF_ERROR(CheckSpec(*peer.hello.spec, state_.spec_limits).status());
  }
  if (!joining_.OwnPlace(SplitCandidates(candidates)).has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "candidates: '{}': none is this daemon: members must name it as it listens, or as "
                 "its `advertise` says",
                 candidates);
  }
  GroupRecord* const group = state_.groups.Find(peer.hello.group);
  if (group == nullptr) return absl::OkStatus();
  // The joining daemon then searches for the coordinator again.
  if (group->given_up) return GivenUp(*group);
  if (group->coordinator == nullptr) {
    return Error(absl::StatusCode::kUnavailable, "group '{}' is coordinated by {}", group->name(),
                 group->join.address);
  }
  return joining_.CheckCandidates(group, candidates, peer.hello.spec);
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

absl::Status Joiners::CheckEncrypted(const GroupRecord& group, const PeerGreeting& hello) const {
  const GroupSpec& spec = group.machine->spec();
  REFITD_RETURN_IF_ERROR(CheckKnowsEncryption(group.name(), spec, hello.daemon_id, hello.protocol));
  return CheckEncryption(group.name(), spec, state_.options.daemon_id, state_.options.clear_wire);
}

void Joiners::Admit(Peers::Waiting peer, Turn& turn) {
  const std::string name = peer.hello.group;
  GroupRecord* group = state_.groups.Find(name);
  REFITD_CHECK(group != nullptr);
  if (group->coordinator == nullptr) return peer.session->End(Followed(*group));
  if (group->given_up) return peer.session->End(GivenUp(*group));
  if (absl::Status status =
          group->coordinator->CanJoin(peer.hello.daemon_id, peer.hello.boot_id, peer.address);
      !status.ok()) {
    return peer.session->End(std::move(status));
  }
  if (absl::Status spanning = device_slots_.CheckSpanning(name, nullptr); !spanning.ok()) {
    return peer.session->End(std::move(spanning));
  }
  if (absl::Status encrypted = CheckEncrypted(*group, peer.hello); !encrypted.ok()) {
    return peer.session->End(std::move(encrypted));
  }
  LinkUp up;
  up.incarnation = group->machine->incarnation();
  up.spec = group->machine->spec();
  up.version = group->machine->version();
  up.coordinator_id = state_.options.daemon_id;
  up.protocol = peer.hello.protocol;
  peer.session->Accept(up);
  const NodeId node = state_.peers.Join(peer.hello, std::move(peer.session));
  turn.Handle(
      name, NodeJoined{node, peer.hello.daemon_id, peer.address, up.protocol, peer.hello.boot_id});
}

void Joiners::AdmitWaiting(const std::string& group, Turn& turn) {
  for (Waiters::OfGroup& w : state_.waiters.TakeAll(group, "")) {
    members_.Enter(std::move(w.record), state_.groups.Find(group), std::move(w.attached), turn);
  }
  for (Peers::Waiting& peer : state_.peers.TakeWaiting(group)) Admit(std::move(peer), turn);
}

absl::StatusOr<uint64_t> Joiners::Probe(const PeerQuestion& question) {
  const Turn turn(state_.turns);
  if (question.boot_id == state_.boot_id) {
    return absl::FailedPreconditionError(
        "boot_id: the daemon probes itself: members must name it as it listens, or as its "
        "`advertise` says");
  }
  if (state_.draining) return absl::UnavailableError("the daemon is draining");
  GroupRecord* const group = state_.groups.Find(question.group);
  if (group == nullptr || group->coordinator == nullptr || group->given_up) return 0;
  const uint64_t own = group->machine->incarnation();
  if (!group->candidates.empty() && GivesWay(own, question.incarnation)) {
    group->outbid = std::max(group->outbid, question.incarnation);
    state_.timer.Wake();
  }
  return own;
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
  if (known != nullptr && SameStructure(*known, *report->layout)) report->layout = known;
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
