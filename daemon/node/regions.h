// Members' memory: regions in host memory and on GPUs, and the staging pools that members map.
//
// Opening and closing device memory takes up to milliseconds, and longer if a context is made. It
// runs on the thread for regions, or on a thread of the descriptor socket.
//
// Thread-safe; called without the mutex.
#ifndef REFITD_DAEMON_NODE_REGIONS_H_
#define REFITD_DAEMON_NODE_REGIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/identities.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "daemon/sockets/descriptor_socket.h"
#include "transport/device_memory.h"

namespace refitd {

// A block of device memory that another process shares, unchecked.
struct IpcBlock {
  std::string handle;
  std::string device;  // the device's name
  int64_t byte_offset = 0;
  int64_t bytes = 0;  // 0: all of the block
};

class Regions : public DescriptorHandler {
 public:
  Regions(DaemonState* state, const Identities* identities, Members* members, DeviceSlots* slots,
          DataPlane* data_plane)
      : state_(*state),
        identities_(*identities),
        members_(*members),
        device_slots_(*slots),
        data_plane_(*data_plane) {}

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
                                          uint64_t address = 0) override;
  absl::Status ReleaseRegion(const Token& token, const PeerCredentials& peer,
                             RegionId region) override;
  absl::StatusOr<PoolHandle> MapPool(const Token& token, const PeerCredentials& peer) override;

  // ---- device memory of one push ----
  // Opens the handles of these indices.
  absl::StatusOr<DeviceSource> OpenSource(const std::vector<DeviceRef>& handles, int ordinal,
                                          std::vector<int> indices) const;
  // Runs `answer` once all regions are closed whose last reference the caller has dropped, or drops
  // before its own job on the thread for regions ends.
  void AnswerClosed(std::function<void()> answer);

 private:
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
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::StatusOr<DeviceHandle> CheckHandle(const Caller& caller, bool engine, const IpcBlock& block)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::StatusOr<RegionRecord> OpenDevice(const DeviceHandle& handle) const;
  // Makes device memory a region. Its mapping is closed on the thread for regions, wherever the
  // region is destroyed.
  RegionRecord RecordOf(std::shared_ptr<const DeviceRegion> region, bool engine,
                        const MemoryOrigin& origin) const;
  absl::StatusOr<RegionId> RegisterVmm(const Token& token, const PeerCredentials& peer, UniqueFd fd,
                                       int64_t bytes, uint64_t address);
  // Removes the region from the records, unless it is in use. The region is unmapped when the
  // result is destroyed, which must not happen under the mutex.
  absl::StatusOr<RegionRecord> Take(MemberRecord* member, RegionId region)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Calls `closed` when the region is closed, or when only running copies still hold it.
  void Close(RegionRecord region, std::function<void()> closed);
  absl::StatusOr<PoolHandle> HandleOf(const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
  const Identities& identities_;
  Members& members_;
  DeviceSlots& device_slots_;
  DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_REGIONS_H_
