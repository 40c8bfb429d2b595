// The daemon's heart: groups, members, leases, memory; where events meet state machines and actions
// meet the world.
//
//   services (gRPC) --calls--> Node, a Turn --events--> GroupMachine (pure)
//   Executor, wire, links, member streams, replies <--effects-- Node <--actions-- GroupMachine
//
//   node.cc           groups, time, the daemon's life
//   node_members.cc   hellos, leases, layouts
//   node_calls.cc     a trainer's calls
//   node_memory.cc    regions, staging pools, the descriptor socket
//   node_device.cc    members on GPUs: their devices, device memory, a lost GPU
//   node_actions.cc   events in, actions out
//   node_peers.cc     other daemons and the wire
//   node_programs.cc  compiled refits: plans, node programs, their steps
//   node_operator.cc  what operators ask
//
// One mutex serialises all state machines, and guards the state: Calls, Leases, Memory, each
// group's Pools, Watchers (a class a file), and what is still here. A Turn holds it. Nothing under
// it blocks: transports have their own threads, plans are made and device memory is opened and
// closed on threads of their own, streams have their own queues; replies run, events and log lines
// are written after it was released. P6: a member's mappings are dropped only on ReleaseMember, and
// every copy holds its own reference. P8: a lost member's token dies at once, its record with its
// last copy. P9: a lease is bound to the credentials that attached.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_NODE_H_
#define REFITD_DAEMON_NODE_NODE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/execute/executor.h"
#include "daemon/execute/job_threads.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/follower.h"
#include "daemon/group/group.h"
#include "daemon/group/machine.h"
#include "daemon/group/wire_lock.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/calls.h"
#include "daemon/node/leases.h"
#include "daemon/node/member.h"
#include "daemon/node/memory.h"
#include "daemon/node/peers.h"
#include "daemon/node/pools.h"
#include "daemon/node/push_turns.h"
#include "daemon/node/sinks.h"
#include "daemon/node/turn.h"
#include "daemon/node/watchers.h"
#include "daemon/process/log_queue.h"
#include "daemon/process/observer.h"
#include "daemon/sockets/descriptor_socket.h"
#include "daemon/sockets/process_watch.h"
#include "proto/protocol.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/operator.pb.h"
#include "refitd/v1/peer.pb.h"
#include "refitd/v1/trainer.pb.h"
#include "transport/base/mutex.h"
#include "transport/cuda/memory.h"
#include "transport/cuda/nccl/nccl.h"
#include "transport/cuda/nccl/wire.h"
#include "transport/host/memory.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace refitd {

// GPUs that this daemon serves.
struct DeviceOptions {
  std::shared_ptr<CudaMemory> memory;     // null: none; else the transport moves what it opens
  std::string detail = "not asked for";   // versions found, or why none are served; for people
  NcclReport nccl;                        // which the transport has; of no meaning without memory
  std::shared_ptr<DeviceWire> wire;       // between daemons; null: none
  std::string no_wire = "not asked for";  // why there is none, for people
};

struct NodeOptions {
  std::string daemon_id = "refitd";  // unique among the daemons of a group; the order of wire locks
  std::string advertise;  // HOST:PORT that members name to mean this daemon; may be empty
  GroupLimits group;
  PeerLimits peers;
  int64_t default_slot_bytes = int64_t{64} << 20;
  int default_slots = 4;
  int64_t max_pool_bytes = int64_t{16} << 30;  // all groups' staging together, on each device
  int64_t max_region_bytes = kMaxRegionBytes;  // of one region
  int64_t inline_bytes = int64_t{4} << 20;     // of one PushBucket
  int64_t message_bytes = int64_t{8} << 20;    // of any message
  // With so many, the one that had no member for the longest makes room for another.
  int max_groups = 64;
  int max_members = 4096;  // of all groups, and of daemons that joined groups of this one
  // A group without a member is given up after so long; never while an update runs.
  Duration group_idle = std::chrono::minutes(10);
  int max_regions_per_member = 4096;
  int max_regions =
      16'384;  // of all members: a process has 65,530 mappings by default (vm.max_map_count)
  std::string descriptor_socket;  // path, told to members
  DeviceOptions cuda;
  NodeObserver* observer = nullptr;  // outlives the node; null: nobody counts
};

