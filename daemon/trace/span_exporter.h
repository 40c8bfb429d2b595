// Exports each update that has ended as spans, to a collector of OpenTelemetry (OTLP over gRPC).
//
// The daemon reports updates by Send, under its mutex: there they are only noted. A thread of its
// own asks for what is recorded of an update that ended, and calls the collector.
//
// Invariants
//  1. Send never waits for the collector, or for anything that waits for it.
//  2. At most kMaxQueued updates wait to be exported. One more is dropped, and one that could not
//     be exported is too: `count` gets each update once, and one line a minute tells of the
//     dropped.
//  3. No call takes longer than `limit` (P4), nor Stop longer than its grace.
//
// Thread-safe.
#ifndef REFITD_DAEMON_TRACE_SPAN_EXPORTER_H_
#define REFITD_DAEMON_TRACE_SPAN_EXPORTER_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/node/sinks.h"
#include "daemon/trace/otlp.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.grpc.pb.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"

namespace refitd {

struct SpanExporterOptions {
  std::string collector;  // for the log
  std::string daemon_id;
  // Makes a channel for the export of one update, by the certificates of the moment.
  std::function<std::shared_ptr<grpc::Channel>()> dial;
  // Adds what is recorded of the group's last update.
  std::function<void(const std::string& group, UpdateTrace*)> complete;
  std::function<void(bool exported)> count;
  std::function<void(const std::string&)> log;
  std::function<int64_t()> now_ns;  // since 1970
  Duration limit = std::chrono::seconds(10);
  Duration pause = std::chrono::seconds(1);  // before the second try; twice as long before the next
};

class SpanExporter final : public UpdateSink {
 public:
  static constexpr size_t kMaxQueued = 64;
  static constexpr size_t kMaxRunning = 4096;  // groups, of which one may have been deleted
  static constexpr int kTries = 3;
  static constexpr Duration kLogPause = std::chrono::minutes(1);

  explicit SpanExporter(SpanExporterOptions options);
  ~SpanExporter() override;  // as Stop, without a grace

  void Send(UpdateNews news) override;
  void End(absl::Status /*status*/) override {}

  // Exports what waits, for at most `grace`. No function of the options is called afterwards.
  void Stop(Duration grace);

 private:
  struct Change {
    double seconds = 0;  // since epoch_ns_
    UpdateNews news;
  };
  using Changes = std::vector<Change>;  // of one update, in order

  void Run();
  // Not OK: why the update's spans were not all taken.
  absl::Status Export(const Changes& changes);
  absl::Status SendOne(const ExportRequest& request,
                       otlp::collector::trace::v1::TraceService::StubInterface* stub);
  absl::Status Call(const ExportRequest& request,
                    otlp::collector::trace::v1::TraceService::StubInterface* stub);
  // Returns false where Stop does not leave the time.
  bool Pause(Duration pause);
  void NoteDropped(const absl::Status& why);
  bool TimeIsUp() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const SpanExporterOptions options_;
  const int64_t epoch_ns_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Changes> running_ ABSL_GUARDED_BY(mutex_);  // by group
  std::deque<Changes> queue_ ABSL_GUARDED_BY(mutex_);               // updates that have ended
  int64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;  // since the last line of the log
  std::optional<TimePoint> stop_by_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<TimePoint> logged_;  // the thread's
  std::thread thread_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_TRACE_SPAN_EXPORTER_H_
