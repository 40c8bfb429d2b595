// top: one screen of what the daemon does, drawn again at an interval.
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "daemon/refitctl/command.h"
#include "daemon/refitctl/format.h"
#include "daemon/refitctl/top_screen.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

using std::chrono::milliseconds;

struct TopOptions {
  milliseconds interval{1000};
  bool once = false;
};

absl::StatusOr<std::string> Draw(const OperatorClient& client, TopScreen* screen) {
  REFITD_ASSIGN_OR_RETURN(const auto status, client.Call(&Rpcs::GetStatus));
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return screen->Render(status, now.count());
}

// Draws until its user ends it. A daemon that does not answer for a while is said on the screen.
int RunTop(const GlobalOptions& global, const TopOptions& options) {
  if (global.json) {
    return UsageError("top draws a screen: `refitctl status -o json` has the same for programs");
  }
  const OperatorClient client(global);
  TopScreen screen;
  absl::StatusOr<std::string> text = Draw(client, &screen);
  if (!text.ok()) return Fail(text.status());
  while (true) {
    const std::string shown = text.ok() ? *text : Message(text.status()) + "\n";
    const auto size = TerminalSizeOf(STDOUT_FILENO);
    if (size && !options.once) {
      PrintRaw(FullScreen(shown, *size));
    } else {
      Print(shown);
    }
    if (options.once) return kExitOk;
    std::this_thread::sleep_for(options.interval);
    text = Draw(client, &screen);
  }
}

}  // namespace

Command AddTop(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "top", "Groups, instances, versions, links and who is waited for, drawn again and again",
      kLook);
  auto options = std::make_shared<TopOptions>();
  sub.Add("--interval", &options->interval, "Time between two screens",
          {.lowest = milliseconds(100)});
  sub.AddFlag("--once", &options->once, "Print one screen and end");
  return {sub, [&global, options] { return RunTop(global, *options); }};
}

}  // namespace refitd::refitctl
