// trace: updates of a group in Chrome's trace format: the last one, or those that end while it
// watches.
#include <memory>
#include <string>

#include "daemon/refitctl/command.h"
#include "daemon/refitctl/trace_events.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

constexpr std::chrono::milliseconds kWatchInterval{20};  // the shortest that the daemon takes

struct TraceOptions {
  std::string group;
  int updates = 0;  // 0: the last one
};

double Now() {
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return now.count();
}

absl::Status AddLast(const OperatorClient& client, const std::string& group, UpdateTrace* trace) {
  REFITD_ASSIGN_OR_RETURN(const auto statistics, client.Call(&Rpcs::GetUpdateStatistics, group));
  trace->Add(statistics);
  REFITD_ASSIGN_OR_RETURN(const auto shown, client.Call(&Rpcs::GetGroup, group));
  trace->Add(shown.group());
  return absl::OkStatus();
}

// Ends when so many updates have ended, or the deadline has passed.
absl::Status Follow(const GlobalOptions& global, const OperatorClient& client,
                    const TraceOptions& options, UpdateTrace* trace) {
  REFITD_RETURN_IF_ERROR(client.ready());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + global.timeout);
  v1::WatchUpdatesRequest request;
  request.set_group(options.group);
  request.set_interval_ms(kWatchInterval.count());
  const auto reader = client.stub().WatchUpdates(&context, request);
  v1::UpdateStatus update;
  int ended = 0;
  absl::Status added;
  while (added.ok() && ended < options.updates && reader->Read(&update)) {
    if (!trace->Watch(update, Now())) continue;
    ++ended;
    added = AddLast(client, options.group, trace);
  }
  context.TryCancel();
  const absl::Status status = StatusOfCall(reader->Finish(), client.target());
  if (!added.ok() || ended == options.updates) return added;
  if (!absl::IsDeadlineExceeded(status)) return status;
  return Error(absl::StatusCode::kDeadlineExceeded,
               "{} of {} updates of group {} ended within --timeout", ended, options.updates,
               options.group);
}

int RunTrace(const GlobalOptions& global, const TraceOptions& options) {
  const OperatorClient client(global);
  UpdateTrace trace;
  const absl::Status status = options.updates > 0 ? Follow(global, client, options, &trace)
                                                  : AddLast(client, options.group, &trace);
  if (!status.ok()) return Fail(status);
  Print(ChromeTrace(trace.Updates()));
  return kExitOk;
}

}  // namespace

Command AddTrace(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "trace", "Print a group's updates in Chrome's trace format, for ui.perfetto.dev", kLook);
  sub.Explain(
      "Without --updates: the last update, its buckets, and what daemons and links did in the "
      "last\n"
      "refit; and how long each instance was paused. With it also the phases, by the daemon's\n"
      "clock. What is not recorded stands in the trace under not_recorded.");
  auto options = std::make_shared<TraceOptions>();
  sub.Add("GROUP", &options->group, "The group").Required();
  sub.Add("--updates", &options->updates,
          "Watch until so many more updates have ended, for --timeout at most")
      .InRange(1, 1000);
  return {sub, [&global, options] { return RunTrace(global, *options); }};
}

}  // namespace refitd::refitctl
