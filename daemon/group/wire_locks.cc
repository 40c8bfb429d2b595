#include "daemon/group/wire_locks.h"

#include <set>

#include "transport/base/status.h"

namespace refitd::coordinator {

std::optional<NodeId> WireLocks::awaited() const {
  if (held_ == order_.size()) return std::nullopt;
  return order_[held_];
}

std::optional<TimePoint> WireLocks::due() const {
  if (held_ == order_.size()) return std::nullopt;
  return deadline_;
}

NodeCommands WireLocks::Ask(std::vector<NodeId> order, TimePoint now) {
  order_ = std::move(order);
  held_ = 0;
  wanted_ = turn_taken_ = false;
  return AskNext(now);
}

NodeCommands WireLocks::AskNext(TimePoint now) {
  if (held_ == order_.size()) return {};
  holder_.clear();
  deadline_ = now + limit_;
  return {{order_[held_], PeerWireLock{update_}}};
}

NodeCommands WireLocks::Granted(NodeId node, TimePoint now) {
  if (awaited() != node) return {};
  ++held_;
  return AskNext(now);
}

NodeCommands WireLocks::Forget(NodeId node, TimePoint now) {
  const auto lock = std::find(order_.begin(), order_.end(), node);
  if (lock == order_.end()) return {};
  const auto index = static_cast<size_t>(lock - order_.begin());
  order_.erase(lock);
  if (index == held_) return AskNext(now);
  if (index < held_) --held_;
  return {};
}

NodeCommands WireLocks::GiveBack() {
  // The lock that comes next was asked for, and is given back too.
  order_.resize(std::min(held_ + 1, order_.size()));
  held_ = 0;
  NodeCommands commands;
  for (const NodeId node : std::exchange(order_, {})) {
    commands.push_back({node, PeerWireUnlock{update_}});
  }
  return commands;
}

NodeCommands WireLocks::GiveBackIfWanted(bool idle) {
  if (!wanted_ || !asked() || awaited().has_value() || (!turn_taken_ && !idle)) return {};
  wanted_ = false;
  return GiveBack();
}

std::string WireLocks::WhyLate(const JoinedNodes& nodes) const {
  return fmt::format("the wire of {} was not free within {}: {} has it",
                     nodes.Name(order_.at(held_)), InSeconds(limit_),
                     holder_.empty() ? "nobody answered who" : "group " + holder_);
}

void WireLocks::CheckInvariants() const {
  REFITD_CHECK(held_ <= order_.size());
  REFITD_CHECK(std::set<NodeId>(order_.begin(), order_.end()).size() == order_.size());
}

}  // namespace refitd::coordinator
