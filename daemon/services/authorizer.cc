#include "daemon/services/authorizer.h"

#include <memory>
#include <optional>
#include <utility>

#include "daemon/process/last_words.h"
#include "transport/base/status.h"
#include "transport/tls/grpc_credentials.h"

namespace refitd {
namespace {

// The name in the log of a caller whose identity could not be found out.
constexpr std::string_view kUnknown = "unknown";

int PidOf(const Peer& peer) { return peer.credentials.has_value() ? peer.credentials->pid : 0; }

}  // namespace

Principal PrincipalOf(const Peer& peer) {
  Principal caller;
  if (peer.credentials.has_value()) {
    caller.uid = peer.credentials->uid;
    caller.gids.assign(peer.credentials->groups.begin(), peer.credentials->groups.end());
    caller.gids.push_back(peer.credentials->gid);
  } else {
    caller.certificate = peer.identity;
  }
  return caller;
}

absl::StatusOr<Peer> Authorizer::Recognise(const grpc::ServerContextBase& context) const {
  const std::string peer = context.peer();
  if (peer.rfind("ipv4:", 0) == 0 || peer.rfind("ipv6:", 0) == 0) {
    if (!options_.tls) return Peer{};
    REFITD_ASSIGN_OR_RETURN(std::string identity, CallerIdentity(context));
    return Peer{.credentials = std::nullopt, .identity = std::move(identity)};
  }
  std::optional<PeerCredentials> credentials = options_.peers->Lookup(peer);
  if (!credentials.has_value())
    return absl::PermissionDeniedError("the peer's credentials are unknown");
  return Peer{std::move(credentials)};
}

std::string Authorizer::OwnerOf(const std::string& group) const {
  return options_.owner == nullptr || group.empty() ? std::string() : options_.owner(group);
}

absl::Status Authorizer::CheckKnown(const Policy& policy, const Principal& caller) const {
  absl::Status known = policy.CheckKnown(caller);
  // A policy that was replaced ends no lease, so whoever has a lease stays known.
  if (known.ok() || options_.has_lease == nullptr || !options_.has_lease(caller.identity())) {
    return known;
  }
  return absl::OkStatus();
}

absl::Status Authorizer::AdmitToDescriptors(const PeerCredentials& peer) const {
  const Peer caller{peer};
  absl::Status status = CheckKnown(*options_.policies->Current(), PrincipalOf(caller));
  if (!status.ok() && options_.audit != nullptr) {
    options_.audit->Record({.what = AuditWhat::kRefusal,
                            .identity = IdentityOf(caller),
                            .pid = PidOf(caller),
                            .subject = "descriptor socket",
                            .outcome = std::string(absl::StatusCodeToString(status.code())),
                            .reason = Message(status)});
  }
  return status;
}

absl::Status Authorizer::AdmitToMetrics(const std::string& identity) const {
  const Principal caller{.certificate = identity};
  absl::Status status =
      identity.empty()
          ? absl::UnauthenticatedError("the certificate has no SPIFFE ID and no DNS name")
          : options_.policies->Current()->CheckEverywhere(caller, {Role::kOperatorRead});
  if (!status.ok() && options_.audit != nullptr) {
    options_.audit->Record({.what = AuditWhat::kRefusal,
                            .identity = identity,
                            .subject = "metrics",
                            .outcome = std::string(absl::StatusCodeToString(status.code())),
                            .reason = Message(status)});
  }
  return status;
}

absl::Status Authorizer::Check(const Peer& peer, const RequestContext& request_context,
                               bool group_follows) const {
  const RpcEntry& entry = EntryOf(request_context.rpc);
  const std::shared_ptr<const Policy> policy = options_.policies->Current();
  const Principal caller = PrincipalOf(peer);
  switch (entry.scope) {
    case RpcScope::kLease:  // Authenticate (daemon/node/life.h) compares the lease's identity
      return CheckKnown(*policy, caller);
    case RpcScope::kKnown:
      return policy->CheckKnown(caller);
    case RpcScope::kGroups:
      if (request_context.group.empty()) return policy->CheckAnywhere(caller, entry.roles);
      break;
    case RpcScope::kEveryGroup:
      if (request_context.group.empty()) return policy->CheckEverywhere(caller, entry.roles);
      break;
    case RpcScope::kGroup:
      if (group_follows) return policy->CheckAnywhere(caller, entry.roles);
      break;
  }
  return policy->Check(caller, entry.roles, request_context.group, OwnerOf(request_context.group));
}

void Authorizer::Judge(const grpc::ServerContextBase& context, const absl::StatusOr<Peer>& peer,
                       const absl::Status& allowed) const {
  if (options_.guard == nullptr) return;
  if (allowed.ok()) return options_.guard->Allowed(context.peer(), IdentityOf(*peer));
  const bool known =
      peer.ok() && CheckKnown(*options_.policies->Current(), PrincipalOf(*peer)).ok();
  options_.guard->Refused(context.peer(), known);
}

absl::StatusOr<Peer> Authorizer::Admit(const grpc::ServerContextBase& context,
                                       const RequestContext& request_context) const {
  NoteWork(EntryOf(request_context.rpc).method.data());  // a literal
  absl::StatusOr<Peer> peer = Recognise(context);
  if (!peer.ok()) {
    Judge(context, peer, peer.status());
    Refused(request_context, std::string(kUnknown), 0, peer.status());
    return peer;
  }
  const bool opens_stream = request_context.rpc == Rpc::kTrainerAttach ||
                            request_context.rpc == Rpc::kEngineAttach ||
                            request_context.rpc == Rpc::kPeerLink;
  const absl::Status status = Check(*peer, request_context, opens_stream);
  Judge(context, peer, status);
  if (!status.ok()) {
    Refused(request_context, IdentityOf(*peer), PidOf(*peer), status);
    return status;
  }
  return peer;
}

absl::Status Authorizer::Enter(Peer* peer, const RequestContext& request_context) const {
  absl::Status status = Check(*peer, request_context, /*group_follows=*/false);
  if (!status.ok()) {
    Refused(request_context, IdentityOf(*peer), PidOf(*peer), status);
    return status;
  }
  peer->any_owner =
      options_.policies->Current()->MayJoinOthers(PrincipalOf(*peer), request_context.group);
  return absl::OkStatus();
}

void Authorizer::RefusedLater(const Peer& peer, const RequestContext& request_context,
                              const absl::Status& why) const {
  Refused(request_context, IdentityOf(peer), PidOf(peer), why);
}

bool Authorizer::Shows(const Peer& peer, Rpc rpc, const std::string& group) const {
  return options_.policies->Current()
      ->Check(PrincipalOf(peer), EntryOf(rpc).roles, group, OwnerOf(group))
      .ok();
}

void Authorizer::Refused(const RequestContext& request_context, const std::string& identity,
                         int pid, const absl::Status& why) const {
  if (options_.audit == nullptr) return;
  options_.audit->Record({.what = AuditWhat::kRefusal,
                          .identity = identity,
                          .pid = pid,
                          .rpc = std::string(EntryOf(request_context.rpc).method),
                          .group = request_context.group,
                          .outcome = std::string(absl::StatusCodeToString(why.code())),
                          .reason = Message(why),
                          .request_id = request_context.request_id});
}

void Authorizer::AuditAnswer(const RequestContext& request_context, const Peer& peer,
                             const absl::Status& answer) const {
  if (options_.audit == nullptr) return;
  const RpcEntry& entry = EntryOf(request_context.rpc);
  if (!entry.audit.has_value()) {
    // With these answers the presented token belongs to no lease, or to one of another identity.
    if (absl::IsPermissionDenied(answer) || absl::IsUnauthenticated(answer)) {
      Refused(request_context, IdentityOf(peer), PidOf(peer), answer);
    }
    return;
  }
  options_.audit->Record({.what = *entry.audit,
                          .identity = IdentityOf(peer),
                          .pid = PidOf(peer),
                          .rpc = std::string(entry.method),
                          .group = request_context.group,
                          .outcome = std::string(absl::StatusCodeToString(answer.code())),
                          .reason = answer.ok() ? "" : Message(answer),
                          .request_id = request_context.request_id});
}

absl::StatusOr<v1::CheckAccessResponse> Authorizer::CheckAccess(
    const v1::CheckAccessRequest& request) const {
  REFITD_ASSIGN_OR_RETURN(const Principal caller, ParsePrincipal(request.identity(), "identity"));
  REFITD_ASSIGN_OR_RETURN(const Role role, ParseRole(request.role()));
  v1::CheckAccessResponse response;
  response.set_owner(OwnerOf(request.group()));
  const std::shared_ptr<const Policy> policy = options_.policies->Current();
  response.set_allowed(policy->Check(caller, {role}, request.group(), response.owner()).ok());
  response.set_reason(policy->Why(caller, role, request.group(), response.owner()));
  return response;
}

LinkAuthorizer LinkAuthorizerOf(const Authorizer* authorizer) {
  return [authorizer](const grpc::ServerContextBase& context) -> absl::StatusOr<LinkCaller> {
    REFITD_ASSIGN_OR_RETURN(Peer admitted, authorizer->Admit(context, {Rpc::kPeerLink}));
    const auto peer = std::make_shared<Peer>(std::move(admitted));
    return LinkCaller{
        .identity = peer->identity,
        .enter =
            [authorizer, peer](const std::string& group) {
              return authorizer->Enter(peer.get(), {.rpc = Rpc::kPeerLink, .group = group});
            },
        .refused =
            [authorizer, peer](const std::string& group, const absl::Status& why) {
              authorizer->RefusedLater(*peer, {.rpc = Rpc::kPeerLink, .group = group}, why);
            }};
  };
}

}  // namespace refitd
