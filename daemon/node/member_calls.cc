#include "daemon/node/member_calls.h"

#include <map>
#include <memory>
#include <numeric>
#include <string_view>
#include <variant>
#include <vector>

#include "daemon/execute/program_executor.h"
#include "daemon/link/reports.h"
#include "daemon/node/identities.h"
#include "daemon/node/life.h"
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

int64_t InlineBytes(const ReceivedBucket& received) {
  const auto* const texts = std::get_if<std::vector<std::string_view>>(&received.source);
  if (texts == nullptr) return 0;
  return std::accumulate(
      texts->begin(), texts->end(), int64_t{0},
      [](int64_t sum, std::string_view text) { return sum + static_cast<int64_t>(text.size()); });
}

// Only members' memory can be an engine's.
bool IsInMembersMemory(const CheckedBucket& bucket) {
  return bucket.source == CheckedBucket::Source::kRegions ||
         bucket.source == CheckedBucket::Source::kDevice;
}

// The first byte of a bucket's tensor. The regions exist.
MemoryOrigin OriginOf(const MemberRecord& trainer, const CheckedBucket& bucket, size_t tensor) {
  const CheckedBucket::Place& place = bucket.places[tensor];
  if (bucket.source != CheckedBucket::Source::kRegions) return place.origin;
  MemoryOrigin origin = trainer.regions.at(place.region).memory.origin;
  origin.begin += place.byte_offset;
  return origin;
}

// Not OK: bytes of the bucket lie in memory where an engine has other bytes (P11).
absl::Status CheckPlaces(const MemberRecord& trainer, const CheckedBucket& bucket,
                         const DestinationPlaces& places) {
  for (size_t t = 0; t < bucket.tensors.size(); ++t) {
    const MemoryOrigin origin = OriginOf(trainer, bucket, t);
    if (!places.Shares(origin)) continue;
    const TensorSpec& tensor = bucket.tensors[t];
    const TensorRange& range = bucket.ranges[t];
    for (const Box& box : BoxesOfRange(tensor.shape, range.start, range.count)) {
      MemoryOrigin at = origin;
      at.begin += (FirstIndex(box, tensor.shape) - range.start) * ElementBytes(tensor.dtype);
      REFITD_RETURN_IF_ERROR(
          places.Check(tensor, box, at, fmt::format("trainer rank {}", trainer.rank)));
    }
  }
  return absl::OkStatus();
}

// The memory of the group's engines at this daemon. Valid until the next call.
const DestinationPlaces& PlacesOfEngines(DaemonState& state, GroupRecord* group)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
  decltype(group->engine_places.engines) engines;
  for (const auto& [id, member] : state.members.all()) {
    if (member.engine && member.layout != nullptr && member.group == group->name()) {
      engines.emplace_back(id, member.layout, member.flipped());
    }
  }
  GroupRecord::EnginePlaces& kept = group->engine_places;
  if (kept.places != nullptr && kept.engines == engines) return *kept.places;
  const DataPlane::GroupMemory memory = state.data_plane->MemoryOf(*group);
  std::vector<PlacedLayout> placed;
  for (const auto& [id, layout, flipped] : engines) {
    placed.push_back(PlaceOf(id, layout, true, memory));
  }
  kept = {std::move(engines), std::make_shared<const DestinationPlaces>(std::move(placed))};
  return *kept.places;
}

}  // namespace

absl::StatusOr<std::pair<std::string, GroupEvent>> MemberCalls::MakeEvent(
    const Caller& caller, const EventFunction& event) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                          Authenticate(state_, caller, /*engine=*/false));
  REFITD_RETURN_IF_ERROR(state_.calls.Admit());
  REFITD_ASSIGN_OR_RETURN(GroupEvent made, event(*member));
  return std::pair(member->group, std::move(made));
}

void MemberCalls::Hand(CallId call, const Caller& caller, ReplyFunction reply,
                       const EventFunction& event, StateLock::Order order) {
  StateLock lock(&state_.mutex, order);
  absl::StatusOr<std::pair<std::string, GroupEvent>> made = MakeEvent(caller, event);
  if (made.ok()) {
    const auto* push = std::get_if<BucketEvent>(&made->second);
    state_.calls.Add(
        call,
        {made->first, Audited(state_, made->first, made->second, caller.peer, std::move(reply)),
         push != nullptr ? push->bucket : nullptr});
    lock.Handle(made->first, std::move(made->second));
  } else {
    lock.Answer(
        [reply = std::move(reply), refused = made.status()] { reply(refused, EmptyReply{}); });
  }
}

