#include "daemon/metrics.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "daemon/process/process_stats.h"
#include "daemon/process/version.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Label = ClientMetric::Label;
using Labels = std::vector<Label>;

constexpr std::array<std::string_view, 5> kPhaseNames = {"prepare", "data", "verify", "process",
                                                         "flip"};
constexpr std::array<std::string_view, 3> kMoveNames = {"copy", "broadcast", "exchange"};
// The names of FillEnd's values, in their order.
constexpr std::array<std::string_view, 3> kCatchUpEndNames = {"committed", "gave_way", "failed"};
// Values of the label "result" of refitd_restores_total, in the order of GroupCounts::restores.
constexpr std::array<std::string_view, 2> kRestoreNames = {"unchanged", "changed"};

// An instance in none of so many committed updates loses its histogram of pauses.
constexpr uint64_t kUpdatesWithoutPause = 8;

double Seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

// Index 0 stands for committed, which is no reason.
size_t IndexOf(std::string_view reason) {
  const auto* const found = std::find(kUpdateReasons.begin() + 1, kUpdateReasons.end(), reason);
  return std::min<size_t>(static_cast<size_t>(found - kUpdateReasons.begin()),
                          kUpdateReasons.size() - 1);
}

uint64_t Positive(int64_t number) { return number < 0 ? 0 : static_cast<uint64_t>(number); }

}  // namespace

// One family for each metric, in the order of their first use.
class Metrics::Families {
 public:
  void Counter(std::string_view name, std::string_view help, Labels labels, double value) {
    ClientMetric* metric = Add(name, help, MetricType::Counter, std::move(labels));
    metric->counter.value = value;
  }
  void Counter(std::string_view name, std::string_view help, Labels labels, uint64_t value) {
    Counter(name, help, std::move(labels), static_cast<double>(value));
  }
  void Gauge(std::string_view name, std::string_view help, Labels labels, double value) {
    Add(name, help, MetricType::Gauge, std::move(labels))->gauge.value = value;
  }
  void Gauge(std::string_view name, std::string_view help, Labels labels, int64_t value) {
    Gauge(name, help, std::move(labels), static_cast<double>(value));
  }
  template <const auto& kBounds>
  void Seconds(std::string_view name, std::string_view help, Labels labels,
               const HistogramOf<kBounds>& values) {
    ClientMetric::Histogram& out =
        Add(name, help, MetricType::Histogram, std::move(labels))->histogram;
    uint64_t count = 0;
    for (size_t i = 0; i < values.counts.size(); ++i) {
      count += values.counts[i];
      const double bound =
          i < kBounds.size() ? kBounds[i] : std::numeric_limits<double>::infinity();
      out.bucket.push_back({.cumulative_count = count, .upper_bound = bound});
    }
    out.sample_count = count;
    out.sample_sum = values.sum;
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  ClientMetric* Add(std::string_view name, std::string_view help, MetricType type, Labels labels) {
    const auto [at, added] = index_.try_emplace(name, families_.size());
    if (added) families_.push_back({std::string(name), std::string(help), type, {}});
    ClientMetric& metric = families_[at->second].metric.emplace_back();
    metric.label = std::move(labels);
    return &metric;
  }

  std::map<std::string_view, size_t> index_;  // keys are literals
  std::vector<MetricFamily> families_;
};

// ---- what the node reports ----

template <const auto& kBounds>
void Metrics::HistogramOf<kBounds>::Observe(Duration duration) {
  const double seconds = Seconds(duration);
  const auto* const at = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  ++counts[static_cast<size_t>(at - kBounds.begin())];
  sum += seconds;
}

Metrics::Metrics(size_t max_groups) : max_groups_(max_groups) {}

Metrics::GroupCounts* Metrics::Find(const std::string& group) {
  const auto found = groups_.find(group);
  if (found != groups_.end()) return &found->second;
  if (groups_.size() >= max_groups_) {
    ++dropped_;
    return nullptr;
  }
  return &groups_[group];
}

void Metrics::UpdateEnded(const UpdateReport& report) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(report.group);
  if (counts == nullptr) return;
  ++counts->updates[report.committed ? 0 : IndexOf(report.reason)];
  ForgetPauses(counts);
  counts->update_bytes += Positive(report.bytes);
  if (report.rollback && report.committed) ++counts->rollbacks;
  for (size_t i = 0; i < kPushMethods.size(); ++i) {
    counts->pushed_bytes[i] += Positive(report.pushed_bytes[i]);
  }
  counts->total.Observe(report.total);
  const std::array phases = {report.prepare, report.data, report.verify, report.process,
                             report.flip};
  for (size_t i = 0; i < phases.size(); ++i) {
    if (phases[i] > Duration::zero()) counts->phases[i].Observe(phases[i]);
  }
  const bool staged = report.flip > Duration::zero() && !report.rollback;
  if (staged) counts->staging.Observe(report.data + report.verify);
}

