#include "daemon/services/status.h"

#include <algorithm>
#include <chrono>

#include "daemon/link/hello.h"
#include "daemon/link/trainer_messages.h"
#include "daemon/process/process_stats.h"
#include "daemon/process/version.h"
#include "proto/convert.h"
#include "proto/failure.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

constexpr int64_t kDefaultWatchMs = 200;
constexpr int64_t kMinWatchMs = 20;
constexpr int64_t kMaxWatchMs = 3'600'000;

double Seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

v1::WireCommunicatorStatus ToProto(const DaemonDetails::WireCommunicator& communicator,
                                   const DeviceMemory& memory) {
  v1::WireCommunicatorStatus out;
  out.set_group(communicator.group);
  if (communicator.id.has_value()) out.set_number(communicator.id->value());
  out.set_rank(communicator.status.rank);
  out.set_ranks(communicator.status.size);
  out.set_state(std::string(communicator.status.state));
  out.set_error(Message(communicator.status.status));
  for (const DeviceCommunicatorStatus::Rail& rail : communicator.status.rails) {
    v1::WireRail* const carried = out.add_rails();
    carried->set_gpu_uuid(memory.NameOf(rail.device));
    carried->set_bytes_sent(rail.moved.bytes_sent);
    carried->set_bytes_received(rail.moved.bytes_received);
  }
  return out;
}

// The loaded NCCL, and what is made with it.
void Fill(const DeviceOptions& devices, const DaemonDetails& details, v1::NcclStatus* status) {
  status->set_library(devices.collectives.library);
  status->set_version(devices.collectives.version);
  status->set_problem(devices.collectives.problem);
  status->set_no_symmetric(devices.collectives.no_symmetric);
  for (const CommunicatorStatus& communicator : details.communicators) {
    v1::CommunicatorStatus* const out = status->add_communicators();
    out->set_number(communicator.number);
    for (const int device : communicator.devices) {
      out->add_gpu_uuids(devices.memory->NameOf(device));
    }
    out->set_copy_engines(communicator.copy_engines);
    out->set_windows(communicator.windows);
    out->set_window_bytes(communicator.window_bytes);
    out->set_error(Message(communicator.status));
  }
  for (const DaemonDetails::WireCommunicator& communicator : details.wire_communicators) {
    *status->add_wire_communicators() = ToProto(communicator, *devices.memory);
  }
  status->set_abandoned_communicators(details.abandoned_communicators);
}

void Show(const InstanceView& instance, v1::InstanceStatus* status) {
  status->set_name(instance.name);
  status->set_state(std::string(instance.state));
  if (instance.version.has_value()) status->set_version(instance.version->value());
  status->set_origin(instance.origin);
  status->set_world_size(instance.world_size);
  status->set_attached(instance.attached);
  status->set_reason(instance.reason);
  status->set_ready(instance.readiness.ready);
  if (instance.readiness.lag.has_value()) status->set_lag(*instance.readiness.lag);
  status->set_unready_reason(instance.readiness.reason);
  status->set_catch_up(instance.catch_up);
}

void Show(const PreviousView& previous, v1::PreviousStatus* status) {
  status->set_version(previous.version.value());
  status->set_refused(previous.refused);
  status->set_held(previous.held);
  if (previous.held_for.has_value()) status->set_held_ms(ToMillis(*previous.held_for));
}

void Show(const NodeView& node, v1::NodeStatus* status) {
  status->set_daemon_id(node.daemon_id);
  status->set_address(node.address);
  status->set_state(std::string(node.state));
  status->set_members(node.members);
  status->set_silent_seconds(Seconds(node.silent));
  status->set_kept_out(node.kept_out);
  status->set_slow(node.slow);
  status->set_protocol(static_cast<int>(node.protocol));
  for (const NodeView::Send& send : node.sends) {
    v1::NodeSend* const s = status->add_sends();
    s->set_daemon_id(send.to);
    s->set_bytes(send.bytes);
  }
  status->set_bytes_sent(node.bytes_sent);
  status->set_bytes_forwarded(node.bytes_forwarded);
  status->set_bytes_received(node.bytes_received);
  status->set_data_seconds(Seconds(node.data_took));
}

