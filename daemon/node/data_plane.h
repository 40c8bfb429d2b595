// Moves the groups' bytes: performs the actions of machines that touch memory (transfers,
// read-backs, compiled refits, collectives) and feeds their ends back as events.
//
//   data_plane.cc           transfers, read-backs, compiled refits
//   data_plane_wires.cc     communicators of the wires, and the collectives on them
//
// Invariants
//  1. Every action that asks for an answer gets one event, unless the group's record is gone.
//  2. A copy or collective holds the mappings that it touches (P6). Bytes are compared with digests
//     of passes over their sources (P1; Executor).
//  3. A communicator is in the records from its opening to its closing. After closing it the data
//     plane does not name it to the wire again. A communicator that is no longer wanted while the
//     wire opens it is closed as soon as it has opened (P8).
//  4. A collective runs only on a communicator whose slots are those that the group uses now.
//
// The class is part of the daemon's state. Its functions are called under the state lock
// (state_lock.h), but for those that say otherwise. Nothing blocks: planning, binding and the
// opening of communicators over GPU memory have threads of their own, whose jobs take the mutex
// when they are done.
#ifndef REFITD_DAEMON_NODE_DATA_PLANE_H_
#define REFITD_DAEMON_NODE_DATA_PLANE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/execute/compare_sides.h"
#include "daemon/execute/executor.h"
#include "daemon/execute/job_threads.h"
#include "daemon/group/machine.h"
#include "daemon/node/calls.h"
#include "daemon/node/groups.h"
#include "daemon/node/members.h"
#include "daemon/node/staging_pools.h"
#include "daemon/node/state_lock.h"
#include "daemon/process/observer.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/device_wire.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace refitd {

class DataPlane {
 public:
  struct Options {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<Wire> wire;               // over host memory; null: none
    std::shared_ptr<DeviceWire> device_wire;  // over GPU memory; null: none
    std::string no_device_wire;               // why there is none; for people
    size_t max_rails = kMaxRails;             // of a communicator over GPU memory
    DaemonObserver* observer = nullptr;       // null: none
    bool compare_sides = false;               // of arenas, behind each read-back
  };
  // The objects that the data plane uses. All must outlive it.
  struct State {
    Groups* groups;
    const Members* members;
    const Calls* calls;
    StagingPools* pools;
  };
  DataPlane(Options options, StateMutex* mutex, const State& state);

  // ---- actions of machines ----
  void Start(GroupRecord* group, StartTransfer start, StateLock& lock);
  void Start(GroupRecord* group, const StartVerify& verify, StateLock& lock);
  void Start(GroupRecord* group, const StartMoves& start, StateLock& lock);
  void Start(GroupRecord* group, const StartWire& a, StateLock& lock);
  void Start(GroupRecord* group, const StartExchange& a, StateLock& lock);
  void Compile(const GroupRecord& group, PlanRefit a);
  void Build(const GroupRecord& group, BuildProgram a);
  void Open(GroupRecord* group, const OpenCommunicator& a, StateLock& lock);
  void Connect(const GroupRecord& group, ConnectCommunicator a, StateLock& lock);
  void Close(const GroupRecord& group, const CloseCommunicator& a);
  // As Executor::Digest; `done` is called without the mutex.
  absl::Status Digest(const GroupRecord& group, MemberId member,
                      const std::shared_ptr<const Layout>& layout,
                      std::function<void(absl::StatusOr<uint64_t>)> done);
  // Compares the sides of a member's arenas (compare_sides.h), of which there are bytes to compare.
  // Called without the mutex, and so is `done`.
  void CompareSides(std::vector<ComparedSides> sides, const std::string& label,
                    std::function<void(const absl::Status&)> done);
  // Drops the digests of an update that has ended.
  void Forget(UpdateId update) { executor_.Forget(update); }

  // ---- what else happens to groups and members ----
  // Drops what was prepared with the member's memory (P8).
  void Release(MemberId member) { executor_.Release(member); }
  // Reports as lost the communicators over GPU memory whose slots were freed (P8). Followers report
  // nothing.
  void GiveUpCommunicators(const GroupRecord& group, StateLock& lock);
  // Closes the communicators of a group whose record was removed.
  void CloseAll(uint64_t group_id);
  // Runs the job after the local moves that are being bound ahead now, which may hold a region.
  // Called without the mutex.
  void AfterBinding(std::function<void()> job) { local_binder_.SubmitBehindAll(std::move(job)); }

  // The memory of one group's members, for the executor. An object lives for one call and is used
  // under the mutex.
  class GroupMemory : public MemoryResolver {
   public:
    GroupMemory(const State& state, const GroupRecord& group) : state_(state), group_(group) {}
    absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
      return Side(member, region, /*back=*/false);
    }
    absl::StatusOr<MemorySpan> Destination(MemberId member, RegionId region) const override {
      return Side(member, region, /*back=*/true);
    }
    bool Flipped(MemberId member) const override;
    absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override;
    absl::StatusOr<MemorySpan> SlotOf(MemberId member, SlotIndex slot) const override;
    std::string LabelOf(MemberId member) const override;
    std::optional<int> DeviceOf(MemberId member) const override;

   private:
    absl::StatusOr<MemorySpan> Side(MemberId member, RegionId region, bool back) const;

