#include "daemon/node/identities.h"

#include <optional>
#include <utility>

#include "daemon/policy/quota.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

int PidOf(const Peer& peer) { return peer.credentials.has_value() ? peer.credentials->pid : 0; }

bool Is(const MemberRecord& member, const std::string& identity) {
  return !member.lost && IdentityOf(member.peer) == identity;
}

// The audit log's line about a trainer's call, without the outcome; nullopt: the log has no line
// about such calls.
std::optional<AuditEvent> AuditOf(const GroupEvent& event) {
  AuditEvent line;
  const auto fill = [&line](AuditWhat what, const char* rpc, const auto& e) {
    line.what = what;
    line.rpc = rpc;
    line.version = e.version.value();
    line.request_id = e.request_id;
    return line;
  };
  if (const auto* begin = std::get_if<BeginEvent>(&event)) {
    return fill(AuditWhat::kBegin, "refitd.v1.Trainer/Begin", *begin);
  }
  if (const auto* commit = std::get_if<CommitEvent>(&event)) {
    return fill(AuditWhat::kCommit, "refitd.v1.Trainer/Commit", *commit);
  }
  if (const auto* refit = std::get_if<RefitEvent>(&event)) {
    return fill(AuditWhat::kCommit, "refitd.v1.Trainer/Refit", *refit);
  }
  if (const auto* abort = std::get_if<AbortEvent>(&event)) {
    return fill(AuditWhat::kAbort, "refitd.v1.Trainer/Abort", *abort);
  }
  if (const auto* rollback = std::get_if<RollbackEvent>(&event)) {
    line.what = AuditWhat::kRollback;
    line.rpc = "refitd.v1.Trainer/Rollback";
    if (rollback->version.has_value()) line.version = rollback->version->value();
    line.request_id = rollback->request_id;
    return line;
  }
  return std::nullopt;
}

void Audit(const DaemonState& state, const AuditEvent& event) {
  if (state.options.audit != nullptr) state.options.audit->Record(event);
}

}  // namespace

// ---- owners ----

bool MayMakeGroup(const DaemonState& state, const std::string& group, const std::string& identity) {
  if (state.options.owner_rule == nullptr) return true;
  const OwnerRule rule = state.options.owner_rule(group, identity);
  return rule == OwnerRule::kNone || rule == OwnerRule::kNamed;
}

// ---- limits of each identity ----

absl::Status AdmitGroup(const DaemonState& state, const std::string& creator, int64_t pool_bytes,
                        const GroupRecord* joined) {
  const IdentityLimits& limits = state.options.per_identity;
  if (creator.empty() || (limits.groups == 0 && limits.pool_bytes == 0)) return absl::OkStatus();
  int64_t groups = 0;
  int64_t bytes = 0;
  for (const auto& [name, group] : state.groups.all()) {
    if (group->creator != creator || group.get() == joined) continue;
    ++groups;
    bytes += group->pool_bytes();
  }
  REFITD_RETURN_IF_ERROR(CheckQuota("groups", limits.groups, groups, 1, creator));
  return CheckQuota("pool_bytes", limits.pool_bytes, bytes, pool_bytes, creator);
}

absl::Status AdmitMember(const DaemonState& state, const Peer& peer) {
  const int64_t limit = state.options.per_identity.members;
  if (limit == 0) return absl::OkStatus();
  const std::string identity = IdentityOf(peer);
  int64_t members = state.pending.CountOf([&](const MemberRecord& m) { return Is(m, identity); });
  for (const auto& [id, member] : state.members.all()) members += Is(member, identity) ? 1 : 0;
  return CheckQuota("members", limit, members, 1, identity);
}

absl::Status AdmitRegionOf(const DaemonState& state, const MemberRecord& owner) {
  const int64_t limit = state.options.per_identity.regions;
  if (limit == 0) return absl::OkStatus();
  const std::string identity = IdentityOf(owner.peer);
  int64_t regions = 0;
  for (const auto& [id, member] : state.members.all()) {
    if (Is(member, identity)) regions += static_cast<int64_t>(member.regions.size());
  }
  return CheckQuota("regions", limit, regions, 1, identity);
}

absl::Status AdmitUpdate(DaemonState& state, const MemberRecord& trainer,
                         const std::string& request_id) {
  GroupRecord* const group = state.groups.Of(trainer);
  // A catch-up gives way, so this call opens an update.
  if (group->machine->update_running() && !group->machine->catch_up_running())
    return absl::OkStatus();
  const std::string identity = IdentityOf(trainer.peer);
  if (const int64_t limit = state.options.per_identity.updates; limit != 0) {
    int64_t updates = 0;
    for (const std::string& name : state.groups.running()) {
      updates += state.groups.Find(name)->opener.identity == identity ? 1 : 0;
    }
    REFITD_RETURN_IF_ERROR(CheckQuota("updates", limit, updates, 1, identity));
  }
  group->opener = {.identity = identity, .pid = PidOf(trainer.peer), .request_id = request_id};
  return absl::OkStatus();
}

// ---- the audit log ----

void AuditAttach(const DaemonState& state, const MemberRecord& member) {
  Audit(state, {.what = AuditWhat::kAttach,
                .identity = IdentityOf(member.peer),
                .pid = PidOf(member.peer),
                .rpc = member.engine ? "refitd.v1.Engine/Attach" : "refitd.v1.Trainer/Attach",
                .group = member.group,
                .subject = member.engine ? fmt::format("engine of instance {}, member {}",
                                                       member.instance, member.id.value())
                                         : fmt::format("trainer, member {}", member.id.value()),
                .outcome = "OK"});
}

ReplyFunction Audited(const DaemonState& state, const std::string& group, const GroupEvent& event,
                      const Peer& peer, ReplyFunction reply) {
  if (state.options.audit == nullptr) return reply;
  std::optional<AuditEvent> line = AuditOf(event);
  if (!line.has_value()) return reply;
  line->group = group;
  line->identity = IdentityOf(peer);
  line->pid = PidOf(peer);
  return [audit = state.options.audit, line = *std::move(line), reply = std::move(reply)](
             const absl::Status& status, const ReplyPayload& payload) mutable {
    line.outcome = absl::StatusCodeToString(status.code());
    if (!status.ok()) line.reason = Message(status);
    audit->Record(line);
    reply(status, payload);
  };
}

void AuditUpdate(const DaemonState& state, const GroupRecord& group, const UpdateEnded& ended) {
  // A rollback's caller is in the line of its call (AuditWhat::kRollback).
  const GroupRecord::Opener opener = ended.rollback ? GroupRecord::Opener() : group.opener;
  Audit(state, {.what = AuditWhat::kUpdate,
                .identity = opener.identity,
                .pid = opener.pid,
                .group = group.name(),
                .version = ended.version.value(),
                .outcome = ended.outcome == Outcome::kCommitted ? "committed" : "aborted",
                .reason = ended.reason,
                .request_id = opener.request_id});
}

void AuditEviction(const DaemonState& state, const GroupRecord& group, const LogLine& line) {
  Audit(state, {.what = AuditWhat::kEvict,
                .group = group.name(),
                .subject = line.evicted,
                .version = line.version.value(),
                .outcome = "evicted",
                .reason = line.text});
}

}  // namespace refitd
