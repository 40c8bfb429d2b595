#include "daemon/group/readback_on_nodes.h"

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd::coordinator {

void ReadbackOnNodes::SendIfAsked(const Around& around) {
  if (!request_.has_value() || sent_) return;
  sent_ = owed_ = true;
  status_ = absl::OkStatus();
  failed_.clear();
  content_.assign(update_.destinations.size(), 0);
  for (const auto& [node, index] : update_.destinations.by_node()) {
    if (!update_.nodes.contains(node)) continue;
    std::vector<bool> skip = update_.destinations.SkipOn(node, request_->skip);
    if (std::all_of(skip.begin(), skip.end(), [](bool skipped) { return skipped; })) continue;
    running_.insert(node);
    around.Send(node, VerifyUpdate{update_.id, std::move(skip)});
  }
}

bool ReadbackOnNodes::Ended(NodeId node, const VerifyDone& done, bool writes,
                            const Around& around) {
  if (running_.erase(node) == 0) return false;
  const absl::Status status =
      writes ? absl::InternalError("it read back before its parts had ended") : done.status;
  if (!status.ok() && status_.ok()) {
    status_ = around.StatusOf(node, status, false);
  }
  const std::vector<uint32_t>& index = update_.destinations.On(node);
  for (const uint32_t d : done.failed_destinations) {
    if (d < index.size()) failed_.push_back(index[d]);
  }
  for (size_t i = 0; i < std::min(done.content.size(), index.size()); ++i) {
    content_.at(index[i]) = done.content[i];
  }
  // The node read nothing back, so all its destinations count as failed.
  if (!status.ok() && done.failed_destinations.empty()) {
    failed_.insert(failed_.end(), index.begin(), index.end());
  }
  return true;
}

void ReadbackOnNodes::CompleteIfEnded(const Around& around) {
  if (!owed_ || !sent_ || !running_.empty()) return;
  owed_ = false;
  around.Feed(VerifyDone{update_.id, status_, failed_, content_});
}

void ReadbackOnNodes::CheckInvariants() const {
  REFITD_CHECK(running_.empty() || (owed_ && request_.has_value()));
  REFITD_CHECK(!sent_ || content_.size() == update_.destinations.size());
  REFITD_CHECK(status_.ok() || owed_ || sent_);
}

}  // namespace refitd::coordinator