void Metrics::CatchUpEnded(const std::string& group, CatchUpEnd end, int64_t bytes, Duration took) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(group);
  if (counts == nullptr) return;
  ++counts->catch_ups[static_cast<size_t>(end)];
  counts->catch_up_bytes += Positive(bytes);
  if (end == CatchUpEnd::kCommitted) counts->catch_up.Observe(took);
}

void Metrics::InstanceReleased(const std::string& group, const std::string& instance,
                               Duration pause, FlipEnd flip) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(group);
  if (counts == nullptr) return;
  if (flip == FlipEnd::kCommitted) ++counts->flips;
  if (flip == FlipEnd::kBack) ++counts->flip_backs;
  if (counts->pauses.size() >= kMaxShownInstances && !counts->pauses.contains(instance)) return;
  Pauses& pauses = counts->pauses[instance];
  pauses.last = counts->updates[0];
  pauses.histogram.Observe(pause);
}

void Metrics::ForgetPauses(GroupCounts* counts) {
  std::erase_if(counts->pauses, [committed = counts->updates[0]](const auto& of) {
    return of.second.last + kUpdatesWithoutPause < committed;
  });
}

void Metrics::BytesMoved(const std::string& group, MoveKind kind, int64_t bytes) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(group);
  if (counts != nullptr) counts->moved_bytes[static_cast<size_t>(kind)] += Positive(bytes);
}

void Metrics::IntegrityFailure(const std::string& group) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(group);
  if (counts != nullptr) ++counts->integrity_failures;
}

void Metrics::InstanceEvicted(const std::string& group, std::string_view reason) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(group);
  if (counts != nullptr) ++counts->evictions[IndexOf(reason)];
}

void Metrics::Restored(const std::string& group, bool unchanged) {
  MutexLock lock(&mutex_);
  GroupCounts* counts = Find(group);
  if (counts != nullptr) ++counts->restores[unchanged ? 0 : 1];
}

void Metrics::SpansEnded(bool exported) {
  MutexLock lock(&mutex_);
  ++traced_[exported ? 1 : 0];
}

void Metrics::GroupGone(const std::string& group) {
  MutexLock lock(&mutex_);
  groups_.erase(group);
}

// ---- what a scrape shows ----

