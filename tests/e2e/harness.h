// Real processes for end-to-end tests: a test's own daemons, and member processes to kill and stop.
//
// A Daemon is a refitd with its own folder, socket and flags; it is ready when it answers
// GetStatus. A MemberProcess is tests/e2e/member.cc, driven line by line. Both end with their
// object, at the latest with the test. Every wait ends at kDeadline. Not thread-safe.
#ifndef REFITD_TESTS_E2E_HARNESS_H_
#define REFITD_TESTS_E2E_HARNESS_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "refitd/v1/operator.grpc.pb.h"
#include "tests/e2e/raw_client.h"
#include "transport/base/eventually_testing.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/base/unique_fd.h"

namespace refitd::e2e {

// An address of 127.0.0.0/8 that only this process uses, `index` from 0 to 31: no other process's
// connection can take a port there by chance.
std::string OwnLoopback(int index);

// The path of a binary of this build, such as "daemon/refitd" or "tests/e2e/member".
std::string BinaryPath(const std::string& target);

// A process with pipes. It is killed when the object is destroyed, and also when the thread that
// made it ends, since the kernel counts threads.
class Process {
 public:
  explicit Process(const std::vector<std::string>& argv);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  // Returns from SIGSTOP only when all its threads have stopped, since the kernel stops them one by
  // one.
  void Signal(int signal) const;
  // Waits for a moment; true: the process has ended.
  bool EndsWithin(std::chrono::milliseconds wait) const;
  // Exit code, or 128 + the signal that ended it. nullopt: it still runs at kDeadline.
  std::optional<int> WaitExit();
  void WriteLine(const std::string& line);
  // A line of its stdout; nullopt: stdout ended, or kDeadline passed.
  std::optional<std::string> ReadLine();
  // All of its stderr so far.
  std::string Errors();

 private:
  pid_t pid_ = -1;
  std::optional<int> exit_;
  UniqueFd stdin_;
  UniqueFd stdout_;
  UniqueFd stderr_;  // a file, which the process writes to
  std::string buffered_;
};

class Daemon {
 public:
  // Starts and waits until the daemon answers; throws std::runtime_error with its log if it does
  // not. Adds --insecure unless a flag is about TLS or says --insecure itself, and a limit of
  // silence of 10 s unless a flag sets it. `launcher`: a command, with options, that ends by
  // executing the command line after it (nsenter, prlimit).
  explicit Daemon(std::vector<std::string> flags = {}, std::vector<std::string> launcher = {});

  const std::string& socket() const { return socket_; }
  pid_t pid() const { return process_->pid(); }
  std::string log() { return process_->Errors(); }
  // HOST:PORT of its first TCP listener, by which members name it as coordinator; empty: it has
  // none.
  const std::string& address() const { return address_; }
  // HOST:PORT of its first listener for links alone; empty: it has none.
  const std::string& links() const { return links_; }
  // Each call makes a new connection.
  std::shared_ptr<grpc::Channel> Connect() const { return ConnectTo(socket_); }

  void Signal(int signal) { process_->Signal(signal); }
  std::optional<int> WaitExit() { return process_->WaitExit(); }
  // Sends SIGTERM and returns the exit code; nullopt: it still runs at kDeadline.
  std::optional<int> Stop();
  // Sends SIGKILL and reaps. The socket's file stays, as after a crash.
  void Kill();
  // Call after the daemon has ended: starts another with the same folder, socket, flags and TCP
  // address, ready as after construction. The port stays free meanwhile only on a host to which no
  // other process connects: OwnLoopback().
  void Restart();

  v1::GetStatusResponse Status();
  v1::ResourceStatus Resources() { return Status().resources(); }
  // Empty if the group does not exist.
  v1::GroupStatus Group(const std::string& name);
  std::string InstanceState(const std::string& group, const std::string& instance);
  // How many memfds the process has mapped (/proc/PID/maps).
  int MemfdMappings() const;

  // Calls of Operator with kDeadline.
  template <typename Request, typename Response>
  Outcome<Response> Call(grpc::Status (v1::Operator::Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                         const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    Outcome<Response> outcome;
    outcome.status = (operator_.get()->*method)(&context, request, &outcome.response);
    return outcome;
  }

 private:
  void Start();

  TempFolder folder_;
  const std::string socket_;
  std::vector<std::string> flags_;
  const std::vector<std::string> launcher_;
  std::string address_;
  std::string links_;
  std::unique_ptr<Process> process_;
  std::unique_ptr<v1::Operator::Stub> operator_;
};

// A member in a process of its own (tests/e2e/member.cc lists the commands).
class MemberProcess {
 public:
  // `role`: "trainer" or "engine"; settings are "key=value".
  MemberProcess(const Daemon& daemon, const std::string& role,
                const std::vector<std::string>& settings);
  ~MemberProcess();

  pid_t pid() const { return process_.pid(); }
  // Sends a command and waits for its answer: "ok ..." or "error CODE MESSAGE"; "": the process is
  // gone or the deadline passed.
  std::string Do(const std::string& command);
  // Do in two halves, for commands that block.
  void Send(const std::string& command) { process_.WriteLine(command); }
  std::string Answer() { return process_.ReadLine().value_or(""); }
  // Forks a child that keeps the member's sockets open and lives on after the member's death.
  bool ForkChild();

  void Signal(int signal) const { process_.Signal(signal); }
  // Sends SIGKILL and reaps.
  void Kill();
  std::string Errors() { return process_.Errors(); }

 private:
  Process process_;
  std::vector<pid_t> children_;
};

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_HARNESS_H_
