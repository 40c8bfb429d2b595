#include "daemon/node/node.h"

#include <pthread.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "daemon/checks/fields.h"
#include "daemon/process/log.h"

namespace refitd {
namespace {

constexpr Duration kNoWakeLimit = std::chrono::hours(1);

// The spec's unwanted tensors, sorted and without repeats.
absl::StatusOr<std::vector<std::string>> CheckUnwanted(const v1::GroupSpec& spec) {
  const auto& wire = spec.unwanted_tensors();
  const auto prefixes = std::count_if(wire.begin(), wire.end(),
                                      [](const std::string& name) { return name.ends_with('*'); });
  if (wire.size() > kMaxTensorsPerLayout || prefixes > kMaxUnwantedPrefixes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "spec.unwanted_tensors: {} names and {} prefixes, at most {} and {} may be",
                 wire.size() - prefixes, prefixes, kMaxTensorsPerLayout, kMaxUnwantedPrefixes);
  }
  std::vector<std::string> names(wire.begin(), wire.end());
  for (const std::string& name : names) {
    REFITD_RETURN_IF_ERROR(CheckText(name, kMaxNameBytes, "spec.unwanted_tensors"));
    if (name.empty() || name.find('*') < name.size() - 1) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "spec.unwanted_tensors: '{}' is neither a name nor a prefix with '*' at its end",
                   name);
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

Node::Node(NodeOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
           std::unique_ptr<Wire> wire, PeerDialer dialer)
    : options_(std::move(options)),
      processes_(processes),
      dialer_(std::move(dialer)),
      executor_(transport.get()),
      transport_(std::move(transport)),
      wire_(std::move(wire)) {
  timer_ = std::thread([this] { TimerLoop(); });
}

Node::~Node() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    timer_cond_.NotifyAll();
    EndPeers();
    while (links_ > 0) links_cond_.Wait(&mutex_);
  }
  timer_.join();
  planner_.Stop();
  binder_.Stop();
  local_binder_.Stop();
  opener_.Stop();
  regions_thread_->Stop();
  std::unique_ptr<Wire> wire;
  std::shared_ptr<DeviceWire> device_wire;
  {
    // Copies that still run find no epoch to send on any more.
    MutexLock lock(&mutex_);
    for (const auto& [name, group] : groups_) group->epochs.clear();
    wire = std::move(wire_);
    device_wire = std::move(options_.cuda.wire);
  }
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

Node::GroupRecord* Node::FindGroup(const std::string& name) {
  const auto it = groups_.find(name);
  return it == groups_.end() ? nullptr : it->second.get();
}

absl::StatusOr<GroupSpec> Node::CheckSpec(const v1::GroupSpec& wire) const {
  GroupSpec spec;
  const auto check = [](int64_t value, int64_t low, int64_t high, std::string_view field) {
    if (value >= low && value <= high) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument, "spec.{}: {} is not in {}..{}", field, value,
                 low, high);
  };
  REFITD_RETURN_IF_ERROR(check(wire.trainer_ranks(), 1, kMaxTrainerRanks, "trainer_ranks"));
  REFITD_RETURN_IF_ERROR(check(wire.min_instances(), 0, kMaxEngineRanks, "min_instances"));
  if (wire.slots() != 0) REFITD_RETURN_IF_ERROR(check(wire.slots(), 2, kMaxSlots, "slots"));
  REFITD_RETURN_IF_ERROR(check(wire.slot_bytes(), 0, options_.max_pool_bytes, "slot_bytes"));
  if (wire.slot_bytes() % 4096 != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "spec.slot_bytes: {} is not a multiple of 4096", wire.slot_bytes());
  }
  spec.trainer_ranks = wire.trainer_ranks();
  spec.min_instances = std::max(1, wire.min_instances());
  spec.slot_bytes = wire.slot_bytes() == 0 ? options_.default_slot_bytes : wire.slot_bytes();
  spec.slots = wire.slots() == 0 ? options_.default_slots : wire.slots();
  REFITD_RETURN_IF_ERROR(
      check(wire.engine_only_tensors_size(), 0, kMaxTensorsPerLayout, "engine_only_tensors"));
  for (const std::string& name : wire.engine_only_tensors()) {
    REFITD_RETURN_IF_ERROR(CheckText(name, kMaxNameBytes, "spec.engine_only_tensors"));
  }
  spec.engine_only_tensors.assign(wire.engine_only_tensors().begin(),
                                  wire.engine_only_tensors().end());
  std::sort(spec.engine_only_tensors.begin(), spec.engine_only_tensors.end());
  spec.engine_only_tensors.erase(
      std::unique(spec.engine_only_tensors.begin(), spec.engine_only_tensors.end()),
      spec.engine_only_tensors.end());
  REFITD_ASSIGN_OR_RETURN(spec.unwanted_tensors, CheckUnwanted(wire));
  return spec;
}

