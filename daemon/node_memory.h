// Memory of one group's members, for the executor. Inside the node only; used under its mutex.
#ifndef REFITD_DAEMON_NODE_MEMORY_H_
#define REFITD_DAEMON_NODE_MEMORY_H_

#include <map>
#include <memory>

#include "daemon/node.h"
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
    if (group_.pool == nullptr) return absl::InternalError("the staging pool is not mapped");
    const int64_t bytes = group_.machine->spec().slot_bytes;
    return MemorySpan{group_.pool->data() + int64_t{slot.value()} * bytes, bytes, group_.pool};
  }

 private:
  const std::map<MemberId, MemberRecord>& members_;
  const GroupRecord& group_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMORY_H_
