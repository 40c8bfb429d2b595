// MemberCalls has what members call. A member's Attach stream begins with a hello, which leads to
// the member's group: it exists already, is made now, is waited for, or is joined. The end of the
// stream ends the member's lease. All other calls are authenticated by the lease and handed to the
// group as events that wait for their answer: a trainer's calls, layouts, and what engines report.
// Calls that need staging slots or device memory wait for these first.
//
//   member_calls_attach.cc     Attach streams
//   member_calls.cc            trainers' calls, engines' events
//   member_calls_device.cc     calls that wait for slots on GPUs, or for device memory
//   member_calls_layouts.cc    layouts: checked against the member's regions, then registered
//
// Thread-safe; called without the mutex. Each call replies exactly once.
#ifndef REFITD_DAEMON_NODE_MEMBER_CALLS_H_
#define REFITD_DAEMON_NODE_MEMBER_CALLS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/group/peer.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/peer_client.h"
#include "daemon/node/peer_server.h"
#include "daemon/node/state.h"
#include "transport/broadcast.h"
#include "transport/plan/layout.h"

namespace refitd {

// The event of a trainer's call. Call and member are filled in here.
using TrainerEvent = decltype(PeerCall::event);

// A push as it came from a service. The message that it was read from must live until the reply.
struct ReceivedPush {
  BucketEvent event;  // without its call, its member and its bucket
  ReceivedBucket received;
};

class MemberCalls {
 public:
  MemberCalls(DaemonState* state, PeerClient* peer_client, PeerServer* peer_server,
              MemberMemory* memory)
      : state_(*state), peer_client_(*peer_client), peer_server_(*peer_server), memory_(*memory) {}

  // The sink gets Welcome, or End with the reason. Gone may be called at any time afterwards.
  MemberId Attach(absl::StatusOr<Arrival> arrival, std::shared_ptr<MemberSink> sink);
  void Gone(MemberId member, const std::string& reason);
  // The member itself asked to leave. This does what Gone does, but the sink ends with OK, and a
  // process that has seen that end may attach in the member's place.
  void Detached(MemberId member);

  // Hands the event to the group of the member whose lease the caller presents. An event that could
  // not be made answers the call with its status, once the caller is authenticated.
  void Call(CallId call, const Caller& caller, absl::StatusOr<TrainerEvent> event,
            ReplyFunction reply);
  // Does what Call does if `binding_generation` is that of the member's layout; otherwise refuses
  // the call.
  void Refit(CallId call, const Caller& caller, absl::StatusOr<RefitEvent> event,
             uint64_t binding_generation, ReplyFunction reply);
  void PushBucket(CallId call, const Caller& caller, absl::StatusOr<ReceivedPush> push,
                  ReplyFunction reply);
  // Called when the caller has left.
  void CallGone(CallId call);
  // Takes an engine rank's report (ReadyEvent, ProcessedEvent, AckEvent, EngineFailed). Does
  // nothing if the member is lost.
  void HandleEngineEvent(MemberId member, GroupEvent event);

  // ---- layouts ----
  // OK: the lease is that of a rank of that role. Called to refuse a stream before its chunks are
  // collected.
  absl::Status CheckLease(const Caller& caller, bool engine);
  // Returns a hold that counts the bytes of the caller's layout, within limits.held_bytes. The
  // caller grows the hold as chunks of the layout come.
  ByteLedger::Hold HoldFor(const Caller& caller) const {
    return state_.held.Empty(IdentityOf(caller.peer));
  }
  // An engine rank's layout was refused, with that status, before RegisterLayout got it. Where a
  // limit refused it, the group fails the calls that wait for the rank's instance.
  void LayoutRefused(const Caller& caller, const absl::Status& why);
  struct RegisteredLayout {
    uint64_t digest = 0;
    int64_t pieces = 0;
    int64_t bytes = 0;
    bool kept = false;  // the memory is what was kept of the rank, unchanged
  };
  using LayoutReply = std::function<void(const absl::StatusOr<RegisteredLayout>&)>;
  // Replies once, as a ReplyFunction does: OK when the group's coordinator has the layout. If the
  // coordinator is another daemon, its loss (PeerLimits::peer) and the end of the lease are answers
  // too (P4).
  // `hold` counts the layout while it lives.
  void RegisterLayout(CallId call, const Caller& caller, bool engine, Layout layout,
                      LayoutReply reply, ByteLedger::Hold hold = {});

