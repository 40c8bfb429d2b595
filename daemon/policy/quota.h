// Limits of each identity, beside those of the daemon, so that one job can't fill the daemon for
// all (P10). Pure; values.
#ifndef REFITD_DAEMON_POLICY_QUOTA_H_
#define REFITD_DAEMON_POLICY_QUOTA_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "transport/base/status.h"

namespace refitd {

// 0: the daemon's own limit is the only one.
struct IdentityLimits {
  int64_t groups = 0;      // that the identity made at this daemon
  int64_t members = 0;     // attached to this daemon, or waiting to be attached
  int64_t regions = 0;     // of all its members
  int64_t pool_bytes = 0;  // staging pools of the groups that it made, in one place
  int64_t updates = 0;     // running updates that it began
  bool operator==(const IdentityLimits&) const = default;
};

// OK: `more` may be added to the `held` that the identity has. RESOURCE_EXHAUSTED names the limit's
// setting, the identity and the values.
inline absl::Status CheckQuota(std::string_view setting, int64_t limit, int64_t held, int64_t more,
                               std::string_view identity) {
  if (limit == 0 || more <= limit - held) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted,
               "limits.per_identity.{}: {} has {} at this daemon, asks for {} more, and may have "
               "{}",
               setting, identity, held, more, limit);
}

}  // namespace refitd

#endif  // REFITD_DAEMON_POLICY_QUOTA_H_
