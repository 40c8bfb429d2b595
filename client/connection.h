// What a trainer's and an engine's connection to the daemon have in common: the channel over the
// unix socket, the lease, the descriptor socket, this member's regions and its view of the pool.
//
// A Connection is one lease's; a member that attaches again makes another one. Regions are the
// member's, for all its leases: a region has one id here, and another one at each daemon.
//
// Invariants
//  - Everything that waits has a deadline (P4), a silent daemon's end by gRPC's keepalive.
//  - A region's descriptor is sealed before the daemon sees it (P6); the mapping here lives as long
//    as the Region, the daemon's as long as the daemon needs it.
//  - Regions::current() knows every region of the member; others may be on their way there.
//
// Both are thread-safe, a Connection after Adopt, which must come before it is shared.
#ifndef REFITD_CLIENT_CONNECTION_H_
#define REFITD_CLIENT_CONNECTION_H_

#include <grpcpp/channel.h>

#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/descriptor_client.h"
#include "client/slot_memory.h"
#include "client/types.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/host/descriptor_wire.h"
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

// Whose regions they are.
struct RegionOwner {
  bool engine = false;
  std::string device{};
};

// What a region is of, as the daemon is told.
struct RegionSource {
  RegionKind kind = RegionKind::kMemfd;  // of `fd`
  UniqueFd fd{};
  std::string handle{};  // not empty: of a block of cudaMalloc, in place of `fd`
  int64_t bytes = 0;

  bool on_device() const { return !handle.empty() || kind != RegionKind::kMemfd; }
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Waits until a daemon answers at the socket. UNAVAILABLE: none did before `deadline` (with
  // connect()'s own reason); PERMISSION_DENIED: this user may not connect.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ConnectOptions& options,
                                                          TimePoint deadline);
  // One try, for whoever comes again: UNAVAILABLE at once where nobody listens (the socket is not
  // there yet, stale, or still closed to us). CANCELLED soon after `stop` was requested.
  static absl::StatusOr<std::shared_ptr<Connection>> OpenNow(const ConnectOptions& options,
                                                             TimePoint deadline,
                                                             const std::stop_token& stop);

  // Takes the lease over. FAILED_PRECONDITION: the daemon answered with a protocol version that
  // this client does not speak.
  absl::Status Adopt(const v1::Welcome& welcome);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const v1::Welcome& welcome() const { return welcome_; }
  const v1::Lease& lease() const { return welcome_.lease(); }
  const std::string& socket() const { return socket_; }
  Duration call_margin() const { return call_margin_; }

  // The daemon maps what `source` is, of the member that it says; from now on it knows the region
  // `id`. Done before: OK.
  absl::Status RegisterRegion(RegionId id, const RegionSource& source, const RegionOwner& owner,
                              const std::stop_token& stop);
  // The daemon forgets it. Of device memory it has closed its mapping when this returns, unless it
  // refuses, goes away, or takes longer than call_margin and 30 s. Never on a gRPC thread: it waits
  // for one.
  void ReleaseRegion(RegionId id, const RegionSource& source, const RegionOwner& owner);
  // What the daemon calls the region. NOT_FOUND: it does not know it.
  absl::StatusOr<RegionId> WireRegion(RegionId id);
  absl::Status ToWire(v1::Bucket* bucket);
  absl::Status ToWire(Layout* layout);

  // The staging pool of this member's device, mapped at the first call. On a GPU `access` has no
  // meaning.
  absl::StatusOr<std::shared_ptr<const SlotMemory>> Pool(Access access);
  // The same if it was mapped; null: it was not.
  std::shared_ptr<const SlotMemory> MappedPool();

  // From now on nothing is asked of the daemon: regions that go are the daemon's to forget.
  void Detach();

 private:
  Connection(const ConnectOptions& options, std::string socket);
  absl::Status CheckAttached();
  absl::StatusOr<RegionId> RegisterBlock(const RegionSource& source, const RegionOwner& owner);
  void ReleaseDeviceRegion(RegionId wire, const RegionOwner& owner);

  // Constant after Adopt.
  const std::string socket_;
  const std::shared_ptr<grpc::Channel> channel_;
  const Duration call_margin_;
  const std::string device_;
  const std::string cuda_library_;
  v1::Welcome welcome_;
  std::unique_ptr<DescriptorClient> descriptors_;

  Mutex mutex_;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, RegionId> regions_ ABSL_GUARDED_BY(mutex_);  // by id here: the daemon's
  Mutex pool_mutex_;  // held while the daemon is asked: the pool is mapped once
  std::shared_ptr<const SlotMemory> pool_ ABSL_GUARDED_BY(pool_mutex_);
};

class Regions : public std::enable_shared_from_this<Regions> {
 public:
  // `keep`: for daemons to come, each region keeps its descriptor.
  Regions(bool keep, RegionOwner owner) : keep_(keep), owner_(std::move(owner)) {}

  // Known to the current daemon when it is returned; where that one is gone and regions are kept,
  // to the next.
  absl::StatusOr<std::shared_ptr<Region>> New(int64_t bytes);
  // The same for a memfd of the caller's, mapped here too. Errors: as HostRegion::Map.
  absl::StatusOr<std::shared_ptr<Region>> AddMemfd(UniqueFd memfd, int64_t bytes);
  // The same for device memory. INVALID_ARGUMENT: the handle's or the block's bytes.
  absl::StatusOr<std::shared_ptr<Region>> Add(const CudaIpcBlock& block);
  absl::StatusOr<std::shared_ptr<Region>> Add(UniqueFd vmm, int64_t bytes);
  // Makes `connection` the current one, once its daemon knows every region.
  absl::Status MoveTo(std::shared_ptr<Connection> connection, const std::stop_token& stop);
  // The regions that the layout's pieces lie in: whoever holds them keeps them known.
  std::vector<std::shared_ptr<Region>> Of(const Layout& layout);

 private:
  class Mapped;
  absl::StatusOr<std::shared_ptr<Region>> Share(RegionSource source,
                                                std::shared_ptr<HostRegion> memory);
  void Gone(RegionId id, const RegionSource& source);

  const bool keep_;
  const RegionOwner owner_;
  Mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Mapped>> regions_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Connection> current_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_CONNECTION_H_
