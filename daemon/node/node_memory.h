// Memory of one group's members, for the executor. Inside the node only; used under its mutex.
#ifndef REFITD_DAEMON_NODE_NODE_MEMORY_H_
#define REFITD_DAEMON_NODE_NODE_MEMORY_H_

#include <map>
#include <memory>

#include "daemon/node/node.h"
#include "transport/base/status.h"

namespace refitd {

class Node::Memory : public MemoryResolver {
 public:
  Memory(const std::map<MemberId, MemberRecord>& members, const GroupRecord& group)
      : members_(members), group_(group) {}

  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    const auto m = members_.find(member);
    if (m == members_.end()) return Error(absl::StatusCode::kInternal, "member {} is gone", member);
    const auto r = m->second.regions.find(region);
    if (r == m->second.regions.end()) {
      return Error(absl::StatusCode::kNotFound, "region {} of member {} is gone", region, member);
    }
    return r->second.memory;
  }

  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    if (group_.wire_ordinal.has_value()) {
      return SlotIn(group_.device_pools.at(*group_.wire_ordinal).memory, slot);
    }
    if (group_.pool == nullptr) return absl::InternalError("the staging pool is not mapped");
    return SlotIn({group_.pool->data(), group_.pool->bytes(), group_.pool}, slot);
  }

  absl::StatusOr<MemorySpan> SlotOf(MemberId member, SlotIndex slot) const override {
    const auto m = members_.find(member);
    if (m == members_.end() || !m->second.ordinal.has_value()) return Slot(slot);
    const auto pool = group_.device_pools.find(*m->second.ordinal);
    if (pool != group_.device_pools.end()) return SlotIn(pool->second.memory, slot);
    return Error(absl::StatusCode::kInternal, "there is no staging pool on {}", m->second.device);
  }

  std::optional<int> DeviceOf(MemberId member) const override {
    const auto m = members_.find(member);
    return m == members_.end() ? std::nullopt : m->second.ordinal;
  }

 private:
  MemorySpan SlotIn(const MemorySpan& pool, SlotIndex slot) const {
    const int64_t bytes = group_.machine->spec().slot_bytes;
    return {pool.data + int64_t{slot.value()} * bytes, bytes, pool.keep_alive};
  }

  const std::map<MemberId, MemberRecord>& members_;
  const GroupRecord& group_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_NODE_MEMORY_H_
