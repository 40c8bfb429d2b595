#include "daemon/node/operators.h"

#include <algorithm>
#include <map>
#include <utility>

#include "daemon/node/life.h"
#include "daemon/node/restore.h"
#include "daemon/process/log.h"
#include "daemon/sockets/name_lookup.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// How long links are refused for a group that was drained here. Resolvers keep a name for some
// seconds, clusters' DNS for 5 to 30.
constexpr Duration kDrainedFor = std::chrono::seconds(60);

// The group, rank and device of its arenas. Rank: MemberRecord or KeptRank.
template <typename Rank>
ArenaDetails Arena(const Rank& rank) {
  ArenaDetails arena;
  arena.group = rank.group;
  arena.instance = rank.instance;
  arena.rank = rank.rank;
  arena.device = rank.device;
  return arena;
}

}  // namespace

absl::StatusOr<Operators::Created> Operators::CreateGroup(const std::string& name,
                                                          const GroupSpec& spec, bool replace,
                                                          const std::string& request_id,
                                                          const std::string& identity) {
  StateLock lock(&state_.mutex);
  bool created = false;
  absl::StatusOr<GroupRecord*> made =
      MakeGroup(state_, name, spec, std::nullopt, identity, &created, lock);
  if (const GroupRecord* found = state_.groups.Find(name);
      found != nullptr && found->follower != nullptr) {
    return NotCoordinatedHere(*found);
  }
  // For an operator, another spec means that another group has that name.
  if (absl::IsFailedPrecondition(made.status()))
    return absl::AlreadyExistsError(Message(made.status()));
  REFITD_RETURN_IF_ERROR(made.status());
  if (created) peer_server_.AdmitWaiting(name, lock);
  const GroupMachine& machine = *(*made)->machine;
  if (!created && machine.has_trainers() && spec.trainer_ranks != machine.spec().trainer_ranks) {
    return Error(absl::StatusCode::kAlreadyExists,
                 "spec: group '{}' has trainer_ranks {}, and trainers are attached; this one says "
                 "{}",
                 name, machine.spec().trainer_ranks, spec.trainer_ranks);
  }
  if (created || !replace) return Created{machine.incarnation(), created};
  REFITD_ASSIGN_OR_RETURN(const uint64_t incarnation, Replace(*made, request_id, identity, lock));
  return Created{incarnation, true};
}

absl::StatusOr<uint64_t> Operators::Replace(GroupRecord* group, const std::string& request_id,
                                            const std::string& identity, StateLock& lock) {
  if (!request_id.empty() && request_id == group->replace_request)
    return group->replace_incarnation;
  const uint64_t incarnation = NewIncarnation();
  const std::string name = group->name();
  lock.Handle(name, ReplaceGroup{state_.NewCall(), incarnation, identity});
  if (group->machine->incarnation() != incarnation) {
    const std::optional<UpdateView> update = group->machine->ViewUpdate(DaemonState::Now());
    return Error(absl::StatusCode::kFailedPrecondition, "group '{}': the update to version {} runs",
                 name, update.has_value() ? update->version.value() : -1);
  }
  group->replace_request = request_id;
  group->replace_incarnation = incarnation;
  // The replacement ends the streams of trainers, which attach again.
  LoseMembers(
      state_,
      [&name](const MemberRecord& member) { return member.group == name && !member.engine; },
      absl::AbortedError("the group was replaced: attach again"), lock);
  // What was committed before is not to be served again.
  GiveUpKept(
      state_, [&name](const KeptRank& kept) { return kept.group == name; },
      "the group was replaced", lock);
  state_.members.ForgetHeld(name);
  return incarnation;
}

