// The writing ends of the streams that members and watchers read.
#ifndef REFITD_DAEMON_NODE_SINKS_H_
#define REFITD_DAEMON_NODE_SINKS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/group.h"
#include "proto/protocol.h"

namespace refitd {

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

// The version that an engine rank's registered memory holds, and what tells it from others.
struct HeldContent {
  Version version;
  uint64_t origin = 0;  // the incarnation in which it was committed
  std::string owner;    // of the group, then
  uint64_t digest = 0;  // of the memory; never 0
  bool operator==(const HeldContent&) const = default;
};

// What an engine rank takes up of its last lease.
struct KeptNews {
  HeldContent content;
  std::vector<int64_t> region_bytes;  // of a side, by arena
};
// A member was taken in. The news brings its lease, and describes this daemon and the group.
struct WelcomeNews {
  MemberId member;
  std::string token;
  uint64_t incarnation = 0;
  Protocol protocol = kProtocol;  // agreed at the hello
  std::string descriptor_socket;
  int64_t inline_bytes = 0;  // limit of one call
  int outstanding_buckets = 0;
  Duration default_duration{};  // of an update
  Duration max_duration{};
  int64_t message_bytes = 0;
  int64_t slot_bytes = 0;
  int slots = 0;
  std::optional<Version> version;  // of the group; none: no update has committed
  std::optional<Version> content;  // if it is a rollback: the version whose content it has
  std::optional<KeptNews> kept{};  // engines
};
// A loader engine rank may read a part.
struct PartNews {
  SendPart part;
  int64_t slot_bytes = 0;  // slot i of the pool begins at i * slot_bytes
};
// The news that a member gets on its stream. Trainers get neither SendPrepare nor PartNews.
using MemberNews = Joined<std::variant<WelcomeNews, SendPrepare, PartNews>, MemberAction>;
using MemberSink = EventSink<MemberNews>;

// For a watcher: the state that a group's update has now.
struct UpdateNews {
  std::string group;
  UpdateView update;
  uint64_t incarnation = 0;  // of the group
};
using UpdateSink = EventSink<UpdateNews>;
// For a watcher: whether an instance is ready now.
enum class InstanceHealth : uint8_t {
  kUnknown,
  kServing,
  kNotServing
};  // kUnknown: no such instance
using ReadinessSink = EventSink<InstanceHealth>;

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_SINKS_H_
