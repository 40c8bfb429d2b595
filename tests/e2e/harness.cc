#include "tests/e2e/harness.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "transport/base/status.h"

namespace refitd::e2e {
namespace {

using Clock = std::chrono::steady_clock;

int MillisUntil(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

// Whether every thread of the process has stopped, or ended.
bool Stopped(pid_t pid) {
  std::error_code gone;
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks, gone)) {
    std::ifstream stat(task.path() / "stat");
    const std::string line{std::istreambuf_iterator<char>(stat), {}};
    // The name before the state may contain anything, even parentheses.
    const size_t state = line.rfind(") ");
    if (state != std::string::npos && line.find_first_of("TtZX", state + 2) != state + 2) {
      return false;
    }
  }
  return true;
}

// Whether a process accepts connections at `path`; a daemon that was killed leaves the file.
bool Listens(const std::string& path) {
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

}  // namespace

std::string OwnLoopback(int index) {
  // 127.64.0.0 and up: 17 bits of process id and 5 of index. 127.0.0.1 is used by all processes.
  const int pid = getpid() & 0x1FFFF;
  const int host = (1 << 22) | (pid << 5) | index;
  return "127." + std::to_string(host >> 16) + "." + std::to_string((host >> 8) & 0xFF) + "." +
         std::to_string(host & 0xFF);
}

std::string BinaryPath(const std::string& target) {
  namespace fs = std::filesystem;
  // Under `bazel test` the working folder is the tree of runfiles; when run by hand, the binaries
  // lie beside this one.
  if (fs::exists(target)) return fs::absolute(target);
  const fs::path self = fs::read_symlink("/proc/self/exe");
  for (fs::path folder = self.parent_path(); folder.has_relative_path();
       folder = folder.parent_path()) {
    if (fs::exists(folder / target)) return folder / target;
  }
  throw std::runtime_error("no " + target + " beside " + self.string());
}

// ---- processes ----

Process::Process(const std::vector<std::string>& argv) {
  int to_child[2];
  int from_child[2];
  REFITD_CHECK(pipe2(to_child, O_CLOEXEC) == 0 && pipe2(from_child, O_CLOEXEC) == 0);
  stderr_.Reset(memfd_create("stderr", MFD_CLOEXEC));
  std::vector<char*> args;
  for (const std::string& arg : argv) args.push_back(const_cast<char*>(arg.c_str()));
  args.push_back(nullptr);
  // A command to a process that was killed is lost; the missing answer shows that.
  signal(SIGPIPE, SIG_IGN);
  const pid_t parent = getpid();
  pid_ = fork();
  REFITD_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    signal(SIGPIPE, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(to_child[0], STDIN_FILENO);
    dup2(from_child[1], STDOUT_FILENO);
    dup2(stderr_.get(), STDERR_FILENO);
    execv(args[0], args.data());
    _exit(127);
  }
  close(to_child[0]);
  close(from_child[1]);
  stdin_.Reset(to_child[1]);
  stdout_.Reset(from_child[0]);
}

Process::~Process() {
  if (exit_.has_value()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Process::Signal(int signal) const {
  if (exit_.has_value()) return;
  kill(pid_, signal);
  if (signal == SIGSTOP) REFITD_CHECK(Eventually([this] { return Stopped(pid_); }));
}

bool Process::EndsWithin(std::chrono::milliseconds wait) const {
  if (exit_.has_value()) return true;
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  pollfd entry{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  return poll(&entry, 1, static_cast<int>(wait.count())) == 1;
}

std::optional<int> Process::WaitExit() {
  if (exit_.has_value()) return exit_;
  if (!EndsWithin(kDeadline)) return std::nullopt;
  int status = 0;
  REFITD_CHECK(waitpid(pid_, &status, 0) == pid_);
  exit_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return exit_;
}

void Process::WriteLine(const std::string& line) {
  const std::string text = line + "\n";
  // Short lines into a pipe that is read are never written partially.
  [[maybe_unused]] const ssize_t n = write(stdin_.get(), text.data(), text.size());
}

std::optional<std::string> Process::ReadLine() {
  const auto deadline = Clock::now() + kDeadline;
  for (;;) {
    if (const size_t end = buffered_.find('\n'); end != std::string::npos) {
      std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    pollfd entry{.fd = stdout_.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, MillisUntil(deadline)) != 1) return std::nullopt;
    char buffer[4096];
    const ssize_t n = read(stdout_.get(), buffer, sizeof(buffer));
    if (n <= 0) return std::nullopt;
    buffered_.append(buffer, static_cast<size_t>(n));
  }
}

std::string Process::Errors() {
  std::string text(1 << 20, '\0');
  const ssize_t n = pread(stderr_.get(), text.data(), text.size(), 0);
  text.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  return text;
}

// ---- the daemon ----

// Tests that are not about TLS run as a laboratory does.
static bool InTheClear(const std::vector<std::string>& flags) {
  return std::none_of(flags.begin(), flags.end(), [](const std::string& flag) {
    return flag.starts_with("--tls-") || flag.starts_with("--insecure");
  });
}

// Tests run beside each other on machines that are busy with compilers and sanitizers, so a test
// that is not about silence allows twice the default.
static constexpr char kTestSilence[] = "--peers-silence-ms=10000";
static bool SaysSilence(const std::vector<std::string>& flags) {
  return std::any_of(flags.begin(), flags.end(), [](const std::string& flag) {
    return flag.starts_with("--peers-silence-ms");
  });
}

Daemon::Daemon(std::vector<std::string> flags, std::vector<std::string> launcher)
    : socket_(folder_ / "refitd.sock"), flags_(std::move(flags)), launcher_(std::move(launcher)) {
  chmod(folder_.path().c_str(), 0755);  // other users may try the socket
  Start();
}

// The address of the first listener of a kind; empty: there is none.
static std::string ListenerOf(const v1::GetStatusResponse& status, std::string_view kind) {
  for (const std::string& listener : status.listeners()) {
    if (listener.rfind(kind, 0) == 0) return listener.substr(kind.size());
  }
  return "";
}

void Daemon::Start() {
  std::vector<std::string> argv = launcher_;
  argv.insert(argv.end(), {BinaryPath("daemon/refitd"), "--listen-unix=" + socket_});
  argv.insert(argv.end(), flags_.begin(), flags_.end());
  if (InTheClear(flags_)) argv.push_back("--insecure");
  if (!SaysSilence(flags_)) argv.push_back(kTestSilence);
  process_ = std::make_unique<Process>(argv);
  const std::shared_ptr<grpc::Channel> channel = Connect();
  operator_ = v1::Operator::NewStub(channel);
  // The daemon listens before it serves: early connections wait in the queue.
  const bool listens = Eventually(
      [this] { return Listens(socket_) || process_->EndsWithin(std::chrono::milliseconds(1)); });
  const grpc::Status status = Call(&v1::Operator::Stub::GetStatus, v1::GetStatusRequest()).status;
  if (!listens || !status.ok())
    throw std::runtime_error("refitd: " + status.error_message() + "\n" + log());
  const v1::GetStatusResponse running = Status();
  address_ = ListenerOf(running, "tcp:");
  links_ = ListenerOf(running, "peers:");
  // A restarted daemon must be found at the same address.
  for (std::string& flag : flags_) {
    if (flag.rfind("--listen-tcp=", 0) != 0) continue;
    if (flag.size() > 2 && flag.substr(flag.size() - 2) == ":0") flag = "--listen-tcp=" + address_;
    break;
  }
}

void Daemon::Kill() {
  Signal(SIGKILL);
  WaitExit();
}

void Daemon::Restart() {
  REFITD_CHECK(WaitExit().has_value());
  Start();
}

std::optional<int> Daemon::Stop() {
  Signal(SIGTERM);
  return WaitExit();
}

v1::GetStatusResponse Daemon::Status() {
  return Call(&v1::Operator::Stub::GetStatus, v1::GetStatusRequest()).response;
}

v1::GroupStatus Daemon::Group(const std::string& name) {
  v1::GetGroupRequest request;
  request.set_group(name);
  return Call(&v1::Operator::Stub::GetGroup, request).response.group();
}

std::string Daemon::InstanceState(const std::string& group, const std::string& instance) {
  const v1::GroupStatus status = Group(group);
  for (const v1::InstanceStatus& i : status.instances()) {
    if (i.name() == instance) return i.state();
  }
  return "";
}

int Daemon::MemfdMappings() const {
  std::ifstream maps("/proc/" + std::to_string(pid()) + "/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") != std::string::npos) ++count;
  }
  return count;
}

// ---- members ----

namespace {

std::vector<std::string> MemberArguments(const Daemon& daemon, const std::string& role,
                                         const std::vector<std::string>& settings) {
  std::vector<std::string> argv = {BinaryPath("tests/e2e/member"), role, daemon.socket()};
  argv.insert(argv.end(), settings.begin(), settings.end());
  return argv;
}

}  // namespace

MemberProcess::MemberProcess(const Daemon& daemon, const std::string& role,
                             const std::vector<std::string>& settings)
    : process_(MemberArguments(daemon, role, settings)) {}

MemberProcess::~MemberProcess() {
  for (const pid_t child : children_) kill(child, SIGKILL);
}

std::string MemberProcess::Do(const std::string& command) {
  Send(command);
  return Answer();
}

bool MemberProcess::ForkChild() {
  const std::string answer = Do("fork");
  pid_t child = 0;
  if (answer.rfind("ok ", 0) != 0) return false;
  std::from_chars(answer.data() + 3, answer.data() + answer.size(), child);
  if (child <= 0) return false;
  children_.push_back(child);
  return true;
}

void MemberProcess::Kill() {
  process_.Signal(SIGKILL);
  process_.WaitExit();
}

}  // namespace refitd::e2e
