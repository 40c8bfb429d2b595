// The node's answers to operators: creating and deleting groups, status, watching.
#include <algorithm>
#include <map>
#include <utility>

#include "daemon/node/node.h"
#include "daemon/node/update_status.h"
#include "daemon/process/process_stats.h"
#include "daemon/process/version.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int64_t kDefaultWatchMs = 200;
constexpr int64_t kMinWatchMs = 20;
constexpr int64_t kMaxWatchMs = 3'600'000;

double Seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

std::string UuidOf(const CudaMemory& memory, int ordinal) {
  for (const CudaDevice& device : memory.devices()) {
    if (device.ordinal == ordinal) return device.uuid;
  }
  return "";
}

// Describes the loaded NCCL and the communicators that `transport` made with it.
void Describe(const DeviceOptions& cuda, const Transport& transport, v1::NcclStatus* status) {
  status->set_library(cuda.nccl.library);
  if (cuda.nccl.version != 0) status->set_version(NcclVersionText(cuda.nccl.version));
  status->set_problem(cuda.nccl.problem);
  status->set_no_symmetric(cuda.nccl.no_symmetric);
  const auto* const owner = dynamic_cast<const CommunicatorsOwner*>(&transport);
  if (owner == nullptr) return;
  for (const CommunicatorStatus& communicator : owner->Communicators()) {
    v1::CommunicatorStatus* const out = status->add_communicators();
    out->set_epoch(communicator.epoch);
    for (const int device : communicator.devices) {
      out->add_gpu_uuids(UuidOf(*cuda.memory, device));
    }
    out->set_copy_engines(communicator.copy_engines);
    out->set_windows(communicator.windows);
    out->set_window_bytes(communicator.window_bytes);
    out->set_error(Message(communicator.status));
  }
}

void Fill(const DeviceEpochStatus& epoch, const CudaMemory& memory, v1::WireEpochStatus* out) {
  out->set_gpu_uuid(UuidOf(memory, epoch.device));
  out->set_rank(epoch.rank);
  out->set_ranks(epoch.size);
  out->set_state(std::string(epoch.state));
  out->set_error(Message(epoch.status));
  out->set_bytes_sent(epoch.moved.bytes_sent);
  out->set_bytes_received(epoch.moved.bytes_received);
}

}  // namespace

absl::StatusOr<v1::CreateGroupResponse> Node::CreateGroup(const v1::CreateGroupRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckName(request.group(), "group"));
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return Error(absl::StatusCode::kInvalidArgument, "request_id: {} bytes are more than {}",
                 request.request_id().size(), kMaxRequestIdBytes);
  }
  v1::CreateGroupResponse response;
  Turn turn(this, &mutex_);
  bool created = false;
  absl::StatusOr<GroupRecord*> made =
      MakeGroup(request.group(), request.spec(), std::nullopt, &created, turn);
  if (const GroupRecord* found = groups_.Find(request.group());
      found != nullptr && found->follower != nullptr) {
    return Followed(*found);
  }
  // For an operator, another spec means that another group has that name.
  if (absl::IsFailedPrecondition(made.status()))
    return absl::AlreadyExistsError(Message(made.status()));
  REFITD_RETURN_IF_ERROR(made.status());
  if (created) AdmitWaiting(request.group(), turn);
  const GroupMachine& machine = *(*made)->machine;
  if (!created && machine.has_trainers() &&
      request.spec().trainer_ranks() != machine.spec().trainer_ranks) {
    return Error(absl::StatusCode::kAlreadyExists,
                 "spec: group '{}' has trainer_ranks {}, and trainers are attached; this one says "
                 "{}",
                 request.group(), machine.spec().trainer_ranks, request.spec().trainer_ranks());
  }
  response.set_incarnation((*made)->machine->incarnation());
  if (!created && request.replace()) {
    REFITD_ASSIGN_OR_RETURN(const uint64_t incarnation, Replace(*made, request.request_id(), turn));
    response.set_incarnation(incarnation);
    created = true;
  }
  response.set_created(created);
  return response;
}

