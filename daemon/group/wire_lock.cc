#include "daemon/group/wire_lock.h"

#include <algorithm>

namespace refitd {

void WireLock::Acquire(const std::string& group, Events* events) {
  if (holder_ == group || std::find(waiting_.begin(), waiting_.end(), group) != waiting_.end()) {
    return;
  }
  if (holder_.empty()) {
    holder_ = group;
    events->emplace_back(group, WireGranted{});
    return;
  }
  waiting_.push_back(group);
  events->emplace_back(group, WireWaits{holder_});
  events->emplace_back(holder_, WireWanted{});
}

void WireLock::Release(const std::string& group, Events* events) {
  if (holder_ != group) {
    std::erase(waiting_, group);
    return;
  }
  holder_.clear();
  if (waiting_.empty()) return;
  holder_ = std::move(waiting_.front());
  waiting_.pop_front();
  events->emplace_back(holder_, WireGranted{});
  // Another group waits for the new holder already.
  if (!waiting_.empty()) events->emplace_back(holder_, WireWanted{});
}

}  // namespace refitd
