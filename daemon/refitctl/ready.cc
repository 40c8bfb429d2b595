// ready: whether an instance is ready, for readiness probes and for scripts.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "daemon/refitctl/command.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

using grpc::health::v1::HealthCheckResponse;

struct ReadyOptions {
  std::string group;
  std::string instance;
  bool wait = false;
};

std::string ServiceOf(const ReadyOptions& options) {
  return fmt::format("refitd.v1.Engine/{}/{}", options.group, options.instance);
}

// Waits until the instance is ready, or the deadline of the command has passed.
absl::StatusOr<HealthCheckResponse> Await(const OperatorClient& client, const GlobalOptions& global,
                                          const std::string& service) {
  REFITD_RETURN_IF_ERROR(client.ready());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + global.timeout);
  context.set_wait_for_ready(true);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  const auto reader = client.health().Watch(&context, request);
  HealthCheckResponse response;
  while (reader->Read(&response)) {
    if (response.status() != HealthCheckResponse::SERVING) continue;
    context.TryCancel();
    reader->Finish();
    return response;
  }
  const absl::Status status = StatusOfCall(reader->Finish(), client.target());
  if (!status.ok()) return status;
  return absl::UnavailableError("the daemon ended the watch");
}

int RunReady(const GlobalOptions& global, const ReadyOptions& options) {
  const OperatorClient client(global);
  const std::string service = ServiceOf(options);
  absl::StatusOr<HealthCheckResponse> answer =
      options.wait ? Await(client, global, service) : client.CheckHealth(service);
  if (absl::IsNotFound(answer.status())) {
    answer.emplace().set_status(HealthCheckResponse::SERVICE_UNKNOWN);
  }
  if (!answer.ok()) return Fail(answer.status());
  const bool ready = answer->status() == HealthCheckResponse::SERVING;
  const bool known = answer->status() != HealthCheckResponse::SERVICE_UNKNOWN;
  if (global.json) {
    const nlohmann::json out = {
        {"group", options.group},
        {"instance", options.instance},
        {"ready", ready},
        {"status", HealthCheckResponse::ServingStatus_Name(answer->status())}};
    Print(out.dump(2) + "\n");
  } else {
    Print(ready ? "ready\n" : (known ? "not ready\n" : "not known\n"));
  }
  return ready ? kExitOk : kExitNotReady;
}

}  // namespace

Command AddReady(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "ready", "Whether an instance is ready to be sent requests; exit code 6: it is not", kLook);
  auto options = std::make_shared<ReadyOptions>();
  // Kubernetes puts no variables into the commands of probes, so the environment may name both.
  sub.Add("--group", &options->group, "The group").FromEnvironment("REFITD_GROUP").Required();
  sub.Add("--instance", &options->instance, "The instance")
      .FromEnvironment("REFITD_INSTANCE")
      .Required();
  sub.AddFlag("--wait", &options->wait, "Wait until it is ready, for --timeout at most");
  return {sub, [&global, options] { return RunReady(global, *options); }};
}

}  // namespace refitd::refitctl
