// refitd.v1.Peer: the coordinator's end of links, over a PeerAcceptor (the daemon).
#ifndef REFITD_DAEMON_SERVICES_PEER_SERVICE_H_
#define REFITD_DAEMON_SERVICES_PEER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <string>
#include <utility>

#include "daemon/link/peer_link.h"
#include "refitd/v1/peer.grpc.pb.h"

namespace refitd {

// The rule for daemons that want to link (P9).
struct LinkRule {
  bool tls = false;        // links come over TLS; else the configuration says `insecure`
  std::string identity{};  // with `tls`: a pattern that a daemon's identity must match; empty: any
};

// `acceptor` must outlive the server. `message_bytes`: as in the server's SetMaxReceiveMessageSize.
// Callers on a unix socket are clients and are refused. Thread-safe.
//
// Like any server, it must be shut down with a deadline, since links do not end by themselves.
class PeerService final : public v1::Peer::CallbackService {
 public:
  PeerService(PeerAcceptor* acceptor, int64_t message_bytes, LinkRule rule = {})
      : acceptor_(acceptor), message_bytes_(message_bytes), rule_(std::move(rule)) {}

  grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerAnswer>* Link(
      grpc::CallbackServerContext* context) noexcept override;

 private:
  PeerAcceptor* const acceptor_;
  const int64_t message_bytes_;
  const LinkRule rule_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_PEER_SERVICE_H_
