// What Prometheus scrapes: counts of the node's reports (NodeObserver), the node's state, and the
// process's use of memory and descriptors.
//
// Labels are names of groups, ids of daemons that joined them, and words of fixed sets (outcomes,
// phases, states), so the number of series is bounded: a constant times the number of groups, plus
// one for each daemon of a group (P10). A deleted group's series go with it.
//
// Locks: the node calls the observer under its own mutex. A scrape asks the node for its state
// while it holds no lock of this file.
#ifndef REFITD_DAEMON_METRICS_H_
#define REFITD_DAEMON_METRICS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/process/observer.h"
#include "refitd/v1/operator.pb.h"
#include "transport/base/mutex.h"

namespace prometheus {
struct MetricFamily;
}  // namespace prometheus

namespace refitd {

// Upper bounds of the histograms' buckets, in seconds: from 1 ms, the least that an update can
// take, to 1 h, the default maximum.
inline constexpr std::array kSecondsBuckets = {0.001, 0.0025, 0.005, 0.01,  0.025, 0.05, 0.1,
                                               0.25,  0.5,    1.0,   2.5,   5.0,   10.0, 30.0,
                                               60.0,  120.0,  300.0, 900.0, 3600.0};

// Counts since the daemon started, or since the group was created. Thread-safe; a call takes about
// a microsecond.
class Metrics : public NodeObserver {
 public:
  // Reports of groups beyond `max_groups` are only counted as dropped.
  explicit Metrics(size_t max_groups);

  void UpdateEnded(const UpdateReport& report) override;
  void FillEnded(const std::string& group, FillEnd end, int64_t bytes, Duration took) override;
  void BytesMoved(const std::string& group, MoveKind kind, int64_t bytes) override;
  void IntegrityFailure(const std::string& group) override;
  void GroupGone(const std::string& group) override;

  // Everything that a scrape shows, with the state that `status` returns. A group of `status` that
  // has no reports yet gets zeros, since rates need a first value.
  std::vector<prometheus::MetricFamily> Collect(
      const std::function<v1::GetStatusResponse()>& status) const;

 private:
  struct Histogram {
    // the last counts durations beyond all bounds
    std::array<uint64_t, kSecondsBuckets.size() + 1> counts{};
    double sum = 0;
    void Observe(Duration duration);
  };
  static constexpr size_t kPhases = 4;
  static constexpr size_t kMoves = 3;
  static constexpr size_t kFillEnds = 3;
  struct GroupCounts {
    std::array<uint64_t, kUpdateReasons.size()> updates{};  // [0]: committed
    uint64_t update_bytes = 0;
    std::array<uint64_t, kPushMethods.size()> pushed_bytes{};
    std::array<uint64_t, kMoves> moved_bytes{};
    std::array<uint64_t, kFillEnds> fills{};
    uint64_t fill_bytes = 0;
    uint64_t integrity_failures = 0;
    Histogram total;
    Histogram fill;  // of fills that were committed
    std::array<Histogram, kPhases> phases;
  };
  class Families;
  static void Show(const std::string& group, const GroupCounts& counts, Families* families);
  static void Show(const v1::GroupStatus& group, Families* families);
  static void Show(const v1::GetStatusResponse& status, Families* families);

  // Null: the group is beyond the limit.
  GroupCounts* Find(const std::string& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_groups_;
  mutable Mutex mutex_;
  std::map<std::string, GroupCounts> groups_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Serves GET /metrics over HTTP, and nothing else, with kMetricsThreads threads and one that
// accepts. Only a request's path and encoding are looked at. P4: a client that sends or takes
// nothing for kMetricsTimeout is cut off; meanwhile others wait in a short queue.
inline constexpr int kMetricsThreads = 2;
inline constexpr std::chrono::seconds kMetricsTimeout{5};
inline constexpr int kMetricsQueue = 8;  // connections that wait for a thread

class MetricsServer {
 public:
  // `address`: "HOST:PORT", checked by LoadConfig; port 0 takes a free port. `status` runs on the
  // server's threads. `metrics`, and the objects that `status` uses, must outlive the server.
  // ALREADY_EXISTS: the port is in use, or this machine lacks the address.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& address, const Metrics* metrics,
      std::function<v1::GetStatusResponse()> status, Duration timeout = kMetricsTimeout);
  // Cuts off clients and joins the threads, which takes up to 2 s.
  ~MetricsServer();

  // "HOST:PORT" with the port in use.
  const std::string& address() const { return address_; }

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
  std::string address_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_METRICS_H_
