#include "daemon/group/last_run.h"

#include <algorithm>

#include "transport/base/status.h"

namespace refitd::coordinator {

void LastRun::ReadPlan(const ProgramUse& use) {
  const RouteBytes& links = use.plan->routes.links;
  // The plan counts no node behind the last one with a part in it.
  const size_t count = use.plan->routes.nodes;
  REFITD_CHECK(count <= use.nodes.size() && links.matrix.size() == count * count);
  program_ = use.program;
  shares_.clear();
  for (size_t from = 0; from < count; ++from) {
    Share& share = shares_[use.nodes[from]];
    share.sent = links.node_sends[from];
    share.forwarded = links.node_forwards[from];
    share.received = links.node_receives[from];
    for (size_t to = 0; to < count; ++to) {
      const int64_t bytes = links.matrix[from * count + to];
      if (to != from && bytes > 0) share.sends.emplace_back(use.nodes[to], bytes);
    }
    std::stable_sort(share.sends.begin(), share.sends.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    if (share.sends.size() > kMaxShownSends) share.sends.resize(kMaxShownSends);
  }
}

void LastRun::Set(const ProgramUse& use, const std::map<NodeId, Duration>& took) {
  if (program_ != use.program) ReadPlan(use);
  for (auto& [node, share] : shares_) {
    const auto of_node = took.find(node);
    share.took = of_node == took.end() ? Duration(0) : of_node->second;
  }
}

void LastRun::Show(NodeId node, const JoinedNodes& nodes, NodeView* view) const {
  const auto found = shares_.find(node);
  if (found == shares_.end() || found->second.took == Duration(0)) return;
  const Share& share = found->second;
  for (const auto& [to, bytes] : share.sends) {
    if (nodes.exists(to)) view->sends.push_back({nodes.DaemonId(to), bytes});
  }
  view->bytes_sent = share.sent;
  view->bytes_forwarded = share.forwarded;
  view->bytes_received = share.received;
  view->data_took = share.took;
}

}  // namespace refitd::coordinator