absl::StatusOr<uint64_t> Node::Replace(GroupRecord* group, const std::string& request_id,
                                       Turn& turn) {
  if (!request_id.empty() && request_id == group->replace_request)
    return group->replace_incarnation;
  const uint64_t incarnation = NewIncarnation();
  const std::string name = group->name();
  turn.Handle(name, ReplaceGroup{NewCall(), incarnation});
  if (group->machine->incarnation() != incarnation) {
    const std::optional<UpdateView> update = group->machine->ViewUpdate(Now());
    return Error(absl::StatusCode::kFailedPrecondition, "group '{}': the update to version {} runs",
                 name, update.has_value() ? update->version.value() : -1);
  }
  group->replace_request = request_id;
  group->replace_incarnation = incarnation;
  // Trainers hear of it by the end of their streams and attach again.
  std::vector<MemberId> trainers;
  for (const auto& [id, member] : leases_.all()) {
    if (member.group == name && !member.engine) trainers.push_back(id);
  }
  const std::string reason = "the group was replaced: attach again";
  for (const MemberId id : trainers) {
    MemberRecord* const member = leases_.Find(id);
    if (member != nullptr) Lose(member, reason, absl::AbortedError(reason), turn);
  }
  return incarnation;
}

absl::Status Node::DeleteGroup(const v1::DeleteGroupRequest& request) {
  Turn turn(this, &mutex_);
  const GroupRecord* group = groups_.Find(request.group());
  if (group == nullptr) return NoGroup(request.group());
  // A record outlives its lease while copies touch its memory; such a member counts too.
  const auto& all = leases_.all();
  const auto members = std::count_if(all.begin(), all.end(), [&](const auto& entry) {
    return entry.second.group == request.group();
  });
  if (group->follower != nullptr) return Followed(*group);
  if (members > 0 || group->machine->has_members() || group->machine->update_running()) {
    return Error(absl::StatusCode::kFailedPrecondition, "group '{}' has {} members",
                 request.group(), members);
  }
  DropGroup(request.group(), "deleted", turn);
  return absl::OkStatus();
}

void Node::AbortUpdate(CallId call, const v1::AbortUpdateRequest& request, ReplyFunction reply) {
  Turn turn(this, &mutex_);
  if (groups_.Find(request.group()) == nullptr) {
    turn.Answer([reply = std::move(reply), refused = NoGroup(request.group())] {
      reply(refused, EmptyReply{});
    });
    return;
  }
  calls_.Add(call, {request.group(), std::move(reply)});
  turn.Handle(request.group(),
              OperatorAbort{call, std::string(Shorten(request.reason(), kMaxReasonBytes))});
}

v1::GroupStatus Node::GroupStatusOf(const GroupRecord& record) const {
  const MachineView machine = record.machine->View(Now());
  const GroupView& view = machine.group;
  v1::GroupStatus status;
  status.set_name(view.name);
  status.set_incarnation(view.incarnation);
  status.set_state(std::string(view.state));
  v1::GroupSpec* spec = status.mutable_spec();
  spec->set_trainer_ranks(view.spec.trainer_ranks);
  spec->set_min_instances(view.spec.min_instances);
  spec->set_slot_bytes(view.spec.slot_bytes);
  spec->set_slots(view.spec.slots);
  if (view.version.has_value()) status.set_version(view.version->value());
  for (const MemberView& member : view.members) {
    if (!member.engine) status.set_trainers(status.trainers() + 1);
  }
  for (const InstanceView& instance : view.instances) {
    v1::InstanceStatus* i = status.add_instances();
    i->set_name(instance.name);
    i->set_state(std::string(instance.state));
    if (instance.version.has_value()) i->set_version(instance.version->value());
    i->set_origin(instance.origin);
    i->set_world_size(instance.world_size);
    i->set_attached(instance.attached);
    i->set_reason(instance.reason);
  }
  if (view.update.has_value()) *status.mutable_update() = StatusOf(view.name, *view.update);
  for (const SlotView& slot : view.slots) {
    v1::SlotStatus* s = status.add_slots();
    s->set_slot(slot.slot.value());
    s->set_state(std::string(SlotStateName(slot.state)));
    s->set_holder(slot.holder);
  }
  status.set_updates_committed(view.committed);
  status.set_updates_aborted(view.aborted);
  status.set_coordinator(machine.coordinator_address);
  for (const NodeView& node : machine.nodes) {
    v1::NodeStatus* n = status.add_nodes();
    n->set_daemon_id(node.daemon_id);
    n->set_address(node.address);
    n->set_state(std::string(node.state));
    n->set_members(node.members);
    n->set_silent_seconds(Seconds(node.silent));
    n->set_kept_out(node.kept_out);
    n->set_protocol(static_cast<int>(node.protocol));
  }
  if (machine.epoch.has_value()) {
    status.set_epoch(machine.epoch->value());
    status.set_epoch_state(std::string(machine.epoch_state));
    if (const auto stats = data_plane_.StatsOf(record, *machine.epoch); stats.has_value()) {
      status.set_wire_bytes_sent(stats->bytes_sent);
      status.set_wire_bytes_received(stats->bytes_received);
    }
  }
  return status;
}

