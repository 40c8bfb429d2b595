// can: asks whether an identity may act in a role in a group: a configuration file, or the daemon.
#include <memory>
#include <string>

#include "daemon/config.h"
#include "daemon/policy/policy.h"
#include "daemon/refitctl/command.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

struct CanOptions {
  std::string identity;
  std::string role;
  std::string group;
  std::string owner;
  std::string config;
};

absl::StatusOr<v1::CheckAccessResponse> AskFile(const CanOptions& options) {
  REFITD_ASSIGN_OR_RETURN(const Principal caller, ParsePrincipal(options.identity, "--as"));
  REFITD_ASSIGN_OR_RETURN(const Role role, ParseRole(options.role));
  REFITD_ASSIGN_OR_RETURN(const Invocation loaded, LoadConfig({"--config", options.config}, {}));
  REFITD_ASSIGN_OR_RETURN(const auto policy, Policy::Make(PolicySettingsOf(loaded.config)));
  v1::CheckAccessResponse response;
  response.set_allowed(policy->Check(caller, {role}, options.group, options.owner).ok());
  response.set_reason(policy->Why(caller, role, options.group, options.owner));
  response.set_owner(options.owner);
  return response;
}

absl::StatusOr<v1::CheckAccessResponse> AskDaemon(const GlobalOptions& global,
                                                  const CanOptions& options) {
  v1::CheckAccessRequest request;
  request.set_identity(options.identity);
  request.set_role(options.role);
  request.set_group(options.group);
  return OperatorClient(global).Call(&Rpcs::CheckAccess, request);
}

}  // namespace

Command AddCan(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "can", "Whether an identity may act in a role in a group; exit code 1: it may not",
      kConfigure);
  auto options = std::make_shared<CanOptions>();
  sub.Add("--as", &options->identity,
          "uid:N (and ,gid:N for each group of the user), spiffe://..., dns:NAME, anonymous")
      .Required();
  sub.Add("--do", &options->role, "trainer, engine, operator-read, operator-write or peer")
      .Required();
  sub.Add("--group", &options->group, "The group, which need not exist").Required();
  const Option config =
      sub.Add("--config", &options->config,
              "A configuration file to ask; without it the running daemon is asked");
  sub.Add("--owner", &options->owner, "With --config: the identity that owns the group")
      .Needs(config);
  return {sub, [&global, options] {
            const auto answer =
                options->config.empty() ? AskDaemon(global, *options) : AskFile(*options);
            if (!answer.ok()) return Fail(answer.status());
            Print(global.json ? ToJson(*answer, true)
                              : (answer->allowed() ? "yes: " : "no: ") + answer->reason() + "\n");
            return static_cast<int>(answer->allowed() ? kExitOk : kExitFailed);
          }};
}

}  // namespace refitd::refitctl
