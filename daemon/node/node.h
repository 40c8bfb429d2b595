// The daemon's heart: groups, members, leases and memory. Here events reach the state machines, and
// their actions are carried out.
//
//   services (gRPC) --calls--> Node, a Turn --events--> GroupMachine (pure)
//   Executor, wire, links, member streams, replies <--effects-- Node <--actions-- GroupMachine
//
//   node.cc           making and dropping groups, the daemon's life
//   node_members.cc   hellos, leases, layouts
//   node_calls.cc     a trainer's calls
//   node_memory.cc    regions, staging pools, the descriptor socket
//   node_device.cc    members on GPUs: their devices, device memory, a lost GPU
//   node_actions.cc   hands events to machines, performs their actions
//   node_peers.cc     other daemons
//   node_operator.cc  operators' calls
//
// One mutex serialises all state machines and guards the state: DataPlane, DeviceSlots, Groups,
// Waiters, Dialler, Calls, Leases, Memory, Peers and Watchers (a class a file), and the state that
// this class keeps itself. A Turn holds the mutex. Nothing under the mutex blocks: transports have
// their own threads; plans, and the opening and closing of device memory, have theirs; streams have
// queues. Replies run, and events and log lines are written, after the mutex was released. P6: a
// member's mappings are dropped only on ReleaseMember, and every copy holds its own reference. P8:
// a lost member's token dies at once, its record with its last copy. P9: a lease is bound to the
// credentials that attached.
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
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/execute/executor.h"
#include "daemon/execute/job_threads.h"
#include "daemon/group/group.h"
#include "daemon/group/machine.h"
#include "daemon/group/wire_lock.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/calls.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/dialler.h"
#include "daemon/node/group_spec.h"
#include "daemon/node/groups.h"
#include "daemon/node/leases.h"
#include "daemon/node/member.h"
#include "daemon/node/memory.h"
#include "daemon/node/peers.h"
#include "daemon/node/push_turns.h"
#include "daemon/node/sinks.h"
#include "daemon/node/timer.h"
#include "daemon/node/turn.h"
#include "daemon/node/waiters.h"
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

// The GPUs that this daemon serves.
struct DeviceOptions {
  // Null: no GPUs are served. Otherwise the transport moves memory that this has opened.
  std::shared_ptr<CudaMemory> memory;
  std::string detail = "not asked for";   // versions found, or why no GPUs are served; for people
  NcclReport nccl;                        // the transport's NCCL; meaningless without memory
  std::shared_ptr<DeviceWire> wire;       // between daemons; null: none
  std::string no_wire = "not asked for";  // why there is no wire; for people
};

struct NodeOptions {
  std::string daemon_id = "refitd";  // unique in a group; wire locks are taken in its order
  std::string advertise;             // HOST:PORT by which members name this daemon; may be empty
  GroupLimits group;
  PeerLimits peers;
  int64_t default_slot_bytes = int64_t{64} << 20;
  int default_slots = 4;
  int64_t max_pool_bytes = int64_t{16} << 30;  // staging slots of all groups, on each device
  int64_t max_region_bytes = kMaxRegionBytes;  // of one region
  int64_t inline_bytes = int64_t{4} << 20;     // of one PushBucket
  int64_t message_bytes = int64_t{8} << 20;    // of any message
  // When this many groups exist, a new one replaces the group that has had no member for longest.
  int max_groups = 64;
  int max_members = 4096;  // of all groups, and of daemons that joined groups of this one
  // A group without a member is dropped after this time; never while an update runs.
  Duration group_idle = std::chrono::minutes(10);
  int max_regions_per_member = 4096;
  // Of all members: a process has 65,530 mappings by default (vm.max_map_count).
  int max_regions = 16'384;
  std::string descriptor_socket;  // its path, which members are told
  DeviceOptions cuda;
  NodeObserver* observer = nullptr;  // outlives the node; null: none
};

// Called once, as a ReplyFunction is.
template <typename Response>
using ResponseFunction = std::function<void(const absl::StatusOr<Response>&)>;
using LayoutReply = ResponseFunction<v1::LayoutRegistered>;

