// refitctl's commands: each has its own file and adds itself to the command line.
//
// A command's Add function declares its options and returns the function to run if the command is
// chosen. That function prints one line on stderr for an error and returns an exit code
// (exit_code.h). Used by one thread.
#ifndef REFITD_DAEMON_REFITCTL_COMMAND_H_
#define REFITD_DAEMON_REFITCTL_COMMAND_H_

#include <functional>

#include "daemon/refitctl/command_line.h"
#include "daemon/refitctl/exit_code.h"
#include "daemon/refitctl/operator_client.h"

namespace refitd::refitctl {

struct Command {
  CommandApp app;
  std::function<int()> run;
};

// The headings of the help.
inline constexpr char kLook[] = "Look";
inline constexpr char kChange[] = "Change";
inline constexpr char kTry[] = "Try";
inline constexpr char kConfigure[] = "Configure";

Command AddStatus(CommandApp app, const GlobalOptions& global);
Command AddGroups(CommandApp app, const GlobalOptions& global);
Command AddGroup(CommandApp app, const GlobalOptions& global);
Command AddAbort(CommandApp app, const GlobalOptions& global);
Command AddRollback(CommandApp app, const GlobalOptions& global);
Command AddRelease(CommandApp app, const GlobalOptions& global);
Command AddDrain(CommandApp app, const GlobalOptions& global);
Command AddMembers(CommandApp app, const GlobalOptions& global);
Command AddNodes(CommandApp app, const GlobalOptions& global);
Command AddBuckets(CommandApp app, const GlobalOptions& global);
Command AddWatch(CommandApp app, const GlobalOptions& global);
Command AddTop(CommandApp app, const GlobalOptions& global);
Command AddSmoke(CommandApp app, const GlobalOptions& global);
Command AddPush(CommandApp app, const GlobalOptions& global);
Command AddEngine(CommandApp app, const GlobalOptions& global);
Command AddValidate(CommandApp app, const GlobalOptions& global);
Command AddCan(CommandApp app, const GlobalOptions& global);
Command AddSupportBundle(CommandApp app, const GlobalOptions& global);
Command AddTrace(CommandApp app, const GlobalOptions& global);
Command AddReady(CommandApp app, const GlobalOptions& global);
// `line` is the whole command line, which the script completes.
Command AddCompletion(CommandApp app, const CommandLine& line);

// Prints "refitctl: MESSAGE" on stderr, in one line; returns the exit code for the status.
int Fail(const absl::Status& status);
int UsageError(const std::string& message);
// All that refitctl writes goes through these, since texts of members and of files are among it:
// what a terminal would obey is written out (EscapedLines in format.h).
void Print(const std::string& text);     // on stdout, flushed
void PrintRaw(const std::string& text);  // the same for what LiveBlock made, which moves the cursor
void PrintLine(const std::string& line);  // on stderr

// Prints the daemon's answer, as JSON or as `render` makes it; returns the exit code.
template <typename Answer, typename Render>
int Show(const GlobalOptions& global, const absl::StatusOr<Answer>& answer, const Render& render) {
  if (!answer.ok()) return Fail(answer.status());
  Print(global.json ? ToJson(*answer, /*pretty=*/true) : render(*answer));
  return kExitOk;
}

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_COMMAND_H_