void Metrics::Show(const std::string& group, const GroupCounts& counts, Families* families) {
  for (size_t i = 0; i < kUpdateReasons.size(); ++i) {
    families->Counter("refitd_updates_total", "Updates that have ended, by outcome.",
                      {{"group", group},
                       {"result", i == 0 ? "committed" : "aborted"},
                       {"reason", std::string(kUpdateReasons[i])}},
                      counts.updates[i]);
  }
  for (size_t i = 1; i < kUpdateReasons.size(); ++i) {
    families->Counter(
        "refitd_evictions_total", "Instances that were evicted from an update, by cause.",
        {{"group", group}, {"reason", std::string(kUpdateReasons[i])}}, counts.evictions[i]);
  }
  families->Seconds("refitd_update_seconds",
                    "Begin to outcome of updates that have ended, committed or not.",
                    {{"group", group}}, counts.total);
  for (size_t i = 0; i < kPhases; ++i) {
    families->Seconds("refitd_update_phase_seconds",
                      "Phases of updates that have ended; one that was not reached is not counted.",
                      {{"group", group}, {"phase", std::string(kPhaseNames[i])}}, counts.phases[i]);
  }
  families->Counter("refitd_update_bytes_total",
                    "Tensor data that trainers handed over in updates that have ended.",
                    {{"group", group}}, counts.update_bytes);
  for (size_t i = 0; i < kPushMethods.size(); ++i) {
    families->Counter("refitd_pushed_bytes_total",
                      "Tensor data that came in buckets of updates that have ended, by how it went "
                      "on to the engines.",
                      {{"group", group}, {"broadcast", std::string(kPushMethods[i])}},
                      counts.pushed_bytes[i]);
  }
  for (size_t i = 0; i < kMoves; ++i) {
    families->Counter("refitd_moved_bytes_total", "Bytes that the transports wrote or sent.",
                      {{"group", group}, {"move", std::string(kMoveNames[i])}},
                      counts.moved_bytes[i]);
  }
  for (size_t i = 0; i < kCatchUpEnds; ++i) {
    families->Counter("refitd_catch_ups_total",
                      "Catch-ups of late instances from clean ones that have ended, by outcome.",
                      {{"group", group}, {"result", std::string(kCatchUpEndNames[i])}},
                      counts.catch_ups[i]);
  }
  families->Counter("refitd_catch_up_bytes_total",
                    "Tensor data that catch-ups wrote into the instances that they committed.",
                    {{"group", group}}, counts.catch_up_bytes);
  families->Seconds("refitd_catch_up_seconds", "Start to outcome of catch-ups that were committed.",
                    {{"group", group}}, counts.catch_up);
  families->Counter("refitd_rollbacks_total",
                    "Rollbacks that were committed; refitd_updates_total counts them too.",
                    {{"group", group}}, counts.rollbacks);
  families->Seconds(
      "refitd_staging_seconds",
      "Updates that reached their flips: from when the versions could be written to arenas until "
      "they were complete and verified. Engines with arenas serve in that time.",
      {{"group", group}}, counts.staging);
  families->Counter(
      "refitd_flips_total",
      "Instances with arenas that exchanged the sides for a version that was committed, in "
      "updates, rollbacks and catch-ups.",
      {{"group", group}}, counts.flips);
  families->Counter(
      "refitd_flip_backs_total",
      "Instances with arenas whose flip was aborted, so that they exchange the sides back.",
      {{"group", group}}, counts.flip_backs);
  for (size_t i = 0; i < kRestoreNames.size(); ++i) {
    families->Counter("refitd_restores_total",
                      "Engine ranks that took up the arenas of the rank before them, by whether "
                      "these held its version still.",
                      {{"group", group}, {"result", std::string(kRestoreNames[i])}},
                      counts.restores[i]);
  }
  families->Counter("refitd_integrity_failures_total",
                    "Times that verification found other bytes than were meant.",
                    {{"group", group}}, counts.integrity_failures);
}

// The group's instances by their readiness; those beyond kMaxShownInstances are only counted.
void Metrics::ShowInstances(const v1::GroupStatus& group, Families* families) {
  const Label name{"group", group.name()};
  std::vector<const v1::InstanceStatus*> instances;
  int64_t ready = 0;
  for (const v1::InstanceStatus& instance : group.instances()) {
    instances.push_back(&instance);
    ready += instance.ready() ? 1 : 0;
  }
  const auto rank = [](const v1::InstanceStatus* i) {
    return std::tuple(i->ready(), -i->lag(), std::string_view(i->name()));
  };
  std::sort(instances.begin(), instances.end(),
            [&rank](const auto* a, const auto* b) { return rank(a) < rank(b); });
  families->Gauge("refitd_instances_ready", "Instances that are ready to be sent requests.", {name},
                  ready);
  for (size_t i = 0; i < std::min(instances.size(), kMaxShownInstances); ++i) {
    const v1::InstanceStatus& instance = *instances[i];
    // Prometheus calls what it scrapes "instance".
    const Labels labels = {name, {"engine", instance.name()}};
    families->Gauge("refitd_instance_ready",
                    "1 while the instance is clean and not too far behind the group's version.",
                    labels, int64_t{instance.ready()});
    if (!instance.has_lag()) continue;
    families->Gauge("refitd_instance_lag",
                    "By how much the instance's version is behind the group's; no series while the "
                    "two can't be compared.",
                    labels, instance.lag());
  }
}

