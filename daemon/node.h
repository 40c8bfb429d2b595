// The daemon's heart: groups, members, leases, memory; where events meet state machines and actions
// meet the world.
//
//   services (gRPC) --calls--> Node --events--> Group (pure)
//   Executor, member streams, replies <--effects-- Node <--actions-- Group
//
// One mutex serialises all state machines. Nothing under it blocks: transports have their own
// threads, streams their own queues; replies run after it was released. P6: a member's mappings are
// dropped only on ReleaseMember, and every copy holds its own reference. P8: a lost member's token
// dies at once, its record with its last copy. P9: a lease is bound to the credentials that
// attached.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_H_
#define REFITD_DAEMON_NODE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/descriptor_socket.h"
#include "daemon/executor.h"
#include "daemon/group/group.h"
#include "daemon/observer.h"
#include "daemon/process_watch.h"
#include "daemon/update_meter.h"
#include "daemon/wire.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/operator.pb.h"
#include "refitd/v1/trainer.pb.h"
#include "transport/base/mutex.h"
#include "transport/cuda/driver.h"
#include "transport/host/memory.h"
#include "transport/transport.h"

namespace refitd {

struct NodeOptions {
  GroupLimits group;
  int64_t default_slot_bytes = int64_t{64} << 20;
  int default_slots = 4;
  int64_t max_pool_bytes = int64_t{16} << 30;  // all groups' staging together
  int64_t max_region_bytes = kMaxRegionBytes;  // of one region
  int64_t inline_bytes = int64_t{4} << 20;     // of one PushBucket
  int64_t message_bytes = int64_t{8} << 20;    // of any message
  int max_groups = 64;
  int max_members = 4096;
  int max_regions_per_member = 4096;
  int max_regions =
      16'384;  // of all members: a process has 65,530 mappings by default (vm.max_map_count)
  std::string descriptor_socket;     // path, told to members
  NodeObserver* observer = nullptr;  // outlives the node; null: nobody counts
};

// Who is at the other end of a connection: the kernel's word on a unix socket, nothing on TCP.
struct Peer {
  std::optional<PeerCredentials> credentials;
};

// A member's event stream. Send and End are called under the node's mutex: they only enqueue. End
// comes last, once.
template <typename Event>
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void Send(Event event) = 0;
  virtual void End(absl::Status status) = 0;
};
using TrainerSink = EventSink<v1::TrainerEvent>;
using EngineSink = EventSink<v1::EngineEvent>;
using UpdateSink = EventSink<v1::UpdateStatus>;

// Runs once, on any thread, never under the node's mutex.
using ReplyFunction = std::function<void(absl::Status, const ReplyPayload&)>;

class Node : public DescriptorHandler {
 public:
  // `processes` must outlive the node.
  Node(NodeOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes);
  ~Node() override;

  // ---- membership ----
  // The sink gets Welcome, or End with the reason. MemberGone may be called at any time after.
  MemberId AttachTrainer(const v1::TrainerHello& hello, const Peer& peer,
                         std::shared_ptr<TrainerSink> sink);
  MemberId AttachEngine(const v1::EngineHello& hello, const Peer& peer,
                        std::shared_ptr<EngineSink> sink);
  void MemberGone(MemberId member, const std::string& reason);
  void Ready(MemberId member, const v1::Ready& ready);
  void Ack(MemberId member, const v1::Ack& ack);
  void Failed(MemberId member, const v1::Failed& failed);
  // OK: the lease is an engine rank's. Lets a stream be refused before its chunks are collected.
  absl::Status CheckEngineLease(const v1::Lease& lease, const Peer& peer);
  absl::StatusOr<v1::LayoutRegistered> RegisterEngineLayout(const v1::Lease& lease,
                                                            const Peer& peer, Layout layout);

  // ---- a trainer's calls: each replies exactly once ----
  CallId NewCall() { return CallId(next_call_.fetch_add(1)); }
  void Begin(CallId call, const v1::BeginRequest& request, const Peer& peer, ReplyFunction reply);
  void LeaseSlot(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                 ReplyFunction reply);
  void ReleaseSlot(CallId call, const v1::ReleaseSlotRequest& request, const Peer& peer,
                   ReplyFunction reply);
  // `request` must live until the reply: inline bytes are read from it.
  void PushBucket(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                  ReplyFunction reply);
  void Commit(CallId call, const v1::CommitRequest& request, const Peer& peer, ReplyFunction reply);
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
  // Watches until StopWatching; the sink's End comes from the node only with until_idle.
  absl::StatusOr<uint64_t> Watch(const v1::WatchUpdatesRequest& request,
                                 std::shared_ptr<UpdateSink> sink);
  void StopWatching(uint64_t watch);

  // ---- the descriptor socket ----
  absl::StatusOr<RegionId> RegisterRegion(const Token& token, const PeerCredentials& peer,
                                          UniqueFd fd, RegionKind kind, int64_t bytes) override;
  absl::Status ReleaseRegion(const Token& token, const PeerCredentials& peer,
                             RegionId region) override;
  absl::StatusOr<PoolHandle> MapPool(const Token& token, const PeerCredentials& peer) override;

  // ---- life ----
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

