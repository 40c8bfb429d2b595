#include "tests/demo/child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "transport/base/status.h"

namespace refitd::demo {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kInterruptPoll{100};  // how soon an interrupt ends a wait

volatile std::sig_atomic_t interrupted = 0;
void OnInterrupt(int) { interrupted = 1; }

absl::Status Cancelled() { return absl::CancelledError("interrupted"); }

// Feeds lines of `fd` to `events` until its other end is closed.
void ReadLines(UniqueFd fd, const std::string& name, EventLog* events) {
  std::string pending;
  char buffer[4096];
  while (true) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    pending.append(buffer, static_cast<size_t>(got));
    size_t end;
    while ((end = pending.find('\n')) != std::string::npos) {
      events->Add(name, pending.substr(0, end));
      pending.erase(0, end + 1);
    }
  }
  events->Close(name);
}

// The environment without the variables that would configure refitd.
std::vector<char*> CleanEnvironment() {
  std::vector<char*> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "REFITD_", 7) != 0) kept.push_back(*entry);
  }
  kept.push_back(nullptr);
  return kept;
}

// Runs in the child, between fork and exec, and so makes async-signal-safe calls only.
[[noreturn]] void Exec(char* const* argv, char* const* environment, int out, int err,
                       pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent died before the child asked for the signal
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::execve(argv[0], argv, environment);
  ::_exit(127);
}

}  // namespace

bool Interrupted() { return interrupted != 0; }

void CatchInterrupts() {
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

void EventLog::Add(const std::string& child, const std::string& line) {
  nlohmann::json event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!event.is_object()) event = {{"event", "unreadable"}, {"reason", line}};
  MutexLock lock(&mutex_);
  outputs_[child].events.push_back(std::move(event));
  changed_.NotifyAll();
}

void EventLog::Close(const std::string& child) {
  MutexLock lock(&mutex_);
  outputs_[child].closed = true;
  changed_.NotifyAll();
}

absl::StatusOr<nlohmann::json> EventLog::Await(const std::string& child, const std::string& event,
                                               int64_t version, TimePoint deadline) {
  static constexpr std::string_view kTrouble[] = {"mismatch", "aborted", "failed", "lost",
                                                  "unreadable"};
  MutexLock lock(&mutex_);
  while (true) {
    const Output& output = outputs_[child];
    for (const auto& seen : output.events) {
      const std::string name = seen.value("event", "");
      if (name == event && (version == 0 || seen.value("version", int64_t{0}) == version)) {
        return seen;
      }
      if (std::find(std::begin(kTrouble), std::end(kTrouble), name) != std::end(kTrouble)) {
        return Error(absl::StatusCode::kAborted, "{}: {}: {}", child, name,
                     seen.value("reason", ""));
      }
    }
    if (output.closed) {
      return Error(absl::StatusCode::kAborted, "{} ended before '{}' of version {}", child, event,
                   version);
    }
    if (Interrupted()) return Cancelled();
    const auto now = steady_clock::now();
    if (now >= deadline) {
      return Error(absl::StatusCode::kDeadlineExceeded, "{}: no '{}' of version {} in time", child,
                   event, version);
    }
    changed_.WaitUntil(&mutex_, std::min(deadline, now + kInterruptPoll));
  }
}

nlohmann::json EventLog::Last(const std::string& child) {
  MutexLock lock(&mutex_);
  const Output& output = outputs_[child];
  return output.events.empty() ? nlohmann::json() : output.events.back();
}

absl::StatusOr<std::unique_ptr<Child>> Child::Start(const std::string& name,
                                                    const std::vector<std::string>& argv,
                                                    const std::string& stderr_path,
                                                    EventLog* events) {
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0) return ErrnoError(errno, "pipe");
  UniqueFd read_end(pipe_fds[0]);
  UniqueFd write_end(pipe_fds[1]);
  const UniqueFd err(::open(stderr_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!err.valid()) return ErrnoError(errno, stderr_path);
  std::vector<char*> arguments;
  for (const std::string& argument : argv) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  const std::vector<char*> environment = CleanEnvironment();
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return ErrnoError(errno, fmt::format("starting {}", name));
  if (pid == 0) Exec(arguments.data(), environment.data(), write_end.get(), err.get(), parent);
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const int pidfd_error = errno;
  const bool watched = pidfd.valid();
  std::unique_ptr<Child> child(new Child(name, pid, std::move(pidfd)));
  if (!watched) return ErrnoError(pidfd_error, fmt::format("watching {}", name));
  child->reader_ = std::thread(ReadLines, std::move(read_end), name, events);
  return child;
}

Child::~Child() {
  if (!reaped_) {
    Signal(SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (reader_.joinable()) reader_.join();  // the pipe's other end died with the child
}

void Child::Signal(int signal) const { ::kill(pid_, signal); }

absl::StatusOr<int> Child::Wait(TimePoint deadline) {
  while (!reaped_) {
    if (Interrupted()) return Cancelled();
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    pollfd poll_fd{pidfd_.get(), POLLIN, 0};
    const auto wait = std::clamp(left, milliseconds(0), kInterruptPoll);
    if (::poll(&poll_fd, 1, static_cast<int>(wait.count())) == 1) {
      int status = 0;
      if (::waitpid(pid_, &status, 0) < 0) return ErrnoError(errno, name_);
      reaped_ = true;
      exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    } else if (left <= milliseconds(0)) {
      return Error(absl::StatusCode::kDeadlineExceeded, "{} (pid {}) does not end", name_, pid_);
    }
  }
  if (reader_.joinable()) reader_.join();
  return exit_code_;
}

}  // namespace refitd::demo