bool Operators::DrainOne(const std::string& name, StateLock& lock) {
  GroupRecord* const group = state_.groups.Find(name);
  if (group->coordinator != nullptr) lock.Handle(name, DrainEvent{});
  if (group->machine->update_running()) return false;
  LogInfo("group {}: drained for the daemon that its coordinator's name leads to", name);
  if (group->follower != nullptr) {
    // Its end, which is reported, ends the members' leases.
    if (group->join.link != nullptr) group->join.link->Close();
    return true;
  }
  const absl::Status why =
      absl::UnavailableError("the group was drained at this coordinator: attach again");
  peer_server_.RefuseUntil(name, DaemonState::Now() + kDrainedFor);
  LoseMembers(
      state_, [&name](const MemberRecord& member) { return member.group == name; }, why, lock);
  state_.sessions.EndGroup(name, why);
  if (state_.groups.Find(name) != nullptr)
    DropGroup(state_, name, "given up: it was drained", lock);
  return true;
}

absl::StatusOr<Operators::DrainedGroups> Operators::Drain(const std::string& group) {
  StateLock lock(&state_.mutex);
  DrainedGroups done;
  std::vector<std::string> names;
  for (const auto& [name, record] : state_.groups.all()) {
    const std::string& coordinator =
        record->follower != nullptr ? record->join.address : record->named;
    // Only a name can be pointed at another daemon. Members that name a numeric address would come
    // back to this daemon.
    const bool named = !coordinator.empty() && !IsNumericHost(HostOfAddress(coordinator));
    if (name == group && !named) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "group '{}': its members name {} as coordinator, and would come back: only a "
                   "name can lead elsewhere",
                   group, coordinator.empty() ? "this daemon's own address" : coordinator);
    }
    if (named && (group.empty() || name == group)) names.push_back(name);
  }
  if (!group.empty() && names.empty()) return NoGroup(group);
  for (const std::string& name : names) {
    (DrainOne(name, lock) ? done.drained : done.running).push_back(name);
  }
  return done;
}

std::vector<Operators::NamedCoordinator> Operators::NamedCoordinators() {
  const StateLock lock(&state_.mutex);
  std::vector<NamedCoordinator> all;
  for (const auto& [name, group] : state_.groups.all()) {
    const PeerLink* const link = group->join.link.get();
    if (group->coordinator != nullptr && !group->named.empty()) {
      all.push_back({name, group->named, ""});
    } else if (link != nullptr && !group->join.joining && !link->address().empty()) {
      all.push_back({name, group->join.address, link->address()});
    }
  }
  return all;
}

std::vector<std::string> Operators::Listeners() {
  const StateLock lock(&state_.mutex);
  return state_.listeners;
}

absl::Status Operators::DeleteGroup(const std::string& name) {
  StateLock lock(&state_.mutex);
  const GroupRecord* group = state_.groups.Find(name);
  if (group == nullptr) return NoGroup(name);
  // A record outlives its lease while copies touch its memory; such a member counts too.
  const auto& all = state_.members.all();
  const auto members = std::count_if(all.begin(), all.end(),
                                     [&](const auto& entry) { return entry.second.group == name; });
  if (group->follower != nullptr) return NotCoordinatedHere(*group);
  if (members > 0 || group->machine->has_members() || group->machine->update_running()) {
    return Error(absl::StatusCode::kFailedPrecondition, "group '{}' has {} members", name, members);
  }
  DropGroup(state_, name, "deleted", lock);
  return absl::OkStatus();
}

void Operators::Ask(CallId call, const std::string& group, GroupEvent event, ReplyFunction reply) {
  StateLock lock(&state_.mutex);
  if (state_.groups.Find(group) == nullptr) {
    lock.Answer(
        [reply = std::move(reply), refused = NoGroup(group)] { reply(refused, EmptyReply{}); });
    return;
  }
  state_.calls.Add(call, {group, std::move(reply)});
  lock.Handle(group, std::move(event));
}

// ---- what there is to see ----

std::string Operators::OwnerOf(const std::string& group) {
  const StateLock lock(&state_.mutex);
  const GroupRecord* const found = state_.groups.Find(group);
  return found == nullptr ? "" : found->machine->owner();
}

bool Operators::HasLease(const std::string& identity) {
  const StateLock lock(&state_.mutex);
  const auto& all = state_.members.all();
  return std::any_of(all.begin(), all.end(), [&identity](const auto& entry) {
    return !entry.second.lost && IdentityOf(entry.second.peer) == identity;
  });
}