 private:
  struct RegionRecord {
    std::shared_ptr<HostRegion> mapping;
    std::pair<uint64_t, uint64_t> file;  // device and inode: which memfd it is
  };
  struct MemberRecord {
    MemberId id;
    std::string token;
    std::string group;
    bool engine = false;
    bool lost = false;  // its token is dead; copies may still run
    Peer peer;
    std::string client;
    std::string device;
    std::shared_ptr<TrainerSink> trainer_sink;
    std::shared_ptr<EngineSink> engine_sink;
    std::map<RegionId, RegionRecord> regions;
    std::shared_ptr<const Layout> layout;
    uint64_t incarnation = 0;
    WatchHandle watch;
    void End(absl::Status status);
  };
  struct GroupRecord {
    explicit GroupRecord(NodeObserver* observer) : meter(observer) {}
    std::unique_ptr<Group> group;
    UpdateMeter meter;
    UniqueFd pool_fd;
    std::shared_ptr<HostRegion> pool;  // null until first needed
    // The last CreateGroup(replace) with a request id, and the incarnation it made (P3).
    std::string replace_request;
    uint64_t replace_incarnation = 0;
    int64_t pool_bytes() const { return group->spec().slot_bytes * group->spec().slots; }
  };
  // A member that waits for its group.
  struct Waiting {
    MemberRecord record;
    GroupEvent attached;
    TimePoint deadline;
  };
  struct Call {
    std::string group;
    ReplyFunction reply;
  };
  struct Watcher {
    std::shared_ptr<UpdateSink> sink;
    std::string group;
    Duration interval{};
    bool until_idle = false;
    TimePoint due;
    std::map<std::string, std::string> last;  // group -> state last sent, to send each change once
  };
  // What runs after the mutex was released.
  using Deferred = std::vector<std::function<void()>>;
  class Memory;
  struct Performer;

  static absl::Status NoGroup(const std::string& name);
  GroupRecord* FindGroup(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `trainers`: the world size of the trainer rank that would make it; one that can't join makes
  // nothing.
  absl::StatusOr<GroupRecord*> MakeGroup(const std::string& name, const v1::GroupSpec& wire,
                                         std::optional<int> trainers, bool* created)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<GroupSpec> CheckSpec(const v1::GroupSpec& wire) const;
  // Creates, finds or waits for the hello's group, then attaches.
  template <typename Hello, typename Sink, typename Identity>
  MemberId Attach(const Hello& hello, const Peer& peer, std::shared_ptr<Sink> sink,
                  absl::StatusOr<Identity> identity);
  void Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdmitWaiting(const std::string& group, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EnsurePool(GroupRecord* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<MemberRecord*> Authenticate(const v1::Lease& lease, const Peer& peer, bool engine)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<MemberRecord*> AuthenticateToken(const std::string& token, const Peer& peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Authenticates and hands `event(member)` to the member's group, with `reply` waiting under
  // `call`.
  void TrainerCall(CallId call, const v1::Lease& lease, const Peer& peer,
                   const std::string& request_id, ReplyFunction reply,
                   const std::function<absl::StatusOr<GroupEvent>(const MemberRecord&)>& event);
  void MemberEvent(MemberId member, const GroupEvent& event);

  // Feeds one event (and those that its actions bring at once) and performs the actions.
  void Handle(const std::string& group, GroupEvent event, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Perform(GroupRecord* group, GroupAction action, Deferred* deferred,
               std::deque<GroupEvent>* more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformTransfer(GroupRecord* group, StartTransfer start, std::deque<GroupEvent>* more)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PerformVerify(GroupRecord* group, const StartVerify& verify, std::deque<GroupEvent>* more)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendWelcome(GroupRecord* group, MemberRecord* member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(MemberRecord* member, const std::string& reason, absl::Status end, Deferred* deferred)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Erase(MemberId member, Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyWatchers(bool progress) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static std::string WatchKey(const UpdateView& update);
  static uint64_t NewIncarnation();
  absl::StatusOr<uint64_t> Replace(GroupRecord* group, const std::string& request_id,
                                   Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AnyUpdateRuns() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static void RunAll(Deferred deferred);
  void TimerLoop();
  TimePoint NextWake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeTimer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static TimePoint Now() { return std::chrono::steady_clock::now(); }

  v1::GroupStatus GroupStatusOf(const GroupRecord& group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const NodeOptions options_;
  ProcessWatch* const processes_;
  const TimePoint started_ = Now();
  const CudaReport cuda_ = ProbeCuda();
  std::atomic<uint64_t> next_call_{1};

  Mutex mutex_;
  CondVar timer_cond_;
  CondVar idle_cond_;
  std::map<std::string, std::unique_ptr<GroupRecord>> groups_ ABSL_GUARDED_BY(mutex_);
  std::map<MemberId, MemberRecord> members_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, MemberId> tokens_ ABSL_GUARDED_BY(mutex_);
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<CallId, Call> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<CallId, CheckedBucket> buckets_ ABSL_GUARDED_BY(mutex_);  // until their reply
  std::map<uint64_t, Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_member_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_region_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_update_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_watch_ ABSL_GUARDED_BY(mutex_) = 1;
  TimePoint timer_wakes_ ABSL_GUARDED_BY(mutex_) = TimePoint::max();  // until when the timer sleeps
  std::vector<std::string> listeners_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool hurrying_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t regions_ ABSL_GUARDED_BY(mutex_) = 0;  // of all members
  Executor executor_ ABSL_GUARDED_BY(mutex_);

  std::thread timer_;
  // Last: destroyed first, after its jobs ended; their callbacks still find the rest.
  std::unique_ptr<Transport> transport_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_H_
