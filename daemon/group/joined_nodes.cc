#include "daemon/group/joined_nodes.h"

#include <algorithm>
#include <set>
#include <utility>

#include "transport/base/status.h"

namespace refitd::coordinator {
namespace {

constexpr int kPingsPerLimit = 4;  // so that a lost ping is not a lost daemon

}  // namespace

std::string InSeconds(Duration duration) {
  return fmt::format("{:g} s", std::chrono::duration<double>(duration).count());
}

std::optional<NodeId> JoinedNodes::Find(const std::string& daemon_id) const {
  const auto it = std::find_if(nodes_.begin(), nodes_.end(), [&daemon_id](const auto& node) {
    return node.second.daemon_id == daemon_id;
  });
  return it == nodes_.end() ? std::nullopt : std::optional(it->first);
}

std::string JoinedNodes::DaemonId(NodeId node) const {
  if (node == kCoordinatorNode) return own_id_;
  const auto it = nodes_.find(node);
  return it == nodes_.end() ? fmt::format("{}", node) : it->second.daemon_id;
}

Suspect JoinedNodes::SuspectOf(NodeId node) const {
  Suspect suspect;
  suspect.role = SuspectRole::kDaemon;
  suspect.daemon = DaemonId(node);
  return suspect;
}

absl::Status JoinedNodes::CanJoin(const std::string& group, const std::string& daemon_id,
                                  const std::string& boot_id, const std::string& address) const {
  if (daemon_id == own_id_) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "daemon_id: '{}' is this daemon's own: give each daemon its own id", daemon_id);
  }
  if (const std::optional<NodeId> same = Find(daemon_id); same.has_value()) {
    const Node& node = nodes_.at(*same);
    if (node.boot_id == boot_id) return absl::OkStatus();
    return Error(absl::StatusCode::kAlreadyExists,
                 "daemon_id: '{}' is that of the daemon at {}, which is linked; the one at {} is "
                 "another process with the same id: give each daemon its own, or, if it was "
                 "started anew, try again: the old link ends with its process, or after {} of "
                 "silence",
                 daemon_id, node.address, address, InSeconds(silence_));
  }
  if (nodes_.size() + 1 >= static_cast<size_t>(kMaxGroupDaemons)) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "daemon_id: '{}' would be daemon {} of group '{}', which can have {}", daemon_id,
                 nodes_.size() + 2, group, kMaxGroupDaemons);
  }
  return absl::OkStatus();
}

void JoinedNodes::Join(const NodeJoined& joined, TimePoint now) {
  Node node;
  node.daemon_id = joined.daemon_id;
  node.boot_id = joined.boot_id;
  node.address = joined.address;
  node.protocol = joined.protocol;
  node.heard = now;
  node.next_ping = now + silence_ / kPingsPerLimit;
  due_ = std::min(due_.value_or(node.next_ping), node.next_ping);
  nodes_.emplace(joined.node, std::move(node));
  joined_anew_ = true;
}

bool JoinedNodes::Heard(NodeId node, TimePoint now) {
  const auto it = nodes_.find(node);
  if (it == nodes_.end()) return false;
  it->second.heard = now;
  return true;
}

std::vector<NodeId> JoinedNodes::Ping(TimePoint now, NodeCommands* commands) {
  std::vector<NodeId> silent;
  due_.reset();
  for (auto& [id, node] : nodes_) {
    if (now - node.heard > silence_) {
      silent.push_back(id);
      continue;
    }
    if (now >= node.next_ping) {
      node.next_ping = now + silence_ / kPingsPerLimit;
      commands->push_back({id, PeerPing{++node.pings}});
    }
    const TimePoint lost = node.heard + silence_ + std::chrono::nanoseconds(1);
    const TimePoint due = std::min(node.next_ping, lost);
    due_ = std::min(due_.value_or(due), due);
  }
  return silent;
}

NodeCommands JoinedNodes::SendIncarnation(uint64_t incarnation) const {
  NodeCommands commands;
  for (const auto& [id, node] : nodes_) commands.push_back({id, PeerIncarnation{incarnation}});
  return commands;
}

NodeCommands JoinedNodes::SendOwner(const std::string& owner) {
  NodeCommands commands;
  if (owner == owner_ && !joined_anew_) return commands;  // after most events
  owner_ = owner;
  for (auto& [id, node] : nodes_) {
    if (node.owner == owner) continue;
    node.owner = owner;
    commands.push_back({id, PeerOwner{owner}});
  }
  return commands;
}

// Readiness is the example of what a version of the protocol adds: only daemons that agreed to that
// version get it.
NodeCommands JoinedNodes::SendReadiness(const std::vector<PeerReadiness>& news,
                                        const ReadinessBook& book) {
  NodeCommands commands;
  for (const PeerReadiness& each : news) {
    for (const auto& [id, node] : nodes_) {
      if (node.has_readiness) commands.push_back({id, each});
    }
  }
  if (!std::exchange(joined_anew_, false)) return commands;
  for (auto& [id, node] : nodes_) {
    if (node.has_readiness || node.protocol < Protocol::kV1) continue;
    node.has_readiness = true;
    for (PeerReadiness& each : book.All()) commands.push_back({id, std::move(each)});
  }
  return commands;
}

std::vector<NodeView> JoinedNodes::View(TimePoint now) const {
  std::vector<NodeView> views;
  for (const auto& [id, node] : nodes_) {
    NodeView& view = views.emplace_back();
    view.node = id;
    view.daemon_id = node.daemon_id;
    view.address = node.address;
    view.state = "joined";
    view.silent = now - node.heard;
    view.protocol = node.protocol;
  }
  return views;
}

void JoinedNodes::CheckInvariants() const {
  REFITD_CHECK(nodes_.size() < static_cast<size_t>(kMaxGroupDaemons));
  std::set<std::string> ids;
  for (const auto& [id, node] : nodes_) {
    REFITD_CHECK(id != kCoordinatorNode && ids.insert(node.daemon_id).second);
  }
}

}  // namespace refitd::coordinator
