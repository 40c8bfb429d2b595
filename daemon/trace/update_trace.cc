#include "daemon/trace/update_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace refitd {
namespace {

using Kind = UpdateSpan::Kind;

// Whether anything of the update moved by a compiled refit.
bool Refitted(const v1::UpdateStatus& update, const v1::GetUpdateStatisticsResponse& statistics) {
  int64_t pushed = 0;
  for (const v1::BroadcastTotals& by : statistics.pushed()) pushed += by.bytes();
  return pushed < update.bytes();
}

UpdateSpan SpanOf(const v1::UpdateStatus& update, double begin) {
  UpdateSpan span{Kind::kUpdate, "", "", begin, update.elapsed_seconds(), {}};
  span.attributes = {{"group", update.group()},     {"bytes", update.bytes()},
                     {"tensors", update.tensors()}, {"buckets", update.buckets()},
                     {"note", update.note()},       {"reason", update.reason()}};
  return span;
}

void AddBuckets(const v1::GetUpdateStatisticsResponse& statistics, double begin,
                std::vector<UpdateSpan>* spans) {
  std::map<int, double> ends;  // by rank
  for (const v1::BucketStatistics& bucket : statistics.buckets()) {
    double& end = ends.try_emplace(bucket.trainer_rank(), begin).first->second;
    spans->push_back({Kind::kBucket,
                      fmt::format("{}", bucket.trainer_rank()),
                      fmt::format("{}", bucket.seq()),
                      end,
                      bucket.seconds(),
                      {{"group_seq", bucket.group_seq()},
                       {"bytes", bucket.bytes()},
                       {"tensors", bucket.tensors()},
                       {"parts", bucket.parts()}}});
    end += bucket.seconds();
  }
}

// The outcome that ends the pause of a committed instance ends the update.
void AddPauses(const v1::UpdateStatus& update, double end, std::vector<UpdateSpan>* spans) {
  for (const v1::InstanceResult& instance : update.instances()) {
    if (!instance.committed() || !instance.has_pause_seconds()) continue;
    spans->push_back({Kind::kPause,
                      instance.instance(),
                      "",
                      end - instance.pause_seconds(),
                      instance.pause_seconds(),
                      {}});
  }
}

void AddNode(const v1::NodeStatus& node, double begin, std::vector<UpdateSpan>* spans) {
  const double seconds = node.data_seconds();
  if (seconds <= 0) return;
  spans->push_back({Kind::kDaemon,
                    node.daemon_id(),
                    "",
                    begin,
                    seconds,
                    {{"bytes_sent", node.bytes_sent()},
                     {"bytes_forwarded", node.bytes_forwarded()},
                     {"bytes_received", node.bytes_received()}}});
  for (const v1::NodeSend& send : node.sends()) {
    const double rate = static_cast<double>(send.bytes()) / seconds;
    spans->push_back({Kind::kLink,
                      fmt::format("{} to {}", node.daemon_id(), send.daemon_id()),
                      "",
                      begin,
                      seconds,
                      {{"bytes", send.bytes()}, {"bytes_per_second", rate}}});
  }
}

}  // namespace

bool HasEnded(const v1::UpdateStatus& update) {
  return update.outcome() == v1::UPDATE_OUTCOME_COMMITTED ||
         update.outcome() == v1::UPDATE_OUTCOME_ABORTED;
}

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
  if (known == nullptr || known->update.outcome() != v1::UPDATE_OUTCOME_COMMITTED) return;
  if (!Refitted(known->update, known->statistics)) return;
  known->nodes.assign(group.nodes().begin(), group.nodes().end());
}

std::vector<UpdateSpan> UpdateTrace::SpansOf(const Traced& traced) {
  const double begin = traced.begin;
  const double total = traced.update.elapsed_seconds();
  std::vector<UpdateSpan> spans = {SpanOf(traced.update, begin)};
  double data = begin;
  for (size_t i = 0; i < traced.phases.size(); ++i) {
    const Phase& phase = traced.phases[i];
    const double end = i + 1 < traced.phases.size() ? traced.phases[i + 1].begin : total;
    if (phase.state == "data") data = begin + phase.begin;
    if (end <= phase.begin) continue;
    spans.push_back({Kind::kPhase, "", phase.state, begin + phase.begin, end - phase.begin, {}});
  }
  AddPauses(traced.update, begin + total, &spans);
  AddBuckets(traced.statistics, data, &spans);
  for (const v1::NodeStatus& node : traced.nodes) AddNode(node, data, &spans);
  return spans;
}

std::vector<TracedUpdate> UpdateTrace::Updates() const {
  std::vector<TracedUpdate> updates;
  for (const Traced& traced : traced_) updates.push_back({traced.update, SpansOf(traced)});
  return updates;
}

}  // namespace refitd
