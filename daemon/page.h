// The page that people look at, and what its stream of server-sent events brings. MetricsServer
// serves both.
//
//   event: status   data: a GetStatusResponse, as GetStatus returns it, without staging slots
//   event: update   data: an UpdateStatus, as WatchUpdates sends it, for each state that an update
//                   reached, in order;   id: when, in milliseconds since 1970
//
// The data are the operator API's own messages, which Protobuf prints as JSON of one line. The page
// computes all else: phases from the times of the states, rates from what grew between two
// statuses.
#ifndef REFITD_DAEMON_PAGE_H_
#define REFITD_DAEMON_PAGE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/metrics_server.h"
#include "daemon/node/daemon.h"
#include "daemon/node/sinks.h"
#include "refitd/v1/operator.pb.h"
#include "transport/base/mutex.h"

namespace refitd {

// The states of updates that are kept: enough for a hundred updates, of at most seven states each.
inline constexpr size_t kMaxKeptChanges = 700;
// The most left-out instances that a kept change lists, and the most source instances.
inline constexpr size_t kMaxKeptInstances = 16;
// The bytes of all kept changes as events, the newest first; older ones are left out.
inline constexpr size_t kMaxChangesBytes = 4 << 20;
// The bytes of one event. The page shows that a larger one was left out.
inline constexpr size_t kMaxEventBytes = 8 << 20;

// The states that the daemon's updates reached, for pages that are opened later. Thread-safe.
class UpdateHistory final : public UpdateSink {
 public:
  // `now_ms`: milliseconds since 1970.
  explicit UpdateHistory(std::function<int64_t()> now_ms) : now_ms_(std::move(now_ms)) {}

  // Makes no text, since the daemon calls it under its mutex.
  void Send(UpdateNews news) override;
  void End(absl::Status /*status*/) override {}

  // The events since `*seen`, which it moves on; 0: since the first that is kept.
  std::string Since(uint64_t* seen) const;

 private:
  struct Change {
    int64_t ms = 0;
    UpdateNews news;
  };
  const std::function<int64_t()> now_ms_;
  mutable Mutex mutex_;
  std::deque<Change> changes_ ABSL_GUARDED_BY(mutex_);
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 0;  // the changes since the start
};

std::string StatusEvent(v1::GetStatusResponse status);

// The headers of an answer with the page `html`. Its one style and its one script are allowed by
// their digests; nothing else is loaded, and no text becomes HTML or code.
std::string PageHeaders(std::string_view html);

// The page of the daemon, which must outlive the server. From now on it keeps the states of
// updates.
absl::StatusOr<MetricsPage> MakePage(Daemon* daemon);

}  // namespace refitd

#endif  // REFITD_DAEMON_PAGE_H_
