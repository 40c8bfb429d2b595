// Other daemons: those that join groups of this daemon, and coordinators that this
// daemon joins.
#include <algorithm>
#include <utility>

#include "daemon/checks/fields.h"
#include "daemon/node/group_spec.h"
#include "daemon/node/node.h"
#include "daemon/process/log.h"
#include "proto/protocol.h"

namespace refitd {
// ---- groups that another daemon coordinates ----

// The coordinator's address; empty: this daemon.
std::string Node::CoordinatorOf(const std::string& address) const {
  if (address.empty()) return "";
  for (const char* kind : {"tcp:", "peers:"}) {
    if (std::find(listeners_.begin(), listeners_.end(), kind + address) != listeners_.end()) {
      return "";
    }
  }
  if (address == options_.advertise) return "";
  return address;
}

absl::Status Node::Followed(const GroupRecord& group) {
  return Error(absl::StatusCode::kFailedPrecondition,
               "group '{}' is coordinated by {}: name it as coordinator", group.name(),
               group.join.address);
}

absl::StatusOr<GroupRecord*> Node::Follow(const std::string& name, const std::string& address,
                                          const std::optional<v1::GroupSpec>& spec, Turn& turn) {
  if (!dialler_.can_join()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "coordinator: '{}': this daemon joins no others (a link takes tls, or "
                 "listen.insecure)",
                 address);
  }
  if (spec.has_value()) REFITD_RETURN_IF_ERROR(CheckSpec(*spec, spec_limits_).status());
  if (GroupRecord* found = groups_.Find(name); found != nullptr) {
    if (found->follower == nullptr) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "coordinator: '{}', but group '{}' is coordinated by this daemon", address,
                   name);
    }
    if (found->join.address != address) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "coordinator: '{}', but group '{}' is coordinated by {}", address, name,
                   found->join.address);
    }
    if (found->join.joining) return found;
    if (spec.has_value()) {
      REFITD_RETURN_IF_ERROR(CheckSameSpec(name, *spec, found->machine->spec(), spec_limits_));
    }
    if (found->join.link == nullptr) {
      return Error(absl::StatusCode::kUnavailable,
                   "group '{}': the link to {} is lost and being cleaned up: attach again", name,
                   address);
    }
    return found;
  }
  if (draining_) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(MakeRoom(name, nullptr, turn));
  FollowerOptions options;
  options.name = name;
  options.coordinator_address = address;
  options.peer_limits = options_.peers;
  options.next_update = [this] { return UpdateId(next_update_++); };
  return groups_.Follow(std::move(options));
}

// ---- joining ----

void Node::LinkIsUp(const DialTry& of, const LinkUp& up) {
  Turn turn(this, &mutex_);
  GroupRecord* const group = Dialler::Current(of, &groups_);
  if (group == nullptr || !group->join.joining) return;
  absl::Status fits = CheckToldSpec(up.spec, spec_limits_);
  if (fits.ok()) fits = MakeRoom(of.group, &up.spec, turn);
  if (fits.ok()) {
    TakeJoined(group, up, turn);
  } else {
    JoinFailed(group, fits, turn);
  }
}

void Node::TakeJoined(GroupRecord* group, const LinkUp& up, Turn& turn) {
  REFITD_CHECK(group->join.joining);
  const std::string name = group->name();
  group->join.joining = false;
  std::vector<Waiters::OfGroup> admitted = waiters_.TakeAll(name, group->join.address);
  turn.Handle(name, up);
  for (Waiters::OfGroup& w : admitted) {
    GroupRecord* joined = groups_.Find(name);
    absl::Status status = joined == nullptr
                              ? absl::UnavailableError("the coordinator is lost: attach again")
                              : absl::OkStatus();
    if (status.ok() && w.spec.has_value())
      status = CheckSameSpec(name, *w.spec, up.spec, spec_limits_);
    if (status.ok()) {
      Enter(std::move(w.record), joined, std::move(w.attached), turn);
    } else {
      w.record.End(std::move(status));
    }
  }
  const GroupRecord* left = groups_.Find(name);
  const bool wanted = left == nullptr || left->machine->has_members() || waiters_.AnyOfSlots(name);
  if (!wanted) {
    turn.Handle(name, LinkLost{absl::CancelledError("no member of this daemon is left")});
  }
}

void Node::IndexDestinations(const DialTry& of, PeerPrepare* prepare) {
  std::vector<std::shared_ptr<const Layout>> layouts;
  {
    MutexLock lock(&mutex_);
    const GroupRecord* group = groups_.Find(of.group, of.id);
    if (group == nullptr || group->follower == nullptr) return;
    layouts = group->follower->LayoutsToIndex(*prepare);
  }
  if (layouts.empty()) return;
  auto index = Follower::MakeIndex(prepare->destinations, std::move(layouts));
  // The worker makes it again and reports the error.
  if (index.ok()) prepare->index = *std::move(index);
}

