// A trainer's calls are authenticated here and handed to the member's group as events that wait for
// their answer. Calls that need staging slots or device memory wait for these first.
//
// Thread-safe; called without the mutex. Each call replies exactly once.
#ifndef REFITD_DAEMON_NODE_TRAINER_CALLS_H_
#define REFITD_DAEMON_NODE_TRAINER_CALLS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/checks/bucket.h"
#include "daemon/group/peer.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/device_slots.h"
#include "daemon/node/identities.h"
#include "daemon/node/members.h"
#include "daemon/node/regions.h"
#include "daemon/node/state.h"
#include "transport/broadcast.h"

namespace refitd {

// The event of a trainer's call. Call and member are filled in here.
using TrainerEvent = decltype(PeerCall::event);

// A push as it came from a service. The message that it was read from must live until the reply.
struct ReceivedPush {
  BucketEvent event;  // without its call, its member and its bucket
  ReceivedBucket received;
};

class TrainerCalls {
 public:
  TrainerCalls(DaemonState* state, Identities* identities, Members* members, Regions* regions,
               DeviceSlots* slots, const DataPlane* data_plane)
      : state_(*state),
        identities_(*identities),
        members_(*members),
        regions_(*regions),
        device_slots_(*slots),
        data_plane_(*data_plane) {}

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
  // Called when the caller went away.
  void CallGone(CallId call);

 private:
  // Makes the event of a member's call, in a turn.
  using EventFunction = std::function<absl::StatusOr<GroupEvent>(const MemberRecord&)>;
  // The event of an authenticated call, and its group.
  absl::StatusOr<std::pair<std::string, GroupEvent>> MakeEvent(const Caller& caller,
                                                               const EventFunction& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Authenticates, and hands `event(member)` to the member's group with `reply` waiting under
  // `call`. The bucket of a BucketEvent is kept with the call.
  void Hand(CallId call, const Caller& caller, ReplyFunction reply, const EventFunction& event,
            Turn::Order order = Turn::Order::kAny);

  // ---- calls that wait for device memory (trainer_calls_device.cc) ----
  // Counts a call that waits on the thread for regions: at most outstanding_buckets a member.
  absl::Status AdmitOpening(CallId call, MemberId member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::Status OpeningWanted(CallId call);
  absl::Status EndOpening(CallId call);

  void LeaseSlot(CallId call, const Caller& caller, LeaseSlotEvent event, ReplyFunction reply);
  void LeaseOpened(CallId call, const Caller& caller, LeaseSlotEvent event, ReplyFunction reply);

  // The pools that a Begin needs before its event may enter the group.
  struct BeginNeeds {
    bool slots = false;  // on the GPUs
    std::string group;
    uint64_t id = 0;
    std::vector<DeviceSlots::Missing> missing;
  };
  void Begin(CallId call, const Caller& caller, BeginEvent event, ReplyFunction reply);
  absl::StatusOr<BeginNeeds> NeedsOf(CallId call, const Caller& caller, const BeginEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Runs on the thread for regions. Not OK: the call is not wanted any more, or a pool could not be
  // made.
  absl::Status MakePools(CallId call, const std::vector<DeviceSlots::Missing>& missing);
  // `slots`: the pools that the Begin needs are made.
  void BeginOpened(CallId call, const Caller& caller, BeginEvent event, ReplyFunction reply,
                   bool slots);
  // Checks a method that broadcasts through slots. OK: the method can serve updates that this rank
  // begins.
  absl::Status CheckBroadcast(const MemberRecord& trainer, BroadcastMethod method) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Whether broadcasting through slots could gain anything, so that kAuto needs the slots.
  bool CouldGain(const MemberRecord& trainer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // Opens the handles of the bucket, then pushes. Opening takes up to milliseconds, so the thread
  // for regions opens the handles without the mutex. The caller may go away meanwhile: then the
  // call is answered CANCELLED. An answer that comes after the opening waits until memory that was
  // let go is closed (AnswerClosed).
  void PushFromDevice(CallId call, const Caller& caller, ReceivedPush push, ReplyFunction reply);
  void PushOpened(CallId call, const Caller& caller, absl::StatusOr<ReceivedPush> push,
                  ReplyFunction reply, const DeviceSource& device);
  // The memory of the group's engines at this daemon. Valid until the next call.
  const DestinationPlaces& PlacesOfEngines(GroupRecord* group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
  Identities& identities_;
  Members& members_;
  Regions& regions_;
  DeviceSlots& device_slots_;
  const DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_TRAINER_CALLS_H_