void Metrics::Show(const v1::GroupStatus& group, Families* families) {
  const Label name{"group", group.name()};
  if (group.has_version()) {
    families->Gauge("refitd_committed_version", "Version that was committed last.", {name},
                    group.version());
  }
  const bool running = group.update().outcome() == v1::UPDATE_OUTCOME_RUNNING;
  families->Gauge("refitd_update_running", "1 while an update runs.", {name}, int64_t{running});

  int64_t engines = 0;
  std::map<std::string, int64_t> instances;
  for (const v1::InstanceStatus& instance : group.instances()) {
    engines += instance.attached();
    ++instances[instance.state()];
  }
  constexpr std::string_view kLeases = "refitd_leases";
  constexpr std::string_view kLeasesHelp = "Attached ranks.";
  families->Gauge(kLeases, kLeasesHelp, {name, {"role", "trainer"}}, int64_t{group.trainers()});
  families->Gauge(kLeases, kLeasesHelp, {name, {"role", "engine"}}, engines);
  // The coordinator's daemon alone shows instances, so that sums over daemons count each once.
  if (group.coordinator().empty()) {
    for (const auto& [state, count] : instances) {
      families->Gauge("refitd_instances", "Instances by state.", {name, {"state", state}}, count);
    }
    ShowInstances(group, families);
    families->Gauge("refitd_chain_daemons",
                    "Daemons of the longest chain of the last compiled refit; 0: no chain.", {name},
                    int64_t{group.chain_daemons()});
  }
  std::map<std::string, int64_t> slots;
  for (const v1::SlotStatus& slot : group.slots()) ++slots[slot.state()];
  for (const auto& [state, count] : slots) {
    families->Gauge("refitd_slots", "Staging slots by state.", {name, {"state", state}}, count);
  }
  if (group.has_communicator()) {
    families->Gauge("refitd_communicator",
                    "Of the group's communicator between daemons; none is open: no series.", {name},
                    static_cast<int64_t>(group.communicator()));
  }
  std::map<std::string, bool> peers;  // a restarted daemon may be listed twice for a while
  for (const v1::NodeStatus& node : group.nodes()) {
    if (node.state() == "self") continue;
    // The coordinator's id is known once it has accepted this daemon.
    bool& up = peers[node.daemon_id().empty() ? node.address() : node.daemon_id()];
    up = up || node.state() == "joined";
  }
  std::map<std::string, bool> kept_out;
  std::map<std::string, bool> slow;
  for (const v1::NodeStatus& node : group.nodes()) {
    if (node.daemon_id().empty()) continue;
    kept_out[node.daemon_id()] |= !node.kept_out().empty();
    slow[node.daemon_id()] |= !node.slow().empty();
  }
  for (const auto& [daemon, out] : kept_out) {
    families->Gauge(
        "refitd_daemon_kept_out",
        "1 while that daemon's instances take part in no update: its data plane did not "
        "come up. Exported by the coordinator.",
        {name, {"daemon", daemon}}, int64_t{out});
  }
  for (const auto& [daemon, is_slow] : slow) {
    families->Gauge(
        "refitd_daemon_slow",
        "1 while updates leave that daemon's instances to catch-ups: it held the others back for "
        "longer than peers.relay_slow_ms. Exported by the coordinator.",
        {name, {"daemon", daemon}}, int64_t{is_slow});
  }
  for (const auto& [peer, up] : peers) {
    families->Gauge("refitd_peer_up", "1 while that daemon and this one are linked in the group.",
                    {name, {"peer", peer}}, int64_t{up});
  }
}

void Metrics::Show(const v1::GetStatusResponse& status, Families* families) {
  Labels build = {{"version", status.daemon_version()}};
  for (const auto& [transport, text] : DeviceBuilds()) build.push_back({transport, text});
  families->Gauge("refitd_build_info", "1, with what this build is.", std::move(build), int64_t{1});
  families->Gauge("refitd_uptime_seconds", "Time since the daemon began.", {},
                  status.uptime_seconds());
  families->Gauge("refitd_serving", "0: draining.", {}, int64_t{status.serving()});
  const v1::ResourceStatus& resources = status.resources();
  families->Gauge("refitd_members", "Attached processes of all groups.", {}, resources.members());
  families->Gauge("refitd_regions", "Memory regions that members share.", {}, resources.regions());
  families->Gauge("refitd_region_bytes", "Bytes mapped of members' regions.", {},
                  resources.region_bytes());
  families->Gauge("refitd_pool_bytes", "Bytes of staging pools.", {}, resources.pool_bytes());
  for (const v1::GroupStatus& group : status.groups()) Show(group, families);
  ShowArenas(status, families);
}