GroupDetails Operators::DetailsOf(const GroupRecord& record) const {
  GroupDetails details{record.machine->View(DaemonState::Now()), std::nullopt};
  const std::optional<CommunicatorId> communicator = details.machine.communicator;
  if (communicator.has_value()) details.moved = state_.data_plane->StatsOf(record, *communicator);
  return details;
}

std::vector<GroupDetails> Operators::AllGroups() const {
  std::vector<GroupDetails> all;
  for (const auto& [name, group] : state_.groups.all()) all.push_back(DetailsOf(*group));
  return all;
}

void Operators::DescribeWireCommunicators(DaemonDetails* details) const {
  const DeviceWire& wire = *state_.data_plane->device_wire();
  std::map<CommunicatorId, DeviceCommunicatorStatus> open;
  for (DeviceCommunicatorStatus& each : wire.Describe()) {
    const CommunicatorId id = each.communicator;
    open.emplace(id, std::move(each));
  }
  for (const DataPlane::DeviceCommunicator& communicator :
       state_.data_plane->DeviceCommunicators()) {
    const auto found = open.find(communicator.wire_id);
    if (found == open.end()) continue;
    details->wire_communicators.push_back(
        {communicator.group, communicator.id, std::move(found->second)});
    open.erase(found);
  }
  for (auto& [id, communicator] : open)
    details->wire_communicators.push_back({"", std::nullopt, std::move(communicator)});
  details->abandoned_communicators = wire.Abandoned();
}

std::vector<ArenaDetails> Operators::AllArenas() const {
  std::vector<ArenaDetails> all;
  for (const auto& [id, member] : state_.members.all()) {
    if (member.lost || member.layout == nullptr || member.layout->backs.empty()) continue;
    ArenaDetails arena = Arena(member);
    for (const RegionBack& pair : member.layout->backs) {
      const RegionRecord& front = member.regions.at(pair.region);
      arena.front_bytes += front.memory.bytes;
      arena.copies = arena.copies || front.pinned;
      arena.back_bytes += member.regions.at(pair.back).memory.bytes;
    }
    all.push_back(std::move(arena));
  }
  const TimePoint now = DaemonState::Now();
  for (const KeptRank* const kept : state_.kept.all()) {
    ArenaDetails arena = Arena(*kept);
    for (const KeptRank::Arena& each : kept->arenas) {
      arena.front_bytes += each.front.memory.bytes;
      arena.copies = arena.copies || each.front.pinned;
      arena.back_bytes += each.back.memory.bytes;
    }
    arena.kept = ArenaDetails::Kept{kept->content.version, std::max(Duration(), kept->until - now)};
    all.push_back(std::move(arena));
  }
  return all;
}

DaemonDetails Operators::Describe() {
  DaemonDetails details;
  details.uptime = DaemonState::Now() - state_.started;
  const bool has_devices = state_.options.devices.memory != nullptr;
  const auto* const owner =
      dynamic_cast<const CommunicatorsOwner*>(&state_.data_plane->transport());
  if (has_devices && owner != nullptr) details.communicators = owner->Communicators();
  details.moved = state_.data_plane->TotalStats();
  const StateLock lock(&state_.mutex);
  if (has_devices && state_.data_plane->device_wire() != nullptr)
    DescribeWireCommunicators(&details);
  details.listeners = state_.listeners;
  details.serving = !state_.draining;
  details.members = static_cast<int64_t>(state_.members.size());
  for (const auto& [id, member] : state_.members.all()) {
    details.regions += static_cast<int64_t>(member.regions.size());
    details.region_bytes += member.region_bytes();
  }
  for (const auto& [name, group] : state_.groups.all())
    details.pool_bytes += state_.pools.BytesOf(*group);
  details.groups = AllGroups();
  details.arenas = AllArenas();
  return details;
}

std::vector<GroupDetails> Operators::Groups() {
  const StateLock lock(&state_.mutex);
  return AllGroups();
}

