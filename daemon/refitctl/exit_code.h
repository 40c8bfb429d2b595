// refitctl's exit codes. `refitctl --help` prints the same table; scripts may rely on it.
//
// Pure values; thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_EXIT_CODE_H_
#define REFITD_DAEMON_REFITCTL_EXIT_CODE_H_

#include "absl/status/status.h"

namespace refitd::refitctl {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // refused, aborted, or a file that can't be used
  kExitUsage = 2,        // the command line is wrong
  kExitUnreachable = 3,  // no daemon answers there, or it drains
  kExitMismatch = 4,     // bytes in memory differ from the checkpoint
  kExitDeadline = 5,     // a deadline passed
  kExitNotReady = 6,     // an instance is not ready, or not known
};

inline constexpr char kExitCodeHelp[] =
    "Exit codes:\n"
    "  0  done\n"
    "  1  failed or aborted\n"
    "  2  wrong usage\n"
    "  3  the daemon can't be reached, or drains\n"
    "  4  memory differs from the checkpoint\n"
    "  5  a deadline passed\n"
    "  6  the instance is not ready, or not known\n";

inline ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kDataLoss:
      return kExitMismatch;
    case absl::StatusCode::kDeadlineExceeded:
      return kExitDeadline;
    default:
      return kExitFailed;
  }
}

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_EXIT_CODE_H_
