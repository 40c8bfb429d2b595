// refitd.v1.Peer: the coordinator's end of links, over a PeerAcceptor (the daemon).
#ifndef REFITD_DAEMON_SERVICES_PEER_SERVICE_H_
#define REFITD_DAEMON_SERVICES_PEER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/link/peer_link.h"
#include "refitd/v1/peer.grpc.pb.h"

namespace refitd {

// A daemon that may link to some group (P9).
struct LinkCaller {
  std::string identity{};  // of its certificate; empty: no TLS
  // OK: the daemon may link to this group.
  std::function<absl::Status(const std::string& group)> enter;
  // Writes to the audit log why a link to this group was refused later. Null: there is no log.
  std::function<void(const std::string& group, const absl::Status& why)> refused{};
};
// Asks who links. An error refuses the link.
using LinkAuthorizer = std::function<absl::StatusOr<LinkCaller>(const grpc::ServerContextBase&)>;

// `acceptor` must outlive the server. `authorizer`: null lets everybody in. `message_bytes`: as in
// the server's SetMaxReceiveMessageSize. Callers on a unix socket are clients and are refused. A
// link whose daemon gives an address of the data plane that names another identity than its
// certificate is ended with PERMISSION_DENIED. Thread-safe.
//
// Like any server, it must be shut down with a deadline, since links do not end by themselves.
class PeerService final : public v1::Peer::CallbackService {
 public:
  PeerService(PeerAcceptor* acceptor, int64_t message_bytes, LinkAuthorizer authorizer = nullptr)
      : acceptor_(acceptor), message_bytes_(message_bytes), authorizer_(std::move(authorizer)) {}

  grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerAnswer>* Link(
      grpc::CallbackServerContext* context) noexcept override;

 private:
  PeerAcceptor* const acceptor_;
  const int64_t message_bytes_;
  const LinkAuthorizer authorizer_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_PEER_SERVICE_H_
