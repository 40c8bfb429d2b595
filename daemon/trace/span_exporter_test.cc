// Against a collector of the test's own: a gRPC server with OpenTelemetry's TraceService.
#include "daemon/trace/span_exporter.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/base/temp_folder_testing.h"

namespace refitd {
namespace {

using otlp::collector::trace::v1::ExportTraceServiceResponse;
using otlp::collector::trace::v1::TraceService;

class Collector final : public TraceService::Service {
 public:
  // Answers the call with this number, from 1.
  using Answer = std::function<grpc::Status(int number, ExportTraceServiceResponse*)>;
  explicit Collector(Answer answer = nullptr) : answer_(std::move(answer)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    REQUIRE(server_ != nullptr);
  }
  ~Collector() override {
    Release();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  std::string target() const { return "unix:" + socket_; }
  int calls() const {
    MutexLock lock(&mutex_);
    return static_cast<int>(requests_.size());
  }
  ExportRequest request(size_t i) const {
    MutexLock lock(&mutex_);
    return requests_.at(i);
  }
  // From now on calls wait until Release.
  void Hold() {
    MutexLock lock(&mutex_);
    held_ = true;
  }
  void Release() {
    MutexLock lock(&mutex_);
    held_ = false;
    changed_.NotifyAll();
  }

 private:
  grpc::Status Export(grpc::ServerContext* /*context*/, const ExportRequest* request,
                      ExportTraceServiceResponse* response) override {
    int number = 0;
    {
      MutexLock lock(&mutex_);
      requests_.push_back(*request);
      number = static_cast<int>(requests_.size());
      while (held_) changed_.Wait(&mutex_);
    }
    return answer_ ? answer_(number, response) : grpc::Status::OK;
  }

  const Answer answer_;
  const TempFolder folder_;
  const std::string socket_ = folder_ / "s";
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<ExportRequest> requests_ ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::Server> server_;
};

UpdateNews News(uint64_t id, std::string_view state, Outcome outcome,
                const std::string& group = "g") {
  UpdateNews news;
  news.group = group;
  news.incarnation = 3;
  news.update.id = UpdateId(id);
  news.update.version = Version(static_cast<int64_t>(id));
  news.update.state = state;
  news.update.outcome = outcome;
  news.update.elapsed = std::chrono::milliseconds(outcome == Outcome::kRunning ? 0 : 20);
  return news;
}

struct Exporting {
  explicit Exporting(std::string target, Duration limit = std::chrono::seconds(10)) {
    SpanExporterOptions options;
    options.collector = "otel:4317";
    options.daemon_id = "node-a";
    options.dial = [target = std::move(target)] {
      return grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
    };
    options.complete = [](const std::string& group, UpdateTrace* trace) {
      v1::GetUpdateStatisticsResponse statistics;
      *statistics.mutable_update() = trace->Updates().at(0).update;
      CHECK(statistics.update().group() == group);
      statistics.add_buckets()->set_seconds(0.001);
      trace->Add(statistics);
    };
    options.count = [this](bool ok) { ++(ok ? exported : dropped); };
    options.log = [this](const std::string& line) {
      MutexLock lock(&mutex);
      lines.push_back(line);
    };
    options.now_ns = [] { return 5'000'000'000; };
    options.limit = limit;
    options.pause = std::chrono::milliseconds(1);
    exporter.emplace(std::move(options));
  }
  void Update(uint64_t id, const std::string& group = "g") {
    exporter->Send(News(id, "data", Outcome::kRunning, group));
    exporter->Send(News(id, "committed", Outcome::kCommitted, group));
  }
  std::vector<std::string> Lines() {
    MutexLock lock(&mutex);
    return lines;
  }

  std::atomic<int> exported = 0;
  std::atomic<int> dropped = 0;
  Mutex mutex;
  std::vector<std::string> lines ABSL_GUARDED_BY(mutex);
  std::optional<SpanExporter> exporter;
};

TEST_CASE("an update that has ended reaches the collector, with what is recorded of it") {
  const Collector collector;
  Exporting e(collector.target());
  e.exporter->Send(News(7, "preparing", Outcome::kRunning));
  e.exporter->Send(News(7, "data", Outcome::kRunning));
  e.exporter->Send(News(7, "data", Outcome::kRunning));  // progress
  CHECK(collector.calls() == 0);
  e.exporter->Send(News(7, "committed", Outcome::kCommitted));
  REQUIRE(Eventually([&] { return e.exported == 1; }));
  const auto request = collector.request(0);
  const auto& spans = request.resource_spans(0).scope_spans(0).spans();
  REQUIRE(spans.size() == 3);  // the update, "data", the bucket; "preparing" took no time
  CHECK(spans[0].name() == "update");
  CHECK(spans[0].end_time_unix_nano() - spans[0].start_time_unix_nano() == 20'000'000);
  CHECK(spans[1].name() == "data");
  CHECK(spans[2].name() == "bucket");
  CHECK(e.dropped == 0);
}

TEST_CASE("updates of several groups are told apart, and one that nobody saw run is left out") {
  const Collector collector;
  Exporting e(collector.target());
  e.exporter->Send(News(1, "data", Outcome::kRunning, "a"));
  e.exporter->Send(News(1, "data", Outcome::kRunning, "b"));
  e.exporter->Send(News(4, "committed", Outcome::kCommitted, "c"));
  e.exporter->Send(News(2, "data", Outcome::kRunning, "b"));  // the end of 1 was not seen
  e.exporter->Send(News(2, "aborted", Outcome::kAborted, "b"));
  e.exporter->Send(News(1, "committed", Outcome::kCommitted, "a"));
  REQUIRE(Eventually([&] { return e.exported == 2; }));
  CHECK(collector.calls() == 2);
  CHECK(e.dropped == 0);
}

TEST_CASE("a collector that hangs delays no report, and what does not fit is dropped and counted") {
  Collector collector;
  collector.Hold();
  Exporting e(collector.target());
  e.Update(1);
  REQUIRE(Eventually([&] { return collector.calls() == 1; }));
  const auto before = std::chrono::steady_clock::now();
  const int more = 10;
  for (uint64_t id = 2; id < 2 + SpanExporter::kMaxQueued + more; ++id) e.Update(id);
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(5));
  CHECK(e.dropped == more);
  CHECK(e.exported == 0);
  collector.Release();
  CHECK(Eventually([&] { return e.exported == 1 + static_cast<int>(SpanExporter::kMaxQueued); }));
  REQUIRE(e.Lines().size() == 1);
  CHECK(e.Lines()[0] ==
        "the spans of 10 updates were not exported to otel:4317 (traces.collector): 64 updates "
        "waited");
}

TEST_CASE("a call that the collector does not answer ends at its limit, and is tried again") {
  Collector collector;
  collector.Hold();
  Exporting e(collector.target(), std::chrono::milliseconds(50));
  e.Update(1);
  REQUIRE(Eventually([&] { return e.dropped == 1; }));
  CHECK(collector.calls() == SpanExporter::kTries);
  CHECK(e.Lines().size() == 1);
  // The collector keeps one trace, since all tries have the same ids.
  CHECK(collector.request(0).SerializeAsString() == collector.request(2).SerializeAsString());
}

TEST_CASE("a failure that may pass is tried again, another is not") {
  Collector collector([](int number, ExportTraceServiceResponse* response) {
    if (number == 1) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "full");
    if (number == 3) return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no");
    if (number == 4) response->mutable_partial_success()->set_rejected_spans(2);
    return grpc::Status::OK;
  });
  Exporting e(collector.target());
  e.Update(1);
  REQUIRE(Eventually([&] { return e.exported == 1; }));
  CHECK(collector.calls() == 2);
  e.Update(2);
  REQUIRE(Eventually([&] { return e.dropped == 1; }));
  CHECK(collector.calls() == 3);
  e.Update(3);
  REQUIRE(Eventually([&] { return e.dropped == 2; }));
  CHECK(collector.calls() == 4);
  CHECK(e.Lines().size() == 1);  // a minute has not passed
}

TEST_CASE("a collector that is not there costs tries, and one line of the log") {
  const TempFolder folder;
  Exporting e("unix:" + (folder / "nobody"));
  for (uint64_t id = 1; id <= 3; ++id) e.Update(id);
  CHECK(Eventually([&] { return e.dropped == 3; }));
  REQUIRE(e.Lines().size() == 1);
  CHECK(e.Lines()[0].find("the spans of 1 updates") == 0);
}

TEST_CASE("an exporter that stops sends what waits, within its grace") {
  Collector collector;
  {
    Exporting e(collector.target());
    for (uint64_t id = 1; id <= 5; ++id) e.Update(id);
    e.exporter->Stop(kTestDeadline);
    CHECK(e.exported == 5);
    e.Update(6);  // comes too late
  }
  CHECK(collector.calls() == 5);
  collector.Hold();
  Exporting e(collector.target());
  e.Update(7);
  e.Update(8);
  REQUIRE(Eventually([&] { return collector.calls() == 6; }));
  const auto before = std::chrono::steady_clock::now();
  e.exporter->Stop(std::chrono::milliseconds(20));
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(5));
  CHECK(e.exported == 0);
  CHECK(e.dropped == 2);
}

}  // namespace
}  // namespace refitd
