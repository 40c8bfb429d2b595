// Whether code aborts the process, as a failed REFITD_CHECK does. For tests that plant an error.
#ifndef REFITD_TESTS_ABORTS_H_
#define REFITD_TESTS_ABORTS_H_

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "transport/base/status.h"

namespace refitd {

// Runs `body` in a child process, which has no standard error; true: that signal ended the child.
// The caller must have one thread.
inline bool EndsBy(int expected, const std::function<void()>& body) {
  const pid_t pid = fork();
  REFITD_CHECK(pid >= 0);
  if (pid == 0) {
    close(STDERR_FILENO);
    signal(expected, SIG_DFL);  // Catch2 would report the signal as the test's failure
    body();
    _exit(0);
  }
  int status = 0;
  REFITD_CHECK(waitpid(pid, &status, 0) == pid);
  return WIFSIGNALED(status) && WTERMSIG(status) == expected;
}

inline bool Aborts(const std::function<void()>& body) { return EndsBy(SIGABRT, body); }

}  // namespace refitd

#endif  // REFITD_TESTS_ABORTS_H_