absl::Status Node::MakeRoom(const std::string& name, const GroupSpec* spec, Turn& turn) {
  const int64_t needed = spec == nullptr ? 0 : spec->slots * spec->slot_bytes;
  const bool known = FindGroup(name) != nullptr;
  size_t groups = groups_.size();
  int64_t pools = 0;
  std::vector<const GroupRecord*> empty;
  for (const auto& [other, record] : groups_) {
    pools += record->pool_bytes();
    if (record->empty_since.has_value() && Empty(*record)) empty.push_back(record.get());
  }
  std::sort(empty.begin(), empty.end(), [](const GroupRecord* a, const GroupRecord* b) {
    return *a->empty_since < *b->empty_since;
  });
  const auto place = [&] { return known || groups < static_cast<size_t>(options_.max_groups); };
  const auto fits = [&] { return needed <= options_.max_pool_bytes - pools; };
  size_t dropped = 0;
  for (; dropped < empty.size() && (!place() || !fits()); ++dropped) {
    --groups;
    pools -= empty[dropped]->pool_bytes();
  }
  if (!place()) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "group '{}': the daemon has max_groups ({}) groups", name, options_.max_groups);
  }
  if (!fits()) {
    return Error(
        absl::StatusCode::kResourceExhausted,
        "group '{}': {} slots of {} bytes do not fit: {} of max_pool_bytes {} are taken by "
        "other groups",
        name, spec->slots, spec->slot_bytes, pools, options_.max_pool_bytes);
  }
  for (size_t i = 0; i < dropped; ++i) {
    DropGroup(std::string(empty[i]->machine->name()),
              fmt::format("given up, for it has no member and group {} needs its place", name),
              turn);
  }
  return absl::OkStatus();
}

bool Node::Empty(const GroupRecord& group) const {
  return group.coordinator != nullptr && !group.machine->has_members() &&
         !group.machine->update_running() && !peers_.Any(group.machine->name()) &&
         std::none_of(pooling_.begin(), pooling_.end(), [&group](const auto& entry) {
           return entry.second.record.group == group.machine->name();
         });
}

void Node::NoteEmpty(GroupRecord* group, Turn& turn) {
  if (!Empty(*group)) {
    group->empty_since.reset();
    return;
  }
  if (group->empty_since.has_value()) return;
  group->empty_since = Now();
  if (!group->pools.has_host()) return;
  // P8: the pool is given back, and made again for the next member that needs it. It is unmapped
  // after the mutex was released.
  turn.Last([host = std::make_shared<Pools::Host>(group->pools.TakeHost())] { *host = {}; });
}

