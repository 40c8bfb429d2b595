#include "daemon/trace/span_exporter.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "daemon/services/status.h"
#include "proto/grpc_status.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

using otlp::collector::trace::v1::ExportTraceServiceResponse;
using otlp::collector::trace::v1::TraceService;

TimePoint Now() { return std::chrono::steady_clock::now(); }

// OTLP lets a client try again after these failures:
// https://opentelemetry.io/docs/specs/otlp/#failures
bool MayPass(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

// A change that is not the last of its update counts for its state alone.
void Trim(UpdateView* update) {
  update->instances.clear();
  update->source_instances.clear();
  update->left_out = {};
  update->waits_for.clear();
}

}  // namespace

SpanExporter::SpanExporter(SpanExporterOptions options)
    : options_(std::move(options)), epoch_ns_(options_.now_ns()), thread_([this] { Run(); }) {}

SpanExporter::~SpanExporter() { Stop(Duration::zero()); }

void SpanExporter::Send(UpdateNews news) {
  MutexLock lock(&mutex_);
  if (stop_by_.has_value()) return;
  const double seconds = static_cast<double>(options_.now_ns() - epoch_ns_) / 1e9;
  if (running_.size() >= kMaxRunning && !running_.contains(news.group)) {
    running_.erase(running_.begin());
    ++dropped_;
    options_.count(false);
  }
  const auto at = running_.try_emplace(news.group).first;
  Changes& changes = at->second;
  const bool ended = news.update.outcome != Outcome::kRunning;
  if (!changes.empty() && changes[0].news.update.id != news.update.id) changes.clear();
  if (changes.empty() && ended) {  // it ran before the daemon was asked for updates
    running_.erase(at);
    return;
  }
  if (!ended) {
    if (!changes.empty() && changes.back().news.update.state == news.update.state) return;
    Trim(&news.update);
  }
  changes.push_back({seconds, std::move(news)});
  if (!ended) return;
  if (queue_.size() < kMaxQueued) {
    queue_.push_back(std::move(changes));
  } else {
    ++dropped_;
    options_.count(false);
  }
  running_.erase(at);
  changed_.NotifyAll();
}

void SpanExporter::Stop(Duration grace) {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    stop_by_ = Now() + grace;
    changed_.NotifyAll();
    while (!done_ && !TimeIsUp()) changed_.WaitUntil(&mutex_, *stop_by_);
    if (call_ != nullptr) call_->TryCancel();
  }
  thread_.join();
}

bool SpanExporter::TimeIsUp() const { return stop_by_.has_value() && Now() >= *stop_by_; }

// ---- the thread ----

void SpanExporter::Run() {
  while (true) {
    Changes changes;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !stop_by_.has_value()) changed_.Wait(&mutex_);
      if (queue_.empty() || TimeIsUp()) {
        for (size_t i = 0; i < queue_.size(); ++i) options_.count(false);
        done_ = true;
        changed_.NotifyAll();
        return;
      }
      changes = std::move(queue_.front());
      queue_.pop_front();
    }
    const absl::Status exported = Export(changes);
    options_.count(exported.ok());
    NoteDropped(exported);
  }
}

absl::Status SpanExporter::Export(const Changes& changes) {
  UpdateTrace trace;
  for (const Change& change : changes) {
    trace.Watch(ToProto(change.news.group, change.news.update), change.seconds);
  }
  options_.complete(changes[0].news.group, &trace);
  const auto stub = TraceService::NewStub(options_.dial());
  for (const TracedUpdate& update : trace.Updates()) {
    for (const ExportRequest& request :
         ExportRequests(update, changes[0].news.incarnation, options_.daemon_id, epoch_ns_)) {
      REFITD_RETURN_IF_ERROR(SendOne(request, stub.get()));
    }
  }
  return absl::OkStatus();
}

absl::Status SpanExporter::SendOne(const ExportRequest& request,
                                   TraceService::StubInterface* stub) {
  Duration pause = options_.pause;
  for (int tries = 1;; ++tries) {
    absl::Status status = Call(request, stub);
    if (status.ok() || !MayPass(status) || tries == kTries || !Pause(pause)) return status;
    pause *= 2;
  }
}

absl::Status SpanExporter::Call(const ExportRequest& request, TraceService::StubInterface* stub) {
  grpc::ClientContext context;
  {
    MutexLock lock(&mutex_);
    if (TimeIsUp()) return absl::CancelledError("the daemon ends");
    const TimePoint latest = stop_by_.value_or(TimePoint::max());
    const Duration limit = std::min<Duration>(options_.limit, latest - Now());
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::microseconds>(limit));
    call_ = &context;
  }
  ExportTraceServiceResponse response;
  const grpc::Status status = stub->Export(&context, request, &response);
  {
    MutexLock lock(&mutex_);
    call_ = nullptr;
  }
  if (!status.ok()) return FromGrpc(status);
  const auto& partial = response.partial_success();
  if (partial.rejected_spans() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} spans were rejected: {}", partial.rejected_spans(), partial.error_message()));
}

bool SpanExporter::Pause(Duration pause) {
  const TimePoint end = Now() + pause;
  MutexLock lock(&mutex_);
  while (Now() < end) {
    if (TimeIsUp()) return false;
    changed_.WaitUntil(&mutex_, std::min(end, stop_by_.value_or(end)));
  }
  return true;
}

void SpanExporter::NoteDropped(const absl::Status& why) {
  int64_t dropped = 0;
  {
    MutexLock lock(&mutex_);
    if (!why.ok()) ++dropped_;
    if (dropped_ == 0 || (logged_.has_value() && Now() < *logged_ + kLogPause)) return;
    dropped = std::exchange(dropped_, 0);
  }
  logged_ = Now();
  options_.log(fmt::format(
      "the spans of {} updates were not exported to {} (traces.collector): {}", dropped,
      options_.collector,
      why.ok() ? fmt::format("{} updates waited", kMaxQueued) : CleanText(Message(why), 256)));
}

}  // namespace refitd
