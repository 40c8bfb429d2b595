// The metrics that Prometheus scrapes: counts of the node's reports (DaemonObserver), the node's
// state, and the process's use of memory and descriptors.
//
// Labels are names of groups, ids of daemons that joined them, names of instances, and words of
// fixed sets (outcomes, phases, states), so the number of series is bounded: a constant times the
// number of groups, plus one for each daemon of a group, plus two and a histogram of pauses for
// each of at most kMaxShownInstances instances of a group (P10). A deleted group's series go with
// it, and an instance's when the group does not have the instance any more.
//
// Locks: the node calls the observer under its own mutex. A scrape asks the node for its state
// while it holds no lock of this file.
#ifndef REFITD_DAEMON_METRICS_H_
#define REFITD_DAEMON_METRICS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
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

// The same of the histogram of pauses, which every instance has: few, and shorter.
inline constexpr std::array kPauseBuckets = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                                             0.1,    0.5,   2.5,    10.0,  60.0, 600.0};

// The most instances of a group that have series of their own. Those that are not ready come first,
// then the others by their lag, the largest first; of pauses, those that were there first.
inline constexpr size_t kMaxShownInstances = 128;

// Counts since the daemon started, or since the group was created. Thread-safe; a call takes about
// a microsecond.
class Metrics : public DaemonObserver {
 public:
  // Reports of groups beyond `max_groups` are only counted as dropped.
  explicit Metrics(size_t max_groups);

  void UpdateEnded(const UpdateReport& report) override;
  void CatchUpEnded(const std::string& group, CatchUpEnd end, int64_t bytes,
                    Duration took) override;
  void InstanceReleased(const std::string& group, const std::string& instance, Duration pause,
                        FlipEnd flip) override;
  void BytesMoved(const std::string& group, MoveKind kind, int64_t bytes) override;
  void IntegrityFailure(const std::string& group) override;
  void InstanceEvicted(const std::string& group, std::string_view reason) override;
  void Restored(const std::string& group, bool unchanged) override;
  void GroupGone(const std::string& group) override;
  // An update's spans went to the collector; else they were dropped.
  void SpansEnded(bool exported);

  // Everything that a scrape shows, with the state that `status` returns. A group of `status` that
  // has no reports yet gets zeros, since rates need a first value.
  std::vector<prometheus::MetricFamily> Collect(
      const std::function<v1::GetStatusResponse()>& status) const;
  // The same in Prometheus' text format.
  std::string Text(const std::function<v1::GetStatusResponse()>& status) const;

 private:
  template <const auto& kBounds>
  struct HistogramOf {
    // counts[i] has the durations up to bound i, and the last element those beyond all bounds.
    std::array<uint64_t, kBounds.size() + 1> counts{};
    double sum = 0;
    void Observe(Duration duration);
  };
  using Histogram = HistogramOf<kSecondsBuckets>;
  struct Pauses {
    HistogramOf<kPauseBuckets> histogram;
    uint64_t last = 0;  // how many updates were committed before its last pause ended
  };
  static constexpr size_t kPhases = 5;
  static constexpr size_t kMoves = 3;
  static constexpr size_t kCatchUpEnds = 3;
  struct GroupCounts {
    std::array<uint64_t, kUpdateReasons.size()> updates{};    // [0]: committed
    std::array<uint64_t, kUpdateReasons.size()> evictions{};  // [0]: none
    uint64_t update_bytes = 0;
    std::array<uint64_t, kPushMethods.size()> pushed_bytes{};
    std::array<uint64_t, kMoves> moved_bytes{};
    std::array<uint64_t, kCatchUpEnds> catch_ups{};
    std::array<uint64_t, 2> restores{};  // unchanged, changed
    uint64_t catch_up_bytes = 0;
    uint64_t integrity_failures = 0;
    uint64_t rollbacks = 0;  // committed
    uint64_t flips = 0;      // committed
    uint64_t flip_backs = 0;
    std::map<std::string, Pauses> pauses{};  // by instance
    Histogram staging;                       // of updates that reached the flips
    Histogram total;
    Histogram catch_up;  // of catch-ups that were committed
    std::array<Histogram, kPhases> phases;
  };
  class Families;
  static void Show(const std::string& group, const GroupCounts& counts, Families* families);
  static void Show(const v1::GroupStatus& group, Families* families);
  static void ShowPauses(const v1::GroupStatus& group, const GroupCounts& counts,
                         Families* families);
  static void ShowArenas(const v1::GetStatusResponse& status, Families* families);
  static void ShowInstances(const v1::GroupStatus& group, Families* families);
  static void Show(const v1::GetStatusResponse& status, Families* families);

  // Makes room for pauses of other instances.
  static void ForgetPauses(GroupCounts* counts);

  // Null: the group is beyond the limit.
  GroupCounts* Find(const std::string& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_groups_;
  mutable Mutex mutex_;
  std::map<std::string, GroupCounts> groups_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<uint64_t, 2> traced_ ABSL_GUARDED_BY(mutex_){};  // updates: dropped, exported
};

}  // namespace refitd

#endif  // REFITD_DAEMON_METRICS_H_
