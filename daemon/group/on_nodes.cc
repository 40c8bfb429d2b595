#include "daemon/group/on_nodes.h"

namespace refitd::coordinator {

void Destinations::Add(NodeId node) {
  by_node_[node].push_back(static_cast<uint32_t>(node_of_.size()));
  node_of_.push_back(node);
}

const std::vector<uint32_t>& Destinations::On(NodeId node) const {
  static const std::vector<uint32_t>* const kNone = new std::vector<uint32_t>();
  const auto it = by_node_.find(node);
  return it == by_node_.end() ? *kNone : it->second;
}

std::vector<bool> Destinations::SkipOn(NodeId node, const std::vector<bool>& skip) const {
  std::vector<bool> on_node;
  for (const uint32_t d : On(node)) on_node.push_back(d < skip.size() && skip[d]);
  return on_node;
}

void Shares::Begin(std::set<NodeId> nodes, size_t destinations) {
  running_ = std::move(nodes);
  bytes_written_.resize(destinations);
}

void Shares::ForgetFailure() {
  status_ = absl::OkStatus();
  failed_destination_ = -1;
}

}  // namespace refitd::coordinator
