#include "daemon/group/left_out.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace refitd::coordinator {

using Instances = CommunicatorSearch::Instances;

Instances DispensableOfInstances(const GroupView& view, const Around& around, bool all) {
  std::map<std::string_view, std::set<NodeId>> nodes_of;
  for (const MemberView& member : view.members) {
    if (member.engine) nodes_of[member.instance].insert(around.members.NodeOf(member.id));
  }
  Instances instances;
  for (const InstanceView& instance : view.instances) {
    const bool in = all ? instance.attached == instance.world_size : instance.preparing;
    if (in) instances.insert(Dispensable(nodes_of[instance.name], around));
  }
  return instances;
}

bool AnyWithout(const std::set<NodeId>& out, const Instances& instances) {
  return std::any_of(instances.begin(), instances.end(), [&out](const std::set<NodeId>& nodes) {
    return std::none_of(nodes.begin(), nodes.end(), [&out](NodeId n) { return out.contains(n); });
  });
}

namespace {

// Those of the instances that these nodes suffice for. A node that none of them needs counts as an
// instance of its own.
Instances Among(const std::set<NodeId>& nodes, const Instances& instances) {
  Instances among;
  std::set<NodeId> others = nodes;
  for (const std::set<NodeId>& of : instances) {
    if (of.empty() || !std::includes(nodes.begin(), nodes.end(), of.begin(), of.end())) continue;
    among.insert(of);
    for (const NodeId node : of) others.erase(node);
  }
  for (const NodeId node : others) among.insert({node});
  return among;
}

}  // namespace

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
  const Instances instances = DispensableOfInstances(view, around);
  search_.Restrict(Among(Dispensable(update->record().nodes, around), instances));
  const std::set<NodeId> out = search_.LeftOut();
  if (!AnyWithout(out, instances)) return search_.GiveUp();
  LeaveOutForTry(out, update, around);
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
  std::set<NodeId> slow;
  for (const auto& [node, how] : slow_.slow()) slow.insert(node);
  const std::set<NodeId> out = Dispensable(slow, around);
  Instances instances = DispensableOfInstances(view, around);
  if (!AnyWithout(out, instances)) return;
  std::erase_if(instances, [&out](const auto& nodes) { return AnyWithout(out, {nodes}); });
  const auto caught_up = [&around](NodeId node) { return around.members.CatchUpsReach(node); };
  for (const std::set<NodeId>& late : instances) {
    if (!std::all_of(late.begin(), late.end(), caught_up)) return;
  }
  KeepNodesOut leave{update->record().id, {},   "every instance is on a slow daemon",
                     GiveUpClass::kSlow,  true, around.nodes.Suspecting(slow)};
  for (const NodeId node : out) {
    if (!update->KeepOffWire(node)) continue;
    leave.nodes[node] = fmt::format("{} is left out of this update, and catches up after it: {}",
                                    around.nodes.Name(node), WhySlow(node));
  }
  if (!leave.nodes.empty()) around.Feed(std::move(leave));
}

void LeftOut::SearchOn(const std::set<NodeId>& candidates, const WhyDown& why,
                       const GroupView& view, UpdateOnNodes* update, const Around& around) {
  search_failure_ = why;
  const Instances instances = DispensableOfInstances(view, around, /*all=*/true);
  LeaveOutForTry(search_.Failed(Among(candidates, instances)), update, around);
}

void LeftOut::CameUp(const UpdateOnNodes& update, const Around& around) {
  const std::set<NodeId> broken = search_.CameUp(Dispensable(around.communicator->ranks(), around));
  if (broken.empty()) return;
  KeepOut(Dispensable(broken, around), search_failure_, update, around);
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
