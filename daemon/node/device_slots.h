// Knows which staging slots a group lacks on GPUs, makes them and gives them back. Also decides
// where a group's members may lie, so that there is a way for their bytes.
//
// Invariants
//  1. One thread makes slots, so that none are made twice (Options::thread).
//  2. A group has slots on a GPU only while a member is on that GPU, or waits for them (P8). The
//     wire's GPU keeps its slots while a member is on any GPU or an update runs: bytes that were
//     packed into a slot must be the bytes that are sent (P1).
//  3. All slots of a daemon that cross to other daemons lie on one GPU, or all in host memory.
//
// The class is part of the daemon's state. Its functions are called under the mutex (turn.h), but
// for those that say otherwise.
#ifndef REFITD_DAEMON_NODE_DEVICE_SLOTS_H_
#define REFITD_DAEMON_NODE_DEVICE_SLOTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/execute/job_threads.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/groups.h"
#include "daemon/node/leases.h"
#include "daemon/node/peers.h"
#include "daemon/node/turn.h"
#include "daemon/node/waiters.h"
#include "transport/base/mutex.h"
#include "transport/device_memory.h"

namespace refitd {

class DeviceSlots : public WireSlots {
 public:
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
    const Leases* leases;
    const Waiters* waiters;
    const Peers* peers;
  };
  DeviceSlots(Options options, TurnHost* turns, Mutex* mutex, const State& state);

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

  // ---- slots ----
  // Slots that must be made before a call of the member can go on.
  struct Missing {
    std::string group;
    uint64_t id = 0;  // of the group's record
    int ordinal = 0;
  };
  // nullopt: the member has slots, or its memory is the host's.
  std::optional<Missing> MissingOf(const MemberRecord& member) const;
  // Slots on GPUs of the trainer and of the group's engines; each GPU once.
  std::vector<Missing> MissingFor(const MemberRecord& trainer) const;
  // OK: the group has slots on the GPU. CANCELLED: no member is there any more. Called on the
  // thread, without the mutex.
  absl::Status MakeNow(const Missing& missing);
  // A member on that GPU has gone: gives back slots that no one needs any more.
  void DropUnused(GroupRecord* group, int ordinal);
  // An update has ended, or a member has gone: gives the wire's slots back if no one needs them.
  void DropWire(GroupRecord* group);

  // ---- slots in which bytes cross to other daemons ----
  bool Lacks(const GroupRecord& group) const override;
  void Make(const GroupRecord& group, Then then) override;
  absl::Status Ensure(GroupRecord* group) override;

 private:
  // Whether a member of the group is on that GPU, or waits for slots there.
  bool OnDevice(const std::string& group, int ordinal) const;
  // The group's record, if it still lacks the slots; null: it has them. NOT_FOUND: the group is
  // gone.
  absl::StatusOr<GroupRecord*> Lacking(const Missing& missing) const;
  Pools::Device Share(DevicePool made) const;
  void MakeWire(const Missing& missing, const Then& then);
  void Drop(GroupRecord* group, int ordinal);

  const Options options_;
  TurnHost* const turns_;
  Mutex* const mutex_;
  const State state_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_DEVICE_SLOTS_H_