// Dials a coordinator (PeerLink::Dial with the daemon's credentials).
using PeerDialer = std::function<std::unique_ptr<PeerLink>(PeerDial, PeerLinkCallbacks)>;

// As a ReplyFunction.
template <typename Response>
using ResponseFunction = std::function<void(const absl::StatusOr<Response>&)>;
using LayoutReply = ResponseFunction<v1::LayoutRegistered>;

class Node : public DescriptorHandler, public PeerAcceptor, private TurnHost {
 public:
  // `processes` must outlive the node. Without `wire` and `dialer` the daemon serves groups of its
  // own members only.
  Node(NodeOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
       std::unique_ptr<Wire> wire = nullptr, PeerDialer dialer = nullptr);
  // Ends the links and waits for their last callbacks.
  ~Node() override;

  // ---- membership ----
  // The sink gets Welcome, or End with the reason. MemberGone may be called at any time after.
  MemberId AttachTrainer(const v1::TrainerHello& hello, const Peer& peer,
                         std::shared_ptr<TrainerSink> sink);
  MemberId AttachEngine(const v1::EngineHello& hello, const Peer& peer,
                        std::shared_ptr<EngineSink> sink);
  void MemberGone(MemberId member, const std::string& reason);
  // As MemberGone, by the member's own word: its sink ends with OK, and whoever saw that end may
  // attach in its place.
  void MemberDetached(MemberId member);
  void Ready(MemberId member, const v1::Ready& ready);
  void Ack(MemberId member, const v1::Ack& ack);
  void Failed(MemberId member, const v1::Failed& failed);
  // OK: the lease is a rank's of that role. Lets a stream be refused before its chunks are
  // collected.
  absl::Status CheckTrainerLease(const v1::Lease& lease, const Peer& peer);
  absl::Status CheckEngineLease(const v1::Lease& lease, const Peer& peer);
  // Reply once, as a ReplyFunction does: OK when the group's coordinator has it. Where that is
  // another daemon, its loss (PeerLimits::peer) and the end of the lease answer too (P4).
  void RegisterTrainerLayout(CallId call, const v1::Lease& lease, const Peer& peer, Layout layout,
                             LayoutReply reply);
  void RegisterEngineLayout(CallId call, const v1::Lease& lease, const Peer& peer, Layout layout,
                            LayoutReply reply);

  // ---- regions: each replies once ----
  // Device memory; opened on a thread for that.
  void RegisterRegion(const v1::RegisterRegionRequest& request, const Peer& peer, bool engine,
                      ResponseFunction<v1::RegisterRegionResponse> reply);
  // A region of any kind; replies when it is closed.
  void ReleaseRegion(const v1::ReleaseRegionRequest& request, const Peer& peer, bool engine,
                     ResponseFunction<v1::ReleaseRegionResponse> reply);

  // ---- a trainer's calls: each replies exactly once ----
  CallId NewCall() { return CallId(next_call_.fetch_add(1)); }
  void Begin(CallId call, const v1::BeginRequest& request, const Peer& peer, ReplyFunction reply);
  void LeaseSlot(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                 ReplyFunction reply);
  void ReleaseSlot(CallId call, const v1::ReleaseSlotRequest& request, const Peer& peer,
                   ReplyFunction reply);
  // `request` must live until the reply: inline bytes and handles are read from it.
  void PushBucket(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                  ReplyFunction reply);
  void Commit(CallId call, const v1::CommitRequest& request, const Peer& peer, ReplyFunction reply);
  void Refit(CallId call, const v1::RefitRequest& request, const Peer& peer, ReplyFunction reply);
  void Abort(CallId call, const v1::AbortRequest& request, const Peer& peer, ReplyFunction reply);
  // The caller went away.
  void CallGone(CallId call);
  absl::StatusOr<v1::GetUpdateResponse> GetUpdate(const v1::GetUpdateRequest& request);

