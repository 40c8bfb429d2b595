// The writing ends of the streams that members and watchers read.
#ifndef REFITD_DAEMON_NODE_SINKS_H_
#define REFITD_DAEMON_NODE_SINKS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "daemon/group/group.h"

namespace refitd {

namespace v1 {
class EngineEvent;
class TrainerEvent;
}  // namespace v1

// One stream of events. Events go out in the order of Queue and Send. Queue, Send and End are
// called under the daemon's mutex, so none of them waits for the reader. End is called last, and
// once.
template <typename Event>
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void Send(Event event) = 0;
  virtual void End(absl::Status status) = 0;
  // Queue and Flush are Send in two steps: the next Flush, Send or End writes what was queued.
  // Flush may be called on any thread and after End, but not under the daemon's mutex, since
  // writing takes system calls.
  virtual void Queue(Event event) { Send(std::move(event)); }
  virtual void Flush() {}
};
using TrainerSink = EventSink<v1::TrainerEvent>;
using EngineSink = EventSink<v1::EngineEvent>;
// A watcher is told the state that a group's update has now.
struct UpdateNews {
  std::string group;
  UpdateView update;
};
using UpdateSink = EventSink<UpdateNews>;
// A watcher is told whether an instance is ready now.
enum class InstanceHealth : uint8_t {
  kUnknown,
  kServing,
  kNotServing
};  // kUnknown: no such instance
using ReadinessSink = EventSink<InstanceHealth>;

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_SINKS_H_