class Node : public DescriptorHandler,
             public PeerAcceptor,
             private TurnHost,
             private TimerHost,
             private DialHost {
 public:
  // `processes` must outlive the node. Without `wire` and `dialer` the daemon serves only groups
  // whose members are all its own.
  Node(NodeOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes,
       std::unique_ptr<Wire> wire = nullptr, PeerDialer dialer = nullptr);
  // Ends the links and waits for their last callbacks.
  ~Node() override;

  // ---- membership ----
  // The sink gets Welcome, or End with the reason. MemberGone may be called at any time afterwards.
  MemberId AttachTrainer(const v1::TrainerHello& hello, const Peer& peer,
                         std::shared_ptr<TrainerSink> sink);
  MemberId AttachEngine(const v1::EngineHello& hello, const Peer& peer,
                        std::shared_ptr<EngineSink> sink);
  void MemberGone(MemberId member, const std::string& reason);
  // As MemberGone, but the member itself asked for it: its sink ends with OK, and whoever has seen
  // that end may attach in the member's place.
  void MemberDetached(MemberId member);
  void Ready(MemberId member, const v1::Ready& ready);
  void Ack(MemberId member, const v1::Ack& ack);
  void Failed(MemberId member, const v1::Failed& failed);
  // OK: the lease is that of a rank of that role. Called to refuse a stream before its chunks are
  // collected.
  absl::Status CheckTrainerLease(const v1::Lease& lease, const Peer& peer);
  absl::Status CheckEngineLease(const v1::Lease& lease, const Peer& peer);
  // Reply once, as a ReplyFunction does: OK when the group's coordinator has the layout. If the
  // coordinator is another daemon, its loss (PeerLimits::peer) and the end of the lease are answers
  // too (P4).
  void RegisterTrainerLayout(CallId call, const v1::Lease& lease, const Peer& peer, Layout layout,
                             LayoutReply reply);
  void RegisterEngineLayout(CallId call, const v1::Lease& lease, const Peer& peer, Layout layout,
                            LayoutReply reply);

  // ---- regions: each replies once ----
  // Registers device memory, which is opened on a thread of its own.
  void RegisterRegion(const v1::RegisterRegionRequest& request, const Peer& peer, bool engine,
                      ResponseFunction<v1::RegisterRegionResponse> reply);
  // Releases a region of any kind; replies when it is closed.
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
  // Watches until StopWatching. The node itself ends the sink only with until_idle.
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
  // The GPUs can't be used any more: running updates of groups with members on GPUs are given up
  // (bytes written count as dirty, P2). The caller then ends the daemon.
  void DevicesLost(const absl::Status& why);
  // Opens no new update and tells members. Running updates go on.
  void Drain();
  // Waits until no update runs, at most until `deadline`. Then aborts updates that still run,
  // answers their calls, and ends every stream with UNAVAILABLE.
  void Finish(TimePoint deadline);
  // Makes Finish wait no longer for running updates.
  void Hurry();
  // Sets the listeners that status shows, as "unix:PATH", "tcp:HOST:PORT" or
  // "peers:HOST:PORT".
  void SetListeners(std::vector<std::string> listeners);
  // Whether the mutex can be had; for the watchdog.
  bool Alive();
  // Aborts the process if an invariant of the state does not hold; for tests.
  void CheckInvariants();
  // How many views of updates were made for watchers so far: the cost of watching.
  int64_t watched_views();

 private:
  struct Performer;

  static absl::Status NoGroup(const std::string& name);
  // `trainers`: the world size of the trainer rank that asks for the group. If that rank could not
  // join, no group is made.
  absl::StatusOr<GroupRecord*> MakeGroup(const std::string& name, const v1::GroupSpec& message,
                                         std::optional<int> trainers, bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops the groups that must give way (Groups::RoomFor). RESOURCE_EXHAUSTED: there is not enough
  // room.
  absl::Status MakeRoom(const std::string& name, const GroupSpec* spec, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called after every event of the group. When the group becomes empty, records the time and gives
  // the group's host pool back.
  void NoteEmpty(GroupRecord* group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Deletes a group without members. `why` is for the log.
  void DropGroup(const std::string& name, std::string_view why, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropExpired(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED: the daemon has max_members members already.
  absl::Status CheckMembers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Creates, finds or waits for the hello's group, then attaches.
  template <typename HelloMessage, typename Sink, typename Identity>
  MemberId Attach(const HelloMessage& hello, const Peer& peer, std::shared_ptr<Sink> sink,
                  absl::StatusOr<Identity> identity);
  template <typename HelloMessage>
  void Attach(const HelloMessage& hello, MemberRecord record, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename HelloMessage>
  absl::StatusOr<GroupRecord*> GroupFor(const HelloMessage& hello, const std::string& coordinator,
                                        const MemberRecord& record,
                                        const std::optional<v1::GroupSpec>& spec, bool* created,
                                        Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets the member enter the group, at once or when its GPU has the pool that it needs; or refuses
  // it.
  void Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Admit(MemberRecord record, GroupEvent attached, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitWaiting(const std::string& group, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EnsurePool(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The member with this token, if it may have one more region. `identity`: RegionRecord::identity
  // of that region; empty: not known.
  absl::StatusOr<MemberRecord*> AdmitRegion(const std::string& token, const Peer& peer,
                                            const std::string& identity)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes the region from the records, unless it is in use. The region is unmapped when the
  // result is destroyed, which must not happen under the mutex.
  absl::StatusOr<RegionRecord> TakeRegion(MemberRecord* member, RegionId region)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Calls `closed` when the region is closed, or when only running copies still hold it.
  void CloseRegion(RegionRecord region, std::function<void()> closed);

  // Members on GPUs.
  // Runs `answer` after the closing of all regions that the caller, on regions_thread_ or
  // elsewhere, has let go or lets go in this job.
  void AnswerClosed(std::function<void()> answer);
  // The GPU that a hello names, by ordinal; none: host.
  absl::StatusOr<std::optional<int>> DeviceOf(const std::string& name) const;
  // The device memory that the request asks to open.
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
  // Makes device memory a region. Its mapping is closed on regions_thread_, wherever the region is
  // destroyed.
  RegionRecord DeviceRegion(std::shared_ptr<const CudaRegion> region, bool engine) const;
  absl::StatusOr<RegionId> RegisterVmm(const Token& token, const PeerCredentials& peer, UniqueFd fd,
                                       int64_t bytes);
  // Counts a call that waits on regions_thread_ for device memory: at most outstanding_buckets a
  // member.
  absl::Status AdmitOpening(CallId call, MemberId member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OpeningWanted(CallId call);
  absl::Status EndOpening(CallId call);
  // Lets the rank enter once the pool is there, or refuses it.
  void AwaitPool(MemberRecord record, const GroupRecord& group, GroupEvent attached)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPooling(MemberId member, absl::Status made);
  // Ends the stream of a rank that has left waiters_ without being admitted.
  void EndWithoutPool(MemberRecord record, absl::Status status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called when a member on that GPU has gone.
  void DropUnused(GroupRecord* group, int ordinal, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Broadcasts through slots. OK: the method can serve updates that this rank begins.
  absl::Status CheckBroadcast(const MemberRecord& trainer, BroadcastMethod method)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether kAuto could gain anything by slots.
  bool CouldGain(const MemberRecord& trainer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The pools that a Begin needs before its event may enter the group.
  struct BeginNeeds {
    BroadcastMethod broadcast = BroadcastMethod::kDirect;
    bool slots = false;  // on the GPUs
    std::string group;
    uint64_t id = 0;
    std::vector<DeviceSlots::Missing> missing;
  };
  absl::StatusOr<BeginNeeds> NeedsOf(CallId call, const v1::BeginRequest& request, const Peer& peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs on regions_thread_. Not OK: the call is not wanted any more, or a pool could not be made.
  absl::Status MakePools(CallId call, const std::vector<DeviceSlots::Missing>& missing);
  absl::StatusOr<BeginEvent> MakeBegin(CallId call, const v1::BeginRequest& request,
                                       const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `slots`: the pools that it needs are made.
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
  // Makes the event of a member's call; runs under mutex_.
  using EventFunction = std::function<absl::StatusOr<GroupEvent>(const MemberRecord&)>;
  // The event of an authenticated call, and its group.
  absl::StatusOr<std::pair<std::string, GroupEvent>> MakeEvent(const v1::Lease& lease,
                                                               const Peer& peer,
                                                               const std::string& request_id,
                                                               const EventFunction& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Authenticates, and hands `event(member)` to the member's group with `reply` waiting under
  // `call`. `push`: the bucket that `event` checked, which is kept with the call; a push lets other
  // callers go ahead.
  void TrainerCall(CallId call, const v1::Lease& lease, const Peer& peer,
                   const std::string& request_id, ReplyFunction reply, const EventFunction& event,
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

  // Feeds one event to the machine and performs its actions.
  void Dispatch(Turn& turn, const std::string& group, MachineEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) override;
  void Drained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) override;
  void Perform(GroupRecord* group, MachineAction action, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Count(const GroupRecord& group, const UpdateEnded& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Other daemons.
  std::string CoordinatorOf(const std::string& address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status Followed(const GroupRecord& group);
  // The group that the daemon at `address` coordinates, joined or being joined.
  absl::StatusOr<GroupRecord*> Follow(const std::string& name, const std::string& address,
                                      const std::optional<v1::GroupSpec>& spec, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LinkIsUp(const DialTry& of, const LinkUp& up) override;
  void LinkSays(const DialTry& of, PeerCommand command) override;
  void LinkIsLost(const DialTry& of, absl::Status status) override;
  void TakeJoined(GroupRecord* group, const LinkUp& up, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives a reported layout the object of an equal one that the group knows. Compares them without
  // the mutex: it takes as long as there are tensors.
  void ShareLayout(uint64_t session, PeerLayout* report);
  // Makes the index of a Prepare's destinations without the mutex: it takes as long as there are
  // tensors in their layouts.
  void IndexDestinations(const DialTry& of, PeerPrepare* prepare);
  // The try failed: refuses the members that this concerns, and tries again for the others.
  void JoinFailed(GroupRecord* group, const absl::Status& status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopJoining(GroupRecord* group, const absl::Status& status, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Stops joining if no member waits for it any more.
  void StopJoiningIfUnwanted(const std::string& name, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLateMembers(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hands the event of a link or a wire to the group. Does nothing if the group's record `id` is
  // gone.
  void GroupEventOf(const std::string& name, uint64_t id, MachineEvent event);
  void DropFollower(const std::string& name, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks the hello of a daemon that joins, and makes the group that its spec asks for.
  absl::Status TakeHello(Peers::Waiting* peer, bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitPeer(Peers::Waiting peer, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitWaitingPeers(const std::string& group, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPeers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformSend(GroupRecord* group, SendCommand a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformSend(GroupRecord* group, SendReport a, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers a report that the link could not send with the refusal that the coordinator would send.
  void ReportRefused(const std::string& name, const PeerLink* link, PeerLink::Refused refused);
  // For a rank whose group another daemon coordinates. Answered by SlotsMade.
  void PerformMakeSlots(const GroupRecord& group, const MakeSlots& a)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendWelcome(GroupRecord* group, MemberRecord* member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `end`: the status that the member's sink ends with.
  void Gone(MemberId member, const std::string& reason, const absl::Status& end);
  void Lose(MemberRecord* member, const std::string& reason, absl::Status end, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Erase(MemberId member, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static uint64_t NewIncarnation();
  static std::string NewBootId();
  absl::StatusOr<uint64_t> Replace(GroupRecord* group, const std::string& request_id, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  TimePoint NextWake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) override;
  void Ring(Turn& turn, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) override;
  static TimePoint Now() { return std::chrono::steady_clock::now(); }

  void DescribeEpochs(v1::NcclStatus* status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::GroupStatus GroupStatusOf(const GroupRecord& group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  NodeOptions options_;  // without cuda.wire, which is the data plane's
  const SpecLimits spec_limits_{options_.default_slot_bytes, options_.default_slots,
                                options_.max_pool_bytes};
  ProcessWatch* const processes_;
  const std::string boot_id_ = NewBootId();
  const TimePoint started_ = Now();
  std::atomic<uint64_t> next_call_{1};
  std::atomic<uint64_t> next_member_{1};
  std::atomic<uint64_t> next_update_{1};

  // Filled under mutex_, so that lines have the order of their events.
  const std::shared_ptr<LogQueue> log_ = std::make_shared<LogQueue>();

  PushTurns pushes_;
  Mutex mutex_;
  CondVar idle_cond_;
  Leases leases_ ABSL_GUARDED_BY(mutex_);
  Memory memory_ ABSL_GUARDED_BY(mutex_){{options_.max_regions_per_member, options_.max_regions}};
  Waiters waiters_ ABSL_GUARDED_BY(mutex_);
  Peers peers_ ABSL_GUARDED_BY(mutex_);
  Groups groups_ ABSL_GUARDED_BY(mutex_){
      {options_.max_groups, options_.max_pool_bytes, options_.group_idle}, &peers_, &waiters_};
  Dialler dialler_ ABSL_GUARDED_BY(mutex_);
  WireLock wire_lock_ ABSL_GUARDED_BY(mutex_);
  Calls calls_ ABSL_GUARDED_BY(mutex_);
  Watchers watchers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> listeners_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool hurrying_ ABSL_GUARDED_BY(mutex_) = false;
  // Finish aborts updates from now on; metrics count these as given up by the drain.
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Opens device memory and closes regions' mappings. Regions of device memory share this object,
  // since they may be destroyed after the node.
  const std::shared_ptr<JobThreads> regions_thread_ =
      std::make_shared<JobThreads>("refitd-regions");

  // Its functions are called under mutex_, but for those that say otherwise.
  DeviceSlots device_slots_;
  Timer timer_{this, this, &mutex_};
  // Destroyed first, since it comes last: the callbacks of what still runs then find the other
  // members. Its functions are called under mutex_, but for those that say otherwise.
  DataPlane data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_NODE_H_
