// Updates of a group as events of Chrome's trace format, which Perfetto and chrome://tracing show:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
//
// A span is there only if the daemon recorded when it began: phases begin where the update's state
// was seen to change; buckets, daemons and links have a duration and no beginning, so each stands
// at the begin of its update's data phase, and "not_recorded" in the trace says so.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_TRACE_EVENTS_H_
#define REFITD_DAEMON_REFITCTL_TRACE_EVENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "refitd/v1/operator.pb.h"

namespace refitd::refitctl {

class UpdateTrace {
 public:
  // Takes an update as a watch reports it, at `seconds` of any clock that grows. Returns true where
  // this report ends an update that ran when it was first seen.
  bool Watch(const v1::UpdateStatus& update, double seconds);
  // Takes the group's last update, with what is recorded of its buckets. Beside updates that were
  // watched it has no place in time, and is left out.
  void Add(const v1::GetUpdateStatisticsResponse& statistics);
  // Takes what each daemon of the group did in the last compiled refit, which was that of the
  // update added last, and the last catch-up.
  void Add(const v1::GroupStatus& group);

  std::string Json() const;

 private:
  struct Phase {
    std::string state;
    double begin = 0;  // seconds since the update's
  };
  struct Traced {
    double begin = 0;
    std::vector<Phase> phases;
    v1::UpdateStatus update;
    v1::GetUpdateStatisticsResponse statistics;
    std::vector<v1::NodeStatus> nodes;
  };
  Traced* Find(uint64_t update_id);

  std::vector<Traced> traced_;  // in the order in which they were first seen
};

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_TRACE_EVENTS_H_
