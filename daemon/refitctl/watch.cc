// watch: shows running updates, one progress line each.
#include <unistd.h>

#include <memory>

#include "daemon/refitctl/command.h"
#include "daemon/refitctl/render.h"

namespace refitd::refitctl {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTerminalInterval{200};
constexpr milliseconds kLogInterval{
    1000};  // the interval if every change becomes a line that stays

struct WatchOptions {
  std::string group;
  std::chrono::milliseconds interval{0};  // 0: the default of the kind of output
  bool until_idle = false;
  bool timeout_given = false;
};

// Shows a board's changes: redrawn on a terminal, else one line for each change.
class Screen {
 public:
  explicit Screen(std::optional<TerminalSize> terminal) {
    if (terminal) block_.emplace(terminal->columns);
  }
  void Show(const UpdateBoard::Change& change, const UpdateBoard& board) {
    if (!change.changed) return;
    if (block_) {
      PrintRaw(block_->Redraw(change.finished, board.Lines()));
      return;
    }
    for (const std::string& line : change.finished) Print(line + "\n");
    if (change.finished.empty()) {
      for (const std::string& line : board.Lines()) Print(line + "\n");
    }
  }

 private:
  std::optional<LiveBlock> block_;
};

int RunWatch(const GlobalOptions& global, const WatchOptions& options) {
  const OperatorClient client(global);
  grpc::ClientContext context;
  // Without --timeout a watch lasts until its user ends it.
  if (options.timeout_given) {
    context.set_deadline(std::chrono::system_clock::now() + global.timeout);
  }
  const auto terminal = TerminalSizeOf(STDOUT_FILENO);
  v1::WatchUpdatesRequest request;
  request.set_group(options.group);
  request.set_until_idle(options.until_idle);
  request.set_interval_ms((options.interval.count() != 0
                               ? options.interval
                               : (terminal ? kTerminalInterval : kLogInterval))
                              .count());
  if (const absl::Status status = client.ready(); !status.ok()) return Fail(status);
  const auto reader = client.stub().WatchUpdates(&context, request);
  UpdateBoard board;
  Screen screen(terminal);
  v1::UpdateStatus update;
  while (reader->Read(&update)) {
    const auto change = board.Apply(update);
    if (global.json) {
      Print(ToJson(update, false));
    } else {
      screen.Show(change, board);
    }
  }
  const absl::Status status = StatusOfCall(reader->Finish(), client.target());
  if (!status.ok()) return Fail(status);
  return board.aborted() > 0 ? kExitFailed : kExitOk;
}

}  // namespace

Command AddWatch(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "watch", "Updates with their progress; exits with 1 if one that it saw was aborted", kLook);
  auto options = std::make_shared<WatchOptions>();
  sub.Add("--group", &options->group, "Only this group's");
  sub.AddFlag("--until-idle", &options->until_idle, "End when no update runs");
  sub.Add(
      "--interval", &options->interval,
      "Time between progress reports (default: 200ms on a terminal, else 1s)",
      {.lowest = milliseconds(20), .highest = std::chrono::minutes(1), .bare = milliseconds(1)});
  return {sub, [&global, options, app] {
            options->timeout_given = app.given("--timeout");
            return RunWatch(global, *options);
          }};
}

}  // namespace refitd::refitctl
