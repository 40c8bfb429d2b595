// Arenas of engine ranks whose leases have ended, kept for a rank that comes back in their place:
// it gets descriptors of both sides, and is clean once the memory was found to hold the version.
//
// Invariants
//  1. Arenas are kept of at most kMaxRanks ranks; those that would end first give way (P10).
//  2. A rank (group, instance, number) has arenas here at most once.
//  3. What is kept belonged to a rank that its daemon saw clean, at a version with a digest. The
//     daemon has not written the fronts since; that nobody has is for the digest to show (P2, P11).
//  4. It is given only to the process that had it, or when that process has ended: what a process
//     still reads is not written under it (P2).
//
// Arenas that are taken out are unmapped when the result is destroyed, which must not happen under
// the mutex. The class is part of the daemon's state and is used under the state lock
// (state_lock.h).
#ifndef REFITD_DAEMON_NODE_KEPT_RANKS_H_
#define REFITD_DAEMON_NODE_KEPT_RANKS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/node/member.h"

namespace refitd {

class KeptRanks {
 public:
  static constexpr size_t kMaxRanks = 1024;
  using Wanted = std::function<bool(const KeptRank&)>;

  // Keeps them, in place of what was kept of the same rank; returns what gave way.
  [[nodiscard]] std::vector<KeptRank> Keep(KeptRank kept);
  // Finds what is kept for the rank that attaches as `record` says; null: nothing.
  // PERMISSION_DENIED (P9): it belongs to another user. FAILED_PRECONDITION: the process that had
  // it runs still, or the rank was one of another world size or device.
  absl::StatusOr<const KeptRank*> Find(const MemberRecord& record) const;
  // Takes out all for which `wanted` holds.
  std::vector<KeptRank> TakeAll(const Wanted& wanted);
  // Takes out, of those for which `wanted` holds, the one that would end first.
  std::optional<KeptRank> TakeFirst(const Wanted& wanted);
  // When the first of them ends; nullopt: nothing is kept.
  std::optional<TimePoint> NextEnd() const;

  size_t size() const { return ranks_.size(); }
  std::vector<const KeptRank*> all() const;
  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  using Key = std::tuple<std::string, std::string, int>;  // group, instance, rank

  std::map<Key, KeptRank> ranks_;
};

// Whether both are the same rank of the same instance and group.
bool SameRank(const KeptRank& kept, const MemberRecord& record);
// Returns the arenas of an engine rank whose lease ends, if all that its layout names lies in
// arenas whose descriptors the daemon has, and the daemon saw the rank clean. nullopt: nothing is
// to be kept.
std::optional<KeptRank> KeptOf(const MemberRecord& member, TimePoint until);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_KEPT_RANKS_H_
