// A trainer's calls: checked, authenticated, and turned into events of its group.
#include <algorithm>
#include <utility>

#include "daemon/checks/fields.h"
#include "daemon/link/reports.h"
#include "daemon/node/node.h"

namespace refitd {
namespace {

// Checks the duration of a Begin or Refit.
absl::StatusOr<Duration> CheckDuration(int64_t ms, Duration max) {
  REFITD_ASSIGN_OR_RETURN(const Duration duration, CheckMillis(ms, "duration_ms"));
  if (duration <= max) return duration;
  return Error(absl::StatusCode::kInvalidArgument, "duration_ms: {} is more than the maximum {}",
               ms, ToMillis(max));
}

absl::Status CheckVersion(int64_t version) {
  if (version >= 0) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "version: {} is negative", version);
}

// Checks the bucket count of a Commit or Refit.
absl::Status CheckBucketCount(int64_t count) {
  if (count >= 0) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "bucket_count: {} is negative", count);
}

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

absl::StatusOr<std::pair<std::string, GroupEvent>> Node::MakeEvent(const v1::Lease& lease,
                                                                   const Peer& peer,
                                                                   const std::string& request_id,
                                                                   const EventFunction& event) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(lease, peer, false));
  REFITD_RETURN_IF_ERROR(CheckText(request_id, kMaxRequestIdBytes, "request_id"));
  REFITD_RETURN_IF_ERROR(calls_.Admit());
  REFITD_ASSIGN_OR_RETURN(GroupEvent made, event(*member));
  return std::pair(member->group, std::move(made));
}

void Node::TrainerCall(CallId call, const v1::Lease& lease, const Peer& peer,
                       const std::string& request_id, ReplyFunction reply,
                       const EventFunction& event, std::optional<CheckedBucket>* push) {
  Turn turn(this, &mutex_, &pushes_, push != nullptr ? Turn::Order::kPush : Turn::Order::kAny);
  absl::StatusOr<std::pair<std::string, GroupEvent>> made =
      MakeEvent(lease, peer, request_id, event);
  if (made.ok()) {
    calls_.Add(call, {made->first, std::move(reply),
                      push != nullptr ? std::exchange(*push, std::nullopt) : std::nullopt});
    turn.Handle(made->first, std::move(made->second));
  } else {
    turn.Answer(
        [reply = std::move(reply), refused = made.status()] { reply(refused, EmptyReply{}); });
  }
}

absl::StatusOr<BeginEvent> Node::MakeBegin(CallId call, const v1::BeginRequest& request,
                                           const MemberRecord& member) {
  BeginEvent event;
  event.call = call;
  event.member = member.id;
  event.request_id = request.request_id();
  event.version = Version(request.version());
  REFITD_ASSIGN_OR_RETURN(event.duration,
                          CheckDuration(request.duration_ms(), options_.group.max_duration));
  REFITD_ASSIGN_OR_RETURN(event.verification, VerificationFromWire(request.verification()));
  event.evict_late = request.evict_late();
  REFITD_RETURN_IF_ERROR(CheckVersion(request.version()));
  if (request.tensor_count() < 0 || request.tensor_count() > kMaxTensorsPerLayout) {
    return Error(absl::StatusCode::kInvalidArgument, "tensor_count: {} is not in 0..{}",
                 request.tensor_count(), kMaxTensorsPerLayout);
  }
  if (request.total_bytes() < 0) {
    return Error(absl::StatusCode::kInvalidArgument, "total_bytes: {} is negative",
                 request.total_bytes());
  }
  event.tensor_count = request.tensor_count();
  event.total_bytes = request.total_bytes();
  REFITD_ASSIGN_OR_RETURN(event.broadcast, BroadcastFromWire(request.broadcast()));
  event.without_layout = request.without_layout();
  REFITD_RETURN_IF_ERROR(CheckLine(request.note(), kMaxNoteBytes, "note"));
  event.note = request.note();
  return event;
}

