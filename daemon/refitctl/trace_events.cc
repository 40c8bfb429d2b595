#include "daemon/refitctl/trace_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "daemon/refitctl/format.h"

namespace refitd::refitctl {
namespace {

using nlohmann::ordered_json;
using Kind = UpdateSpan::Kind;

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
    Row(kGroup, "updates");
    Row(kGroup, "phases");
  }
  void Span(Process process, const std::string& row, const std::string& name, double begin,
            double seconds, ordered_json args) {
    const int number = Row(process, row);
    events_.push_back({{"ph", "X"},
                       {"name", name},
                       {"pid", process},
                       {"tid", number},
                       {"ts", begin * 1e6},
                       {"dur", seconds * 1e6},
                       {"args", std::move(args)}});
  }
  ordered_json Take() && { return std::move(events_); }

 private:
  // The row of that name, which begins with its first span.
  int Row(Process process, const std::string& name) {
    std::map<std::string, int>& rows = rows_[process];
    const auto [it, added] = rows.try_emplace(name, static_cast<int>(rows.size()) + 1);
    if (added) Meta("thread_name", process, it->second, name);
    return it->second;
  }
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

ordered_json ArgsOf(const UpdateSpan& span) {
  ordered_json args = ordered_json::object();
  for (const auto& [key, value] : span.attributes) {
    std::visit([&, &key = key](const auto& each) { args[key] = each; }, value);
  }
  return args;
}

void Add(const v1::UpdateStatus& update, const UpdateSpan& span, double first, Events* events) {
  const auto add = [&](Process process, const std::string& row, const std::string& name) {
    events->Span(process, row, name, span.begin - first, span.seconds, ArgsOf(span));
  };
  switch (span.kind) {
    case Kind::kUpdate:
      return add(kGroup, "updates", NameOf(update));
    case Kind::kPhase:
      return add(kGroup, "phases", span.name);
    case Kind::kPause:
      return add(kInstances, span.of, "paused");
    case Kind::kBucket:
      return add(kTrainers, "rank " + span.of, "bucket " + span.name);
    case Kind::kDaemon:
      return add(kDaemons, span.of, span.of);
    case Kind::kLink:
      return add(kLinks, span.of, HumanBytes(std::get<int64_t>(span.attributes[0].second)));
  }
}

}  // namespace

std::string ChromeTrace(const std::vector<TracedUpdate>& updates) {
  Events events;
  double first = std::numeric_limits<double>::max();
  for (const TracedUpdate& each : updates) first = std::min(first, each.spans[0].begin);
  for (const TracedUpdate& each : updates) {
    for (const UpdateSpan& span : each.spans) Add(each.update, span, first, &events);
  }
  const ordered_json trace = {{"displayTimeUnit", "ms"},
                              {"otherData", {{"not_recorded", kNotRecorded}}},
                              {"traceEvents", std::move(events).Take()}};
  return trace.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace refitd::refitctl
