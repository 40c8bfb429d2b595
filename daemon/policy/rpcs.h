// Every RPC that the daemon serves, and what the policy asks of its callers (P9).
//
// A handler passes its Rpc to the authorizer, which looks here: no handler decides by itself.
// rpcs.cc compares the table with the services in the protos, so that a new RPC without an entry
// does not compile.
//
// Pure; constants.
#ifndef REFITD_DAEMON_POLICY_RPCS_H_
#define REFITD_DAEMON_POLICY_RPCS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "daemon/policy/policy.h"
#include "daemon/process/audit_event.h"

namespace refitd {

// The RPCs, in the order of kRpcs.
enum class Rpc : uint8_t {
  kTrainerAttach,
  kTrainerRegisterRegion,
  kTrainerReleaseRegion,
  kTrainerRegisterLayout,
  kTrainerBegin,
  kTrainerLeaseSlot,
  kTrainerReleaseSlot,
  kTrainerPushBucket,
  kTrainerCommit,
  kTrainerAbort,
  kTrainerRefit,
  kTrainerRollback,
  kTrainerReleasePrevious,
  kTrainerGetUpdate,
  kEngineAttach,
  kEngineRegisterRegion,
  kEngineReleaseRegion,
  kEngineRegisterLayout,
  kOperatorCreateGroup,
  kOperatorReplaceGroup,  // CreateGroup with `replace`
  kOperatorDeleteGroup,
  kOperatorAbortUpdate,
  kOperatorRollback,
  kOperatorReleasePrevious,
  kOperatorDrain,
  kOperatorGetStatus,
  kOperatorListGroups,
  kOperatorGetGroup,
  kOperatorListMembers,
  kOperatorWatchUpdates,
  kOperatorGetUpdateStatistics,
  kOperatorCheckAccess,
  kPeerLink,
  kHealthCheck,
  kHealthCheckInstance,  // Check with the name of an instance
  kHealthWatch,
  kHealthWatchInstance,
  kReflectionInfo,
};

// The groups in which a caller must have one of an entry's roles.
enum class RpcScope : uint8_t {
  kKnown,  // no role: some rule must name the caller
  kGroup,  // the group that the request or the hello names
  // The group that the request names; if it names none, some group, and the answer leaves out the
  // groups in which the caller has no such role.
  kGroups,
  kEveryGroup,  // the group that the request names; if it names none, every group
  // No role: the call carries a lease. A lease was given for the role at Attach and works for the
  // identity that it was given to. It goes on after a change of the policy.
  kLease,
};

struct RpcEntry {
  Rpc rpc;
  std::string_view method;  // as gRPC names it, without the first '/'
  RpcScope scope;
  RoleSet roles;                        // any of them; empty for scopes that ask for none
  std::optional<AuditWhat> audit = {};  // the act that the audit log names; nullopt: none
};

inline constexpr std::array kRpcs = {
    RpcEntry{Rpc::kTrainerAttach, "refitd.v1.Trainer/Attach", RpcScope::kGroup, {Role::kTrainer}},
    RpcEntry{Rpc::kTrainerRegisterRegion, "refitd.v1.Trainer/RegisterRegion", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerReleaseRegion, "refitd.v1.Trainer/ReleaseRegion", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerRegisterLayout, "refitd.v1.Trainer/RegisterLayout", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerBegin, "refitd.v1.Trainer/Begin", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerLeaseSlot, "refitd.v1.Trainer/LeaseSlot", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerReleaseSlot, "refitd.v1.Trainer/ReleaseSlot", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerPushBucket, "refitd.v1.Trainer/PushBucket", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerCommit, "refitd.v1.Trainer/Commit", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerAbort, "refitd.v1.Trainer/Abort", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerRefit, "refitd.v1.Trainer/Refit", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerRollback, "refitd.v1.Trainer/Rollback", RpcScope::kLease, {}},
    RpcEntry{
        Rpc::kTrainerReleasePrevious, "refitd.v1.Trainer/ReleasePrevious", RpcScope::kLease, {}},
    RpcEntry{Rpc::kTrainerGetUpdate,
             "refitd.v1.Trainer/GetUpdate",
             RpcScope::kGroup,
             {Role::kTrainer, Role::kEngine, Role::kOperatorRead}},
    RpcEntry{Rpc::kEngineAttach, "refitd.v1.Engine/Attach", RpcScope::kGroup, {Role::kEngine}},
    RpcEntry{Rpc::kEngineRegisterRegion, "refitd.v1.Engine/RegisterRegion", RpcScope::kLease, {}},
    RpcEntry{Rpc::kEngineReleaseRegion, "refitd.v1.Engine/ReleaseRegion", RpcScope::kLease, {}},
    RpcEntry{Rpc::kEngineRegisterLayout, "refitd.v1.Engine/RegisterLayout", RpcScope::kLease, {}},
    RpcEntry{Rpc::kOperatorCreateGroup,
             "refitd.v1.Operator/CreateGroup",
             RpcScope::kGroup,
             {Role::kOperatorWrite},
             AuditWhat::kCreate},
    RpcEntry{Rpc::kOperatorReplaceGroup,
             "refitd.v1.Operator/CreateGroup",
             RpcScope::kGroup,
             {Role::kOperatorWrite},
             AuditWhat::kReplace},
    RpcEntry{Rpc::kOperatorDeleteGroup,
             "refitd.v1.Operator/DeleteGroup",
             RpcScope::kGroup,
             {Role::kOperatorWrite},
             AuditWhat::kDelete},
    RpcEntry{Rpc::kOperatorAbortUpdate,
             "refitd.v1.Operator/AbortUpdate",
             RpcScope::kGroup,
             {Role::kOperatorWrite},
             AuditWhat::kAbort},
    RpcEntry{Rpc::kOperatorRollback,
             "refitd.v1.Operator/Rollback",
             RpcScope::kGroup,
             {Role::kOperatorWrite},
             AuditWhat::kRollback},
    RpcEntry{Rpc::kOperatorReleasePrevious,
             "refitd.v1.Operator/ReleasePrevious",
             RpcScope::kGroup,
             {Role::kOperatorWrite}},
    RpcEntry{Rpc::kOperatorDrain,
             "refitd.v1.Operator/Drain",
             RpcScope::kEveryGroup,
             {Role::kOperatorWrite},
             AuditWhat::kDrain},
    RpcEntry{Rpc::kOperatorGetStatus,
             "refitd.v1.Operator/GetStatus",
             RpcScope::kGroups,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kOperatorListGroups,
             "refitd.v1.Operator/ListGroups",
             RpcScope::kGroups,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kOperatorGetGroup,
             "refitd.v1.Operator/GetGroup",
             RpcScope::kGroup,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kOperatorListMembers,
             "refitd.v1.Operator/ListMembers",
             RpcScope::kGroups,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kOperatorWatchUpdates,
             "refitd.v1.Operator/WatchUpdates",
             RpcScope::kEveryGroup,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kOperatorGetUpdateStatistics,
             "refitd.v1.Operator/GetUpdateStatistics",
             RpcScope::kGroup,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kOperatorCheckAccess,
             "refitd.v1.Operator/CheckAccess",
             RpcScope::kGroup,
             {Role::kOperatorRead}},
    RpcEntry{Rpc::kPeerLink, "refitd.v1.Peer/Link", RpcScope::kGroup, {Role::kPeer}},
    RpcEntry{Rpc::kHealthCheck, "grpc.health.v1.Health/Check", RpcScope::kKnown, {}},
    RpcEntry{Rpc::kHealthCheckInstance,
             "grpc.health.v1.Health/Check",
             RpcScope::kGroup,
             {Role::kEngine, Role::kOperatorRead}},
    RpcEntry{Rpc::kHealthWatch, "grpc.health.v1.Health/Watch", RpcScope::kKnown, {}},
    RpcEntry{Rpc::kHealthWatchInstance,
             "grpc.health.v1.Health/Watch",
             RpcScope::kGroup,
             {Role::kEngine, Role::kOperatorRead}},
    RpcEntry{Rpc::kReflectionInfo,
             "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
             RpcScope::kKnown,
             {}},
};

constexpr const RpcEntry& EntryOf(Rpc rpc) { return kRpcs[static_cast<size_t>(rpc)]; }

// Whether entry i is of Rpc i, every Rpc has an entry, and those entries have roles whose scope
// needs one.
constexpr bool RpcTableIsValid() {
  for (size_t i = 0; i < kRpcs.size(); ++i) {
    const RpcEntry& entry = kRpcs[i];
    if (static_cast<size_t>(entry.rpc) != i) return false;
    const bool needs_role = entry.scope != RpcScope::kKnown && entry.scope != RpcScope::kLease;
    if (needs_role == entry.roles.empty()) return false;
  }
  return kRpcs.size() == static_cast<size_t>(Rpc::kReflectionInfo) + 1;
}
static_assert(RpcTableIsValid());

}  // namespace refitd

#endif  // REFITD_DAEMON_POLICY_RPCS_H_
