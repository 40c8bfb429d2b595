#include "daemon/node/state.h"

#include <sys/random.h>

#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

std::string NewBootId() {
  std::string id(16, '\0');
  REFITD_CHECK(getrandom(id.data(), id.size(), 0) == static_cast<ssize_t>(id.size()));
  return id;
}

}  // namespace

DaemonState::DaemonState(DaemonOptions given, DataPlane::Options moves, ProcessWatch* watch,
                         StateMutex::Handlers handlers)
    : options(std::move(given)),
      spec_limits{options.default_slot_bytes, options.default_slots, options.max_pool_bytes},
      boot_id(NewBootId()),
      mapped("mapped_bytes", options.max_mapped_bytes, options.per_identity.mapped_bytes),
      held("held_bytes", options.max_held_bytes, options.per_identity.held_bytes),
      processes(*watch),
      mutex(std::move(handlers)),
      members({options.max_regions_per_member, options.max_regions}),
      groups({options.max_groups, options.max_pool_bytes, options.group_idle}, &sessions, &pending),
      watchers(options.keep_readiness, &groups, &pending),
      pools({.daemon_id = options.daemon_id,
             .memory = options.devices.memory,
             .has_wire = moves.device_wire != nullptr,
             .no_wire = options.devices.no_wire,
             .thread = regions_thread},
            &mutex, {&groups, &members, &pending, &sessions}),
      data_plane(std::make_unique<DataPlane>(
          std::move(moves), &mutex, DataPlane::State{&groups, &members, &calls, &pools})) {}

void DaemonState::CheckInvariants() const {
  calls.CheckInvariants();
  members.CheckInvariants();
  kept.CheckInvariants();
  sessions.CheckInvariants();
  watchers.CheckInvariants();
  pending.CheckInvariants();
  groups.CheckInvariants();
  pools.CheckInvariants();
  data_plane->CheckInvariants();
  for (const auto& [id, member] : members.all()) {
    REFITD_CHECK(groups.Find(member.group) != nullptr);
  }
  // A member waits for a group of this daemon that does not exist yet, or for another daemon's
  // group, which this daemon is joining.
  for (const PendingAttaches::OfGroup& waiting : pending.of_group()) {
    const GroupRecord* const group = groups.Find(waiting.record.group);
    REFITD_CHECK(waiting.coordinator.empty() ? group == nullptr
                                             : group != nullptr && group->join.joining);
  }
}

}  // namespace refitd