void Node::LinkSays(const DialTry& of, PeerCommand command) {
  if (auto* prepare = std::get_if<PeerPrepare>(&command)) IndexDestinations(of, prepare);
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  if (Dialler::Current(of, &groups_) == nullptr) return;
  turn.Handle(of.group, CommandReceived{std::move(command)});
}

void Node::LinkIsLost(const DialTry& of, absl::Status status) {
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  GroupRecord* const group = Dialler::Current(of, &groups_);
  if (group == nullptr) return;
  if (group->join.joining) {
    JoinFailed(group, status, turn);
  } else {
    turn.Handle(of.group, LinkLost{std::move(status)});
  }
}

void Node::JoinFailed(GroupRecord* group, const absl::Status& status, Turn& turn) {
  const bool goes_on = !draining_ && !stopping_;
  if (!dialler_.TakeFailure(group, status, goes_on, Now(), &waiters_)) {
    return StopJoining(group, status, turn);
  }
  timer_.Wake();
}

void Node::StopJoining(GroupRecord* group, const absl::Status& status, Turn& turn) {
  REFITD_CHECK(group->follower != nullptr && !group->machine->has_members());
  group->join.joining = false;
  group->join.redial.reset();
  const std::string name = group->name();
  turn.Handle(name, LinkLost{status});  // drops the group, which has no member
}

void Node::StopJoiningIfUnwanted(const std::string& name, Turn& turn) {
  GroupRecord* group = groups_.Find(name);
  if (group == nullptr || !group->join.joining) return;
  const bool wanted = waiters_.Any(name, group->join.address);
  if (!wanted) StopJoining(group, absl::CancelledError("no member waits for it"), turn);
}

void Node::RefuseLateMembers(TimePoint now, Turn& turn) {
  std::vector<Waiters::OfGroup> late = waiters_.TakeLate(now, Dialler::ExpiryOf(groups_));
  for (Waiters::OfGroup& w : late) w.record.End(Dialler::LateStatus(w, groups_));
  for (const Waiters::OfGroup& w : late) {
    if (!w.coordinator.empty()) StopJoiningIfUnwanted(w.record.group, turn);
  }
}

void Node::GroupEventOf(const std::string& name, uint64_t id, MachineEvent event) {
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  const GroupRecord* group = groups_.Find(name);
  if (group != nullptr && group->id == id) turn.Handle(name, std::move(event));
}

void Node::DropFollower(const std::string& name, Turn& turn) {
  std::shared_ptr<GroupRecord> record = groups_.Remove(name);
  data_plane_.CloseAll(record->id);
  LogInfo("group {}: left its coordinator at {}", name, record->join.address);
  WireLock::Events events;
  wire_lock_.Release(name, &events);
  for (auto& [other, event] : events) turn.Post(other, std::move(event));
  if (options_.observer != nullptr) options_.observer->GroupGone(name);
  // The group's pool is unmapped and its link destroyed after the mutex was released.
  turn.Last([record = std::move(record)]() mutable { record.reset(); });
}

// ---- daemons that join ----

absl::Status Node::TakeHello(Peers::Waiting* peer, bool* created, Turn& turn) {
  const std::string group = peer->hello.group();
  REFITD_RETURN_IF_ERROR(CheckName(group, "group"));
  REFITD_RETURN_IF_ERROR(CheckName(peer->hello.daemon_id(), "daemon_id"));
  if (peer->hello.boot_id() == boot_id_) {
    return absl::FailedPreconditionError(
        "boot_id: the daemon joins itself: members must name it as it listens, or as its "
        "`advertise` says");
  }
  if (draining_) return absl::UnavailableError("the daemon is draining");
  REFITD_ASSIGN_OR_RETURN(const Duration wait, CheckMillis(peer->hello.wait_ms(), "wait_ms"));
  peer->deadline = Now() + wait;
  if (peer->hello.has_spec()) {
    REFITD_RETURN_IF_ERROR(
        MakeGroup(group, peer->hello.spec(), std::nullopt, created, turn).status());
  }
  peers_.ForgetEarlier(*peer);
  if (groups_.Find(group) != nullptr) return absl::OkStatus();
  if (wait == Duration(0)) return NoGroup(group);
  return peers_.AdmitWaiting();
}

void Node::Hello(v1::PeerHello hello, std::string peer_address,
                 std::shared_ptr<PeerSession> session) {
  Turn turn(this, &mutex_);
  Peers::Waiting peer{std::move(hello), std::move(peer_address), std::move(session), Now()};
  const std::string group = peer.hello.group();
  bool created = false;
  if (absl::Status status = TakeHello(&peer, &created, turn); !status.ok()) {
    peer.session->End(std::move(status));
  } else if (groups_.Find(group) == nullptr) {
    peers_.Wait(std::move(peer));
    timer_.Wake();
  } else {
    AdmitPeer(std::move(peer), turn);
    // Members that wait for the group under another coordinator are refused, like new ones.
    if (created) AdmitWaiting(group, turn);
  }
}

