#include "daemon/node/node.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "daemon/node/group_spec.h"
#include "daemon/process/log.h"

namespace refitd {
namespace {

constexpr Duration kNoWakeLimit = std::chrono::hours(1);

}  // namespace

Node::Node(NodeOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
           std::unique_ptr<Wire> wire, PeerDialer dialer)
    : options_(std::move(options)),
      processes_(processes),
      dialler_({.daemon_id = options_.daemon_id,
                .boot_id = boot_id_,
                .message_bytes = options_.message_bytes},
               std::move(dialer), this, &mutex_),
      device_slots_({.daemon_id = options_.daemon_id,
                     .memory = options_.cuda.memory,
                     .has_wire = options_.cuda.wire != nullptr,
                     .no_wire = options_.cuda.no_wire,
                     .thread = regions_thread_},
                    this, &mutex_, {&groups_, &leases_, &waiters_, &peers_}),
      data_plane_({.transport = std::move(transport),
                   .wire = std::move(wire),
                   .device_wire = std::move(options_.cuda.wire),
                   .no_device_wire = options_.cuda.no_wire,
                   .observer = options_.observer},
                  {this, &mutex_, &pushes_}, {&groups_, &leases_, &calls_, &device_slots_}) {
  timer_.Start();
}

// The order of the end: no try to join begins, links report their ends, jobs that use the state
// end, wires and then the transport report what still runs, and only then the state goes.
Node::~Node() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  timer_.Stop();
  {
    MutexLock lock(&mutex_);
    EndPeers();
    dialler_.AwaitLinks(&mutex_);
  }
  data_plane_.StopThreads();
  regions_thread_->Stop();
  data_plane_.StopWires();
}

// ---- groups ----

absl::Status Node::NoGroup(const std::string& name) {
  return Error(absl::StatusCode::kNotFound, "group '{}' does not exist", name);
}

uint64_t Node::NewIncarnation() {
  uint64_t bits = 0;
  REFITD_CHECK(getrandom(&bits, sizeof(bits), 0) == sizeof(bits));
  return bits | 1;  // 0 means "the current one" on the wire
}

std::string Node::NewBootId() {
  std::string id(16, '\0');
  REFITD_CHECK(getrandom(id.data(), id.size(), 0) == static_cast<ssize_t>(id.size()));
  return id;
}

absl::Status Node::MakeRoom(const std::string& name, const GroupSpec* spec, Turn& turn) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<std::string> dropped, groups_.RoomFor(name, spec));
  for (const std::string& other : dropped) {
    DropGroup(other,
              fmt::format("given up, for it has no member and group {} needs its place", name),
              turn);
  }
  return absl::OkStatus();
}

// Called after every event of a coordinator.
void Node::NoteEmpty(GroupRecord* group, Turn& turn) {
  if (!groups_.NoteEmpty(group, Now()) || !group->pools.has_host()) return;
  // P8: the pool is given back, and made again for the next member that needs it. It is unmapped
  // after the mutex was released.
  turn.Last([host = std::make_shared<Pools::Host>(group->pools.TakeHost())] { *host = {}; });
}

void Node::DropGroup(const std::string& name, std::string_view why, Turn& turn) {
  std::shared_ptr<GroupRecord> record = groups_.Remove(name);
  data_plane_.CloseAll(record->id);
  LogInfo("group {}: {}", name, why);
  if (options_.observer != nullptr) options_.observer->GroupGone(name);
  peers_.EndGroup(name, absl::AbortedError("the group was deleted"));
  watchers_.Forget(name);
  // The group's pool is unmapped after the mutex was released.
  turn.Last([record = std::move(record)]() mutable { record.reset(); });
}

void Node::DropExpired(TimePoint now, Turn& turn) {
  for (const std::string& name : groups_.Expired(now)) {
    DropGroup(name,
              fmt::format("given up: it has had no member for {:g} s (limits.group_idle_ms)",
                          std::chrono::duration<double>(options_.group_idle).count()),
              turn);
  }
}

absl::Status Node::CheckMembers() const {
  size_t members = leases_.size() + waiters_.size();
  for (const auto& [name, group] : groups_.all()) {
    if (group->coordinator != nullptr) members += group->coordinator->remote_members();
  }
  if (members < static_cast<size_t>(options_.max_members)) return absl::OkStatus();
  return Error(
      absl::StatusCode::kResourceExhausted,
      "limits.max_members: daemon {} has {} members, with those of daemons that joined its "
      "groups, and takes {}",
      options_.daemon_id, members, options_.max_members);
}