void Node::BeginOpened(CallId call, const v1::BeginRequest& request, const Peer& peer,
                       ReplyFunction reply, bool slots) {
  TrainerCall(call, request.lease(), peer, request.request_id(), std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                mutex_.AssertHeld();
                REFITD_ASSIGN_OR_RETURN(BeginEvent event, MakeBegin(call, request, member));
                REFITD_RETURN_IF_ERROR(CheckBroadcast(member, event.broadcast));
                event.slots_on_devices = slots && device_slots_.MissingFor(member).empty();
                GroupRecord* group = groups_.Of(member);
                if (!group->machine->update_running()) group->broadcasts = false;
                group->broadcasts = group->broadcasts || event.slots_on_devices;
                return event;
              });
}

void Node::LeaseOpened(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                       ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, "", std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                mutex_.AssertHeld();
                if (!member.ordinal.has_value()) {
                  REFITD_RETURN_IF_ERROR(EnsurePool(groups_.Of(member)));
                } else if (device_slots_.MissingOf(member).has_value()) {
                  return absl::InternalError("the staging pool went");
                }
                REFITD_ASSIGN_OR_RETURN(Duration wait, CheckMillis(request.wait_ms(), "wait_ms"));
                return LeaseSlotEvent{call, member.id, Version(request.version()), wait,
                                      UpdateId(request.update_id())};
              });
}

void Node::ReleaseSlot(CallId call, const v1::ReleaseSlotRequest& request, const Peer& peer,
                       ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, "", std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                return ReleaseSlotEvent{
                    call, member.id, {SlotIndex(request.slot()), GrantId(request.grant())}};
              });
}

void Node::PushBucket(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                      ReplyFunction reply) {
  if (request.bucket().has_cuda_ipc() && options_.cuda.memory != nullptr) {
    return PushFromDevice(call, request, peer, std::move(reply));
  }
  PushOpened(call, request, peer, std::move(reply), {});
}

void Node::PushOpened(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                      ReplyFunction reply, const DeviceSource& device) {
  BucketLimits limits;
  std::map<RegionId, int64_t> regions;
  const auto region_bytes = [&regions](RegionId id) -> std::optional<int64_t> {
    const auto it = regions.find(id);
    return it == regions.end() ? std::nullopt : std::optional(it->second);
  };
  // Checking many tensors takes long, so it is done outside the mutex, against a copy of the
  // regions.
  const auto check = [&]() -> absl::StatusOr<CheckedBucket> {
    {
      const Turn turn(this, &mutex_, &pushes_, Turn::Order::kPush);
      REFITD_ASSIGN_OR_RETURN(const MemberRecord* const member,
                              Authenticate(request.lease(), peer, false));
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
      limits = {options_.inline_bytes, groups_.Of(*member)->machine->spec().slot_bytes};
    }
    return CheckBucket(request.bucket(), limits, region_bytes, device);
  };
  absl::StatusOr<CheckedBucket> bucket = check();
  BucketEvent event;
  event.call = call;
  event.request_id = request.request_id();
  event.version = Version(request.version());
  event.update = UpdateId(request.update_id());
  if (bucket.ok()) {
    event.seq = bucket->seq;
    event.tensors = bucket->tensors;
    event.ranges = bucket->ranges;
    event.slot = bucket->slot;
    if (bucket->slot.has_value()) {
      for (const CheckedBucket::Place& place : bucket->places) {
        event.slot_byte_offsets.push_back(place.byte_offset);
      }
    }
  }
  std::optional<CheckedBucket> kept;  // kept with the call until its reply
  TrainerCall(
      call, request.lease(), peer, request.request_id(), std::move(reply),
      [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
        mutex_.AssertHeld();
        REFITD_RETURN_IF_ERROR(bucket.status());
        if (!HasRegions(member.regions, *bucket)) {
          // A region was released meanwhile: the error is as if the region had never been there.
          std::erase_if(regions, [&](const auto& r) { return !member.regions.contains(r.first); });
          return CheckBucket(request.bucket(), limits, region_bytes, device).status();
        }
        if (peers_.Any(member.group)) {
          // Other daemons must be able to read the headers that the bucket becomes.
          REFITD_RETURN_IF_ERROR(CheckHeaderFits(bucket->tensors, options_.message_bytes));
        }
        event.member = member.id;
        kept = *std::move(bucket);
        return std::move(event);
      },
      &kept);
}

