// The staging slots of one group on this daemon, by place: in host memory, and on each GPU that
// needs them. Slots have the same index and offset in every place.
//
// Invariants
//  1. A place is made once and given up as a whole.
//  2. What crosses daemons lies in one place, the wire's: on a GPU where the group's members are on
//     GPUs (wire()), else in host memory. The wire's GPU keeps its slots until ClearWire.
//
// Memory is unmapped and descriptors are closed where what TakeHost returns, or the last user of a
// GPU's memory, goes: not under the mutex.
//
// Part of the daemon's state: used under its mutex (turn.h).
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
  // Slots on a GPU. `memory` may be let go anywhere.
  struct Device {
    MemorySpan memory;
    int descriptor = -1;  // memory.keep_alive's
  };

  // ---- in host memory ----
  bool has_host() const { return host_.memory != nullptr; }
  // UNAVAILABLE: `bytes` is 0, for the coordinator has not told the group's spec yet.
  absl::Status EnsureHost(const std::string& group, int64_t bytes);
  Host TakeHost() { return std::exchange(host_, {}); }

  // ---- on GPUs, by ordinal ----
  bool Has(int ordinal) const { return devices_.contains(ordinal); }
  void Put(int ordinal, Device device);
  // Not the wire's.
  void Drop(int ordinal);

  // ---- the wire's place ----
  // The GPU; nullopt: host memory.
  std::optional<int> wire() const { return wire_; }
  // That GPU has slots, and no GPU is the wire's.
  void SetWire(int ordinal);
  void ClearWire() { wire_.reset(); }

  // ---- slots of `slot_bytes` ----
  // A slot in the wire's place. INTERNAL: that is not made.
  absl::StatusOr<MemorySpan> WireSlot(SlotIndex slot, int64_t slot_bytes) const;
  // A slot on a GPU; nullopt: in the wire's place.
  absl::StatusOr<MemorySpan> Slot(std::optional<int> ordinal, SlotIndex slot,
                                  int64_t slot_bytes) const;
  // A descriptor of the place, for a member to map; nullopt: host memory. `read_only`: of host
  // memory alone. INTERNAL: the place is not made. `slot_bytes` of the result is left to the
  // caller.
  absl::StatusOr<PoolHandle> Share(std::optional<int> ordinal, bool read_only) const;

  // Of all places that are made.
  int64_t bytes() const;

  // Aborts the process where an invariant does not hold.
  void CheckInvariants() const;

 private:
  Host host_;
  std::map<int, Device> devices_;
  std::optional<int> wire_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_POOLS_H_