absl::StatusOr<GroupRecord*> Node::MakeGroup(const std::string& name, const v1::GroupSpec& message,
                                             std::optional<int> trainers, bool* created,
                                             Turn& turn) {
  *created = false;
  REFITD_ASSIGN_OR_RETURN(GroupSpec spec, CheckSpec(message, spec_limits_));
  if (trainers.value_or(spec.trainer_ranks) != spec.trainer_ranks) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} is not the spec's trainer_ranks {}", *trainers,
                 spec.trainer_ranks);
  }
  if (GroupRecord* found = groups_.Find(name); found != nullptr) {
    if (found->follower != nullptr) return Followed(*found);
    REFITD_RETURN_IF_ERROR(CheckEqualSpec(name, found->machine->spec(), spec));
    return found;
  }
  if (draining_) return absl::UnavailableError("the daemon is draining");
  REFITD_RETURN_IF_ERROR(MakeRoom(name, &spec, turn));
  CoordinatorOptions coordinator;
  coordinator.name = name;
  coordinator.daemon_id = options_.daemon_id;
  coordinator.incarnation = NewIncarnation();
  coordinator.spec = std::move(spec);
  coordinator.limits = options_.group;
  coordinator.peer_limits = options_.peers;
  coordinator.next_update = [this] { return UpdateId(next_update_++); };
  coordinator.next_member = [this] { return MemberId(next_member_++); };
  coordinator.next_call = [this] { return NewCall(); };
  // The machine asks while it handles an event, so the mutex is held.
  coordinator.admit_remote = [this] {
    mutex_.AssertHeld();
    return CheckMembers();
  };
  GroupRecord* const group = groups_.Coordinate(std::move(coordinator), Now());
  LogInfo("group {}: created", name);
  timer_.Wake();
  *created = true;
  return group;
}

// ---- time and life ----

TimePoint Node::NextWake() {
  TimePoint wake = Now() + kNoWakeLimit;
  wake = std::min(wake, groups_.NextDeadline().value_or(wake));
  wake = std::min(wake, waiters_.NextExpiry(Dialler::ExpiryOf(groups_)).value_or(wake));
  wake = std::min(wake, peers_.NextDeadline().value_or(wake));
  if (groups_.any_running()) {
    wake = std::min(wake, watchers_.NextDue().value_or(wake));
  }
  return wake;
}

void Node::Ring(Turn& turn, TimePoint now) {
  for (const std::string& name : groups_.Due(now)) turn.Handle(name, Tick{});
  peers_.RefuseLate(now);
  RefuseLateMembers(now, turn);
  dialler_.RedialIfDue(groups_, waiters_, now);
  DropExpired(now, turn);
  if (!watchers_.empty()) watchers_.Progress(groups_.machines(), now);
}

void Node::Drain() {
  Turn turn(this, &mutex_);
  if (draining_) return;
  draining_ = true;
  waiters_.RefuseAll(absl::UnavailableError("the daemon is draining"));
  peers_.RefuseAllWaiting(absl::UnavailableError("the daemon is draining"));
  const std::vector<std::string> names = groups_.names();
  for (const std::string& name : names) StopJoiningIfUnwanted(name, turn);
  for (const std::string& name : names) turn.Handle(name, DrainEvent{});
}

void Node::Finish(TimePoint deadline) {
  {
    Turn turn(this, &mutex_);
    while (groups_.any_running() && !hurrying_ && Now() < deadline) {
      idle_cond_.WaitUntil(&mutex_, deadline);
    }
    stops_ = true;
    for (const std::string& name : groups_.running()) {
      turn.Handle(name, OperatorAbort{NewCall(), "the daemon stops"});
    }
  }
  Turn turn(this, &mutex_);
  // Clean-up waits for running copies, which end by themselves (P6).
  const TimePoint cleanup = Now() + options_.group.cleanup_limit;
  while (groups_.any_running() && Now() < cleanup) idle_cond_.WaitUntil(&mutex_, cleanup);
  std::vector<MemberId> all;
  for (const auto& [id, member] : leases_.all()) all.push_back(id);
  for (const MemberId id : all) {
    MemberRecord* const member = leases_.Find(id);
    if (member == nullptr) continue;
    Lose(member, "the daemon stops", absl::UnavailableError("the daemon stops"), turn);
  }
  EndPeers();
  watchers_.EndAll(absl::UnavailableError("the daemon stops"));
}

void Node::Hurry() {
  MutexLock lock(&mutex_);
  hurrying_ = true;
  idle_cond_.NotifyAll();
}

void Node::SetListeners(std::vector<std::string> listeners) {
  MutexLock lock(&mutex_);
  listeners_ = std::move(listeners);
}

void Node::CheckInvariants() {
  MutexLock lock(&mutex_);
  calls_.CheckInvariants();
  leases_.CheckInvariants();
  memory_.CheckInvariants(leases_);
  peers_.CheckInvariants();
  watchers_.CheckInvariants();
  waiters_.CheckInvariants();
  groups_.CheckInvariants();
  data_plane_.CheckInvariants();
  for (const auto& [id, member] : leases_.all()) {
    REFITD_CHECK(groups_.Find(member.group) != nullptr);
  }
  // A member waits for a group of this daemon that does not exist yet, or for joining another's.
  for (const Waiters::OfGroup& waiting : waiters_.of_group()) {
    const GroupRecord* const group = groups_.Find(waiting.record.group);
    REFITD_CHECK(waiting.coordinator.empty() ? group == nullptr
                                             : group != nullptr && group->join.joining);
  }
}

int64_t Node::watched_views() {
  MutexLock lock(&mutex_);
  return watchers_.views();
}

bool Node::Alive() {
  MutexLock lock(&mutex_);
  return !stopping_;
}

}  // namespace refitd