absl::StatusOr<GroupDetails> Operators::Group(const std::string& name) {
  const StateLock lock(&state_.mutex);
  const GroupRecord* group = state_.groups.Find(name);
  if (group == nullptr) return NoGroup(name);
  return DetailsOf(*group);
}

absl::StatusOr<std::vector<MemberDetails>> Operators::MembersOf(const std::string& group) {
  std::vector<MemberDetails> all;
  const StateLock lock(&state_.mutex);
  if (!group.empty() && state_.groups.Find(group) == nullptr) return NoGroup(group);
  for (const auto& [name, found] : state_.groups.all()) {
    if (!group.empty() && name != group) continue;
    for (MemberView& view : found->machine->View(DaemonState::Now()).group.members) {
      MemberDetails member;
      member.group = name;
      member.view = std::move(view);
      if (const MemberRecord* record = state_.members.Find(member.view.id); record != nullptr) {
        if (record->peer.credentials.has_value()) member.uid = record->peer.credentials->uid;
        member.identity = record->peer.identity;
        member.client = record->client;
        member.device = record->device;
        member.regions = static_cast<int64_t>(record->regions.size());
        member.region_bytes = record->region_bytes();
      }
      all.push_back(std::move(member));
    }
  }
  return all;
}

absl::StatusOr<Operators::Statistics> Operators::StatisticsOf(const std::string& group) {
  const StateLock lock(&state_.mutex);
  const GroupRecord* found = state_.groups.Find(group);
  if (found == nullptr) return NoGroup(group);
  if (found->follower != nullptr) return NotCoordinatedHere(*found);
  return Statistics{found->machine->Statistics(), found->machine->ViewUpdate(DaemonState::Now())};
}

absl::StatusOr<Operators::Past> Operators::PastOf(const std::string& group, uint64_t incarnation,
                                                  Version version) {
  const StateLock lock(&state_.mutex);
  const GroupRecord* found = state_.groups.Find(group);
  if (found == nullptr) return NoGroup(group);
  const uint64_t current = found->machine->incarnation();
  if (incarnation != 0 && incarnation != current) {
    return Past{current, {Outcome::kUnknown, "that incarnation of the group is gone"}};
  }
  return Past{current, found->machine->Past(version)};
}

// ---- watching ----

absl::StatusOr<uint64_t> Operators::Watch(WatchFilter filter, std::shared_ptr<UpdateSink> sink) {
  StateLock lock(&state_.mutex);
  if (!filter.group.empty() && state_.groups.Find(filter.group) == nullptr)
    return NoGroup(filter.group);
  REFITD_ASSIGN_OR_RETURN(const uint64_t id,
                          state_.watchers.Add(std::move(filter), std::move(sink),
                                              state_.groups.machines(), DaemonState::Now()));
  lock.DeadlineMoved();
  return id;
}

void Operators::StopWatching(uint64_t watch) {
  const StateLock lock(&state_.mutex);
  state_.watchers.Remove(watch);
}

absl::StatusOr<Readiness> Operators::ReadinessOf(const std::string& group,
                                                 const std::string& instance) {
  const StateLock lock(&state_.mutex);
  std::optional<Readiness> readiness =
      state_.watchers.ReadinessOf(group, instance, DaemonState::Now());
  if (readiness.has_value()) return *std::move(readiness);
  return Error(absl::StatusCode::kNotFound, "instance '{}' of group '{}' is not known here",
               instance, group);
}

absl::StatusOr<uint64_t> Operators::WatchInstance(const std::string& identity,
                                                  const std::string& group,
                                                  const std::string& instance,
                                                  std::shared_ptr<ReadinessSink> sink) {
  StateLock lock(&state_.mutex);
  REFITD_ASSIGN_OR_RETURN(
      const uint64_t id,
      state_.watchers.AddInstance(identity, group, instance, std::move(sink), DaemonState::Now()));
  lock.DeadlineMoved();
  return id;
}

void Operators::StopWatchingInstance(uint64_t watch) {
  const StateLock lock(&state_.mutex);
  state_.watchers.RemoveInstance(watch);
}

}  // namespace refitd
