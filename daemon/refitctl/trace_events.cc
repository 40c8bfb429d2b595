#include "daemon/refitctl/trace_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "daemon/refitctl/format.h"
#include "daemon/refitctl/render.h"

namespace refitd::refitctl {
namespace {

using nlohmann::ordered_json;

constexpr char kNotRecorded[] =
    "phases of an update that was not watched; when a bucket began (the buckets of a rank stand "
    "one "
    "after the other, in the order in which they ended); when a daemon or a link began and paused "
    "(each stands at the begin of the data phase; a link takes its sender's time); times of single "
    "ranks, and pauses of engines that were not committed; sends of pushes";

// The rows of the trace.
enum Process : int { kGroup = 1, kTrainers, kDaemons, kLinks, kInstances };

class Events {
 public:
  Events() {
    Name(kGroup, "updates");
    Name(kTrainers, "buckets by trainer rank");
    Name(kDaemons, "daemons");
    Name(kLinks, "links");
    Name(kInstances, "instances");
  }
  void Span(Process process, int row, const std::string& name, double begin, double seconds,
            ordered_json args) {
    events_.push_back({{"ph", "X"},
                       {"name", name},
                       {"pid", process},
                       {"tid", row},
                       {"ts", begin * 1e6},
                       {"dur", seconds * 1e6},
                       {"args", std::move(args)}});
  }
  // The row of that name, which begins with its first span.
  int Row(Process process, const std::string& name) {
    std::map<std::string, int>& rows = rows_[process];
    const auto [it, added] = rows.try_emplace(name, static_cast<int>(rows.size()) + 1);
    if (added) Meta("thread_name", process, it->second, name);
    return it->second;
  }
  ordered_json Take() && { return std::move(events_); }

 private:
  void Meta(const char* what, Process process, int row, const std::string& name) {
    events_.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", row}, {"args", {{"name", name}}}});
  }
  void Name(Process process, const std::string& name) { Meta("process_name", process, 0, name); }

  ordered_json events_ = ordered_json::array();
  std::map<Process, std::map<std::string, int>> rows_;
};

std::string NameOf(const v1::UpdateStatus& update) {
  return fmt::format("v{}{} {}", update.version(), update.catch_up() ? " catch-up" : "",
                     update.state());
}

ordered_json ArgsOf(const v1::UpdateStatus& update) {
  return {{"group", update.group()},     {"bytes", update.bytes()}, {"tensors", update.tensors()},
          {"buckets", update.buckets()}, {"note", update.note()},   {"reason", update.reason()}};
}

void AddBuckets(const v1::GetUpdateStatisticsResponse& statistics, double begin, Events* events) {
  std::map<int, double> ends;  // by rank
  for (const v1::BucketStatistics& bucket : statistics.buckets()) {
    double& end = ends.try_emplace(bucket.trainer_rank(), begin).first->second;
    events->Span(kTrainers, events->Row(kTrainers, fmt::format("rank {}", bucket.trainer_rank())),
                 fmt::format("bucket {}", bucket.seq()), end, bucket.seconds(),
                 {{"group_seq", bucket.group_seq()},
                  {"bytes", bucket.bytes()},
                  {"tensors", bucket.tensors()},
                  {"parts", bucket.parts()}});
    end += bucket.seconds();
  }
}

// `end`: of the update, in seconds. Its outcome also ends the pauses of the committed instances.
void AddPauses(const v1::UpdateStatus& update, double end, Events* events) {
  for (const v1::InstanceResult& instance : update.instances()) {
    if (!instance.committed() || !instance.has_pause_seconds()) continue;
    events->Span(kInstances, events->Row(kInstances, instance.instance()), "paused",
                 end - instance.pause_seconds(), instance.pause_seconds(), ordered_json::object());
  }
}

void AddNode(const v1::NodeStatus& node, double begin, Events* events) {
  if (node.data_seconds() <= 0) return;
  events->Span(kDaemons, events->Row(kDaemons, node.daemon_id()), node.daemon_id(), begin,
               node.data_seconds(),
               {{"bytes_sent", node.bytes_sent()},
                {"bytes_forwarded", node.bytes_forwarded()},
                {"bytes_received", node.bytes_received()}});
  for (const v1::NodeSend& send : node.sends()) {
    const std::string link = fmt::format("{} to {}", node.daemon_id(), send.daemon_id());
    const double rate = static_cast<double>(send.bytes()) / node.data_seconds();
    events->Span(kLinks, events->Row(kLinks, link), HumanBytes(send.bytes()), begin,
                 node.data_seconds(), {{"bytes", send.bytes()}, {"bytes_per_second", rate}});
  }
}

}  // namespace

UpdateTrace::Traced* UpdateTrace::Find(uint64_t update_id) {
  const auto found = std::find_if(traced_.begin(), traced_.end(), [update_id](const Traced& t) {
    return t.update.update_id() == update_id;
  });
  return found == traced_.end() ? nullptr : &*found;
}

bool UpdateTrace::Watch(const v1::UpdateStatus& update, double seconds) {
  Traced* known = Find(update.update_id());
  const bool ended = HasEnded(update);
  if (known == nullptr) {
    if (ended) return false;
    known = &traced_.emplace_back();
    known->begin = seconds - update.elapsed_seconds();
  }
  const bool was_running = known->phases.empty() || !HasEnded(known->update);
  if (known->phases.empty() || known->phases.back().state != update.state()) {
    // The first phase that is seen may have begun with the update, or after others.
    known->phases.push_back({update.state(), update.elapsed_seconds()});
  }
  known->update = update;
  return ended && was_running;
}

void UpdateTrace::Add(const v1::GetUpdateStatisticsResponse& statistics) {
  if (!statistics.has_update()) return;
  Traced* known = Find(statistics.update().update_id());
  if (known == nullptr && !traced_.empty()) return;  // nobody watched it
  if (known == nullptr) {
    known = &traced_.emplace_back();
    known->update = statistics.update();
  }
  known->statistics = statistics;
}

void UpdateTrace::Add(const v1::GroupStatus& group) {
  Traced* const known = Find(group.update().update_id());
  if (known != nullptr) known->nodes.assign(group.nodes().begin(), group.nodes().end());
}

std::string UpdateTrace::Json() const {
  Events events;
  const int updates = events.Row(kGroup, "updates");
  const int phases = events.Row(kGroup, "phases");
  double first = std::numeric_limits<double>::max();
  for (const Traced& traced : traced_) first = std::min(first, traced.begin);
  for (const Traced& traced : traced_) {
    const double begin = traced.begin - first;
    const double total = traced.update.elapsed_seconds();
    events.Span(kGroup, updates, NameOf(traced.update), begin, total, ArgsOf(traced.update));
    double data = begin;
    for (size_t i = 0; i < traced.phases.size(); ++i) {
      const Phase& phase = traced.phases[i];
      const double end = i + 1 < traced.phases.size() ? traced.phases[i + 1].begin : total;
      if (phase.state == "data") data = begin + phase.begin;
      if (end > phase.begin) {
        events.Span(kGroup, phases, phase.state, begin + phase.begin, end - phase.begin,
                    ordered_json::object());
      }
    }
    AddPauses(traced.update, begin + total, &events);
    AddBuckets(traced.statistics, data, &events);
    for (const v1::NodeStatus& node : traced.nodes) AddNode(node, data, &events);
  }
  const ordered_json trace = {{"displayTimeUnit", "ms"},
                              {"otherData", {{"not_recorded", kNotRecorded}}},
                              {"traceEvents", std::move(events).Take()}};
  return trace.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace refitd::refitctl
