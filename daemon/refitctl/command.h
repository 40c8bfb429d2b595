// refitctl's commands: each in its own file, adding itself to the command line.
//
// A command's Add function declares its options and returns what runs when it was chosen; that
// returns an exit code (exit_code.h) after printing one line on stderr for an error. One thread.
#ifndef REFITD_DAEMON_REFITCTL_COMMAND_H_
#define REFITD_DAEMON_REFITCTL_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>

#include "daemon/refitctl/exit_code.h"
#include "daemon/refitctl/operator_client.h"

namespace refitd::refitctl {

struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

Command AddStatus(CLI::App* app, const GlobalOptions& global);
Command AddGroups(CLI::App* app, const GlobalOptions& global);
Command AddMembers(CLI::App* app, const GlobalOptions& global);
Command AddNodes(CLI::App* app, const GlobalOptions& global);
Command AddBuckets(CLI::App* app, const GlobalOptions& global);
Command AddWatch(CLI::App* app, const GlobalOptions& global);
Command AddPush(CLI::App* app, const GlobalOptions& global);
Command AddEngine(CLI::App* app, const GlobalOptions& global);
Command AddPlan(CLI::App* app, const GlobalOptions& global);
Command AddValidate(CLI::App* app, const GlobalOptions& global);

// "refitctl: MESSAGE" on stderr, in one line; the code that fits.
int Fail(const absl::Status& status);
int UsageError(const std::string& message);
void Print(const std::string& text);  // on stdout, flushed

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_COMMAND_H_
