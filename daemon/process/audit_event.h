// The events of the audit log. Pure values.
#ifndef REFITD_DAEMON_PROCESS_AUDIT_EVENT_H_
#define REFITD_DAEMON_PROCESS_AUDIT_EVENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace refitd {

enum class AuditWhat : uint8_t {
  kAttach,        // a member got its lease
  kRefusal,       // somebody may not do what was asked for
  kBegin,         // a trainer rank's call, with its answer
  kCommit,        // a trainer rank's call (Commit or Refit), with its answer
  kAbort,         // a trainer rank's or an operator's call, with its answer
  kRollback,      // a trainer rank's or an operator's call, with its answer
  kUpdate,        // an update ended: committed or aborted
  kEvict,         // an update goes on without an instance
  kCreate,        // an operator's CreateGroup
  kReplace,       // a group started a new incarnation
  kDelete,        // an operator's DeleteGroup
  kDrain,         // an operator's Drain
  kPolicy,        // the policy that is in force, or that was not taken over
  kCertificates,  // the certificates that are in force, or that were not taken over
};

constexpr std::string_view AuditName(AuditWhat what) {
  switch (what) {
    case AuditWhat::kAttach:
      return "attach";
    case AuditWhat::kRefusal:
      return "refusal";
    case AuditWhat::kBegin:
      return "begin";
    case AuditWhat::kCommit:
      return "commit";
    case AuditWhat::kAbort:
      return "abort";
    case AuditWhat::kRollback:
      return "rollback";
    case AuditWhat::kUpdate:
      return "update";
    case AuditWhat::kEvict:
      return "evict";
    case AuditWhat::kCreate:
      return "create";
    case AuditWhat::kReplace:
      return "replace";
    case AuditWhat::kDelete:
      return "delete";
    case AuditWhat::kDrain:
      return "drain";
    case AuditWhat::kPolicy:
      return "policy";
    case AuditWhat::kCertificates:
      return "certificates";
  }
  return "";
}

// Empty fields are left out of the line. No field ever has a lease's token, or bytes of a tensor.
struct AuditEvent {
  AuditWhat what = AuditWhat::kRefusal;
  std::string identity{};  // who did it: "uid:1000", "spiffe://...", "dns:...", "anonymous"
  int pid = 0;             // 0: not known
  std::string rpc{};       // "refitd.v1.Trainer/Begin"
  std::string group{};
  std::string subject{};  // the member or instance that the event is about
  std::optional<int64_t> version{};
  std::string outcome{};  // "OK" or another code of gRPC; "committed", "aborted" of an update
  std::string reason{};
  std::string request_id{};
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_AUDIT_EVENT_H_