v1::GroupStatus ToProto(const GroupDetails& details) {
  const MachineView& machine = details.machine;
  const GroupView& view = machine.group;
  v1::GroupStatus status;
  status.set_name(view.name);
  status.set_incarnation(view.incarnation);
  status.set_owner(view.owner);
  status.set_state(std::string(view.state));
  *status.mutable_spec() = SpecToProto(view.spec, /*lists=*/false);
  if (view.version.has_value()) status.set_version(view.version->value());
  if (view.content.has_value()) status.set_content_version(view.content->value());
  if (view.previous.has_value()) Show(*view.previous, status.mutable_previous());
  for (const MemberView& member : view.members) {
    if (!member.engine) status.set_trainers(status.trainers() + 1);
  }
  for (const InstanceView& instance : view.instances) {
    Show(instance, status.add_instances());
  }
  if (view.update.has_value()) *status.mutable_update() = ToProto(view.name, *view.update);
  if (view.catch_up.has_value()) *status.mutable_catch_up() = ToProto(view.name, *view.catch_up);
  for (const SlotView& slot : view.slots) {
    v1::SlotStatus* s = status.add_slots();
    s->set_slot(slot.slot.value());
    s->set_state(std::string(SlotStateName(slot.state)));
    s->set_holder(slot.holder);
  }
  status.set_updates_committed(view.committed);
  status.set_updates_aborted(view.aborted);
  status.set_chain_daemons(static_cast<int>(view.chain_daemons));
  status.set_coordinator(machine.coordinator_address);
  for (const NodeView& node : machine.nodes) Show(node, status.add_nodes());
  if (machine.communicator.has_value()) {
    status.set_communicator(machine.communicator->value());
    status.set_communicator_state(std::string(machine.communicator_state));
  }
  if (details.moved.has_value()) {
    status.set_wire_bytes_sent(details.moved->bytes_sent);
    status.set_wire_bytes_received(details.moved->bytes_received);
  }
  return status;
}

v1::MemberStatus ToProto(const MemberDetails& details) {
  const MemberView& view = details.view;
  v1::MemberStatus member;
  member.set_id(view.id.value());
  member.set_group(details.group);
  member.set_role(view.engine ? "engine" : "trainer");
  member.set_instance(view.instance);
  member.set_rank(view.rank);
  member.set_world_size(view.world_size);
  if (view.engine) {
    member.set_delivery(std::string(Name(view.delivery)));
  }
  member.set_state(std::string(view.state));
  member.set_pid(view.pid);
  member.set_pieces(view.pieces);
  member.set_layout_digest(view.layout_digest);
  if (details.uid.has_value()) member.set_uid(*details.uid);
  member.set_identity(details.identity);
  member.set_client(details.client);
  member.set_device(details.device);
  member.set_regions(details.regions);
  member.set_region_bytes(details.region_bytes);
  return member;
}

v1::ArenaStatus ToProto(const ArenaDetails& details) {
  v1::ArenaStatus arena;
  arena.set_group(details.group);
  arena.set_instance(details.instance);
  arena.set_rank(details.rank);
  arena.set_device(details.device);
  arena.set_front_bytes(details.front_bytes);
  arena.set_back_bytes(details.back_bytes);
  arena.set_flip(details.copies ? "host" : "remap");
  if (!details.kept.has_value()) return arena;
  arena.set_kept(true);
  arena.set_version(details.kept->version.value());
  arena.set_seconds_left(Seconds(details.kept->left));
  return arena;
}

v1::BucketStatistics ToProto(const BucketRecord& record) {
  v1::BucketStatistics bucket;
  bucket.set_group_seq(record.group_seq);
  bucket.set_trainer_rank(record.trainer_rank);
  bucket.set_seq(record.seq);
  bucket.set_tensors(record.tensors);
  bucket.set_bytes(record.bytes);
  bucket.set_parts(record.parts);
  bucket.set_broadcast(ToProto(record.broadcast));
  bucket.set_seconds(Seconds(record.took));
  return bucket;
}

}  // namespace