 private:
  // ---- Attach streams (member_calls_attach.cc) ----
  MemberId Attach(Arrival arrival);
  // Creates, finds or waits for the member's group, then lets the member enter it.
  void Attach(Arrival arrival, StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // The member's group: found, made, or being joined. Null: the group does not exist, and the
  // member does not make it.
  absl::StatusOr<GroupRecord*> GroupFor(const Arrival& arrival, const std::string& coordinator,
                                        bool* created, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  void EndAttach(MemberId member, const std::string& reason, const absl::Status& end);

  // Makes the event of a member's call, under the state lock.
  using EventFunction = std::function<absl::StatusOr<GroupEvent>(const MemberRecord&)>;
  // The event of an authenticated call, and its group.
  absl::StatusOr<std::pair<std::string, GroupEvent>> MakeEvent(const Caller& caller,
                                                               const EventFunction& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Authenticates, and hands `event(member)` to the member's group with `reply` waiting under
  // `call`. The bucket of a BucketEvent is kept with the call.
  void Hand(CallId call, const Caller& caller, ReplyFunction reply, const EventFunction& event,
            StateLock::Order order = StateLock::Order::kAny);

  // ---- calls that wait for device memory (member_calls_device.cc) ----
  void LeaseSlot(CallId call, const Caller& caller, LeaseSlotEvent event, ReplyFunction reply);
  void LeaseOpened(CallId call, const Caller& caller, LeaseSlotEvent event, ReplyFunction reply);

  // The pools that a Begin needs before its event may enter the group.
  struct BeginNeeds {
    bool slots = false;  // on the GPUs
    std::string group;
    uint64_t id = 0;
    std::vector<StagingPools::Missing> missing;
  };
  void Begin(CallId call, const Caller& caller, BeginEvent event, ReplyFunction reply);
  absl::StatusOr<BeginNeeds> NeedsOf(CallId call, const Caller& caller, const BeginEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // `slots`: the pools that the Begin needs are made.
  void BeginOpened(CallId call, const Caller& caller, BeginEvent event, ReplyFunction reply,
                   bool slots);

  // Opens the handles of the bucket, then pushes. Opening takes up to milliseconds, so the thread
  // for regions opens the handles without the mutex. The caller may go away meanwhile: then the
  // call is answered CANCELLED. An answer that comes after the opening waits until memory that was
  // let go is closed (AnswerClosed).
  void PushFromDevice(CallId call, const Caller& caller, ReceivedPush push, ReplyFunction reply);
  void PushOpened(CallId call, const Caller& caller, absl::StatusOr<ReceivedPush> push,
                  ReplyFunction reply, const DeviceSource& device);

  // ---- layouts (member_calls_layouts.cc) ----
  // A layout that was checked and is being registered.
  struct Registering {
    CallId call;
    Caller caller;
    bool engine = false;
    std::shared_ptr<const Layout> layout;
    LayoutReply reply;
    RegisteredLayout registered;  // the answer
    OutsideBytes outside;         // MemberRecord::outside_bytes
    bool compared = false;        // the sides of its arenas are equal there
    bool parked = false;          // the call waits (Calls::BeginOpening)
  };
  absl::StatusOr<std::shared_ptr<const Layout>> CheckLayout(const Caller& caller, bool engine,
                                                            Layout layout, ByteLedger::Hold hold,
                                                            OutsideBytes* outside);
  absl::Status Park(const MemberRecord& member, Registering* r)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  void Refuse(const Registering& parked, const absl::Status& why);
  // Compares the sides of its arenas without the mutex, then goes on.
  void Compare(const Registering& parked, std::vector<ComparedSides> sides,
               const std::string& label, std::optional<uint64_t> content);
  void HandLayout(Registering r, std::optional<uint64_t> content);
  absl::StatusOr<MemberRecord*> AdmitLayout(const Caller& caller, bool engine, const Layout& layout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  std::string_view DiffersFromKept(const MemberRecord& member, uint64_t layout_digest,
                                   std::optional<uint64_t> content) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  absl::Status ReadContent(const MemberRecord& member, Registering* r)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Null: nothing of an earlier lease is written to the rank's memory any more.
  MemberRecord* EarlierLeaseOf(const MemberRecord& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  DaemonState& state_;
  PeerClient& peer_client_;
  PeerServer& peer_server_;
  MemberMemory& memory_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBER_CALLS_H_
