// The staging slots of all groups on this daemon, by place: in host memory, and on each GPU that
// needs them. A slot has the same index and offset in every place. The class makes slots and gives
// them back, and decides where a group's members may lie, so that there is a way for their bytes.
//
// Invariants
//  1. The slots of a place are made and given up together. One thread makes those on GPUs, so that
//     none are made twice (Options::thread).
//  2. A group has slots on a GPU only while a member is on that GPU, or waits for them (P8). The
//     wire's GPU keeps its slots while a member is on any GPU or an update runs: bytes that were
//     packed into a slot must be the bytes that are sent (P1).
//  3. All slots of a group that cross to other daemons lie in one place, the wire's: a GPU if the
//     group's members are on GPUs (WireOf), else host memory.
//  4. Slots belong to a group that exists (P8).
//
// Slots in host memory are made when a member first needs them. Those on a GPU are made before a
// loader rank there is welcomed, when a trainer there first takes or maps one, or for a Begin whose
// buckets may be broadcast through slots; they are given up with the last member on that GPU.
//
// Host memory is unmapped, and its descriptor closed, when the result of Take or TakeHost is
// destroyed; a GPU's memory is freed when its last user drops it. Neither may happen under the
// mutex.
//
// The class is part of the daemon's state. Its functions are called under the state lock
// (state_lock.h), but for those that say otherwise.
#ifndef REFITD_DAEMON_NODE_STAGING_POOLS_H_
#define REFITD_DAEMON_NODE_STAGING_POOLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/execute/job_threads.h"
#include "daemon/node/groups.h"
#include "daemon/node/members.h"
#include "daemon/node/peer_sessions.h"
#include "daemon/node/pending_attaches.h"
#include "daemon/node/state_lock.h"
#include "daemon/sockets/descriptor_socket.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/device_memory.h"
#include "transport/host/memory.h"
#include "transport/transport.h"

namespace refitd {

class StagingPools {
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
  // The places of one group's slots.
  struct Places {
    Host host;
    std::map<int, Device> devices;  // by ordinal
    std::optional<int> wire;        // the wire's GPU; nullopt: host memory
  };
  // `made`: whether the slots could be made.
  using Then = std::function<void(GroupRecord* group, const absl::Status& made, StateLock& lock)>;
  struct Options {
    std::string daemon_id;
    std::shared_ptr<DeviceMemory> memory;  // null: no member is on a GPU
    bool has_wire = false;                 // bytes of GPUs can cross to other daemons
    std::string no_wire;                   // why they can't; for people
    // The thread that makes slots and gives them back. Slots share the thread, since they may be
    // destroyed later than this object.
    std::shared_ptr<JobThreads> thread;
  };
  // The objects that this class uses. All must outlive it.
  struct State {
    Groups* groups;
    const Members* members;
    const PendingAttaches* pending;
    const PeerSessions* sessions;
  };
  StagingPools(Options options, StateMutex* mutex, const State& state);
  virtual ~StagingPools() = default;

  // ---- where members may lie ----
  // Whether the group has several daemons.
  bool Spans(const GroupRecord& group) const;
  // Refuses combinations that no transport can move, before anything waits for them: device memory
  // to another daemon without NCCL, GPU memory into host memory, and one bucket into both host
  // memory and a GPU. FAILED_PRECONDITION.
  absl::Status CheckEntering(const GroupRecord& group, const MemberRecord& record) const;
  // Whether this daemon's members of a group that spans several daemons can exchange bytes with the
  // other daemons' members. If the group's spec demands encryption, members on GPUs can't, since
  // bytes of GPU memory are not encrypted. `entering`: a member that is about to enter and counts
  // too; null: none.
  absl::Status CheckSpanning(const std::string& group, const MemberRecord* entering) const;

  // ---- in host memory ----
  bool HasHost(const GroupRecord& group) const { return Of(group).host.memory != nullptr; }
  // Makes the slots, unless they are there. UNAVAILABLE: the coordinator has not sent the group's
  // spec yet.
  absl::Status EnsureHost(const GroupRecord& group);
  Host TakeHost(const GroupRecord& group);

