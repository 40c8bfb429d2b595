#include "daemon/link/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/grpcpp.h>

#include <utility>

#include "daemon/link/peer_link.h"
#include "refitd/v1/peer.grpc.pb.h"
#include "transport/base/ids.h"

namespace refitd {
namespace {

constexpr int kReconnectMs = 50;
constexpr int kMaxReconnectMs = 1000;
// A channel that can't connect resolves its name anew, at most so often. (A new channel always
// resolves it.) gRPC's own 30 s would be too long for a name that was pointed elsewhere.
constexpr int kResolveMs = 1000;
// Keepalive is on only because gRPC then sets TCP_USER_TIMEOUT as well. The interval is long
// because a server takes pings that come more often than every 5 minutes for an attack.
constexpr int kKeepaliveMs = 600'000;

}  // namespace

std::string TcpAddress(const std::string& peer) {
  if (peer.rfind("ipv4:", 0) != 0 && peer.rfind("ipv6:", 0) != 0) return "";
  std::string address = peer.substr(5);
  for (const auto& [escaped, plain] : {std::pair{"%5B", "["}, std::pair{"%5D", "]"}}) {
    if (const size_t at = address.find(escaped); at != std::string::npos) {
      address.replace(at, 3, plain);
    }
  }
  return address;
}

std::shared_ptr<grpc::Channel> MakePeerChannel(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    int64_t message_bytes) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, static_cast<int>(ToMillis(kPeerUserTimeout)));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kResolveMs);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(message_bytes));
  arguments.SetMaxSendMessageSize(-1);  // checked against the other side's limit
  return grpc::CreateCustomChannel("dns:///" + address, credentials, arguments);
}

// Keeps a channel, which never connects, for as long as the process lives.
void KeepCallbackThreads() {
  struct LameCall : grpc::ClientBidiReactor<v1::PeerMessage, v1::PeerAnswer> {
    void OnDone(const grpc::Status& /*status*/) noexcept override {}
    grpc::ClientContext context;
    std::unique_ptr<v1::Peer::Stub> stub =
        v1::Peer::NewStub(grpc::CreateCustomChannel("", nullptr, {}));
  };
  static const auto* const kept = [] {
    auto* call = new LameCall;
    call->stub->async()->Link(&call->context, call);
    call->StartCall();
    return call;
  }();
  (void)kept;
}

}  // namespace refitd
