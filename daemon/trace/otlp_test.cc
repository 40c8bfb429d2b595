#include "daemon/trace/otlp.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace refitd {
namespace {

using otlp::trace::v1::Span;

constexpr int64_t kEpoch = 1'700'000'000'000'000'000;
constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kIncarnation = 0xabc;

v1::UpdateStatus StatusOf(const std::string& state, double elapsed) {
  v1::UpdateStatus update;
  update.set_group("policy");
  update.set_version(5);
  update.set_update_id(9);
  update.set_state(state);
  update.set_elapsed_seconds(elapsed);
  update.set_bytes(1 << 20);
  update.set_outcome(v1::UPDATE_OUTCOME_RUNNING);
  if (state == "committed") update.set_outcome(v1::UPDATE_OUTCOME_COMMITTED);
  if (state == "aborted") update.set_outcome(v1::UPDATE_OUTCOME_ABORTED);
  return update;
}

// An update that refitted, with everything that spans are made of; seen from 2 s after the epoch.
UpdateTrace Traced(const std::string& end, int64_t pushed = 0, int buckets = 2) {
  UpdateTrace trace;
  trace.Watch(StatusOf("preparing", 0), 2);
  trace.Watch(StatusOf("data", 0.1), 2.1);
  v1::UpdateStatus last = StatusOf(end, 0.5);
  if (end == "aborted") last.set_reason("trainer rank 0: died");
  v1::InstanceResult* const instance = last.add_instances();
  instance->set_instance("a");
  instance->set_committed(true);
  instance->set_pause_seconds(0.003);
  trace.Watch(last, 2.5);
  v1::GetUpdateStatisticsResponse statistics;
  *statistics.mutable_update() = last;
  statistics.add_pushed()->set_bytes(pushed);
  for (int i = 0; i < buckets; ++i) {
    v1::BucketStatistics* const bucket = statistics.add_buckets();
    bucket->set_trainer_rank(1);
    bucket->set_seq(i);
    bucket->set_seconds(0.1);
    bucket->set_bytes(7);
  }
  trace.Add(statistics);
  v1::GroupStatus group;
  *group.mutable_update() = last;
  v1::NodeStatus* const node = group.add_nodes();
  node->set_daemon_id("node-a");
  node->set_data_seconds(0.25);
  v1::NodeSend* const send = node->add_sends();
  send->set_daemon_id("node-b");
  send->set_bytes(1 << 20);
  trace.Add(group);
  return trace;
}

std::vector<ExportRequest> RequestsOf(const UpdateTrace& trace,
                                      uint64_t incarnation = kIncarnation) {
  return ExportRequests(trace.Updates().at(0), incarnation, "node-a", kEpoch);
}

std::vector<Span> SpansOf(const std::vector<ExportRequest>& requests) {
  std::vector<Span> spans;
  for (const ExportRequest& request : requests) {
    REQUIRE(request.resource_spans_size() == 1);
    REQUIRE(request.resource_spans(0).scope_spans_size() == 1);
    const auto& of = request.resource_spans(0).scope_spans(0).spans();
    spans.insert(spans.end(), of.begin(), of.end());
  }
  return spans;
}

std::map<std::string, std::string> AttributesOf(const Span& span) {
  std::map<std::string, std::string> found;
  for (const auto& attribute : span.attributes()) {
    const auto& value = attribute.value();
    found[attribute.key()] = value.has_string_value() ? value.string_value()
                             : value.has_int_value()  ? fmt::format("{}", value.int_value())
                                                      : fmt::format("{}", value.double_value());
  }
  return found;
}

std::set<std::string> IdsOf(const std::vector<Span>& spans) {
  std::set<std::string> ids;
  for (const Span& span : spans) ids.insert(span.trace_id() + span.span_id());
  return ids;
}

TEST_CASE(
    "an update's spans are a trace: phases, and what ranks, daemons, links and instances did") {
  const auto requests = RequestsOf(Traced("committed"));
  REQUIRE(requests.size() == 1);
  std::vector<std::string> shown;
  const std::vector<Span> spans = SpansOf(requests);
  for (const Span& span : spans) {
    const auto start = static_cast<int64_t>(span.start_time_unix_nano()) - kEpoch;
    const auto end = static_cast<int64_t>(span.end_time_unix_nano()) - kEpoch;
    shown.push_back(fmt::format("{} {}-{}", span.name(), start / kMs, end / kMs));
    CHECK(span.trace_id() == spans[0].trace_id());
    CHECK(span.parent_span_id() == (&span == &spans[0] ? "" : spans[0].span_id()));
    CHECK(span.kind() == Span::SPAN_KIND_INTERNAL);
    CHECK_FALSE(span.has_status());
  }
  CHECK(shown == std::vector<std::string>{
                     "update 2000-2500", "preparing 2000-2100", "data 2100-2500", "pause 2497-2500",
                     "bucket 2100-2200", "bucket 2200-2300", "daemon 2100-2350", "link 2100-2350"});
  CHECK(spans[0].trace_id().size() == 16);
  CHECK(spans[0].span_id().size() == 8);
  CHECK(IdsOf(spans).size() == spans.size());
  auto root = AttributesOf(spans[0]);
  CHECK(root["refitd.group"] == "policy");
  CHECK(root["refitd.version"] == "5");
  CHECK(root["refitd.incarnation"] == "abc");
  CHECK(root["refitd.outcome"] == "committed");
  CHECK(AttributesOf(spans[3])["refitd.instance"] == "a");
  CHECK(AttributesOf(spans[4])["refitd.trainer_rank"] == "1");
  CHECK(AttributesOf(spans[5])["refitd.seq"] == "1");
  CHECK(AttributesOf(spans[6])["refitd.daemon"] == "node-a");
  CHECK(AttributesOf(spans[7])["refitd.link"] == "node-a to node-b");
  CHECK(AttributesOf(spans[7])["refitd.bytes_per_second"] == "4194304");
  Span resource;
  *resource.mutable_attributes() = requests[0].resource_spans(0).resource().attributes();
  CHECK(AttributesOf(resource)["service.name"] == "refitd");
  CHECK(AttributesOf(resource)["service.instance.id"] == "node-a");
}

TEST_CASE("an aborted update is an error with its reason, and has no spans of an earlier refit") {
  const std::vector<Span> spans = SpansOf(RequestsOf(Traced("aborted")));
  CHECK(spans[0].status().code() == otlp::trace::v1::Status::STATUS_CODE_ERROR);
  CHECK(spans[0].status().message() == "trainer rank 0: died");
  for (const Span& span : spans) CHECK(AttributesOf(span).count("refitd.link") == 0);
}

TEST_CASE("an update that pushed all its bytes showed daemons and links of an earlier refit") {
  for (const Span& span : SpansOf(RequestsOf(Traced("committed", 1 << 20)))) {
    CHECK(AttributesOf(span).count("refitd.daemon") == 0);
  }
}

TEST_CASE("an update that is exported twice makes the same trace, another attempt another") {
  const auto first = SpansOf(RequestsOf(Traced("committed")));
  CHECK(IdsOf(first) == IdsOf(SpansOf(RequestsOf(Traced("committed")))));
  const auto other = SpansOf(RequestsOf(Traced("committed"), kIncarnation + 1));
  CHECK(other[0].trace_id() != first[0].trace_id());
  UpdateTrace retried;
  v1::UpdateStatus again = StatusOf("data", 0);
  again.set_update_id(10);
  retried.Watch(again, 3);
  CHECK(SpansOf(RequestsOf(retried))[0].trace_id() != first[0].trace_id());
}

TEST_CASE("many spans go in several messages of one trace") {
  const auto requests = RequestsOf(Traced("committed", 0, 2 * kMaxSpansPerRequest));
  CHECK(requests.size() == 3);
  const std::vector<Span> spans = SpansOf(requests);
  CHECK(spans.size() == 2 * kMaxSpansPerRequest + 6);
  CHECK(IdsOf(spans).size() == spans.size());
  for (const ExportRequest& request : requests) CHECK(request.ByteSizeLong() < 4 << 20);
}

}  // namespace
}  // namespace refitd
