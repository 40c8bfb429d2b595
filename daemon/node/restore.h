// How arenas outlive the leases of their ranks: they are kept when a lease ends, claimed by the
// rank that takes the place, compared when that rank has registered its layout, and given up when
// they were kept long enough or their memory is needed.
//
// P2, P11: a rank that takes up arenas is clean only where structure and content are what the rank
// before held. P8: nothing is kept without an end.
#ifndef REFITD_DAEMON_NODE_RESTORE_H_
#define REFITD_DAEMON_NODE_RESTORE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/node/kept_ranks.h"
#include "daemon/node/member.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"

namespace refitd {

// The lease of an engine rank ends: what is to be kept of it is kept.
void KeepArenas(DaemonState& state, MemberRecord* member, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// An engine rank arrives: if it restores, it claims what is kept of it. PERMISSION_DENIED (P9):
// that belongs to another user.
absl::Status ClaimKept(const DaemonState& state, Arrival* arrival)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// The group has taken the rank in: it gets what it has claimed. What else is kept of the rank is
// given up, and so is what is kept on its GPU, whose memory the rank is about to ask for.
void HandOverKept(DaemonState& state, MemberRecord* member, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// The rank's first layout is registered, over the kept version, or is refused because it is not;
// `differs`: how. Logs and counts that, and drops the kept regions. The rank's own regions keep the
// memory.
void EndRestore(DaemonState& state, MemberRecord* member, std::string_view differs, StateLock& lock)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
// Gives up all for which `wanted` holds. `why` is for the log.
void GiveUpKept(DaemonState& state, const KeptRanks::Wanted& wanted, std::string_view why,
                StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_RESTORE_H_
