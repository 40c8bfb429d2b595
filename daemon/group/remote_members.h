// The members and the calls of the daemons that joined a group, each with the number that its
// daemon gave it and with the number that the group knows it by.
//
// A member or call stays known after its node is lost, until the group is done with it.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_REMOTE_MEMBERS_H_
#define REFITD_DAEMON_GROUP_REMOTE_MEMBERS_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/group/joined_nodes.h"
#include "transport/plan/layout.h"

namespace refitd::coordinator {

class RemoteMembers {
 public:
  struct Member {
    NodeId node;
    MemberId id;  // on its daemon
    bool engine = false;
    bool caught_up = false;  // an engine rank to which catch-ups bring what it lacks
  };
  struct Call {
    NodeId node;
    CallId id;  // on its daemon
  };

  size_t size() const { return members_.size(); }
  // Null: the member is the coordinator's own.
  const Member* Find(MemberId ours) const;
  NodeId NodeOf(MemberId ours) const;
  // The member as its daemon knows it.
  MemberId IdOnNode(MemberId ours) const;
  // The member that is attached to that node; nullopt: it is not, or no longer.
  std::optional<MemberId> OursOf(NodeId node, MemberId theirs) const;
  size_t CountOn(NodeId node) const;
  // Whether catch-ups bring each version to all engine ranks of the node. False for the
  // coordinator's own node.
  bool CatchUpsReach(NodeId node) const;

  void Attach(MemberId ours, const Member& member);
  // The member is no longer attached to its node.
  std::optional<MemberId> Detach(NodeId node, MemberId theirs);
  std::vector<MemberId> DetachAll(NodeId node);
  // The group is done with the member. nullopt: it is the coordinator's own.
  std::optional<Member> Release(MemberId ours);

  // nullopt: the call is the coordinator's own.
  std::optional<Call> FindCall(CallId ours) const;
  std::optional<CallId> CallOf(NodeId node, CallId theirs) const;
  std::vector<CallId> CallsOf(NodeId node) const;
  void AddCall(CallId ours, const Call& call);
  // The call is answered.
  std::optional<Call> TakeCall(CallId ours);

  void CheckInvariants(const JoinedNodes& nodes) const;

 private:
  std::map<MemberId, Member> members_;
  std::map<std::pair<NodeId, MemberId>, MemberId> attached_;  // the group's number
  std::map<CallId, Call> calls_;
  std::map<std::pair<NodeId, CallId>, CallId> calls_of_;  // the group's number
};

// The layouts of a group's members that are registered, with their digests.
//
// Only the structure of other daemons' layouts counts here, and many engines have equal ones, so
// equal layouts share one object; plans and catalogs go through each object once. Trainers' layouts
// are not shared, since a new registration is recognised by its new object.
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

#endif  // REFITD_DAEMON_GROUP_REMOTE_MEMBERS_H_
