// completion: a script that makes a shell complete refitctl's commands and options.
#include <memory>
#include <string>

#include "daemon/refitctl/command.h"

namespace refitd::refitctl {

Command AddCompletion(CommandApp app, const CommandLine& line) {
  CommandApp sub = app.AddCommand(
      "completion",
      "Print a script for the shell: source <(refitctl completion bash), the same with zsh, or "
      "refitctl completion fish | source",
      kConfigure);
  auto shell = std::make_shared<std::string>();
  sub.Add("SHELL", shell.get(), "The shell").Required().OneOf(kShells);
  return {sub, [&line, shell] {
            PrintRaw(line.Completion(*shell));
            return static_cast<int>(kExitOk);
          }};
}

}  // namespace refitd::refitctl