void Node::AdmitPeer(Peers::Waiting peer, Turn& turn) {
  const std::string name = peer.hello.group();
  GroupRecord* group = groups_.Find(name);
  REFITD_CHECK(group != nullptr);
  if (group->coordinator == nullptr) return peer.session->End(Followed(*group));
  if (absl::Status status =
          group->coordinator->CanJoin(peer.hello.daemon_id(), peer.hello.boot_id(), peer.address);
      !status.ok()) {
    return peer.session->End(std::move(status));
  }
  if (absl::Status spanning = device_slots_.CheckSpanning(name, nullptr); !spanning.ok()) {
    return peer.session->End(std::move(spanning));
  }
  LinkUp up;
  up.incarnation = group->machine->incarnation();
  up.spec = group->machine->spec();
  up.version = group->machine->version();
  up.coordinator_id = options_.daemon_id;
  up.protocol = AgreeProtocol(peer.hello.protocol(), peer.hello.highest_protocol(), "protocol")
                    ->protocol;  // CheckPeerHello found one
  peer.session->Accept(up);
  const NodeId node = peers_.Join(name, std::move(peer.session));
  turn.Handle(name, NodeJoined{node, peer.hello.daemon_id(), peer.address, up.protocol,
                               peer.hello.boot_id()});
}

void Node::AdmitWaitingPeers(const std::string& group, Turn& turn) {
  for (Peers::Waiting& peer : peers_.TakeWaiting(group)) AdmitPeer(std::move(peer), turn);
}

void Node::ShareLayout(uint64_t session, PeerLayout* report) {
  std::shared_ptr<const Layout> known;
  {
    MutexLock lock(&mutex_);
    const std::optional<Peers::Joined> joined = peers_.Find(session);
    if (!joined.has_value()) return;
    const GroupRecord* group = groups_.Find(joined->group);
    if (group == nullptr || group->coordinator == nullptr) return;
    known = group->coordinator->KnownLayout(joined->node, *report);
  }
  if (known != nullptr && SameStructure(*known, *report->layout)) report->layout = known;
}

void Node::Report(uint64_t session, PeerReport report) {
  if (auto* layout = std::get_if<PeerLayout>(&report)) ShareLayout(session, layout);
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  if (const std::optional<Peers::Joined> joined = peers_.Find(session); joined.has_value()) {
    turn.Handle(joined->group, ReportReceived{joined->node, std::move(report)});
  }
}

void Node::Gone(uint64_t session, std::string reason) {
  Turn turn(this, &mutex_);
  const std::optional<Peers::Joined> joined = peers_.Remove(session);
  if (joined.has_value()) turn.Handle(joined->group, NodeLost{joined->node, std::move(reason)});
}

void Node::EndPeers() {
  peers_.EndAll(absl::UnavailableError("the daemon stops"));
  for (const auto& [name, group] : groups_.all()) {
    if (group->join.link != nullptr) group->join.link->Close();
  }
}

// Encoding a command may take long (a plan), and every daemon gets one, so encoding waits until the
// mutex is released. A daemon to which a command can't be sent can't follow any more: its session
// ends, and Gone follows.
void Node::PerformSend(GroupRecord* group, SendCommand a, Turn& turn) {
  const std::shared_ptr<PeerSession> session = peers_.SessionOf(group->name(), a.node);
  if (session == nullptr) return;
  if (session->Queue(std::move(a.command)).ok()) turn.Flush(session);
}

// Encoding a report may take long too: an engine's layout has every tensor of its model.
void Node::PerformSend(GroupRecord* group, SendReport a, Turn& turn) {
  if (group->join.link == nullptr) return;
  if (!group->join.link->Queue(std::move(a.report)).ok()) return;  // on_lost follows
  turn.Flush(group->join.link,
             [this, name = group->name(), link = group->join.link.get()](
                 PeerLink::Refused refused) { ReportRefused(name, link, std::move(refused)); });
}

// A report that can't be sent is answered with the refusal that the coordinator would send.
void Node::ReportRefused(const std::string& name, const PeerLink* link, PeerLink::Refused refused) {
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  const GroupRecord* group = groups_.Find(name);
  if (group == nullptr || group->join.link.get() != link) return;
  absl::Status& status = refused.status;
  if (const auto* call = std::get_if<PeerCall>(&refused.report)) {
    const CallId id = std::visit([](const auto& event) { return event.call; }, call->event);
    turn.Handle(name, CommandReceived{PeerReply{id, std::move(status), EmptyReply{}}});
  } else if (const auto* attach = std::get_if<PeerAttach>(&refused.report)) {
    turn.Handle(name, CommandReceived{PeerRefuse{attach->member, std::move(status)}});
  } else if (const auto* layout = std::get_if<PeerLayout>(&refused.report)) {
    turn.Handle(name, CommandReceived{PeerReply{layout->call, std::move(status), EmptyReply{}}});
  } else {
    turn.Handle(name, LinkLost{std::move(status)});
  }
}

}  // namespace refitd
