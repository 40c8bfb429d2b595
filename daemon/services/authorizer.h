// The one place where the daemon decides who may call (P9).
//
// Every handler asks the authorizer before it does anything, with its entry of
// daemon/policy/rpcs.h. The authorizer identifies the caller (by the kernel on unix sockets, by the
// certificate over TLS), asks the current policy, and writes refusals, and what operators do, to
// the audit log.
//
// Thread-safe.
#ifndef REFITD_DAEMON_SERVICES_AUTHORIZER_H_
#define REFITD_DAEMON_SERVICES_AUTHORIZER_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/member.h"
#include "daemon/policy/policy.h"
#include "daemon/policy/policy_store.h"
#include "daemon/policy/rpcs.h"
#include "daemon/process/audit_log.h"
#include "daemon/services/peer_service.h"
#include "daemon/sockets/accept_loop.h"
#include "daemon/sockets/connection_guard.h"
#include "refitd/v1/operator.pb.h"

namespace refitd {

// The authorizer judges a call by this: its RPC, and what the request names.
struct RequestContext {
  Rpc rpc;
  std::string group{};       // empty: the request names none, or not yet
  std::string request_id{};  // empty: none
};

struct AuthorizerOptions {
  const PeerTable* peers = nullptr;
  const PolicyStore* policies = nullptr;
  // The identity that owns a group; empty: nobody does, or there is no such group. Null: nobody
  // owns any group.
  std::function<std::string(const std::string& group)> owner{};
  // Whether a member of that identity has a lease. Null: none has.
  std::function<bool(const std::string& identity)> has_lease{};
  AuditLog* audit = nullptr;         // null: none
  ConnectionGuard* guard = nullptr;  // sees all calls; null: none
  bool tls = false;                  // TCP is served with TLS
};

// All objects to which the options point must outlive the authorizer.
class Authorizer {
 public:
  explicit Authorizer(AuthorizerOptions options) : options_(std::move(options)) {}

  // Returns the caller if the policy lets it in. If the group comes in a later message (Attach,
  // Link), `request_context` names none here, and Enter must follow. PERMISSION_DENIED names
  // identity, role and group. UNAUTHENTICATED: the certificate gives no identity.
  absl::StatusOr<Peer> Admit(const grpc::ServerContextBase& context,
                             const RequestContext& request_context) const;
  // The second half of Admit, for calls that name their group in a stream's first message. Fills in
  // what the node must know of the peer's rights.
  absl::Status Enter(Peer* peer, const RequestContext& request_context) const;
  // Writes to the audit log that a stream whose caller was let in is refused for a later message.
  void RefusedLater(const Peer& peer, const RequestContext& request_context,
                    const absl::Status& why) const;
  // Whether an answer to this RPC may show the group to the caller.
  bool Shows(const Peer& peer, Rpc rpc, const std::string& group) const;

  // Whether a process may use the descriptor socket.
  absl::Status AdmitToDescriptors(const PeerCredentials& peer) const;

  // Whether a client whose certificate gives this identity (empty: none) may read the metrics. They
  // name every group, so the client must be an operator who may read all groups. PERMISSION_DENIED,
  // UNAUTHENTICATED: no identity.
  absl::Status AdmitToMetrics(const std::string& identity) const;

  // Writes to the audit log how the call was answered, if the log has such calls.
  void AuditAnswer(const RequestContext& request_context, const Peer& peer,
                   const absl::Status& answer) const;

  absl::StatusOr<v1::CheckAccessResponse> CheckAccess(const v1::CheckAccessRequest& request) const;

 private:
  // OK: some rule names the caller, or the caller has a lease, under an earlier policy.
  absl::Status CheckKnown(const Policy& policy, const Principal& caller) const;
  // Reports to the guard whether a call proves or discredits its connection.
  void Judge(const grpc::ServerContextBase& context, const absl::StatusOr<Peer>& peer,
             const absl::Status& allowed) const;
  absl::StatusOr<Peer> Recognise(const grpc::ServerContextBase& context) const;
  absl::Status Check(const Peer& peer, const RequestContext& request_context,
                     bool group_follows) const;
  std::string OwnerOf(const std::string& group) const;
  void Refused(const RequestContext& request_context, const std::string& identity, int pid,
               const absl::Status& why) const;

  const AuthorizerOptions options_;
};

Principal PrincipalOf(const Peer& peer);

// Returns the function by which PeerService asks who links; `authorizer` must outlive it.
LinkAuthorizer LinkAuthorizerOf(const Authorizer* authorizer);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_AUTHORIZER_H_
