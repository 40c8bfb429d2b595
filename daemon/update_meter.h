// Times and counts one group's updates from outside: it sees what goes into the Group and what
// comes out, and tells a NodeObserver.
//
// Pure but for the observer. Not thread-safe: lives beside its Group, under the same mutex.
#ifndef REFITD_DAEMON_UPDATE_METER_H_
#define REFITD_DAEMON_UPDATE_METER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

#include "daemon/group/group.h"
#include "daemon/observer.h"

namespace refitd {

class UpdateMeter {
 public:
  // `observer` outlives the meter; null: nothing is told.
  explicit UpdateMeter(NodeObserver* observer) : observer_(observer) {}

  // Call after each group.Handle(event, now, &actions), with what that event alone brought.
  void Handled(const GroupEvent& event, const GroupActions& actions, const Group& group,
               TimePoint now);

  // From now on an OperatorAbort is the daemon's own: it ends.
  void DaemonStops() { stops_ = true; }

 private:
  struct Running {
    TimePoint begun;
    std::optional<TimePoint> ready;      // every rank
    std::optional<TimePoint> committed;  // the last trainer rank
    std::optional<TimePoint> verified;
    std::string_view reason;                // why it is being given up; empty: it is not
    std::map<PartSeq, int64_t> slot_bytes;  // of parts that are being copied into a slot
  };
  void Look(const GroupEvent& event, const GroupActions& actions, const Group& group,
            TimePoint now);
  void Moved(const TransferDone& done, const Group& group);
  std::string_view CauseIn(const GroupEvent& event) const;
  void End(const Group& group, TimePoint now);

  NodeObserver* const observer_;
  bool stops_ = false;
  std::optional<Running> running_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_UPDATE_METER_H_
