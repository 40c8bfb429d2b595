// Limits of each identity, beside those of the daemon, so that one job can't fill the daemon for
// all (P10). Pure; values.
#ifndef REFITD_DAEMON_POLICY_QUOTA_H_
#define REFITD_DAEMON_POLICY_QUOTA_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "transport/base/status.h"

namespace refitd {

// 0: the daemon's own limit is the only one.
struct IdentityLimits {
  int64_t groups = 0;        // that the identity made at this daemon
  int64_t members = 0;       // attached to this daemon, or waiting to be attached
  int64_t regions = 0;       // of all its members
  int64_t pool_bytes = 0;    // staging pools of the groups that it made, in one place
  int64_t updates = 0;       // running updates that it began
  int64_t mapped_bytes = 0;  // host memory of its members, mapped
  int64_t held_bytes = 0;    // layouts and inline bytes of its members
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

// OK: the identity may take one more of the places that all share, of which `taken` are taken, and
// `held` by itself. One identity takes at most half of them, so that it can't keep all others out.
inline absl::Status CheckPlace(std::string_view what, size_t places, size_t taken, size_t held,
                               std::string_view identity) {
  if (taken >= places) {
    return Error(absl::StatusCode::kResourceExhausted, "{} {} already", taken, what);
  }
  if (held < places / 2) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted,
               "{} {} already, of which {} has {}, the most that one identity may have", taken,
               what, identity, held);
}

}  // namespace refitd

#endif  // REFITD_DAEMON_POLICY_QUOTA_H_