void Node::DropGroup(const std::string& name, std::string_view why, Turn& turn) {
  const auto it = groups_.find(name);
  for (const auto& [epoch, record] : it->second->epochs) WireOf(record)->Close(record.id);
  LogInfo("group {}: {}", name, why);
  if (options_.observer != nullptr) options_.observer->GroupGone(name);
  peers_.EndGroup(name, absl::AbortedError("the group was deleted"));
  watchers_.Forget(name);
  // The group's pool is unmapped after the mutex was released.
  turn.Last(
      [record = std::shared_ptr<GroupRecord>(std::move(it->second))]() mutable { record.reset(); });
  groups_.erase(it);
}

void Node::DropExpired(TimePoint now, Turn& turn) {
  std::vector<std::string> expired;
  for (const auto& [name, group] : groups_) {
    if (!group->empty_since.has_value() || now - *group->empty_since < options_.group_idle)
      continue;
    if (Empty(*group)) {
      expired.push_back(name);
    } else {
      group->empty_since = now;  // a member is about to enter
    }
  }
  for (const std::string& name : expired) {
    DropGroup(name,
              fmt::format("given up: it has had no member for {:g} s (limits.group_idle_ms)",
                          std::chrono::duration<double>(options_.group_idle).count()),
              turn);
  }
}

absl::Status Node::CheckMembers() const {
  size_t members = leases_.size() + waiting_.size() + pooling_.size();
  for (const auto& [name, group] : groups_) {
    if (group->coordinator != nullptr) members += group->coordinator->remote_members();
  }
  if (members < static_cast<size_t>(options_.max_members)) return absl::OkStatus();
  return Error(
      absl::StatusCode::kResourceExhausted,
      "limits.max_members: daemon {} has {} members, with those of daemons that joined its "
      "groups, and takes {}",
      options_.daemon_id, members, options_.max_members);
}

absl::StatusOr<Node::GroupRecord*> Node::MakeGroup(const std::string& name,
                                                   const v1::GroupSpec& wire,
                                                   std::optional<int> trainers, bool* created,
                                                   Turn& turn) {
  *created = false;
  REFITD_ASSIGN_OR_RETURN(GroupSpec spec, CheckSpec(wire));
  if (trainers.value_or(spec.trainer_ranks) != spec.trainer_ranks) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} is not the spec's trainer_ranks {}", *trainers,
                 spec.trainer_ranks);
  }
  if (GroupRecord* found = FindGroup(name); found != nullptr) {
    if (found->follower != nullptr) return Followed(*found);
    // The spec's trainer_ranks are not compared: the group compares them when trainers attach.
    if (EqualButTrainers(found->machine->spec(), spec)) return found;
    const GroupSpec& has = found->machine->spec();
    return Error(absl::StatusCode::kFailedPrecondition,
                 "spec: group '{}' has min_instances {}, slot_bytes {}, slots {}, {} engine-only "
                 "and {} unwanted tensors; this one says {}, {}, {}, {}, {}",
                 name, has.min_instances, has.slot_bytes, has.slots, has.engine_only_tensors.size(),
                 has.unwanted_tensors.size(), spec.min_instances, spec.slot_bytes, spec.slots,
                 spec.engine_only_tensors.size(), spec.unwanted_tensors.size());
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
  auto record = std::make_unique<GroupRecord>();
  record->id = next_group_++;
  auto machine = std::make_unique<Coordinator>(std::move(coordinator));
  record->coordinator = machine.get();
  record->machine = std::move(machine);
  record->empty_since = Now();
  LogInfo("group {}: created", name);
  GroupRecord* result = record.get();
  groups_[name] = std::move(record);
  WakeTimer();
  *created = true;
  return result;
}

// ---- time and life ----

TimePoint Node::NextWake() const {
  TimePoint wake = Now() + kNoWakeLimit;
  for (const auto& [name, group] : groups_) {
    if (const auto deadline = group->machine->NextDeadline(); deadline.has_value())
      wake = std::min(wake, *deadline);
    if (group->redial.has_value()) wake = std::min(wake, *group->redial);
    if (group->empty_since.has_value()) {
      wake = std::min(wake, *group->empty_since + options_.group_idle);
    }
  }
  for (const Waiting& w : waiting_) {
    if (const auto expiry = ExpiryOf(w); expiry.has_value()) wake = std::min(wake, *expiry);
  }
  wake = std::min(wake, peers_.NextDeadline().value_or(wake));
  if (AnyUpdateRuns()) {
    wake = std::min(wake, watchers_.NextDue().value_or(wake));
  }
  return wake;
}

