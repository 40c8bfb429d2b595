// The staging slots of one group on this daemon, by place: in host memory, and on each GPU that
// needs them. A slot has the same index and offset in every place.
//
// Invariants
//  1. The slots of a place are made and given up together.
//  2. Slots that cross to other daemons lie in one place, the wire's: a GPU if the group's members
//     are on GPUs (wire()), else host memory. The wire's GPU keeps its slots until ClearWire.
//
// Host memory is unmapped and its descriptor closed when the result of TakeHost is destroyed, a
// GPU's when its last user lets it go: neither may happen under the mutex.
//
// The class is part of the daemon's state and is used under its mutex (turn.h).
#ifndef REFITD_DAEMON_NODE_POOLS_H_
#define REFITD_DAEMON_NODE_POOLS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/sockets/descriptor_socket.h"
#include "transport/base/ids.h"
#include "transport/base/unique_fd.h"
#include "transport/host/memory.h"
#include "transport/transport.h"

namespace refitd {

class Pools {
 public:
  struct Host {
    UniqueFd fd;
    std::shared_ptr<HostRegion> memory;  // null: not made
  };
  // Slots on a GPU. `memory` may be destroyed on any thread.
  struct Device {
    MemorySpan memory;
    int descriptor = -1;  // owned by memory.keep_alive
  };

  // ---- in host memory ----
  bool has_host() const { return host_.memory != nullptr; }
  // UNAVAILABLE: `bytes` is 0, because the coordinator has not told the group's spec yet.
  absl::Status EnsureHost(const std::string& group, int64_t bytes);
  Host TakeHost() { return std::exchange(host_, {}); }

  // ---- on GPUs, by ordinal ----
  bool Has(int ordinal) const { return devices_.contains(ordinal); }
  void Put(int ordinal, Device device);
  // The GPU must not be the wire's.
  void Drop(int ordinal);

  // ---- the wire's place ----
  // The wire's GPU; nullopt: host memory.
  std::optional<int> wire() const { return wire_; }
  // The GPU must have slots, and no GPU may be the wire's already.
  void SetWire(int ordinal);
  void ClearWire() { wire_.reset(); }

  // ---- slots of `slot_bytes` ----
  // A slot in the wire's place. INTERNAL: the place is not made.
  absl::StatusOr<MemorySpan> WireSlot(SlotIndex slot, int64_t slot_bytes) const;
  // A slot on a GPU; nullopt: in the wire's place.
  absl::StatusOr<MemorySpan> Slot(std::optional<int> ordinal, SlotIndex slot,
                                  int64_t slot_bytes) const;
  // A descriptor of the place, which a member can map; nullopt: of host memory. `read_only` has an
  // effect on host memory alone. INTERNAL: the place is not made. The caller sets the result's
  // `slot_bytes`.
  absl::StatusOr<PoolHandle> Share(std::optional<int> ordinal, bool read_only) const;

  // Bytes of all places that are made.
  int64_t bytes() const;

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  Host host_;
  std::map<int, Device> devices_;
  std::optional<int> wire_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_POOLS_H_
