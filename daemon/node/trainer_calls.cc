#include "daemon/node/trainer_calls.h"

#include <algorithm>
#include <map>

#include "daemon/checks/fields.h"
#include "daemon/link/reports.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// Whether the member still has the regions that a bucket names. Region ids are never used twice.
template <typename Regions>
bool HasRegions(const Regions& regions, const CheckedBucket& bucket) {
  if (bucket.source != CheckedBucket::Source::kRegions) return true;
  RegionId last;
  for (const CheckedBucket::Place& place : bucket.places) {
    if (place.region == last) continue;
    if (!regions.contains(place.region)) return false;
    last = place.region;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::pair<std::string, GroupEvent>> TrainerCalls::MakeEvent(
    const Caller& caller, const EventFunction& event) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                          members_.Authenticate(caller, /*engine=*/false));
  REFITD_RETURN_IF_ERROR(state_.calls.Admit());
  REFITD_ASSIGN_OR_RETURN(GroupEvent made, event(*member));
  return std::pair(member->group, std::move(made));
}

void TrainerCalls::Hand(CallId call, const Caller& caller, ReplyFunction reply,
                        const EventFunction& event, Turn::Order order) {
  Turn turn(state_.turns, order);
  absl::StatusOr<std::pair<std::string, GroupEvent>> made = MakeEvent(caller, event);
  if (made.ok()) {
    const auto* push = std::get_if<BucketEvent>(&made->second);
    state_.calls.Add(
        call,
        {made->first, identities_.Audited(made->first, made->second, caller.peer, std::move(reply)),
         push != nullptr ? push->bucket : nullptr});
    turn.Handle(made->first, std::move(made->second));
  } else {
    turn.Answer(
        [reply = std::move(reply), refused = made.status()] { reply(refused, EmptyReply{}); });
  }
}

void TrainerCalls::Call(CallId call, const Caller& caller, absl::StatusOr<TrainerEvent> event,
                        ReplyFunction reply) {
  if (event.ok()) {
    if (auto* begin = std::get_if<BeginEvent>(&*event)) {
      return Begin(call, caller, std::move(*begin), std::move(reply));
    }
    if (auto* lease = std::get_if<LeaseSlotEvent>(&*event)) {
      return LeaseSlot(call, caller, *lease, std::move(reply));
    }
  }
  Hand(call, caller, std::move(reply),
       [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
         REFITD_RETURN_IF_ERROR(event.status());
         return std::visit(
             [&](auto& kind) -> GroupEvent {
               kind.call = call;
               kind.member = member.id;
               return std::move(kind);
             },
             *event);
       });
}

void TrainerCalls::Refit(CallId call, const Caller& caller, absl::StatusOr<RefitEvent> event,
                         uint64_t binding_generation, ReplyFunction reply) {
  const auto check = [&](const MemberRecord& member)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn) -> absl::StatusOr<GroupEvent> {
    REFITD_RETURN_IF_ERROR(event.status());
    if (member.layout == nullptr) {
      return absl::FailedPreconditionError("this rank has no layout: RegisterLayout first");
    }
    if (const auto pending = state_.calls.LayoutsOf(member.id); !pending.empty()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "binding_generation: {} is being replaced by {}, which is not answered yet",
                   binding_generation, pending.front()->binding_generation);
    }
    if (binding_generation != member.layout->binding_generation) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "binding_generation: {} is not the registered {}", binding_generation,
                   member.layout->binding_generation);
    }
    REFITD_RETURN_IF_ERROR(identities_.AdmitUpdate(member, event->request_id));
    event->call = call;
    event->member = member.id;
    return *std::move(event);
  };
  Hand(call, caller, std::move(reply), check);
}

void TrainerCalls::PushBucket(CallId call, const v1::PushBucketRequest& request,
                              const Caller& caller, ReplyFunction reply) {
  if (request.bucket().has_cuda_ipc() && state_.options.cuda.memory != nullptr) {
    return PushFromDevice(call, request, caller, std::move(reply));
  }
  PushOpened(call, request, caller, std::move(reply), {});
}

void TrainerCalls::PushOpened(CallId call, const v1::PushBucketRequest& request,
                              const Caller& caller, ReplyFunction reply,
                              const DeviceSource& device) {
  BucketLimits limits;
  std::map<RegionId, int64_t> regions;
  const auto region_bytes = [&regions](RegionId id) -> std::optional<int64_t> {
    const auto it = regions.find(id);
    return it == regions.end() ? std::nullopt : std::optional(it->second);
  };
  // Checking many tensors takes long, so it is done outside the mutex, against a copy of the
  // regions.
  const auto check = [&]() -> absl::StatusOr<std::shared_ptr<const CheckedBucket>> {
    {
      const Turn turn(state_.turns, Turn::Order::kPush);
      REFITD_ASSIGN_OR_RETURN(const MemberRecord* const member,
                              members_.Authenticate(caller, /*engine=*/false));
      // P10: a bucket with more tensors is refused without looking at them.
      const auto& refs = request.bucket().regions().refs();
      const int64_t count = std::min<int64_t>(refs.size(), kMaxTensorsPerBucket);
      RegionId last;
      for (int i = 0; i < count; ++i) {
        const RegionId id(refs[i].region_id());
        if (id == last) continue;
        last = id;
        const auto it = member->regions.find(id);
        if (it != member->regions.end()) regions[it->first] = it->second.memory.bytes;
      }
      limits = {state_.options.inline_bytes, state_.groups.Of(*member)->machine->spec().slot_bytes};
    }
    REFITD_ASSIGN_OR_RETURN(CheckedBucket checked,
                            CheckBucket(request.bucket(), limits, region_bytes, device));
    return std::make_shared<const CheckedBucket>(std::move(checked));
  };
  const absl::StatusOr<std::shared_ptr<const CheckedBucket>> bucket = check();
  BucketEvent event;
  event.call = call;
  event.request_id = request.request_id();
  event.version = Version(request.version());
  event.update = UpdateId(request.update_id());
  if (bucket.ok()) event.bucket = *bucket;
  Hand(
      call, caller, std::move(reply),
      [&](const MemberRecord& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
          kInTurn) -> absl::StatusOr<GroupEvent> {
        REFITD_RETURN_IF_ERROR(CheckText(request.request_id(), kMaxRequestIdBytes, "request_id"));
        REFITD_RETURN_IF_ERROR(bucket.status());
        if (!HasRegions(member.regions, **bucket)) {
          // A region was released meanwhile: the error is as if the region had never been there.
          std::erase_if(regions, [&](const auto& r) { return !member.regions.contains(r.first); });
          return CheckBucket(request.bucket(), limits, region_bytes, device).status();
        }
        if (state_.peers.Any(member.group)) {
          // Other daemons must be able to read the headers that the bucket becomes.
          REFITD_RETURN_IF_ERROR(CheckHeaderFits((*bucket)->tensors, state_.options.message_bytes));
        }
        event.member = member.id;
        return std::move(event);
      },
      Turn::Order::kPush);
}

void TrainerCalls::CallGone(CallId call) {
  Turn turn(state_.turns);
  state_.calls.NoteGone(call);
  if (const std::string* group = state_.calls.GroupOf(call); group != nullptr) {
    turn.Handle(*group, refitd::CallGone{call});
  }
}

}  // namespace refitd
