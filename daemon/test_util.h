// Folders, processes and waits for tests. Not thread-safe.
#ifndef REFITD_DAEMON_TEST_UTIL_H_
#define REFITD_DAEMON_TEST_UTIL_H_

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>

#include "transport/base/eventually_testing.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// A child that runs `body` and then waits to be killed. It never outlives this process.
class ChildProcess {
 public:
  explicit ChildProcess(const std::function<void()>& body) {
    pid_ = fork();
    REFITD_CHECK(pid_ >= 0);
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    for (;;) pause();
  }
  ~ChildProcess() { Kill(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // Does not reap: the child stays a zombie until Kill.
  void Signal(int signal) const { kill(pid_, signal); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
};

inline sockaddr_un UnixAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REFITD_CHECK(path.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Invalid: the connection was refused.
inline UniqueFd ConnectTo(const std::string& path, int type) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  const sockaddr_un address = UnixAddress(path);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    fd.Reset();
  }
  return fd;
}

// Whether data or the end can be read before the deadline.
inline bool Readable(const UniqueFd& fd) {
  pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(kTestDeadline).count();
  return poll(&entry, 1, static_cast<int>(ms)) == 1;
}

}  // namespace refitd

#endif  // REFITD_DAEMON_TEST_UTIL_H_
