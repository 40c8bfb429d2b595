#include "daemon/group/remote_members.h"

#include <algorithm>

#include "transport/base/status.h"
#include "transport/plan/node_program.h"

namespace refitd::coordinator {

const RemoteMembers::Member* RemoteMembers::Find(MemberId ours) const {
  const auto it = members_.find(ours);
  return it == members_.end() ? nullptr : &it->second;
}

NodeId RemoteMembers::NodeOf(MemberId ours) const {
  const Member* const member = Find(ours);
  return member == nullptr ? kCoordinatorNode : member->node;
}

MemberId RemoteMembers::IdOnNode(MemberId ours) const {
  const Member* const member = Find(ours);
  return member == nullptr ? ours : member->id;
}

std::optional<MemberId> RemoteMembers::OursOf(NodeId node, MemberId theirs) const {
  const auto it = attached_.find({node, theirs});
  return it == attached_.end() ? std::nullopt : std::optional(it->second);
}

size_t RemoteMembers::CountOn(NodeId node) const {
  size_t count = 0;
  auto it = attached_.lower_bound({node, MemberId(0)});
  for (; it != attached_.end() && it->first.first == node; ++it) ++count;
  return count;
}

bool RemoteMembers::CatchUpsReach(NodeId node) const {
  return node != kCoordinatorNode &&
         std::none_of(members_.begin(), members_.end(), [node](const auto& member) {
           return member.second.node == node && member.second.engine && !member.second.caught_up;
         });
}

void RemoteMembers::Attach(MemberId ours, const Member& member) {
  attached_[{member.node, member.id}] = ours;
  members_[ours] = member;
}

std::optional<MemberId> RemoteMembers::Detach(NodeId node, MemberId theirs) {
  const std::optional<MemberId> ours = OursOf(node, theirs);
  attached_.erase({node, theirs});
  return ours;
}

std::vector<MemberId> RemoteMembers::DetachAll(NodeId node) {
  std::vector<MemberId> detached;
  auto it = attached_.lower_bound({node, MemberId(0)});
  for (; it != attached_.end() && it->first.first == node; it = attached_.erase(it)) {
    detached.push_back(it->second);
  }
  return detached;
}

std::optional<RemoteMembers::Member> RemoteMembers::Release(MemberId ours) {
  const auto it = members_.find(ours);
  if (it == members_.end()) return std::nullopt;
  const Member member = it->second;
  members_.erase(it);
  if (OursOf(member.node, member.id) == ours) attached_.erase({member.node, member.id});
  return member;
}

std::optional<RemoteMembers::Call> RemoteMembers::FindCall(CallId ours) const {
  const auto it = calls_.find(ours);
  return it == calls_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<CallId> RemoteMembers::CallOf(NodeId node, CallId theirs) const {
  const auto it = calls_of_.find({node, theirs});
  return it == calls_of_.end() ? std::nullopt : std::optional(it->second);
}

std::vector<CallId> RemoteMembers::CallsOf(NodeId node) const {
  std::vector<CallId> calls;
  auto it = calls_of_.lower_bound({node, CallId(0)});
  for (; it != calls_of_.end() && it->first.first == node; ++it) calls.push_back(it->second);
  return calls;
}

void RemoteMembers::AddCall(CallId ours, const Call& call) {
  calls_[ours] = call;
  calls_of_[{call.node, call.id}] = ours;
}

std::optional<RemoteMembers::Call> RemoteMembers::TakeCall(CallId ours) {
  const std::optional<Call> call = FindCall(ours);
  if (!call.has_value()) return std::nullopt;
  calls_.erase(ours);
  calls_of_.erase({call->node, call->id});
  return call;
}

void RemoteMembers::CheckInvariants(const JoinedNodes& nodes) const {
  for (const auto& [at, ours] : attached_) {
    REFITD_CHECK(nodes.contains(at.first));
    const Member* const member = Find(ours);
    REFITD_CHECK(member != nullptr && member->node == at.first && member->id == at.second);
  }
  REFITD_CHECK(calls_.size() == calls_of_.size());
  for (const auto& [ours, call] : calls_) REFITD_CHECK(CallOf(call.node, call.id) == ours);
}

// ---- MemberLayouts ----

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
