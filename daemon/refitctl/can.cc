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
  return OperatorClient(global).CheckAccess(request);
}

}  // namespace

Command AddCan(CLI::App* app, const GlobalOptions& global) {
  CLI::App* sub = app->add_subcommand(
      "can", "Whether an identity may act in a role in a group; exit code 1: it may not");
  auto options = std::make_shared<CanOptions>();
  sub->add_option(
         "--as", options->identity,
         "uid:N (and ,gid:N for each group of the user), spiffe://..., dns:NAME, anonymous")
      ->required();
  sub->add_option("--do", options->role, "trainer, engine, operator-read, operator-write or peer")
      ->required();
  sub->add_option("--group", options->group, "The group, which need not exist")->required();
  CLI::Option* const config =
      sub->add_option("--config", options->config,
                      "A configuration file to ask; without it the running daemon is asked");
  sub->add_option("--owner", options->owner, "With --config: the identity that owns the group")
      ->needs(config);
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