void Node::Commit(CallId call, const v1::CommitRequest& request, const Peer& peer,
                  ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, request.request_id(), std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                REFITD_RETURN_IF_ERROR(CheckBucketCount(request.bucket_count()));
                return CommitEvent{call,
                                   member.id,
                                   request.request_id(),
                                   Version(request.version()),
                                   request.bucket_count(),
                                   request.pushes_under_way(),
                                   UpdateId(request.update_id())};
              });
}

void Node::Refit(CallId call, const v1::RefitRequest& request, const Peer& peer,
                 ReplyFunction reply) {
  TrainerCall(
      call, request.lease(), peer, request.request_id(), std::move(reply),
      [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
        mutex_.AssertHeld();
        RefitEvent event;
        event.call = call;
        event.member = member.id;
        event.request_id = request.request_id();
        event.version = Version(request.version());
        REFITD_ASSIGN_OR_RETURN(event.duration,
                                CheckDuration(request.duration_ms(), options_.group.max_duration));
        REFITD_ASSIGN_OR_RETURN(event.verification, VerificationFromWire(request.verification()));
        event.evict_late = request.evict_late();
        REFITD_RETURN_IF_ERROR(CheckVersion(request.version()));
        REFITD_RETURN_IF_ERROR(CheckBucketCount(request.bucket_count()));
        event.bucket_count = request.bucket_count();
        event.update = UpdateId(request.update_id());
        if (member.layout == nullptr) {
          return absl::FailedPreconditionError("this rank has no layout: RegisterLayout first");
        }
        if (const auto pending = calls_.LayoutsOf(member.id); !pending.empty()) {
          return Error(absl::StatusCode::kFailedPrecondition,
                       "binding_generation: {} is being replaced by {}, which is not answered yet",
                       request.binding_generation(), pending.front()->binding_generation);
        }
        if (request.binding_generation() != member.layout->binding_generation) {
          return Error(absl::StatusCode::kFailedPrecondition,
                       "binding_generation: {} is not the registered {}",
                       request.binding_generation(), member.layout->binding_generation);
        }
        return event;
      });
}

void Node::Abort(CallId call, const v1::AbortRequest& request, const Peer& peer,
                 ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, request.request_id(), std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                REFITD_RETURN_IF_ERROR(CheckText(request.reason(), kMaxReasonBytes, "reason"));
                return AbortEvent{call,
                                  member.id,
                                  request.request_id(),
                                  Version(request.version()),
                                  request.reason(),
                                  UpdateId(request.update_id())};
              });
}

void Node::CallGone(CallId call) {
  Turn turn(this, &mutex_);
  calls_.NoteGone(call);
  if (const std::string* group = calls_.GroupOf(call); group != nullptr) {
    turn.Handle(*group, refitd::CallGone{call});
  }
}

absl::StatusOr<v1::GetUpdateResponse> Node::GetUpdate(const v1::GetUpdateRequest& request) {
  MutexLock lock(&mutex_);
  const GroupRecord* group = groups_.Find(request.group());
  if (group == nullptr) return NoGroup(request.group());
  v1::GetUpdateResponse response;
  response.set_incarnation(group->machine->incarnation());
  if (request.incarnation() != 0 && request.incarnation() != group->machine->incarnation()) {
    response.set_reason("that incarnation of the group is gone");
    return response;
  }
  const PastUpdate past = group->machine->Past(Version(request.version()));
  response.set_outcome(static_cast<v1::UpdateOutcome>(past.outcome));
  response.set_reason(past.reason);
  return response;
}

}  // namespace refitd