  // ---- operators ----
  absl::StatusOr<v1::CreateGroupResponse> CreateGroup(const v1::CreateGroupRequest& request);
  absl::Status DeleteGroup(const v1::DeleteGroupRequest& request);
  void AbortUpdate(CallId call, const v1::AbortUpdateRequest& request, ReplyFunction reply);
  v1::GetStatusResponse GetStatus();
  absl::StatusOr<v1::ListGroupsResponse> ListGroups();
  absl::StatusOr<v1::GetGroupResponse> GetGroup(const v1::GetGroupRequest& request);
  absl::StatusOr<v1::ListMembersResponse> ListMembers(const v1::ListMembersRequest& request);
  absl::StatusOr<v1::GetUpdateStatisticsResponse> GetUpdateStatistics(
      const v1::GetUpdateStatisticsRequest& request);
  // Watches until StopWatching; the sink's End comes from the node only with until_idle.
  absl::StatusOr<uint64_t> Watch(const v1::WatchUpdatesRequest& request,
                                 std::shared_ptr<UpdateSink> sink);
  void StopWatching(uint64_t watch);

  // ---- daemons that join groups of this one ----
  void Hello(v1::PeerHello hello, std::string peer_address,
             std::shared_ptr<PeerSession> session) override;
  void Report(uint64_t session, PeerReport report) override;
  void Gone(uint64_t session, std::string reason) override;

  // ---- the descriptor socket ----
  absl::StatusOr<RegionId> RegisterRegion(const Token& token, const PeerCredentials& peer,
                                          UniqueFd fd, RegionKind kind, int64_t bytes) override;
  absl::Status ReleaseRegion(const Token& token, const PeerCredentials& peer,
                             RegionId region) override;
  absl::StatusOr<PoolHandle> MapPool(const Token& token, const PeerCredentials& peer) override;

  // ---- life ----
  // The GPUs can't be used any more: running updates of groups with members on them are given up
  // (what was written counts as dirty, P2). The caller ends the daemon.
  void DevicesLost(const absl::Status& why);
  // No new updates; members are told. Running ones go on.
  void Drain();
  // Waits until no update runs, at most until `deadline`; then aborts what still runs (its calls
  // are answered) and ends every stream with UNAVAILABLE.
  void Finish(TimePoint deadline);
  // Finish waits no longer for running updates.
  void Hurry();
  // What status shows: "unix:PATH", "tcp:HOST:PORT".
  void SetListeners(std::vector<std::string> listeners);
  // True if the mutex can be had: for the watchdog.
  bool Alive();
  // Aborts the process where an invariant of the state does not hold: for tests.
  void CheckInvariants();
  // Views of updates that were made for watchers so far: what watching costs.
  int64_t watched_views();

 private:
  // An open end of a communicator.
  struct EpochRecord {
    EpochId id;               // the wire's
    bool on_devices = false;  // of the wire over GPU memory
    int ordinal = -1;         // on_devices: of its GPU; -1: its slots are being made
  };
  struct GroupRecord {
    uint64_t id = 0;  // never reused: what comes late is told from it
    std::unique_ptr<GroupMachine> machine;
    // One of the two, owned by `machine`.
    Coordinator* coordinator = nullptr;
    Follower* follower = nullptr;
    std::string coordinator_address;  // follower
    std::unique_ptr<PeerLink> link;   // follower; null: lost, or a pause
    // Follower: the coordinator has not taken this daemon in yet. Members wait for it in waiting_,
    // at least one; tries to join follow each other for as long as one of them waits.
    bool joining = false;
    uint64_t dial = 0;                // the number of the last try: what earlier ones say is old
    bool dialled_spec = false;        // it brings a spec, and so makes the group
    TimePoint dialled_until;          // without one it waits so long for the group
    std::optional<TimePoint> redial;  // no try is under way: the next begins then
    absl::Status refusal;             // why there is a pause
    // Coordinator: since when it has had no member; none: it has some, or an update runs.
    std::optional<TimePoint> empty_since;
    std::map<EpochId, EpochRecord> epochs;  // by the machine's id, while open
    // The staging slots. Those in host memory are made when a member first needs them. Those on a
    // GPU are made before a staged rank there is welcomed, when a trainer there first leases or
    // maps, or for a Begin whose buckets may be broadcast through slots; they are given up with the
    // last member there. The wire's GPU keeps its slots as long as a member is on any GPU or an
    // update runs.
    Pools pools;
    // Engine ranks that attach have to have a pool on their GPU: while Begin calls make theirs, and
    // where the running update's buckets may be broadcast.
    int preparing_begins = 0;
    bool broadcasts = false;
    bool wants_pools() const {
      return preparing_begins > 0 || (broadcasts && machine->update_running());
    }
    // The last CreateGroup(replace) with a request id, and the incarnation it made (P3).
    std::string replace_request;
    uint64_t replace_incarnation = 0;
    int64_t pool_bytes() const { return machine->spec().slot_bytes * machine->spec().slots; }
  };
  // A member that waits for its group: to be created here, or for this daemon to join the
  // coordinator.
  struct Waiting {
    MemberRecord record;
    GroupEvent attached;
    TimePoint deadline;                 // of its own wait for the group
    bool waits = true;                  // false: the group must exist, or be made by its spec
    std::string coordinator;            // empty: here
    std::optional<v1::GroupSpec> spec;  // with a coordinator: what it would make the group with
  };
  // An engine rank that waits until its group has a pool on its GPU: it reads parts there, or an
  // update that is being opened broadcasts.
  struct Pooling {
    MemberRecord record;
    GroupEvent attached;
  };
  class GroupMemory;
  struct Performer;