void Node::DescribeEpochs(v1::NcclStatus* status) {
  const DeviceWire& wire = *data_plane_.device_wire();
  std::map<EpochId, DeviceEpochStatus> open;
  for (DeviceEpochStatus& each : wire.Describe()) {
    const EpochId id = each.epoch;
    open.emplace(id, std::move(each));
  }
  const CudaMemory& memory = *options_.cuda.memory;
  for (const DataPlane::DeviceEpoch& epoch : data_plane_.DeviceEpochs()) {
    const auto found = open.find(epoch.wire_id);
    if (found == open.end()) continue;
    v1::WireEpochStatus* const out = status->add_epochs();
    out->set_group(epoch.group);
    out->set_epoch(epoch.id.value());
    Fill(found->second, memory, out);
    open.erase(found);
  }
  for (const auto& [id, epoch] : open) Fill(epoch, memory, status->add_epochs());
  status->set_abandoned_epochs(wire.Abandoned());
}

v1::GetStatusResponse Node::GetStatus() {
  v1::GetStatusResponse response;
  response.set_daemon_version(std::string(kVersion));
  response.set_build(BuildInfo());
  response.set_uptime_seconds(Seconds(Now() - started_));
  v1::TransportStatus* host = response.add_transports();
  host->set_name("host");
  host->set_available(true);
  host->set_detail("sealed memfd regions, threaded copies");
  v1::TransportStatus* cuda = response.add_transports();
  cuda->set_name("cuda");
  cuda->set_available(options_.cuda.memory != nullptr);
  cuda->set_detail(options_.cuda.detail);
  if (cuda->available()) Describe(options_.cuda, data_plane_.transport(), cuda->mutable_nccl());
  response.set_daemon_id(options_.daemon_id);
  v1::ResourceStatus* resources = response.mutable_resources();
  const WireStats moved = data_plane_.TotalStats();
  resources->set_wire_bytes_sent(moved.bytes_sent);
  resources->set_wire_bytes_received(moved.bytes_received);
  if (const absl::StatusOr<ProcessStats> stats = ReadProcessStats(); stats.ok()) {
    resources->set_threads(stats->threads);
    resources->set_descriptors(stats->descriptors);
    resources->set_anonymous_bytes(stats->anonymous_bytes);
  }
  MutexLock lock(&mutex_);
  if (cuda->available() && data_plane_.device_wire() != nullptr)
    DescribeEpochs(cuda->mutable_nccl());
  for (const std::string& listener : listeners_) response.add_listeners(listener);
  response.set_serving(!draining_);
  resources->set_members(static_cast<int64_t>(leases_.size()));
  for (const auto& [id, member] : leases_.all()) {
    for (const auto& [region_id, region] : member.regions) {
      resources->set_regions(resources->regions() + 1);
      resources->set_region_bytes(resources->region_bytes() + region.memory.bytes);
    }
  }
  for (const auto& [name, group] : groups_.all()) {
    resources->set_pool_bytes(resources->pool_bytes() + group->pools.bytes());
    *response.add_groups() = GroupStatusOf(*group);
  }
  return response;
}

absl::StatusOr<v1::ListGroupsResponse> Node::ListGroups() {
  v1::ListGroupsResponse response;
  MutexLock lock(&mutex_);
  for (const auto& [name, group] : groups_.all()) *response.add_groups() = GroupStatusOf(*group);
  return response;
}

absl::StatusOr<v1::GetGroupResponse> Node::GetGroup(const v1::GetGroupRequest& request) {
  MutexLock lock(&mutex_);
  const GroupRecord* group = groups_.Find(request.group());
  if (group == nullptr) return NoGroup(request.group());
  v1::GetGroupResponse response;
  *response.mutable_group() = GroupStatusOf(*group);
  // Only this call returns the long lists: a status of all groups must fit into a message.
  for (const std::string& name : group->machine->spec().engine_only_tensors) {
    response.mutable_group()->mutable_spec()->add_engine_only_tensors(name);
  }
  for (const std::string& name : group->machine->spec().unwanted_tensors) {
    response.mutable_group()->mutable_spec()->add_unwanted_tensors(name);
  }
  return response;
}

