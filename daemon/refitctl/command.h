// refitctl's commands: each has its own file and adds itself to the command line.
//
// A command's Add function declares its options and returns the function to run if the command is
// chosen. That function prints one line on stderr for an error and returns an exit code
// (exit_code.h). Used by one thread.
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
Command AddCan(CLI::App* app, const GlobalOptions& global);
Command AddReady(CLI::App* app, const GlobalOptions& global);
Command AddDoctor(CLI::App* app, const GlobalOptions& global);

// Prints "refitctl: MESSAGE" on stderr, in one line; returns the exit code for the status.
int Fail(const absl::Status& status);
int UsageError(const std::string& message);
void Print(const std::string& text);  // on stdout, flushed

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_COMMAND_H_