void Metrics::ShowPauses(const v1::GroupStatus& group, const GroupCounts& counts,
                         Families* families) {
  for (const v1::InstanceStatus& instance : group.instances()) {
    const auto pauses = counts.pauses.find(instance.name());
    if (pauses == counts.pauses.end()) continue;
    families->Seconds(
        "refitd_pause_seconds",
        "From when the first of the instance's ranks stopped, as they say with Ready, to when the "
        "coordinator sent them the outcome, which lets them go on, in updates, rollbacks and "
        "catch-ups, committed or not. A rank that does not say so, or never answered, counts from "
        "Prepare. What an engine does after the outcome, before it answers requests again, is not "
        "counted. Exported by the coordinator.",
        {{"group", group.name()}, {"engine", instance.name()}}, pauses->second.histogram);
  }
}

void Metrics::ShowArenas(const v1::GetStatusResponse& status, Families* families) {
  std::map<std::tuple<std::string, bool, bool>, int64_t> bytes;  // by group, kept, back
  for (const v1::GroupStatus& group : status.groups()) {
    for (const bool kept : {false, true}) {
      for (const bool back : {false, true}) bytes[{group.name(), kept, back}] = 0;
    }
  }
  for (const v1::ArenaStatus& arena : status.arenas()) {
    bytes[{arena.group(), arena.kept(), false}] += arena.front_bytes();
    bytes[{arena.group(), arena.kept(), true}] += arena.back_bytes();
  }
  for (const auto& [of, sum] : bytes) {
    const auto& [group, kept, back] = of;
    families->Gauge("refitd_arena_bytes",
                    "Bytes of arenas, by side, and by owner: an attached engine rank, or none "
                    "while they are kept for the next.",
                    {{"group", group},
                     {"owner", kept ? "kept" : "attached"},
                     {"side", back ? "back" : "front"}},
                    sum);
  }
}

std::vector<MetricFamily> Metrics::Collect(
    const std::function<v1::GetStatusResponse()>& status_of_node) const {
  // The counts are taken first, so that a group that is deleted in between is shown once more with
  // its counts, never with zeros. The lock is held for one group at a time, since the node may wait
  // for it.
  std::map<std::string, GroupCounts> groups;
  uint64_t dropped = 0;
  std::array<uint64_t, 2> traced{};
  for (;;) {
    MutexLock lock(&mutex_);
    dropped = dropped_;
    traced = traced_;
    const auto next =
        groups.empty() ? groups_.begin() : groups_.upper_bound(groups.rbegin()->first);
    if (next == groups_.end()) break;
    groups.emplace_hint(groups.end(), *next);
  }
  const v1::GetStatusResponse status = status_of_node();
  for (const v1::GroupStatus& group : status.groups()) groups.try_emplace(group.name());

  Families families;
  Show(status, &families);
  for (const auto& [group, counts] : groups) Show(group, counts, &families);
  for (const v1::GroupStatus& group : status.groups()) {
    ShowPauses(group, groups.at(group.name()), &families);
  }
  families.Counter("refitd_dropped_reports_total",
                   "Events that were not counted, since there were too many groups.", {}, dropped);
  for (const bool exported : {false, true}) {
    families.Counter("refitd_traced_updates_total",
                     "Updates whose spans traces.collector took, or that were dropped.",
                     {{"result", exported ? "exported" : "dropped"}}, traced[exported ? 1 : 0]);
  }
  if (const absl::StatusOr<ProcessStats> process = ReadProcessStats(); process.ok()) {
    families.Gauge("process_open_fds", "Open file descriptors.", {}, process->descriptors);
    families.Gauge("process_threads", "Threads.", {}, process->threads);
    families.Gauge("process_resident_memory_bytes",
                   "Resident memory, mapped regions and pools included.", {},
                   process->resident_bytes);
    families.Gauge("refitd_anonymous_memory_bytes",
                   "Resident memory without mapped regions and pools.", {},
                   process->anonymous_bytes);
  }
  return families.Take();
}

std::string Metrics::Text(const std::function<v1::GetStatusResponse()>& status) const {
  return prometheus::TextSerializer().Serialize(Collect(status));
}

}  // namespace refitd
