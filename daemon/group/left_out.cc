#include "daemon/group/left_out.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace refitd::coordinator {

NodeSharing::NodeSharing(const GroupView& view, const Around& around) {
  std::map<std::string_view, std::set<NodeId>> nodes_of;
  for (const MemberView& member : view.members) {
    if (member.engine) nodes_of[member.instance].insert(around.members.NodeOf(member.id));
  }
  // Nodes with trainers are never left out, so an instance with ranks there does not tie its other
  // nodes to them.
  for (const auto& [instance, nodes] : nodes_of) Join(Dispensable(nodes, around));
  for (const InstanceView& instance : view.instances) {
    if (instance.preparing) by_instance_.push_back(nodes_of[instance.name]);
  }
}

// The sets that an instance joins become one set.
void NodeSharing::Join(const std::set<NodeId>& nodes) {
  if (nodes.empty()) return;
  std::set<NodeId> replaced;
  for (const NodeId node : nodes) replaced.insert(first_.emplace(node, node).first->second);
  for (auto& [node, first] : first_) {
    if (replaced.contains(first)) first = *replaced.begin();
  }
}

std::set<NodeId> NodeSharing::FirstOf(const std::set<NodeId>& nodes) const {
  std::set<NodeId> firsts;
  for (const NodeId node : nodes) {
    const auto at = first_.find(node);
    firsts.insert(at == first_.end() ? node : at->second);
  }
  return firsts;
}

std::set<NodeId> NodeSharing::AllOf(const std::set<NodeId>& firsts) const {
  std::set<NodeId> nodes = firsts;
  for (const auto& [node, first] : first_) {
    if (firsts.contains(first)) nodes.insert(node);
  }
  return nodes;
}

bool NodeSharing::LeavesInstance(const std::set<NodeId>& out) const {
  return std::any_of(by_instance_.begin(), by_instance_.end(), [&out](const auto& nodes) {
    return std::none_of(nodes.begin(), nodes.end(), [&out](NodeId n) { return out.contains(n); });
  });
}

// ---- LeftOut ----
std::string LeftOut::WhySlow(NodeId node) const {
  const auto it = slow_.slow().find(node);
  if (it == slow_.slow().end()) return "";
  return fmt::format(
      "it held the others back by {} (peers.relay_slow_ms {}): {}",
      InSeconds(std::chrono::duration_cast<std::chrono::milliseconds>(it->second.held)),
      ToMillis(slow_limit_), SlowNodes::Describe(it->second));
}

void LeftOut::Forget(NodeId node) {
  search_.Forget(node);
  slow_.Forget(node);
}

void LeftOut::LeaveOutUntried(const GroupView& view, UpdateOnNodes* update, const Around& around) {
  const NodeSharing sharing(view, around);
  search_.Restrict(sharing.FirstOf(Dispensable(update->record().nodes, around)));
  const std::set<NodeId> out = sharing.AllOf(search_.LeftOut());
  if (sharing.LeavesInstance(out)) LeaveOutForTry(out, update, around);
}

void LeftOut::LeaveOutForTry(const std::set<NodeId>& out, UpdateOnNodes* update,
                             const Around& around) {
  const UpdateRecord& record = update->record();
  KeepNodesOut leave{
      record.id, {}, search_failure_.reason, search_failure_.kind, true, search_failure_.failure};
  std::vector<NodeId> left;
  for (const NodeId node : out) {
    if (!update->KeepOffWire(node)) continue;
    leave.nodes[node] = fmt::format("{} is left out of this update to find the daemon at fault: {}",
                                    around.nodes.Name(node), search_failure_.reason);
    left.push_back(node);
  }
  if (left.empty()) return;
  around.Log(LogLine::kWarning,
             fmt::format("the update to version {} leaves out {} to find the daemon at fault: {}",
                         record.version, around.nodes.Names(left), search_failure_.reason));
  around.Feed(std::move(leave));
}

// A catch-up brings these nodes the new version after the others have it.
void LeftOut::LeaveOutSlow(const GroupView& view, UpdateOnNodes* update, const Around& around) {
  const NodeSharing sharing(view, around);
  std::set<NodeId> slow;
  for (const auto& [node, how] : slow_.slow()) slow.insert(node);
  const std::set<NodeId> out = sharing.AllOf(sharing.FirstOf(Dispensable(slow, around)));
  if (!sharing.LeavesInstance(out)) return;
  const auto caught_up = [&around](NodeId node) { return around.members.CatchUpsReach(node); };
  if (!std::all_of(out.begin(), out.end(), caught_up)) return;
  KeepNodesOut leave{update->record().id, {},   "every instance is on a slow daemon",
                     GiveUpClass::kSlow,  true, around.nodes.Suspecting(slow)};
  for (const NodeId node : out) {
    if (!update->KeepOffWire(node)) continue;
    const std::string why = WhySlow(node);
    leave.nodes[node] = fmt::format(
        "{} is left out of this update, and catches up after it: {}", around.nodes.Name(node),
        why.empty() ? "it has ranks of an instance that has others on a slow daemon" : why);
  }
  if (!leave.nodes.empty()) around.Feed(std::move(leave));
}

void LeftOut::SearchOn(const std::set<NodeId>& candidates, const WhyDown& why,
                       const GroupView& view, UpdateOnNodes* update, const Around& around) {
  const NodeSharing sharing(view, around);
  search_failure_ = why;
  LeaveOutForTry(sharing.AllOf(search_.Failed(sharing.FirstOf(candidates))), update, around);
}

void LeftOut::CameUp(const GroupView& view, const UpdateOnNodes& update, const Around& around) {
  const NodeSharing sharing(view, around);
  const std::set<NodeId> broken =
      search_.CameUp(sharing.FirstOf(Dispensable(around.communicator->ranks(), around)));
  if (broken.empty()) return;
  KeepOut(Dispensable(sharing.AllOf(broken), around), search_failure_, update, around);
}

void LeftOut::KeepOut(const std::set<NodeId>& suspects, const WhyDown& why,
                      const UpdateOnNodes& update, const Around& around) {
  KeepNodesOut keep{update.record().id, {}, why.reason, why.kind, false, why.failure};
  for (const NodeId node : suspects) {
    search_.Forget(node);
    keep.nodes[node] = fmt::format("{} is kept out until it attaches anew: {}",
                                   around.nodes.Name(node), why.reason);
    around.Log(LogLine::kWarning, keep.nodes[node]);
  }
  around.Feed(std::move(keep));
}

void LeftOut::Judge(const ProgramEnded& ended, const UpdateOnNodes& update, const Around& around) {
  if (slow_limit_ == Duration(0)) return;
  for (const NodeId node : slow_.Review(ended.uses)) {
    around.Log(
        LogLine::kInfo,
        fmt::format("{} receives as fast as the others again: updates take its instances again",
                    around.nodes.Name(node)));
  }
  if (update.record().from_engines() || !ended.ok) return;
  std::set<NodeId> candidates = Dispensable(update.record().nodes, around);
  std::erase_if(candidates, [&around](NodeId node) { return !around.members.CatchUpsReach(node); });
  for (const NodeId node : slow_.Judge(ended.uses, candidates)) {
    around.Log(LogLine::kWarning,
               fmt::format("{} is slow, so updates leave its instances to catch-ups: {}",
                           around.nodes.Name(node), WhySlow(node)));
  }
}

}  // namespace refitd::coordinator