  static absl::Status NoGroup(const std::string& name);
  GroupRecord* FindGroup(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `trainers`: the world size of the trainer rank that would make it; one that can't join makes
  // nothing.
  absl::StatusOr<GroupRecord*> MakeGroup(const std::string& name, const v1::GroupSpec& wire,
                                         std::optional<int> trainers, bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<GroupSpec> CheckSpec(const v1::GroupSpec& wire) const;
  // OK: the group is one of max_groups, and its pool of `spec` (null: not known yet) fits beside
  // the others'. Gives up groups without members for that, the longest empty first; none where that
  // would not do. RESOURCE_EXHAUSTED.
  absl::Status MakeRoom(const std::string& name, const GroupSpec* spec, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether nobody has anything to do with a group of this daemon's.
  bool Empty(const GroupRecord& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After any event of the group: notes since when it is empty, and gives its pool back.
  void NoteEmpty(GroupRecord* group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A group without members. `why` is for the log.
  void DropGroup(const std::string& name, std::string_view why, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropExpired(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED: max_members.
  absl::Status CheckMembers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Creates, finds or waits for the hello's group, then attaches.
  template <typename HelloMessage, typename Sink, typename Identity>
  MemberId Attach(const HelloMessage& hello, const Peer& peer, std::shared_ptr<Sink> sink,
                  absl::StatusOr<Identity> identity);
  // Or refuses it. At once, or when its GPU has the pool that it needs.
  void Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Admit(MemberRecord record, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitWaiting(const std::string& group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EnsurePool(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The member, if it may have one more region, of this identity if one is given.
  absl::StatusOr<MemberRecord*> AdmitRegion(const std::string& token, const Peer& peer,
                                            const std::string& identity)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Out of the records, unless it is in use. Unmapped where what is returned goes: not under the
  // mutex.
  absl::StatusOr<RegionRecord> TakeRegion(MemberRecord* member, RegionId region)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Calls `closed` when it is closed, or when only copies that still run hold it.
  void CloseRegion(RegionRecord region, std::function<void()> closed);

  // Members on GPUs.
  // Answers behind the closing of whatever the caller, on regions_thread_ or elsewhere, has let go
  // of, or lets go of in this job.
  void AnswerClosed(std::function<void()> answer);
  // The ordinal of a hello's device; none: host.
  absl::StatusOr<std::optional<int>> DeviceOf(const std::string& name) const;
  absl::Status CheckDevices(const GroupRecord& group, const MemberRecord& record) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is to be opened for the request.
  struct DeviceHandle {
    int ordinal = 0;
    bool engine = false;
    int64_t bytes = 0;  // 0: all of the block
    std::string handle;
  };
  absl::StatusOr<DeviceHandle> CheckHandle(const v1::RegisterRegionRequest& request,
                                           const Peer& peer, bool engine)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<RegionRecord> OpenDevice(const DeviceHandle& handle) const;
  // Device memory as a region; its mapping is closed on regions_thread_, wherever it is let go.
  RegionRecord DeviceRegion(std::shared_ptr<const CudaRegion> region, bool engine) const;
  absl::StatusOr<RegionId> RegisterVmm(const Token& token, const PeerCredentials& peer, UniqueFd fd,
                                       int64_t bytes);
  // A call that waits on regions_thread_ for device memory: at most outstanding_buckets a member.
  absl::Status AdmitOpening(CallId call, MemberId member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OpeningWanted(CallId call);
  absl::Status EndOpening(CallId call);
  // Staging pools on GPUs.
  // On regions_thread_. OK: the group of this id has a pool on the device, which has a member of
  // it.
  absl::Status MakeDevicePool(const std::string& group, uint64_t id, int ordinal);
  bool OnDevice(const std::string& group, int ordinal) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The rank enters once the pool is there; or is refused.
  void AwaitPool(MemberRecord record, const GroupRecord& group, GroupEvent attached)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPooling(MemberId member, absl::Status made);
  // Of a rank that is not in pooling_ any more and was not admitted.
  void EndWithoutPool(MemberRecord record, absl::Status status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unless a member is on that GPU, or it is the wire's.
  void DropPool(GroupRecord* group, int ordinal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Once a member on that GPU has gone.
  void DropUnused(GroupRecord* group, int ordinal, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A pool that is to be made before a call of this member goes on.
  struct MissingPool {
    std::string group;
    uint64_t id = 0;
    int ordinal = 0;
  };
  std::optional<MissingPool> Missing(const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Broadcasts through slots. OK: the method can serve updates that this rank begins.
  absl::Status CheckBroadcast(const MemberRecord& trainer, BroadcastMethod method)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether kAuto could gain by slots.
  bool CouldGain(const MemberRecord& trainer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // GPUs of the trainer and of the group's engines that have none.
  std::vector<MissingPool> MissingFor(const MemberRecord& trainer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What a Begin needs before its event may enter the group.
  struct BeginNeeds {
    BroadcastMethod broadcast = BroadcastMethod::kDirect;
    bool slots = false;  // on the GPUs
    std::string group;
    uint64_t id = 0;
    std::vector<MissingPool> missing;
  };
  absl::StatusOr<BeginNeeds> NeedsOf(CallId call, const v1::BeginRequest& request, const Peer& peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On regions_thread_. Not OK: the call is not wanted any more, or a pool could not be made.
  absl::Status MakePools(CallId call, const std::vector<MissingPool>& missing);
  absl::StatusOr<BeginEvent> MakeBegin(CallId call, const v1::BeginRequest& request,
                                       const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `slots`: the pools are there.
  void BeginOpened(CallId call, const v1::BeginRequest& request, const Peer& peer,
                   ReplyFunction reply, bool slots);
  absl::StatusOr<PoolHandle> HandleOf(const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaseOpened(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                   ReplyFunction reply);
  // Opens the handles of the bucket, then pushes.
  void PushFromDevice(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                      ReplyFunction reply);
  absl::StatusOr<DeviceSource> OpenSource(const v1::CudaIpcHandles& handles, int ordinal,
                                          std::vector<int> indices) const;
  void PushOpened(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                  ReplyFunction reply, const DeviceSource& device);

  absl::StatusOr<MemberRecord*> Authenticate(const v1::Lease& lease, const Peer& peer, bool engine)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Authenticates and hands `event(member)` to the member's group, with `reply` waiting under
  // `call`. `push`: the bucket that `event` checked, kept with
  // the call; a push lets others go ahead.
  void TrainerCall(CallId call, const v1::Lease& lease, const Peer& peer,
                   const std::string& request_id, ReplyFunction reply,
                   const std::function<absl::StatusOr<GroupEvent>(const MemberRecord&)>& event,
                   std::optional<CheckedBucket>* push = nullptr);
  void MemberEvent(MemberId member, const GroupEvent& event);
  void RegisterLayout(CallId call, const v1::Lease& lease, const Peer& peer, bool engine,
                      Layout layout, LayoutReply reply);
  absl::StatusOr<std::shared_ptr<const Layout>> CheckLayout(const v1::Lease& lease,
                                                            const Peer& peer, bool engine,
                                                            Layout layout);
  absl::StatusOr<const MemberRecord*> AdmitLayout(const v1::Lease& lease, const Peer& peer,
                                                  bool engine, const Layout& layout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Feeds one event and performs the actions that come of it.
  void Dispatch(Turn& turn, const std::string& group, const MachineEvent& event) override;
  void Drained() override;
  void Perform(GroupRecord* group, MachineAction action, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool UsesHostPool(const StartTransfer& start) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StartTransfer WithoutTheGone(StartTransfer start) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformTransfer(GroupRecord* group, StartTransfer start, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `status`: what came of the slots that it waited for.
  void PerformTransfer(GroupRecord* group, StartTransfer start, absl::Status status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformVerify(GroupRecord* group, const StartVerify& verify, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Count(const GroupRecord& group, const UpdateEnded& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Compiled refits.
  void PerformCompile(const GroupRecord& group, CompileProgram a)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformBuild(const GroupRecord& group, BuildProgram a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformMoves(GroupRecord* group, const StartMoves& start, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformMoves(GroupRecord* group, const StartMoves& start, absl::Status status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Binds the moves that come after a comparison, while that runs.
  void BindAhead(const GroupRecord& group, const StartMoves& compare)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On a binder's thread: binds them, unless that was done ahead, and submits them.
  void BindMoves(const std::string& name, uint64_t id,
                 const std::shared_ptr<Executor::Moves>& moves);
  void SubmitMoves(const std::string& name, uint64_t id,
                   const std::shared_ptr<Executor::Moves>& moves)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformExchange(GroupRecord* group, const StartExchange& a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Other daemons.
  std::string CoordinatorOf(const std::string& address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status Followed(const GroupRecord& group);
  // The group that the daemon at `address` coordinates, joined or being joined.
  absl::StatusOr<GroupRecord*> Follow(const std::string& name, const std::string& address,
                                      const std::optional<v1::GroupSpec>& spec, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the spec, with what it leaves to a default as the group has it, is the group's.
  absl::Status CheckSameSpec(const std::string& name, const v1::GroupSpec& wire,
                             const GroupSpec& known) const;
  // Joining. A try brings the spec of a member that waits, if one has any, and the longest wait.
  bool AwaitsJoin(const Waiting& waiting, const GroupRecord& group) const;
  void Dial(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LinkIsUp(const std::string& name, uint64_t id, uint64_t dial, const LinkUp& up);
  void TakeJoined(GroupRecord* group, const LinkUp& up, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LinkSays(const std::string& name, uint64_t id, uint64_t dial, PeerCommand command);
  void LinkIsLost(const std::string& name, uint64_t id, uint64_t dial, absl::Status status);
  // The try has failed: refuses those whom that concerns, and tries again for the others.
  void JoinFailed(GroupRecord* group, const absl::Status& status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopJoining(GroupRecord* group, const absl::Status& status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If the daemon is joining for nobody any more.
  void StopJoiningIfUnwanted(const std::string& name, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When a waiting member is refused; none: the try to join that is under way decides.
  std::optional<TimePoint> ExpiryOf(const Waiting& waiting) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLateMembers(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RedialIfDue(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For callbacks of links and wire: nothing happens if that record of the group is gone.
  void GroupEventOf(const std::string& name, uint64_t id, MachineEvent event);
  void DropFollower(const std::string& name, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitPeer(Peers::Waiting peer, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitWaitingPeers(const std::string& group, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPeers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformSend(GroupRecord* group, SendCommand a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformSend(GroupRecord* group, const SendReport& a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static std::optional<EpochRecord> WireEpoch(const GroupRecord& group, EpochId epoch);
  Wire* WireOf(const EpochRecord& epoch) const;
  // Whether the epoch can move what is in the group's slots.
  static bool ReachesSlots(const EpochRecord& epoch, const GroupRecord& group);
  // Whether the group is of several daemons.
  bool Spans(const GroupRecord& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether what this daemon has of a group of several daemons can cross to the others. `entering`:
  // with this member, which is about to come; null: as it is.
  absl::Status CheckSpanning(const std::string& group, const MemberRecord* entering) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For a rank whose group another daemon coordinates: answered by SlotsMade.
  void PerformMakeSlots(const GroupRecord& group, const MakeSlots& a)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where the slots are that cross daemons: host memory, or the pool of the wire's GPU
  // (Pools::wire), which has to be made first (LacksWirePool).
  absl::Status EnsureWirePool(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool LacksWirePool(const GroupRecord& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `then` follows under the mutex; not where the group is gone.
  using WirePoolFunction = std::function<void(GroupRecord*, absl::Status made, Turn& turn)>;
  void MakeWirePool(const GroupRecord& group, WirePoolFunction then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // P8: of a group without members on GPUs.
  void DropWirePool(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OpenOnDevice(GroupRecord* group, const OpenEpoch& a, EpochId local)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformOpen(GroupRecord* group, const OpenEpoch& a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformConnect(GroupRecord* group, ConnectEpoch a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformClose(GroupRecord* group, const CloseEpoch& a) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // P8: of a coordinator, those over GPUs whose slots went.
  void GiveUpEpochs(const GroupRecord& group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformWire(GroupRecord* group, const StartWire& a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendWelcome(GroupRecord* group, MemberRecord* member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `end`: what the member's sink ends with.
  void Gone(MemberId member, const std::string& reason, const absl::Status& end);
  void Lose(MemberRecord* member, const std::string& reason, absl::Status end, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Erase(MemberId member, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Watchers::Machines Machines() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static uint64_t NewIncarnation();
  static std::string NewBootId();
  absl::StatusOr<uint64_t> Replace(GroupRecord* group, const std::string& request_id, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AnyUpdateRuns() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void TimerLoop();
  TimePoint NextWake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeTimer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static TimePoint Now() { return std::chrono::steady_clock::now(); }

  void DescribeEpochs(v1::NcclStatus* status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::GroupStatus GroupStatusOf(const GroupRecord& group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const NodeOptions options_;
  ProcessWatch* const processes_;
  const PeerDialer dialer_;
  const std::string boot_id_ = NewBootId();
  const TimePoint started_ = Now();
  std::atomic<uint64_t> next_call_{1};
  std::atomic<uint64_t> next_member_{1};
  std::atomic<uint64_t> next_update_{1};

  // Filled under mutex_, so that lines have the order of what they tell.
  const std::shared_ptr<LogQueue> log_ = std::make_shared<LogQueue>();

  PushTurns pushes_;
  Mutex mutex_;
  CondVar timer_cond_;
  CondVar idle_cond_;
  std::map<std::string, std::unique_ptr<GroupRecord>> groups_ ABSL_GUARDED_BY(mutex_);
  Leases leases_ ABSL_GUARDED_BY(mutex_);
  Memory memory_ ABSL_GUARDED_BY(mutex_){{options_.max_regions_per_member, options_.max_regions}};
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<MemberId, Pooling> pooling_ ABSL_GUARDED_BY(mutex_);
  Peers peers_ ABSL_GUARDED_BY(mutex_);
  WireLock wire_lock_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_group_ ABSL_GUARDED_BY(mutex_) = 1;
  Calls calls_ ABSL_GUARDED_BY(mutex_);
  Watchers watchers_ ABSL_GUARDED_BY(mutex_);
  int links_ ABSL_GUARDED_BY(mutex_) = 0;  // dialled, on_lost not told yet
  CondVar links_cond_;
  TimePoint timer_wakes_ ABSL_GUARDED_BY(mutex_) = TimePoint::max();  // until when the timer sleeps
  std::vector<std::string> listeners_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool hurrying_ ABSL_GUARDED_BY(mutex_) = false;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;  // what is given up from now on, the end gives up
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Opens device memory and closes what regions hold. Whoever lets a device's region go uses it,
  // be it after the node.
  const std::shared_ptr<JobThreads> regions_thread_ =
      std::make_shared<JobThreads>("refitd-regions");
  Executor executor_ ABSL_GUARDED_BY(mutex_);

  // Stopped by the destructor's body: their jobs use what is below. Binding has threads of its
  // own: a step of an update does not wait for another group's plan, and local moves are bound
  // while replicas are compared and rounds are packed.
  // Two: while a group's plan takes its seconds, those of the others take turns on the other one.
  JobThreads planner_{"refitd-planner", 2};
  JobThreads binder_{"refitd-binder"};
  JobThreads local_binder_{"refitd-local"};
  JobThreads opener_{"refitd-opener"};  // epochs over GPU memory

  std::thread timer_;
  // Last: destroyed first, after its jobs ended; their callbacks still find the rest.
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Wire> wire_;  // null: none
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_NODE_H_