  // ---- on GPUs ----
  bool Has(const GroupRecord& group, int ordinal) const {
    return Of(group).devices.contains(ordinal);
  }
  // Slots on a GPU that must be made before a member's call can go on.
  struct Missing {
    std::string group;
    uint64_t id = 0;  // of the group's record
    int ordinal = 0;
  };
  // nullopt: the member has slots, or its memory is the host's.
  std::optional<Missing> MissingOf(const MemberRecord& member) const;
  // Slots on the GPUs of the group's engines; each GPU once.
  std::vector<Missing> MissingFor(const std::string& group) const;
  // OK: the group has slots on the GPU. CANCELLED: no member is on that GPU any more. Called on the
  // thread, without the mutex.
  absl::Status MakeNow(const Missing& missing);
  // Call it when a member on that GPU has left: frees slots that nobody needs any more.
  void DropUnused(const GroupRecord& group, int ordinal);
  // Call it when an update has ended or a member has left: frees the wire's slots if nobody needs
  // them.
  void DropWire(const GroupRecord& group);

  // ---- the wire's place: slots in which bytes cross to other daemons ----
  // The wire's GPU; nullopt: host memory.
  std::optional<int> WireOf(const GroupRecord& group) const { return Of(group).wire; }
  // (These three are virtual for the data plane's test.)
  // Whether the group's slots must be made on a GPU before they can be used.
  virtual bool Lacks(const GroupRecord& group) const;
  // Makes the group's slots on a GPU. `then` is called under the mutex, unless the group is gone.
  virtual void Make(const GroupRecord& group, Then then);
  // Makes the slots if they lie in host memory. UNAVAILABLE: they must be made on a GPU.
  virtual absl::Status Ensure(const GroupRecord& group);

  // ---- what members and wires see ----
  // A slot in the wire's place. INTERNAL: the place is not made.
  absl::StatusOr<MemorySpan> WireSlot(const GroupRecord& group, SlotIndex slot) const;
  // A slot on a GPU; nullopt: in the wire's place.
  absl::StatusOr<MemorySpan> Slot(const GroupRecord& group, std::optional<int> ordinal,
                                  SlotIndex slot) const;
  // A descriptor of the place, which a member can map; nullopt: of host memory. `read_only` has an
  // effect on host memory alone. INTERNAL: the place is not made.
  absl::StatusOr<PoolHandle> Share(const GroupRecord& group, std::optional<int> ordinal,
                                   bool read_only) const;
  // Bytes of all places that are made.
  int64_t BytesOf(const GroupRecord& group) const;

  // Takes out the slots of a group whose record was removed.
  Places Take(uint64_t group_id);
  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 protected:
  // Put adds the group's slots on a GPU, SetWire names the GPU whose slots the wire uses. Before
  // the call there must be none.
  void Put(const GroupRecord& group, int ordinal, Device device);
  void SetWire(const GroupRecord& group, int ordinal);
  void ClearWire(const GroupRecord& group) { Of(group).wire.reset(); }

 private:
  // Whether a member of the group is on that GPU, or waits for slots there.
  bool OnDevice(const std::string& group, int ordinal) const;
  // The group's record, if the group still lacks the slots; null: it has them. NOT_FOUND: the group
  // was removed.
  absl::StatusOr<GroupRecord*> Lacking(const Missing& missing) const;
  Device Shared(DevicePool made) const;
  void MakeWire(const Missing& missing, const Then& then);
  void Drop(const GroupRecord& group, int ordinal);
  Places& Of(const GroupRecord& group) { return places_[group.id]; }
  const Places& Of(const GroupRecord& group) const;

  const Options options_;
  StateMutex* const mutex_;
  const State state_;
  std::map<uint64_t, Places> places_;  // by group's record
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_STAGING_POOLS_H_
