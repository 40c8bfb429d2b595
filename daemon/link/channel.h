// The channels on which this daemon calls other daemons.
#ifndef REFITD_DAEMON_LINK_CHANNEL_H_
#define REFITD_DAEMON_LINK_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <cstdint>
#include <memory>
#include <string>

namespace refitd {

// A channel with a connection of its own, which resolves the address anew. `message_bytes`: the
// largest message that it takes.
std::shared_ptr<grpc::Channel> MakePeerChannel(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    int64_t message_bytes = 64 << 10);

// Converts what gRPC calls a peer, "ipv4:10.0.0.1:4000" to "10.0.0.1:4000" and
// "ipv6:%5B::1%5D:4000" to "[::1]:4000"; empty: not TCP.
std::string TcpAddress(const std::string& peer);

// gRPC joins its callback threads when the last channel that used them is destroyed, even on one of
// these threads: a callback that drops the last reference would bring the process down. After this
// call the threads live as long as the process.
void KeepCallbackThreads();

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_CHANNEL_H_