void MemberCalls::Call(CallId call, const Caller& caller, absl::StatusOr<TrainerEvent> event,
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

void MemberCalls::Refit(CallId call, const Caller& caller, absl::StatusOr<RefitEvent> event,
                        uint64_t binding_generation, ReplyFunction reply) {
  const auto check = [&](const MemberRecord& member)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) -> absl::StatusOr<GroupEvent> {
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
    REFITD_RETURN_IF_ERROR(AdmitUpdate(state_, member, event->request_id));
    event->call = call;
    event->member = member.id;
    return *std::move(event);
  };
  Hand(call, caller, std::move(reply), check);
}

void MemberCalls::PushBucket(CallId call, const Caller& caller, absl::StatusOr<ReceivedPush> push,
                             ReplyFunction reply) {
  if (push.ok() && push->received.bucket->source == CheckedBucket::Source::kDevice &&
      state_.options.devices.memory != nullptr) {
    return PushFromDevice(call, caller, *std::move(push), std::move(reply));
  }
  PushOpened(call, caller, std::move(push), std::move(reply), {});
}

void MemberCalls::PushOpened(CallId call, const Caller& caller, absl::StatusOr<ReceivedPush> push,
                             ReplyFunction reply, const DeviceSource& device) {
  // P10: inline bytes stay in memory until their call is answered, which for a bucket ahead of its
  // turn may take as long as the update.
  const auto hold = std::make_shared<ByteLedger::Hold>(state_.held.Empty(IdentityOf(caller.peer)));
  BucketLimits limits;
  std::map<RegionId, int64_t> regions;
  const auto region_bytes = [&regions](RegionId id) -> std::optional<int64_t> {
    const auto it = regions.find(id);
    return it == regions.end() ? std::nullopt : std::optional(it->second);
  };
  // Placing many tensors takes long, so it is done outside the mutex, against a copy of the
  // regions.
  const auto place = [&]() -> absl::Status {
    REFITD_RETURN_IF_ERROR(push.status());
    const ReceivedBucket& received = push->received;
    {
      const StateLock lock(&state_.mutex, StateLock::Order::kPush);
      REFITD_ASSIGN_OR_RETURN(const MemberRecord* const member,
                              Authenticate(state_, caller, /*engine=*/false));
      if (const auto* refs = std::get_if<std::vector<RegionRef>>(&received.source)) {
        RegionId last;
        for (const RegionRef& ref : *refs) {
          if (ref.region == last) continue;
          last = ref.region;
          const auto it = member->regions.find(last);
          if (it != member->regions.end()) regions[last] = it->second.memory.bytes;
        }
      }
      limits = {state_.options.inline_bytes, state_.groups.Of(*member)->machine->spec().slot_bytes};
    }
    REFITD_RETURN_IF_ERROR(hold->GrowTo(InlineBytes(received)));
    REFITD_ASSIGN_OR_RETURN(received.bucket->places,
                            PlacesOf(received, limits, region_bytes, device));
    received.bucket->unaligned = UnalignedOf(*received.bucket);
    return absl::OkStatus();
  };
  const absl::Status placed = place();
  Hand(
      call, caller,
      [hold, reply = std::move(reply)](const absl::Status& status, const ReplyPayload& payload) {
        *hold = {};
        reply(status, payload);
      },
      [&](const MemberRecord& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
          kStateLocked) -> absl::StatusOr<GroupEvent> {
        REFITD_RETURN_IF_ERROR(placed);
        const CheckedBucket& bucket = *push->received.bucket;
        if (!HasRegions(member.regions, bucket)) {
          // A region was released meanwhile: the error is that of a region that never existed.
          std::erase_if(regions, [&](const auto& r) { return !member.regions.contains(r.first); });
          return PlacesOf(push->received, limits, region_bytes, device).status();
        }
        // A refusal comes before the group gets the bucket, so every instance stays clean.
        if (IsInMembersMemory(bucket)) {
          REFITD_RETURN_IF_ERROR(
              CheckPlaces(member, bucket, PlacesOfEngines(state_, state_.groups.Of(member))));
        }
        if (state_.sessions.Any(member.group)) {
          // Other daemons get headers that are made of this bucket, and must be able to read them.
          REFITD_RETURN_IF_ERROR(CheckHeaderFits(bucket.tensors, state_.options.message_bytes));
        }
        BucketEvent event = std::move(push->event);
        event.call = call;
        event.member = member.id;
        event.bucket = std::move(push->received.bucket);
        return event;
      },
      StateLock::Order::kPush);
}

void MemberCalls::HandleEngineEvent(MemberId member, GroupEvent event) {
  StateLock lock(&state_.mutex, StateLock::Order::kAhead);
  const MemberRecord* const found = state_.members.Find(member);
  if (found != nullptr && !found->lost) lock.Handle(found->group, std::move(event));
}

void MemberCalls::CallGone(CallId call) {
  StateLock lock(&state_.mutex);
  state_.calls.NoteCallerLeft(call);
  if (const std::string* group = state_.calls.GroupOf(call); group != nullptr) {
    lock.Handle(*group, refitd::CallGone{call});
  }
}

}  // namespace refitd
