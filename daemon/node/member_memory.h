// Members' memory: regions in host memory and on GPUs, and the staging pools that members map.
//
// Address space is finite, and memfds may be sparse: without a limit, regions of terabytes that
// cost their owner nothing leave the daemon no address for anything else.
//
// Invariants
//  1. The bytes of host memory that are mapped at a time, of all members and of one identity, stay
//     within their limits (ByteLedger), and one region within the machine's memory (P10).
//  2. A memfd is mapped once for reading, once for writing and once for each GPU that it is pinned
//     for, however many regions it is: regions share a mapping that covers them, which counts once,
//     for the identity that brought it first.
//  3. A caller whose call was answered may free its memory: the daemon has closed it (P8).
//
// Opening and closing device memory takes up to milliseconds, and longer if a context is made. It
// runs on the thread for regions, or on a thread of the descriptor socket.
//
// Thread-safe; called without the mutex. Mappings may outlive the object.
#ifndef REFITD_DAEMON_NODE_MEMBER_MEMORY_H_
#define REFITD_DAEMON_NODE_MEMBER_MEMORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/node/state.h"
#include "daemon/policy/byte_ledger.h"
#include "daemon/sockets/descriptor_socket.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/device_memory.h"
#include "transport/host/memory.h"
#include "transport/transport.h"

namespace refitd {

// A block of device memory that another process shares, unchecked.
struct IpcBlock {
  std::string handle;
  std::string device;  // the device's name
  int64_t byte_offset = 0;
  int64_t bytes = 0;  // 0: all of the block
};

class MemberMemory : public DescriptorHandler {
 public:
  explicit MemberMemory(DaemonState* state) : state_(*state) {}

  // Opens device memory, on a thread of its own, and registers it. Replies once.
  struct Registered {
    RegionId id;
    int64_t bytes = 0;
  };
  using RegisterReply = std::function<void(const absl::StatusOr<Registered>&)>;
  void RegisterDevice(const Caller& caller, bool engine, const IpcBlock& block,
                      RegisterReply reply);
  // Releases a region of any kind; replies once, when it is closed.
  void Release(const Caller& caller, bool engine, RegionId region,
               std::function<void(const absl::Status&)> reply);

  // ---- the descriptor socket ----
  absl::StatusOr<RegionId> RegisterRegion(const Token& token, const PeerCredentials& peer,
                                          UniqueFd fd, RegionKind kind, int64_t bytes,
                                          uint64_t address = 0,
                                          KeepDescriptor keep = KeepDescriptor::kNo) override;
  absl::Status ReleaseRegion(const Token& token, const PeerCredentials& peer,
                             RegionId region) override;
  absl::StatusOr<PoolHandle> MapPool(const Token& token, const PeerCredentials& peer) override;
  absl::StatusOr<SideHandle> TakeKept(const Token& token, const PeerCredentials& peer,
                                      uint64_t side) override;

  // ---- host memory ----
  // Identifies the memfd: two descriptors of one memfd have equal origins.
  static absl::StatusOr<MemoryOrigin> OriginOf(const UniqueFd& fd);
  // Maps the first `bytes` of the memfd, or shares a mapping of it. `origin`: OriginOf(fd). Kept
  // arenas (kept_ranks.h) give way where a limit is reached. Errors: as of HostRegion::Map;
  // RESOURCE_EXHAUSTED: a limit.
  absl::StatusOr<MemorySpan> Map(const UniqueFd& fd, const MemoryOrigin& origin, int64_t bytes,
                                 Access access, const std::string& identity);

  // ---- device memory of one push ----
  // Opens the handles of these indices.
  absl::StatusOr<DeviceSource> OpenSource(const std::vector<DeviceRef>& handles, int ordinal,
                                          std::vector<int> indices) const;
  // Runs `answer` once all regions are closed whose last reference the caller has dropped, or drops
  // before its own job on the thread for regions ends.
  void AnswerClosed(std::function<void()> answer);

 private:
  // A mapping, counted until it is closed: of the two regions it has one.
  struct Mapping {
    int64_t bytes() const { return region != nullptr ? region->bytes() : pinned->bytes(); }

    ByteLedger::Hold hold;
    std::shared_ptr<const HostRegion> region;
    std::shared_ptr<const DeviceRegion> pinned;
  };
  // Device and inode of the file; the ordinal of the GPU that it is pinned for.
  using Key = std::tuple<uint64_t, uint64_t, Access, std::optional<int>>;

  // Takes the bytes from the limits of mapped memory. RESOURCE_EXHAUSTED: a limit, or the machine's
  // memory.
  absl::StatusOr<ByteLedger::Hold> ChargeLimits(const std::string& identity, int64_t bytes);
  std::shared_ptr<const Mapping> FindMapping(const Key& key, int64_t bytes);
  void KeepMapping(const Key& key, const std::shared_ptr<const Mapping>& mapping);

  // The device memory that a call asks to open, checked.
  struct DeviceHandle {
    int ordinal = 0;
    bool engine = false;
    int64_t bytes = 0;  // 0: all of the block
    std::string handle;
  };

  // The member with this token, if it may have one more region. `identity`: RegionRecord::identity
  // of that region; empty: not known.
  absl::StatusOr<MemberRecord*> Admit(const std::string& token, const Peer& peer,
                                      const std::string& identity)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  absl::StatusOr<DeviceHandle> CheckHandle(const Caller& caller, bool engine, const IpcBlock& block)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  absl::StatusOr<RegionRecord> OpenDevice(const DeviceHandle& handle) const;
  // Makes device memory a region. Its mapping is closed on the thread for regions, wherever the
  // region is destroyed.
  RegionRecord RecordOf(std::shared_ptr<const DeviceRegion> region, bool engine,
                        const MemoryOrigin& origin) const;
  // Maps and pins a memfd that has pages, or shares such a mapping; counts it as Map does.
  absl::StatusOr<RegionRecord> Pin(int ordinal, bool engine, const UniqueFd& fd, int64_t bytes,
                                   const std::string& identity);
  absl::StatusOr<RegionId> RegisterOnDevice(const Token& token, const PeerCredentials& peer,
                                            UniqueFd fd, RegionKind kind, int64_t bytes,
                                            uint64_t address, KeepDescriptor keep);
  // Removes the region from the records, unless it is in use. The region is unmapped when the
  // result is destroyed, which must not happen under the mutex.
  absl::StatusOr<RegionRecord> Take(MemberRecord* member, RegionId region)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Calls `closed` when the region is closed, or when only running copies still hold it.
  void Close(RegionRecord region, std::function<void()> closed);
  absl::StatusOr<PoolHandle> HandleOf(const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  DaemonState& state_;

  Mutex mutex_;
  // The largest mapping of each memfd; some have ended.
  std::map<Key, std::weak_ptr<const Mapping>> mappings_ ABSL_GUARDED_BY(mutex_);
  size_t sweep_at_ ABSL_GUARDED_BY(mutex_) = 64;  // the size at which ended mappings are dropped
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBER_MEMORY_H_
