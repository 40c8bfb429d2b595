// Finds the memory of one group's members for the executor. An object lives for one call and is
// used under the daemon's mutex.
#ifndef REFITD_DAEMON_NODE_GROUP_MEMORY_H_
#define REFITD_DAEMON_NODE_GROUP_MEMORY_H_

#include "daemon/execute/executor.h"
#include "daemon/node/groups.h"
#include "daemon/node/leases.h"
#include "transport/base/status.h"

namespace refitd {

class GroupMemory : public MemoryResolver {
 public:
  GroupMemory(const Leases& leases, const GroupRecord& group) : leases_(leases), group_(group) {}

  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    const MemberRecord* const m = leases_.Find(member);
    if (m == nullptr) return Error(absl::StatusCode::kInternal, "member {} is gone", member);
    const auto r = m->regions.find(region);
    if (r == m->regions.end()) {
      return Error(absl::StatusCode::kNotFound, "region {} of member {} is gone", region, member);
    }
    return r->second.memory;
  }

  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    return group_.pools.WireSlot(slot, group_.machine->spec().slot_bytes);
  }

  absl::StatusOr<MemorySpan> SlotOf(MemberId member, SlotIndex slot) const override {
    return group_.pools.Slot(DeviceOf(member), slot, group_.machine->spec().slot_bytes);
  }

  std::string LabelOf(MemberId member) const override {
    const MemberRecord* const m = leases_.Find(member);
    if (m == nullptr) return MemoryResolver::LabelOf(member);
    return m->engine ? fmt::format("engine {} rank {}", m->instance, m->rank)
                     : fmt::format("trainer rank {}", m->rank);
  }

  std::optional<int> DeviceOf(MemberId member) const override {
    const MemberRecord* const m = leases_.Find(member);
    return m == nullptr ? std::nullopt : m->ordinal;
  }

 private:
  const Leases& leases_;
  const GroupRecord& group_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_GROUP_MEMORY_H_
