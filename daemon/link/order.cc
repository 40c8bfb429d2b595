#include "daemon/link/order.h"

#include <algorithm>

#include "transport/base/status.h"

namespace refitd {

using absl::StatusCode;

absl::Status PeerOrder::Announce(uint64_t incarnation) {
  if (incarnations_.size() > kMaxIncarnationsAhead) {
    return Error(StatusCode::kResourceExhausted,
                 "the group was replaced {} times without the other daemon taking note",
                 incarnations_.size() - 1);
  }
  incarnations_.push_back(incarnation);
  return absl::OkStatus();
}

absl::StatusOr<bool> PeerOrder::Check(uint64_t sequence, uint64_t incarnation) {
  if (sequence != 0 && sequence <= last_) return false;
  if (sequence != last_ + 1) {
    return Error(StatusCode::kAborted, "sequence is {} where {} comes next: messages are missing",
                 sequence, last_ + 1);
  }
  const auto found = std::find(incarnations_.begin(), incarnations_.end(), incarnation);
  if (found == incarnations_.end()) {
    return Error(StatusCode::kFailedPrecondition, "incarnation is {:#x} where the group's is {:#x}",
                 incarnation, incarnations_.back());
  }
  incarnations_.erase(incarnations_.begin(), found);
  last_ = sequence;
  return true;
}

}  // namespace refitd
