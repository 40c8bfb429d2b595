#include "daemon/process/line_writer.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <deque>
#include <utility>

#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd {

absl::StatusOr<UniqueFd> OpenForLines(const std::string& path, mode_t mode) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK;
  UniqueFd file(open(path.c_str(), kFlags, mode));
  if (!file.valid() && errno == ENXIO) {
    return Error(absl::StatusCode::kUnavailable, "\"{}\" is a FIFO that nobody reads", path);
  }
  if (!file.valid()) return ErrnoError(errno, fmt::format("\"{}\"", path));
  // The thread that writes may wait.
  if (fcntl(file.get(), F_SETFL, O_APPEND) != 0) return ErrnoError(errno, path);
  return file;
}

struct LineWriter::State {
  State(Sink to, std::function<std::string(int64_t)> counts)
      : sink(std::move(to)), dropped_text(std::move(counts)) {}

  const Sink sink;
  const std::function<std::string(int64_t)> dropped_text;

  Mutex mutex;
  CondVar changed;
  std::deque<Line> lines ABSL_GUARDED_BY(mutex);
  size_t bytes ABSL_GUARDED_BY(mutex) = 0;  // of lines
  int64_t dropped ABSL_GUARDED_BY(mutex) = 0;
  bool writing ABSL_GUARDED_BY(mutex) = false;
  bool ending ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;

  void Push(LogLevel level, std::string text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    bytes += text.size();
    lines.push_back({level, std::chrono::system_clock::now(), std::move(text)});
  }
  void CountDropped() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (dropped > 0) Push(LogLevel::kWarning, dropped_text(std::exchange(dropped, 0)));
  }
  // Waits for the next line; false: there is none, and none will come.
  bool Next(Line* line) {
    MutexLock lock(&mutex);
    writing = false;
    if (lines.empty()) CountDropped();
    while (lines.empty()) {
      ended = ending;
      changed.NotifyAll();  // for Flush, and for the end
      if (ended) return false;
      changed.Wait(&mutex);
    }
    *line = std::move(lines.front());
    lines.pop_front();
    bytes -= line->text.size();
    writing = true;
    return true;
  }
};

LineWriter::LineWriter(Sink sink, std::function<std::string(int64_t)> dropped)
    : state_(std::make_shared<State>(std::move(sink), std::move(dropped))),
      thread_([state = state_] { Run(state); }) {}

LineWriter::~LineWriter() {
  const auto deadline = std::chrono::steady_clock::now() + kEndLimit;
  bool ended = false;
  {
    MutexLock lock(&state_->mutex);
    state_->ending = true;
    state_->changed.NotifyAll();
    while (!state_->ended && state_->changed.WaitUntil(&state_->mutex, deadline)) {
    }
    ended = state_->ended;
  }
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void LineWriter::Run(const std::shared_ptr<State>& state) {
  for (Line line; state->Next(&line);) state->sink(line);
}

void LineWriter::Add(LogLevel level, std::string text) {
  State& state = *state_;
  MutexLock lock(&state.mutex);
  if (state.lines.size() >= kMaxLines || state.bytes + text.size() > kMaxBytes) {
    ++state.dropped;
    return;
  }
  state.CountDropped();
  state.Push(level, std::move(text));
  state.changed.NotifyAll();
}

bool LineWriter::Flush(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  State& state = *state_;
  MutexLock lock(&state.mutex);
  const auto idle = [&state]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
    return state.lines.empty() && !state.writing && state.dropped == 0;
  };
  while (!idle()) {
    if (!state.changed.WaitUntil(&state.mutex, deadline)) return idle();
  }
  return true;
}

}  // namespace refitd
