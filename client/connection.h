// The part of a connection to the daemon that trainers and engines share: the channel over the unix
// socket, the lease, the descriptor socket, this member's regions and its view of the pool.
//
// A Connection belongs to one lease; a member that attaches again makes another Connection. Regions
// belong to the member, for all its leases: a region has one id in this process, and another id at
// each daemon.
//
// Invariants
//  - Every wait has a deadline (P4); gRPC's keepalive notices a silent daemon.
//  - A region's descriptor is sealed before the daemon sees it (P6). The mapping here lives as long
//    as the Region, the daemon's mapping as long as the daemon needs it.
//  - The daemon of Regions' current Connection knows every region of the member; another daemon may
//    know some of them, while the member moves to it.
//
// Both classes are thread-safe; Adopt must be called before a Connection is shared.
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
#include "client/target.h"
#include "client/types.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/host/descriptor_format.h"
#include "transport/host/memory.h"

namespace refitd::client {

// Largest message that the client takes: a bucket's metadata may have 65,536 names of 512 bytes.
inline constexpr int kMaxMessageBytes = 64 << 20;

// Longest free text about itself that a client sends; the rest is cut off.
inline constexpr size_t kMaxClientBytes = 128;

// Checks the options, but not those that only the daemon can judge. INVALID_ARGUMENT names field
// and value.
absl::Status CheckConnectOptions(const ConnectOptions& options);
absl::Status CheckRank(int rank, int world_size);
// Checks for printable ASCII of 1 to 128 characters, the most that a daemon takes.
absl::Status CheckIdentifier(std::string_view value, std::string_view field);

v1::GroupSpec SpecToProto(const GroupSpec& spec);

// The member that owns regions.
struct RegionOwner {
  bool engine = false;
  std::string device{};
};

// The memory of a region, as its registration describes it.
struct RegionSource {
  RegionKind kind = RegionKind::kMemfd;  // of `fd`
  UniqueFd fd{};
  std::string handle{};  // not empty: the driver's handle of a block, in place of `fd`
  int64_t bytes = 0;
  uint64_t address = 0;  // of exported memory in this process; 0: unknown
  KeepDescriptor keep = KeepDescriptor::kNo;

  bool on_device() const { return !handle.empty() || kind != RegionKind::kMemfd; }
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Waits until a daemon answers. UNAVAILABLE: no daemon answered before `deadline` (with
  // connect()'s own reason); PERMISSION_DENIED: this user may not connect; UNAUTHENTICATED: over
  // TCP, one side refuses the other's certificate. If certificates can't be loaded, the error is
  // that of LoadCertificates.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ConnectOptions& options,
                                                          TimePoint deadline);
  // Tries once, for a member that attaches again: UNAVAILABLE at once if nobody listens (the socket
  // is not there yet, stale, or does not let us in yet). CANCELLED soon after `stop` was requested.
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

  // Makes the daemon map `source` as a region of `owner`; from now on the daemon knows the region
  // `id`. OK also if it knew the region before.
  absl::Status RegisterRegion(RegionId id, const RegionSource& source, const RegionOwner& owner,
                              const std::stop_token& stop);
  // Makes the daemon forget the region. When this returns, the daemon has closed its mapping of
  // device memory, unless it refuses, goes away, or takes longer than call_margin and 30 s. Not to
  // be called on a gRPC thread, because this waits for one.
  void ReleaseRegion(RegionId id, const RegionSource& source, const RegionOwner& owner);
  // The daemon's id of the region. NOT_FOUND: the daemon does not know the region.
  absl::StatusOr<RegionId> DaemonRegion(RegionId id);
  // Each of the two regions has the other's id at the daemon from now on.
  void Exchange(const RegionBack& pair);
  absl::Status ToProto(v1::Bucket* bucket);
  absl::Status ToProto(Layout* layout);

  // The staging pool of this member's device, mapped at the first call. On a device `access` has no
  // meaning.
  absl::StatusOr<std::shared_ptr<const SlotMemory>> Pool(Access access);
  // The arena of that number, from 0, that the daemon keeps for this lease. NOT_FOUND: there are
  // fewer.
  absl::StatusOr<SharedSides> TakeKept(int index);
  // The staging pool if it was mapped already; else null.
  std::shared_ptr<const SlotMemory> MappedPool();

  // Stops asking the daemon for anything, even to forget regions: the daemon does that by itself.
  void Detach();

 private:
  Connection(const ConnectOptions& options, const Target& target,
             std::shared_ptr<grpc::Channel> channel);
  absl::Status CheckAttached();
  absl::Status CheckShares();  // attached, and not over TCP
  absl::StatusOr<RegionId> RegisterBlock(const RegionSource& source, const RegionOwner& owner);
  void ReleaseDeviceRegion(RegionId daemon_id, const RegionOwner& owner);

  // Constant after Adopt.
  const std::string socket_;  // or "HOST:PORT"
  const bool tcp_;
  const std::shared_ptr<grpc::Channel> channel_;
  const Duration call_margin_;
  const std::string device_;
  const std::string device_library_;  // the driver
  v1::Welcome welcome_;
  std::unique_ptr<DescriptorClient> descriptors_;

  Mutex mutex_;
  bool detached_ ABSL_GUARDED_BY(mutex_) = false;
  // The daemon's ids of regions; the key is the region's id in this process.
  std::map<uint64_t, RegionId> regions_ ABSL_GUARDED_BY(mutex_);
  Mutex pool_mutex_;  // held while the daemon is asked, so that the pool is mapped only once
  std::shared_ptr<const SlotMemory> pool_ ABSL_GUARDED_BY(pool_mutex_);
};

class Regions : public std::enable_shared_from_this<Regions> {
 public:
  // `keep`: each region keeps its descriptor, to register it with a later daemon.
  Regions(bool keep, RegionOwner owner) : keep_(keep), owner_(std::move(owner)) {}

  // Makes a region of host memory. The current daemon knows it when this returns; if that daemon is
  // gone and regions are kept, the next daemon will.
  absl::StatusOr<std::shared_ptr<Region>> New(int64_t bytes);
  // The same for a memfd of the caller, which is mapped here too. Errors: as HostRegion::Map.
  absl::StatusOr<std::shared_ptr<Region>> AddMemfd(UniqueFd memfd, int64_t bytes);
  // The same for device memory. INVALID_ARGUMENT: the handle or the block has a wrong number of
  // bytes.
  absl::StatusOr<std::shared_ptr<Region>> AddBlock(const std::string& handle, int64_t bytes);
  absl::StatusOr<std::shared_ptr<Region>> AddExported(UniqueFd exported, int64_t bytes,
                                                      uint64_t address);
  // The same for memory that is not mapped as a region here.
  absl::StatusOr<std::shared_ptr<Region>> Add(RegionSource source) {
    return Share(std::move(source), nullptr);
  }
  // Exchanges the memory that later daemons are given for the two regions.
  void ExchangeSources(RegionId a, RegionId b);
  // Registers every region with the daemon of `connection`, then makes that the current connection.
  absl::Status MoveTo(std::shared_ptr<Connection> connection, const std::stop_token& stop);
  // The regions that the layout's pieces lie in, and their backs; the daemon knows a region as long
  // as anyone holds it.
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