v1::UpdateStatus ToProto(const std::string& group, const UpdateView& update) {
  v1::UpdateStatus status;
  status.set_group(group);
  status.set_version(update.version.value());
  status.set_update_id(update.id.value());
  status.set_state(std::string(update.state));
  status.set_outcome(static_cast<v1::UpdateOutcome>(update.outcome));
  status.set_reason(CleanText(update.reason, kMaxStatusTextBytes));
  SetFailure(update.failure, &status);
  status.set_bytes(update.bytes);
  status.set_total_bytes(update.total_bytes);
  status.set_tensors(update.tensors);
  status.set_tensor_count(update.tensor_count);
  status.set_buckets(update.buckets);
  status.set_note(update.note);
  status.set_catch_up(update.catch_up);
  if (update.content.has_value()) status.set_content_version(update.content->value());
  for (const std::string& source_instance : update.source_instances)
    status.add_source_instances(source_instance);
  status.set_left_out_tensors(update.left_out.tensors);
  status.set_left_out_bytes(update.left_out.bytes);
  for (const std::string& name : update.left_out.names) status.add_left_out(name);
  status.set_elapsed_seconds(Seconds(update.elapsed));
  status.set_remaining_ms(ToMillis(update.remaining));
  status.set_waits_for(CleanText(update.waits_for, kMaxStatusTextBytes));
  for (const InstanceOutcome& outcome : update.instances) {
    Fill(outcome, status.add_instances());
  }
  return status;
}

namespace {

// Whether members that name an address as their coordinator come to this daemon. `listeners`: as
// Daemon::SetListeners has them.
bool ReachesThis(const std::string& address, const std::vector<std::string>& listeners) {
  return std::any_of(listeners.begin(), listeners.end(), [&](const std::string& listener) {
    const size_t kind = listener.find(':');
    if (listener.substr(0, kind) == "unix") return false;
    const std::string host = HostOfAddress(listener.substr(kind + 1));
    const bool any = host.empty() || host == "0.0.0.0" || host == "::";
    return any ? IsOwnAddress(address) : host == address;
  });
}

}  // namespace

void ShowMoved(Daemon* daemon, NameLookup* lookup,
               google::protobuf::RepeatedPtrField<v1::GroupStatus>* groups) {
  const std::vector<Operators::NamedCoordinator> named = daemon->operators().NamedCoordinators();
  if (named.empty()) return;
  const std::vector<std::string> listeners = daemon->operators().Listeners();
  for (const Operators::NamedCoordinator& each : named) {
    const NameLookup::Addresses found = lookup->Of(HostOfAddress(each.name));
    const std::string linked = HostOfAddress(each.linked);
    const bool leads_there =
        std::any_of(found.begin(), found.end(), [&](const std::string& address) {
          return each.linked.empty() ? ReachesThis(address, listeners) : address == linked;
        });
    const auto group = std::find_if(groups->begin(), groups->end(),
                                    [&](const auto& g) { return g.name() == each.group; });
    if (found.empty() || leads_there || group == groups->end()) continue;
    group->mutable_coordinator_moved()->set_name(each.name);
    for (const std::string& address : found) {
      group->mutable_coordinator_moved()->add_addresses(address);
    }
  }
}