    const State& state_;
    const GroupRecord& group_;
  };
  GroupMemory MemoryOf(const GroupRecord& group) const { return {state_, group}; }

  // ---- status ----
  // How often groups have asked for plans, programs and comparisons so far.
  struct Asked {
    int64_t plans = 0;
    int64_t programs = 0;  // of this daemon
    int64_t comparisons = 0;
  };
  const Asked& asked() const { return asked_; }
  // nullopt: the communicator is not open here.
  std::optional<WireStats> StatsOf(const GroupRecord& group, CommunicatorId communicator) const;
  // A communicator over GPU memory. They are ordered by group and then by id.
  struct DeviceCommunicator {
    std::string group;
    CommunicatorId id;       // the machine's
    CommunicatorId wire_id;  // the wire's
  };
  std::vector<DeviceCommunicator> DeviceCommunicators() const;
  // These two functions are thread-safe until StopWires.
  const Transport& transport() const { return *transport_; }
  DeviceWire* device_wire() const { return device_wire_.get(); }
  // Counts all communicators since the start. Thread-safe until StopWires.
  WireStats TotalStats() const;

  // ---- the end ----
  // Ends the threads; jobs that have not begun are dropped. Called without the mutex.
  void StopThreads();
  // Ends the wires and waits for their last callbacks: copies that still run find no communicator
  // to send on. Called without the mutex, after StopThreads.
  void StopWires();

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  // This daemon's open end of a communicator.
  struct Communicator {
    CommunicatorId id;        // the wire's id
    bool on_devices = false;  // belongs to the wire over GPU memory
    // The GPU's ordinal if on_devices; -1: the GPU's slots are being made.
    int ordinal = -1;
  };

  // Feeds the event to the group, unless its record is gone. Called without the mutex.
  void Report(const std::string& group, uint64_t id, MachineEvent event);
  void CountBytes(const std::string& group, MoveKind kind, int64_t bytes) const;

  // ---- transfers ----
  bool UsesHostPool(const StartTransfer& start) const;
  StartTransfer WithoutErasedMembers(StartTransfer start) const;
  // `status`: whether the slots that the transfer waited for could be made.
  void Start(GroupRecord* group, const StartTransfer& start, absl::Status status, StateLock& lock);
  void EndTransfer(const std::string& group, const Executor::Done& done);

  // ---- read-backs ----
  // The arenas of a destination of an update.
  struct OfDestination {
    uint32_t index = 0;
    std::string label;
    std::vector<ComparedSides> sides;
  };
  std::vector<OfDestination> SidesToCompare(const GroupRecord& group,
                                            const StartVerify& verify) const;
  // Compares the arenas of `next` and those behind it, then reports. Called without the mutex.
  void CompareThenReport(const std::string& group, VerifyDone verified,
                         std::shared_ptr<const std::vector<OfDestination>> all, size_t next);

  // ---- compiled refits ----
  void Start(GroupRecord* group, const StartMoves& start, absl::Status status, StateLock& lock);
  // Binds the moves that follow a comparison while the comparison runs.
  void BindAhead(const GroupRecord& group, const StartMoves& compare);
  // Runs on a binder's thread: binds the moves, unless they were bound ahead, and submits them.
  void BindMoves(const std::string& name, uint64_t id,
                 const std::shared_ptr<Executor::Moves>& moves);
  void SubmitMoves(const std::string& name, uint64_t id,
                   const std::shared_ptr<Executor::Moves>& moves);

  // ---- wires ----
  // The record of a machine's communicator; null: it is not open.
  const Communicator* Find(const GroupRecord& group, CommunicatorId communicator) const;
  Communicator* Find(uint64_t group_id, CommunicatorId communicator);
  void Erase(uint64_t group_id, CommunicatorId communicator);
  void OpenOnDevice(const GroupRecord& group, const OpenCommunicator& a, CommunicatorId local);
  void OpenOnDevice(const std::string& name, uint64_t id, const OpenCommunicator& a,
                    CommunicatorId local, int ordinal);
  Wire* WireOf(const Communicator& communicator) const;
  // Whether the communicator can move bytes of the group's slots.
  bool ReachesSlots(const Communicator& communicator, const GroupRecord& group) const;
  // The communicator on which an operation of the group may run now.
  absl::StatusOr<Communicator> ReadyCommunicator(GroupRecord* group, CommunicatorId communicator);
  absl::StatusOr<WireExchange> ExchangeOf(const GroupRecord& group, const StartExchange& a,
                                          int64_t* received) const;
  // The function that a wire calls at the end of an operation.
  std::function<void(absl::Status)> WireDoneOf(const GroupRecord& group,
                                               CommunicatorId communicator, WireSeq seq,
                                               MoveKind kind, int64_t bytes);

  // Constant after construction.
  StateMutex& mutex_;
  const State state_;
  const std::string no_device_wire_;
  const size_t max_rails_;
  DaemonObserver* const observer_;
  const bool compare_sides_;

  // Guarded by the mutex.
  Executor executor_;
  Asked asked_;
  std::map<uint64_t, std::map<CommunicatorId, Communicator>>
      communicators_;  // by group's record; no empty entries

  // The jobs of these threads use the members above and below, so the threads are stopped first
  // (StopThreads). Binding has threads of its own, so that a step of an update does not wait for
  // another group's plan, and local moves are bound while replicas are compared and rounds are
  // packed. There are two planner threads: while one group's plan takes seconds, other groups'
  // plans take turns on the other thread. A group is the owner of its jobs on all of these threads.
  JobThreads planner_{"refitd-planner", 2};
  JobThreads binder_{"refitd-binder"};
  JobThreads local_binder_{"refitd-local"};
  JobThreads opener_{"refitd-opener"};  // communicators over GPU memory

  // The transport and the wires come last so that they are destroyed first: their callbacks then
  // still find the other members.
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Wire> wire_;
  std::shared_ptr<DeviceWire> device_wire_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_DATA_PLANE_H_
