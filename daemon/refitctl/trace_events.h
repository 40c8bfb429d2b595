// Updates of a group as events of Chrome's trace format, which Perfetto and chrome://tracing show:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
//
// The trace says under "not_recorded" what the daemon does not record. Pure; thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_TRACE_EVENTS_H_
#define REFITD_DAEMON_REFITCTL_TRACE_EVENTS_H_

#include <string>
#include <vector>

#include "daemon/trace/update_trace.h"

namespace refitd::refitctl {

std::string ChromeTrace(const std::vector<TracedUpdate>& updates);

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_TRACE_EVENTS_H_