v1::GetStatusResponse StatusOf(Daemon* daemon) {
  const DaemonOptions& options = daemon->options();
  const DaemonDetails details = daemon->operators().Describe();
  v1::GetStatusResponse response;
  response.set_daemon_version(std::string(kVersion));
  response.set_build(BuildInfo());
  response.set_uptime_seconds(Seconds(details.uptime));
  v1::TransportStatus* host = response.add_transports();
  host->set_name("host");
  host->set_available(true);
  host->set_detail("sealed memfd regions, threaded copies");
  v1::TransportStatus* cuda = response.add_transports();
  cuda->set_name("cuda");
  cuda->set_available(options.devices.memory != nullptr);
  cuda->set_detail(options.devices.detail);
  if (cuda->available()) Fill(options.devices, details, cuda->mutable_nccl());
  response.set_daemon_id(options.daemon_id);
  v1::ResourceStatus* resources = response.mutable_resources();
  resources->set_wire_bytes_sent(details.moved.bytes_sent);
  resources->set_wire_bytes_received(details.moved.bytes_received);
  if (const absl::StatusOr<ProcessStats> stats = ReadProcessStats(); stats.ok()) {
    resources->set_threads(stats->threads);
    resources->set_descriptors(stats->descriptors);
    resources->set_anonymous_bytes(stats->anonymous_bytes);
  }
  for (const std::string& listener : details.listeners) response.add_listeners(listener);
  response.set_serving(details.serving);
  resources->set_members(details.members);
  resources->set_regions(details.regions);
  resources->set_region_bytes(details.region_bytes);
  resources->set_pool_bytes(details.pool_bytes);
  for (const GroupDetails& group : details.groups) *response.add_groups() = ToProto(group);
  for (const ArenaDetails& arena : details.arenas) *response.add_arenas() = ToProto(arena);
  return response;
}

v1::ListGroupsResponse ListGroups(Daemon* daemon) {
  v1::ListGroupsResponse response;
  for (const GroupDetails& group : daemon->operators().Groups()) {
    *response.add_groups() = ToProto(group);
  }
  return response;
}

absl::StatusOr<v1::GetGroupResponse> GetGroup(Daemon* daemon, const v1::GetGroupRequest& request) {
  REFITD_ASSIGN_OR_RETURN(const GroupDetails group, daemon->operators().Group(request.group()));
  v1::GetGroupResponse response;
  *response.mutable_group() = ToProto(group);
  *response.mutable_group()->mutable_spec() = SpecToProto(group.machine.group.spec);
  return response;
}

absl::StatusOr<v1::ListMembersResponse> ListMembers(Daemon* daemon,
                                                    const v1::ListMembersRequest& request) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<MemberDetails> members,
                          daemon->operators().MembersOf(request.group()));
  v1::ListMembersResponse response;
  for (const MemberDetails& member : members) *response.add_members() = ToProto(member);
  return response;
}

absl::StatusOr<v1::GetUpdateStatisticsResponse> GetUpdateStatistics(
    Daemon* daemon, const v1::GetUpdateStatisticsRequest& request) {
  REFITD_ASSIGN_OR_RETURN(const Operators::Statistics found,
                          daemon->operators().StatisticsOf(request.group()));
  v1::GetUpdateStatisticsResponse response;
  if (found.update.has_value()) {
    *response.mutable_update() = ToProto(request.group(), *found.update);
  }
  for (const BroadcastTotals& totals : found.statistics.pushed) {
    *response.add_pushed() = BroadcastTotalsToProto(totals.method, totals.bytes, totals.buckets);
  }
  for (const BucketRecord& record : found.statistics.buckets) {
    *response.add_buckets() = ToProto(record);
  }
  response.set_buckets_left_out(found.statistics.left_out);
  return response;
}

absl::StatusOr<v1::GetUpdateResponse> GetUpdate(Daemon* daemon,
                                                const v1::GetUpdateRequest& request) {
  REFITD_ASSIGN_OR_RETURN(const Operators::Past past,
                          daemon->operators().PastOf(request.group(), request.incarnation(),
                                                     Version(request.version())));
  v1::GetUpdateResponse response;
  response.set_incarnation(past.incarnation);
  response.set_outcome(static_cast<v1::UpdateOutcome>(past.update.outcome));
  response.set_reason(CleanText(past.update.reason, kMaxStatusTextBytes));
  SetFailure(past.update.failure, &response);
  return response;
}

absl::StatusOr<WatchFilter> FilterOf(const v1::WatchUpdatesRequest& request) {
  const int64_t interval = request.interval_ms() == 0 ? kDefaultWatchMs : request.interval_ms();
  if (interval < kMinWatchMs || interval > kMaxWatchMs) {
    return InvalidField("interval_ms", "interval_ms: {} is not in {}..{}", interval, kMinWatchMs,
                        kMaxWatchMs);
  }
  return WatchFilter{request.group(), std::chrono::milliseconds(interval), request.until_idle()};
}

}  // namespace refitd
