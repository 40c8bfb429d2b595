#include "daemon/group/member_layouts.h"

#include "transport/base/status.h"
#include "transport/plan/node_program.h"

namespace refitd::coordinator {

std::shared_ptr<const Layout> MemberLayouts::Find(MemberId member) const {
  const auto it = layouts_.find(member);
  return it == layouts_.end() ? nullptr : it->second.layout;
}

uint64_t MemberLayouts::DigestOf(MemberId member) const {
  const auto it = layouts_.find(member);
  return it == layouts_.end() ? 0 : it->second.digest;
}

std::shared_ptr<const Layout> MemberLayouts::Share(const std::shared_ptr<const Layout>& layout,
                                                   uint64_t digest) {
  std::weak_ptr<const Layout>& known = shared_[digest];
  std::shared_ptr<const Layout> before = known.lock();
  if (before == layout) return layout;  // the daemon has compared them (SharedWith)
  if (before != nullptr) {
    ++compared_;
    if (SameStructure(*before, *layout)) return before;
  }
  known = layout;
  if (shared_.size() > 2 * layouts_.size() + 1) {
    std::erase_if(shared_, [](const auto& entry) { return entry.second.expired(); });
  }
  return layout;
}

std::shared_ptr<const Layout> MemberLayouts::SharedWith(uint64_t digest) const {
  const auto known = shared_.find(digest);
  return known == shared_.end() ? nullptr : known->second.lock();
}

void MemberLayouts::CheckInvariants(const std::function<bool(MemberId)>& attached) const {
  for (const auto& [member, known] : layouts_) {
    REFITD_CHECK(known.layout != nullptr && attached(member));
  }
}

}  // namespace refitd::coordinator
