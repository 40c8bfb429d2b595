// The memory, descriptors and processor time that this process uses, read from /proc/self.
// Thread-safe.
#ifndef REFITD_DAEMON_PROCESS_PROCESS_STATS_H_
#define REFITD_DAEMON_PROCESS_PROCESS_STATS_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace refitd {

struct ProcessStats {
  int64_t threads = 0;
  int64_t descriptors = 0;      // open, without the one used for counting
  int64_t resident_bytes = 0;   // VmRSS: with mapped regions and pools
  int64_t anonymous_bytes = 0;  // resident (RssAnon): without mapped regions and pools
};

// UNAVAILABLE: /proc has an unexpected format.
absl::StatusOr<ProcessStats> ReadProcessStats();

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_PROCESS_STATS_H_