absl::StatusOr<v1::ListMembersResponse> Node::ListMembers(const v1::ListMembersRequest& request) {
  v1::ListMembersResponse response;
  MutexLock lock(&mutex_);
  if (!request.group().empty() && groups_.Find(request.group()) == nullptr)
    return NoGroup(request.group());
  for (const auto& [name, group] : groups_.all()) {
    if (!request.group().empty() && name != request.group()) continue;
    for (const MemberView& view : group->machine->View(Now()).group.members) {
      v1::MemberStatus* member = response.add_members();
      member->set_id(view.id.value());
      member->set_group(name);
      member->set_role(view.engine ? "engine" : "trainer");
      member->set_instance(view.instance);
      member->set_rank(view.rank);
      member->set_world_size(view.world_size);
      if (view.engine) {
        member->set_delivery(view.delivery == DeliveryMode::kRegistered ? "registered" : "staged");
      }
      member->set_state(std::string(view.state));
      member->set_pid(view.pid);
      member->set_pieces(view.pieces);
      member->set_layout_digest(view.layout_digest);
      const MemberRecord* const record = leases_.Find(view.id);
      if (record == nullptr) continue;
      if (record->peer.credentials.has_value()) member->set_uid(record->peer.credentials->uid);
      member->set_identity(record->peer.identity);
      member->set_client(record->client);
      member->set_device(record->device);
      for (const auto& [id, region] : record->regions) {
        member->set_regions(member->regions() + 1);
        member->set_region_bytes(member->region_bytes() + region.memory.bytes);
      }
    }
  }
  return response;
}

absl::StatusOr<v1::GetUpdateStatisticsResponse> Node::GetUpdateStatistics(
    const v1::GetUpdateStatisticsRequest& request) {
  v1::GetUpdateStatisticsResponse response;
  UpdateStatistics statistics;
  {
    MutexLock lock(&mutex_);
    const GroupRecord* group = groups_.Find(request.group());
    if (group == nullptr) return NoGroup(request.group());
    if (group->follower != nullptr) return Followed(*group);
    statistics = group->machine->Statistics();
    const std::optional<UpdateView> update = group->machine->ViewUpdate(Now());
    if (update.has_value()) *response.mutable_update() = StatusOf(request.group(), *update);
  }
  for (const BroadcastTotals& totals : statistics.pushed) {
    *response.add_pushed() = BroadcastTotalsToWire(totals.method, totals.bytes, totals.buckets);
  }
  for (const BucketRecord& record : statistics.buckets) {
    v1::BucketStatistics* bucket = response.add_buckets();
    bucket->set_group_seq(record.group_seq);
    bucket->set_trainer_rank(record.trainer_rank);
    bucket->set_seq(record.seq);
    bucket->set_tensors(record.tensors);
    bucket->set_bytes(record.bytes);
    bucket->set_parts(record.parts);
    bucket->set_broadcast(ToWire(record.broadcast));
    bucket->set_seconds(Seconds(record.took));
  }
  response.set_buckets_left_out(statistics.left_out);
  return response;
}

// ---- watching ----

absl::StatusOr<uint64_t> Node::Watch(const v1::WatchUpdatesRequest& request,
                                     std::shared_ptr<UpdateSink> sink) {
  const int64_t interval = request.interval_ms() == 0 ? kDefaultWatchMs : request.interval_ms();
  if (interval < kMinWatchMs || interval > kMaxWatchMs) {
    return Error(absl::StatusCode::kInvalidArgument, "interval_ms: {} is not in {}..{}", interval,
                 kMinWatchMs, kMaxWatchMs);
  }
  const Turn turn(this, &mutex_);
  if (!request.group().empty() && groups_.Find(request.group()) == nullptr)
    return NoGroup(request.group());
  REFITD_ASSIGN_OR_RETURN(
      const uint64_t id,
      watchers_.Add({request.group(), std::chrono::milliseconds(interval), request.until_idle()},
                    std::move(sink), groups_.machines(), Now()));
  timer_.Wake();
  return id;
}

void Node::StopWatching(uint64_t watch) {
  MutexLock lock(&mutex_);
  watchers_.Remove(watch);
}

}  // namespace refitd
