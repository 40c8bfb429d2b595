// A group's spec as callers ask for it: checked and completed with the daemon's defaults (P10).
//
// Pure functions, thread-safe.
#ifndef REFITD_DAEMON_NODE_GROUP_SPEC_H_
#define REFITD_DAEMON_NODE_GROUP_SPEC_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/group.h"

namespace refitd {

struct SpecLimits {
  int64_t default_slot_bytes = int64_t{64} << 20;
  int default_slots = 4;
  int64_t max_pool_bytes = int64_t{16} << 30;
};

// Returns the wanted spec with the daemon's defaults in place of 0 for `slots` and `slot_bytes`.
// INVALID_ARGUMENT, naming field and value: a number is out of its range, or a name is no name.
absl::StatusOr<GroupSpec> CheckSpec(GroupSpec wanted, const SpecLimits& limits);

// OK: the wanted spec equals `known`; a field left to its default equals any value.
// FAILED_PRECONDITION: they differ.
absl::Status CheckSameSpec(const std::string& group, GroupSpec wanted, const GroupSpec& known,
                           const SpecLimits& limits);

// OK: the spec equals `has`, except for trainer ranks, which the group compares when trainers
// attach. FAILED_PRECONDITION, naming both values: they differ.
absl::Status CheckEqualSpec(const std::string& group, const GroupSpec& has, const GroupSpec& spec);

// OK: the daemon may move the group's bytes to other daemons. FAILED_PRECONDITION, naming group and
// daemon: the spec demands encrypted_data, and the daemon's data plane does not encrypt. `clear`:
// why it does not; empty: it does.
absl::Status CheckEncryption(const std::string& group, const GroupSpec& spec,
                             const std::string& daemon, const std::string& clear);

// Checks a spec that a coordinator sends to a daemon that joins: its sizes have the same limits as
// in an operator's spec (P10).
absl::Status CheckGivenSpec(const GroupSpec& given, const SpecLimits& limits);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_GROUP_SPEC_H_