void Node::WakeTimer() {
  if (NextWake() < timer_wakes_) timer_cond_.NotifyAll();
}

void Node::TimerLoop() {
  pthread_setname_np(pthread_self(), "refitd-timer");
  while (true) {
    Turn turn(this, &mutex_);
    timer_wakes_ = NextWake();
    while (!stopping_ && Now() < timer_wakes_) {
      timer_cond_.WaitUntil(&mutex_, timer_wakes_);
      timer_wakes_ = NextWake();
    }
    if (stopping_) return;
    const TimePoint now = Now();
    std::vector<std::string> due;
    for (const auto& [name, group] : groups_) {
      const auto deadline = group->machine->NextDeadline();
      if (deadline.has_value() && *deadline <= now) due.push_back(name);
    }
    for (const std::string& name : due) turn.Handle(name, Tick{});
    peers_.RefuseLate(now);
    RefuseLateMembers(now, turn);
    RedialIfDue(now);
    DropExpired(now, turn);
    if (!watchers_.empty()) watchers_.Progress(Machines(), now);
  }
}

bool Node::AnyUpdateRuns() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& entry) { return entry.second->machine->update_running(); });
}

void Node::Drain() {
  Turn turn(this, &mutex_);
  if (draining_) return;
  draining_ = true;
  for (Waiting& w : waiting_) w.record.End(absl::UnavailableError("the daemon is draining"));
  waiting_.clear();
  for (auto& [id, pooling] : pooling_) {
    pooling.record.End(absl::UnavailableError("the daemon is draining"));
  }
  pooling_.clear();
  peers_.RefuseAllWaiting(absl::UnavailableError("the daemon is draining"));
  std::vector<std::string> names;
  for (const auto& [name, group] : groups_) names.push_back(name);
  for (const std::string& name : names) StopJoiningIfUnwanted(name, turn);
  for (const std::string& name : names) turn.Handle(name, DrainEvent{});
}

void Node::Finish(TimePoint deadline) {
  {
    Turn turn(this, &mutex_);
    while (AnyUpdateRuns() && !hurrying_ && Now() < deadline) {
      idle_cond_.WaitUntil(&mutex_, deadline);
    }
    std::vector<std::string> running;
    for (const auto& [name, group] : groups_) {
      if (group->machine->update_running()) running.push_back(name);
    }
    stops_ = true;
    for (const std::string& name : running) {
      turn.Handle(name, OperatorAbort{NewCall(), "the daemon stops"});
    }
  }
  Turn turn(this, &mutex_);
  // Clean-up waits for running copies, which end by themselves (P6).
  const TimePoint cleanup = Now() + options_.group.cleanup_limit;
  while (AnyUpdateRuns() && Now() < cleanup) idle_cond_.WaitUntil(&mutex_, cleanup);
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
  for (const auto& [name, group] : groups_) {
    REFITD_CHECK(group->machine->name() == name);
    REFITD_CHECK((group->coordinator != nullptr) != (group->follower != nullptr));
    group->machine->CheckInvariants();
    group->pools.CheckInvariants();
  }
  for (const auto& [id, member] : leases_.all()) REFITD_CHECK(groups_.contains(member.group));
  // A member waits for a group of this daemon that does not exist yet, or for joining another's.
  for (const Waiting& waiting : waiting_) {
    const auto group = groups_.find(waiting.record.group);
    REFITD_CHECK(waiting.coordinator.empty() ? group == groups_.end()
                                             : group != groups_.end() && group->second->joining);
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
