#include "daemon/group/peer.h"

#include <algorithm>
#include <utility>

namespace refitd {

PeerProgram WithItsPart(PeerProgram command) {
  const std::shared_ptr<const RefitPlan> whole = std::exchange(command.whole, nullptr);
  if (whole == nullptr) return command;
  const RoutePlan& plan = whole->routes;
  std::vector<bool> here(plan.source_nodes.size());
  for (size_t s = 0; s < here.size(); ++s) here[s] = plan.source_nodes[s] == command.node;
  std::vector<ReplicaShare> shares;
  if (!command.sources.empty()) shares = SharesOf(whole->replicas, here);
  if (command.plan == nullptr) {
    auto part = std::make_shared<RoutePlan>(ShareOfNode(plan, command.node, command.local_layouts));
    // The shares must number tensors as the part does, not as the whole plan does.
    for (ReplicaShare& share : shares) {
      const std::string& name = plan.tensors[share.tensor].name;
      const auto at =
          std::lower_bound(part->tensors.begin(), part->tensors.end(), name,
                           [](const TensorSpec& t, const std::string& n) { return t.name < n; });
      share.tensor = static_cast<uint32_t>(at - part->tensors.begin());
    }
    command.plan = std::move(part);
  }
  command.replicas = std::make_shared<const std::vector<ReplicaShare>>(std::move(shares));
  command.local_layouts.clear();
  return command;
}

uint64_t HeaderDigest(const PeerHeader& header) {
  HashChain chain(header.update.value());
  const auto add = [&chain](auto number) { chain.Add(static_cast<uint64_t>(number)); };
  add(header.version.value());
  add(header.part.value());
  add(header.group_seq);
  add(header.root.value());
  header.content->AddTo(&chain);
  add(header.slot.has_value());
  if (header.slot.has_value()) {
    add(header.slot->slot.value());
    add(header.slot->grant.value());
  }
  add(header.leased);
  add(header.verification);
  return chain.hash();
}

}  // namespace refitd
