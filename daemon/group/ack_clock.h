// The times at which the loader readers of an update are late with their next acknowledgements, in
// order. An acknowledgement moves only the reader that sent it.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_ACK_CLOCK_H_
#define REFITD_DAEMON_GROUP_ACK_CLOCK_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "transport/base/ids.h"

namespace refitd::group {

class AckClock {
 public:
  // The reader owes its next acknowledgement at `due`; nullopt: it owes none.
  void Set(MemberId reader, std::optional<TimePoint> due) {
    ++looked_at_;
    const auto known = due_.find(reader);
    if (known != due_.end()) {
      order_.erase({known->second, reader});
      due_.erase(known);
    }
    if (!due.has_value()) return;
    due_.emplace(reader, *due);
    order_.insert({*due, reader});
  }
  // The earliest time and its reader (of several, the lowest id); nullopt: no reader owes an
  // acknowledgement.
  std::optional<std::pair<TimePoint, MemberId>> First() const {
    ++looked_at_;
    if (order_.empty()) return std::nullopt;
    return *order_.begin();
  }
  bool nobody_owes() const { return order_.empty(); }

  // How many entries were looked at so far, which tests use to check the cost.
  int64_t looked_at() const { return looked_at_; }

 private:
  std::map<MemberId, TimePoint> due_;
  std::set<std::pair<TimePoint, MemberId>> order_;  // the entries of `due_`
  mutable int64_t looked_at_ = 0;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_ACK_CLOCK_H_
