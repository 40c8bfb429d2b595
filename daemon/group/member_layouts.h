// The layouts of a group's members that are registered, with their digests.
//
// Only the structure of other daemons' layouts counts here, and many engines have equal ones, so
// equal layouts share one object; plans and catalogs go through each object once. Trainers' layouts
// are not shared, since a new registration is recognised by its new object.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_MEMBER_LAYOUTS_H_
#define REFITD_DAEMON_GROUP_MEMBER_LAYOUTS_H_

#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "transport/base/ids.h"
#include "transport/plan/layout.h"

namespace refitd::coordinator {

class MemberLayouts {
 public:
  void Set(MemberId member, std::shared_ptr<const Layout> layout, uint64_t digest) {
    layouts_[member] = {std::move(layout), digest};
  }
  void Erase(MemberId member) { layouts_.erase(member); }
  std::shared_ptr<const Layout> Find(MemberId member) const;
  uint64_t DigestOf(MemberId member) const;  // 0: it has none

  // The layout, or the object of another engine's layout that is equal to it.
  std::shared_ptr<const Layout> Share(const std::shared_ptr<const Layout>& layout, uint64_t digest);
  // A shared layout with that digest. Null: there is none.
  std::shared_ptr<const Layout> SharedWith(uint64_t digest) const;
  // How many layouts were compared; tests check the cost by it.
  int64_t compared() const { return compared_; }

  void CheckInvariants(const std::function<bool(MemberId)>& attached) const;

 private:
  struct Known {
    std::shared_ptr<const Layout> layout;
    uint64_t digest = 0;
  };
  std::map<MemberId, Known> layouts_;
  std::map<uint64_t, std::weak_ptr<const Layout>> shared_;  // by digest
  int64_t compared_ = 0;
};

}  // namespace refitd::coordinator

#endif  // REFITD_DAEMON_GROUP_MEMBER_LAYOUTS_H_
