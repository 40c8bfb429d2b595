// What a trainer's and an engine's connection to the daemon have in common: the channel over the
// unix socket, the lease, the descriptor socket, this member's regions and its view of the pool.
//
// Invariants
//  - Everything that waits has a deadline (P4).
//  - A region's descriptor is sealed before the daemon sees it (P6); the mapping here lives as long
//    as the Region, the daemon's as long as the daemon needs it.
//
// Thread-safe after Adopt, which must come before the connection is shared.
#ifndef REFITD_CLIENT_CONNECTION_H_
#define REFITD_CLIENT_CONNECTION_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/descriptor_client.h"
#include "client/types.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/host/memory.h"

namespace refitd::client {

// Largest message that the client takes: a bucket's metadata may have 65,536 names of 512 bytes.
inline constexpr int kMaxMessageBytes = 64 << 20;

// Longest free text about itself that a client sends; the rest is cut off.
inline constexpr size_t kMaxClientBytes = 128;

// INVALID_ARGUMENT naming field and value. Options that only the daemon can judge are left to it.
absl::Status CheckConnectOptions(const ConnectOptions& options);
absl::Status CheckRank(int rank, int world_size);
// Printable ASCII, 1 to 128 characters: what the daemon would take at most.
absl::Status CheckIdentifier(std::string_view value, std::string_view field);

// `options.socket`, else REFITD_SOCKET, else kDefaultSocket.
std::string SocketPath(const ConnectOptions& options);

v1::GroupSpec SpecToWire(const GroupSpec& spec);

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Waits until a daemon answers at the socket. UNAVAILABLE: none did before `deadline` (with
  // connect()'s own reason); PERMISSION_DENIED: this user may not connect.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ConnectOptions& options,
                                                          TimePoint deadline);

  // Takes the lease over. FAILED_PRECONDITION: another protocol version.
  absl::Status Adopt(const v1::Welcome& welcome);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const v1::Welcome& welcome() const { return welcome_; }
  const v1::Lease& lease() const { return welcome_.lease(); }
  Duration call_margin() const { return call_margin_; }

  absl::StatusOr<std::shared_ptr<Region>> NewRegion(int64_t bytes);
  // The staging pool, mapped at the first call.
  absl::StatusOr<std::shared_ptr<HostRegion>> Pool(Access access);

  // From now on nothing is asked of the daemon: regions that go are the daemon's to forget.
  void Detach();

 private:
  class MappedRegion;
  Connection(std::shared_ptr<grpc::Channel> channel, Duration call_margin)
      : channel_(std::move(channel)), call_margin_(call_margin) {}
  void ReleaseRegion(RegionId id);
  absl::Status CheckAttached();

  // Constant after Adopt.
  const std::shared_ptr<grpc::Channel> channel_;
  const Duration call_margin_;
  v1::Welcome welcome_;
  std::unique_ptr<DescriptorClient> descriptors_;

  Mutex mutex_;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  Mutex pool_mutex_;  // held while the daemon is asked: the pool is mapped once
  std::shared_ptr<HostRegion> pool_ ABSL_GUARDED_BY(pool_mutex_);
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_CONNECTION_H_
