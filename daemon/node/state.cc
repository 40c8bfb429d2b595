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

DaemonState::DaemonState(DaemonOptions given, TurnHost* turn_host, TimerHost* timer_host)
    : options(std::move(given)),
      spec_limits{options.default_slot_bytes, options.default_slots, options.max_pool_bytes},
      boot_id(NewBootId()),
      mapped("mapped_bytes", options.max_mapped_bytes, options.per_identity.mapped_bytes),
      held("held_bytes", options.max_held_bytes, options.per_identity.held_bytes),
      mappings(options.machine_bytes, &mapped),
      turns{turn_host, &mutex, &pushes},
      memory({options.max_regions_per_member, options.max_regions}),
      groups({options.max_groups, options.max_pool_bytes, options.group_idle}, &peers, &waiters),
      readiness(options.keep_readiness, &groups, &waiters),
      timer(timer_host, turn_host, &mutex) {}

void DaemonState::CheckInvariants() const {
  calls.CheckInvariants();
  leases.CheckInvariants();
  memory.CheckInvariants(leases);
  peers.CheckInvariants();
  watchers.CheckInvariants();
  waiters.CheckInvariants();
  groups.CheckInvariants();
  readiness.CheckInvariants();
  for (const auto& [id, member] : leases.all()) {
    REFITD_CHECK(groups.Find(member.group) != nullptr);
  }
  // A member waits for a group of this daemon that does not exist yet, or for another daemon's
  // group, which this daemon is joining.
  for (const Waiters::OfGroup& waiting : waiters.of_group()) {
    const GroupRecord* const group = groups.Find(waiting.record.group);
    REFITD_CHECK(waiting.coordinator.empty() ? group == nullptr
                                             : group != nullptr && group->join.joining);
  }
}

}  // namespace refitd
