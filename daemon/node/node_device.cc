// Members on GPUs: their devices, device memory as regions and as sources of buckets, calls that
// wait for staging slots there, and the loss of a GPU.
//
// Opening and closing device memory takes up to milliseconds, and longer if a context is made. It
// runs on regions_thread_, or on a thread of the descriptor socket.
#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "daemon/node/node.h"
#include "daemon/process/log.h"
#include "transport/base/status.h"
#include "transport/broadcast.h"

namespace refitd {
namespace {

constexpr size_t kMaxUuidInMessage = 64;

bool IsHost(std::string_view device) { return device.empty() || device == "host"; }

// The status with the name of its field in front.
absl::Status In(std::string_view field, const absl::Status& status) {
  return Error(status.code(), "{}: {}", field, Message(status));
}

}  // namespace

// ---- devices ----

absl::StatusOr<std::optional<int>> Node::DeviceOf(const std::string& name) const {
  if (IsHost(name)) return std::nullopt;
  if (options_.cuda.memory == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "device.name: '{}': this daemon has no transport for it ({})", name,
                 options_.cuda.detail);
  }
  const absl::StatusOr<int> ordinal = options_.cuda.memory->DeviceOf(name);
  if (!ordinal.ok()) return In("device.name", ordinal.status());
  return *ordinal;
}

void Node::DevicesLost(const absl::Status& why) {
  LogError("the GPUs are lost to this process: {}", Message(why));
  Turn turn(this, &mutex_);
  for (const std::string& name : groups_.running()) {
    if (!leases_.HasDevices(name)) continue;
    turn.Handle(
        name, OperatorAbort{NewCall(), fmt::format("the daemon lost its GPUs: {}", Message(why))});
  }
}

// ---- regions ----

// Closing waits for the driver, and the last reference may be dropped anywhere, even under the
// mutex.
RegionRecord Node::DeviceRegion(std::shared_ptr<const CudaRegion> region, bool engine) const {
  const CudaRegion* const raw = region.get();
  std::shared_ptr<const void> kept(
      raw, [closer = regions_thread_, held = std::move(region)](const void*) mutable {
        closer->Submit([closed = std::move(held)]() mutable { closed.reset(); });
      });
  RegionRecord record;
  record.identity = fmt::format("device {} {}", raw->device(), static_cast<void*>(raw->data()));
  record.memory = {raw->data(), raw->bytes(), std::move(kept)};
  record.access = engine ? Access::kReadWrite : Access::kReadOnly;
  record.on_device = true;
  return record;
}

// P8: a caller that is answered may free the memory. The first job runs after the caller's job,
// which has then let go of its regions; the second runs after those are closed.
void Node::AnswerClosed(std::function<void()> answer) {
  regions_thread_->Submit([this, answer = std::move(answer)] { regions_thread_->Submit(answer); });
}

absl::StatusOr<Node::DeviceHandle> Node::CheckHandle(const v1::RegisterRegionRequest& request,
                                                     const Peer& peer, bool engine) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(request.lease(), peer, engine));
  if (options_.cuda.memory == nullptr) {
    return Error(absl::StatusCode::kUnimplemented, "this daemon has no cuda transport: {}",
                 options_.cuda.detail);
  }
  const v1::CudaIpcHandle& given = request.cuda_ipc();
  if (given.handle().size() != kCudaIpcHandleBytes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "cuda_ipc.handle has {} bytes, a CUDA IPC handle {}", given.handle().size(),
                 kCudaIpcHandleBytes);
  }
  if (given.byte_offset() != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "cuda_ipc.byte_offset is {}, must be 0: a region is a whole block",
                 given.byte_offset());
  }
  if (given.bytes() < 0) {
    return Error(absl::StatusCode::kInvalidArgument, "cuda_ipc.bytes is {}, less than 0",
                 given.bytes());
  }
  if (!member->ordinal.has_value() || given.gpu_uuid() != member->device) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "cuda_ipc.gpu_uuid is '{}', the lease's device is '{}'",
                 Shorten(given.gpu_uuid(), kMaxUuidInMessage), member->device);
  }
  REFITD_RETURN_IF_ERROR(AdmitRegion(request.lease().token(), peer, "").status());
  return DeviceHandle{*member->ordinal, engine, given.bytes(), given.handle()};
}

absl::StatusOr<RegionRecord> Node::OpenDevice(const DeviceHandle& handle) const {
  absl::StatusOr<std::shared_ptr<const CudaRegion>> opened =
      options_.cuda.memory->OpenLegacy(handle.ordinal, handle.handle);
  if (!opened.ok()) return In("cuda_ipc.handle", opened.status());
  RegionRecord region = DeviceRegion(*std::move(opened), handle.engine);
  if (handle.bytes > region.memory.bytes) {
    return Error(absl::StatusCode::kInvalidArgument, "cuda_ipc.bytes is {}: the block has {}",
                 handle.bytes, region.memory.bytes);
  }
  if (handle.bytes > 0) region.memory.bytes = handle.bytes;
  if (region.memory.bytes <= options_.max_region_bytes) return region;
  return Error(absl::StatusCode::kResourceExhausted,
               "cuda_ipc.bytes: {} is more than max_region_bytes {}", region.memory.bytes,
               options_.max_region_bytes);
}

void Node::RegisterRegion(const v1::RegisterRegionRequest& request, const Peer& peer, bool engine,
                          ResponseFunction<v1::RegisterRegionResponse> reply) {
  const auto check = [&]() -> absl::StatusOr<DeviceHandle> {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(DeviceHandle checked, CheckHandle(request, peer, engine));
    REFITD_RETURN_IF_ERROR(memory_.BeginOpening());
    return checked;
  };
  absl::StatusOr<DeviceHandle> handle = check();
  if (!handle.ok()) return reply(handle.status());
  regions_thread_->Submit([this, handle = *std::move(handle), token = request.lease().token(), peer,
                           reply = std::move(reply)] {
    absl::StatusOr<RegionRecord> opened = OpenDevice(handle);
    const auto add = [&]() -> absl::StatusOr<v1::RegisterRegionResponse> {
      MutexLock lock(&mutex_);
      memory_.EndOpening();
      REFITD_RETURN_IF_ERROR(opened.status());
      // The lease may have ended meanwhile, and another region of the same memory may have come.
      REFITD_ASSIGN_OR_RETURN(MemberRecord * member, AdmitRegion(token, peer, opened->identity));
      v1::RegisterRegionResponse response;
      response.set_bytes(opened->memory.bytes);
      response.set_region_id(memory_.Add(member, *std::move(opened)).value());
      return response;
    };
    absl::StatusOr<v1::RegisterRegionResponse> added = add();
    if (added.ok()) return reply(added);
    AnswerClosed([reply, refused = added.status()] { reply(refused); });
  });
}

absl::StatusOr<RegionId> Node::RegisterVmm(const Token& token, const PeerCredentials& peer,
                                           UniqueFd fd, int64_t bytes) {
  const std::string key(token.begin(), token.end());
  int ordinal = 0;
  bool engine = false;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, AdmitRegion(key, Peer{peer}, ""));
    if (options_.cuda.memory == nullptr) {
      return Error(absl::StatusCode::kUnimplemented,
                   "region_kind: 2: this daemon has no cuda transport: {}", options_.cuda.detail);
    }
    if (!member->ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "region_kind: 2 is device memory, the lease's device is '{}'", member->device);
    }
    ordinal = *member->ordinal;
    engine = member->engine;
  }
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<const CudaRegion> imported,
                          options_.cuda.memory->ImportVmm(ordinal, std::move(fd), bytes));
  RegionRecord region = DeviceRegion(std::move(imported), engine);
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, AdmitRegion(key, Peer{peer}, region.identity));
  return memory_.Add(member, std::move(region));
}

// ---- calls that wait for device memory ----

absl::Status Node::AdmitOpening(CallId call, MemberId member) {
  return calls_.AdmitOpening(call, member, options_.group.outstanding_buckets);
}

// Asked again right before the driver is kept busy, since the call may have waited long in line.
absl::Status Node::OpeningWanted(CallId call) {
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(const MemberId id, calls_.OpeningOf(call));
  const MemberRecord* const member = leases_.Find(id);
  if (member != nullptr && !member->lost) return absl::OkStatus();
  return absl::CancelledError("the lease ended");
}

absl::Status Node::EndOpening(CallId call) {
  MutexLock lock(&mutex_);
  return calls_.EndOpening(call);
}

// ---- staging pools ----

void Node::AwaitPool(MemberRecord record, const GroupRecord& group, GroupEvent attached) {
  REFITD_CHECK(record.engine && record.ordinal.has_value());
  const MemberId member = record.id;
  const int ordinal = *record.ordinal;
  regions_thread_->Submit(
      [this, member, missing = DeviceSlots::Missing{record.group, group.id, ordinal}] {
        EndPooling(member, device_slots_.MakeNow(missing));
      });
  waiters_.Wait(Waiters::OfSlots{std::move(record), std::move(attached)});
}

void Node::EndPooling(MemberId member, absl::Status made) {
  Turn turn(this, &mutex_);
  std::optional<Waiters::OfSlots> taken = waiters_.TakeOfSlots(member);
  if (!taken.has_value()) return;  // it went away, or the daemon drains
  Waiters::OfSlots waited = *std::move(taken);
  GroupRecord* group = groups_.Find(waited.record.group);
  if (made.ok() && group == nullptr) made = NoGroup(waited.record.group);
  const bool there = group != nullptr && !absl::IsCancelled(made) && !absl::IsNotFound(made);
  if (!made.ok() && there && !waited.record.staged) {
    // This rank can take part without slots.
    LogWarning("group {}: what is being opened goes without broadcasts: {}", waited.record.group,
               Message(made));
    std::get<EngineAttached>(waited.attached).lacks_slots = true;
    made = absl::OkStatus();
  }
  if (made.ok()) made = device_slots_.CheckEntering(*group, waited.record);
  if (made.ok()) {
    Admit(std::move(waited.record), std::move(waited.attached), turn);
  } else {
    EndWithoutPool(std::move(waited.record), std::move(made), turn);
  }
}

// The pool may have been made for the rank already.
void Node::EndWithoutPool(MemberRecord record, absl::Status status, Turn& turn) {
  record.End(std::move(status));
  GroupRecord* group = groups_.Find(record.group);
  if (group == nullptr) return;
  DropUnused(group, *record.ordinal, turn);
  turn.Drain();
  group = groups_.Find(record.group);
  if (group != nullptr && group->coordinator != nullptr) NoteEmpty(group, turn);
}

void Node::DropUnused(GroupRecord* group, int ordinal, Turn& turn) {
  device_slots_.DropUnused(group, ordinal);
  data_plane_.GiveUpEpochs(*group, turn);
}

void Node::PerformMakeSlots(const GroupRecord& group, const MakeSlots& a) {
  const MemberRecord* const member = leases_.Find(a.member);
  if (member == nullptr || !member->ordinal.has_value()) return;
  regions_thread_->Submit(
      [this, member = a.member,
       missing = DeviceSlots::Missing{group.name(), group.id, *member->ordinal}] {
        GroupEventOf(missing.group, missing.id, SlotsMade{member, device_slots_.MakeNow(missing)});
      });
}

void Node::LeaseSlot(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                     ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<std::optional<DeviceSlots::Missing>> {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(request.lease(), peer, false));
    std::optional<DeviceSlots::Missing> missing = device_slots_.MissingOf(*member);
    if (!missing.has_value()) return missing;
    REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
    return missing;
  };
  const absl::StatusOr<std::optional<DeviceSlots::Missing>> missing = check();
  if (!missing.ok()) return reply(missing.status(), EmptyReply{});
  if (!missing->has_value()) return LeaseOpened(call, request, peer, std::move(reply));
  regions_thread_->Submit(
      [this, call, request, peer, pool = **missing, reply = std::move(reply)]() mutable {
        absl::Status made = OpeningWanted(call);
        if (made.ok()) made = device_slots_.MakeNow(pool);
        const absl::Status wanted = EndOpening(call);
        if (made.ok()) made = wanted;
        if (!made.ok()) return reply(made, EmptyReply{});
        LeaseOpened(call, request, peer, std::move(reply));
      });
}

// ---- broadcasts through slots ----

absl::Status Node::CheckBroadcast(const MemberRecord& trainer, BroadcastMethod method) {
  if (method == BroadcastMethod::kAuto || method == BroadcastMethod::kDirect) {
    return absl::OkStatus();
  }
  const GroupRecord& group = *groups_.Of(trainer);
  if (device_slots_.Spans(group)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs of one daemon, and group '{}' spans daemons",
                 BroadcastMethodName(method), trainer.group);
  }
  if (!trainer.ordinal.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs, and this trainer rank's memory is the host's",
                 BroadcastMethodName(method));
  }
  if (absl::Status can = data_plane_.transport().CanBroadcast(method); !can.ok()) {
    return Error(can.code(), "broadcast: {}: {}", BroadcastMethodName(method), Message(can));
  }
  return absl::OkStatus();
}

// One instance alone gains nothing: its ranks hold shards, so no byte goes to two of them.
bool Node::CouldGain(const MemberRecord& trainer) const {
  if (!trainer.ordinal.has_value() || device_slots_.Spans(*groups_.Of(trainer))) return false;
  const auto can = [this](BroadcastMethod method) {
    return data_plane_.transport().CanBroadcast(method).ok();
  };
  if (!can(BroadcastMethod::kChain) && !can(BroadcastMethod::kSymmetric) &&
      !can(BroadcastMethod::kNccl)) {
    return false;
  }
  std::set<int> devices;
  std::set<std::string_view> instances;
  for (const auto& [id, member] : leases_.all()) {
    if (!member.engine || member.lost || member.staged || member.group != trainer.group) continue;
    if (!member.ordinal.has_value() || member.ordinal == trainer.ordinal) continue;
    devices.insert(*member.ordinal);
    instances.insert(member.instance);
  }
  return devices.size() > 1 && instances.size() > 1;
}

absl::StatusOr<Node::BeginNeeds> Node::NeedsOf(CallId call, const v1::BeginRequest& request,
                                               const Peer& peer) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(request.lease(), peer, false));
  BeginNeeds needs;
  REFITD_ASSIGN_OR_RETURN(needs.broadcast, BroadcastFromWire(request.broadcast()));
  if (needs.broadcast == BroadcastMethod::kDirect) return needs;
  // A Begin that is refused anyway makes no pools.
  REFITD_RETURN_IF_ERROR(MakeBegin(call, request, *member).status());
  REFITD_RETURN_IF_ERROR(CheckBroadcast(*member, needs.broadcast));
  needs.slots = needs.broadcast != BroadcastMethod::kAuto || CouldGain(*member);
  if (!needs.slots) return needs;
  needs.missing = device_slots_.MissingFor(*member);
  if (needs.missing.empty()) return needs;
  REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
  GroupRecord* group = groups_.Of(*member);
  needs.group = member->group;
  needs.id = group->id;
  ++group->preparing_begins;
  return needs;
}

absl::Status Node::MakePools(CallId call, const std::vector<DeviceSlots::Missing>& missing) {
  for (const DeviceSlots::Missing& slots : missing) {
    REFITD_RETURN_IF_ERROR(OpeningWanted(call));
    const absl::Status made = device_slots_.MakeNow(slots);
    // Cancelled: the member that needed the pool has gone.
    if (!made.ok() && !absl::IsCancelled(made)) return made;
  }
  return absl::OkStatus();
}

// Pools are made before the event enters the group, so that no slot is granted that a GPU lacks.
// Engine ranks that attach meanwhile wait for a pool of their own (GroupRecord::wants_pools).
void Node::Begin(CallId call, const v1::BeginRequest& request, const Peer& peer,
                 ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<BeginNeeds> {
    MutexLock lock(&mutex_);
    return NeedsOf(call, request, peer);
  };
  absl::StatusOr<BeginNeeds> checked = check();
  if (!checked.ok()) return reply(checked.status(), EmptyReply{});
  if (checked->missing.empty()) {
    return BeginOpened(call, request, peer, std::move(reply), checked->slots);
  }
  regions_thread_->Submit(
      [this, call, request, peer, needs = *std::move(checked), reply = std::move(reply)]() mutable {
        absl::Status made = MakePools(call, needs.missing);
        const absl::Status wanted = EndOpening(call);
        if (!wanted.ok()) made = wanted;
        const bool goes_without = needs.broadcast == BroadcastMethod::kAuto && wanted.ok();
        if (made.ok() || goes_without) {
          if (!made.ok()) {
            LogWarning("group {}: version {} is pushed without broadcasts: {}", needs.group,
                       request.version(), Message(made));
          }
          BeginOpened(call, request, peer, std::move(reply), made.ok());
        } else {
          reply(Error(made.code(), "broadcast: {}: {}", BroadcastMethodName(needs.broadcast),
                      Message(made)),
                EmptyReply{});
        }
        MutexLock lock(&mutex_);
        GroupRecord* group = groups_.Find(needs.group);
        if (group != nullptr && group->id == needs.id) --group->preparing_begins;
      });
}

// ---- buckets ----

absl::StatusOr<DeviceSource> Node::OpenSource(const v1::CudaIpcHandles& handles, int ordinal,
                                              std::vector<int> indices) const {
  DeviceSource source;
  std::map<std::string_view, MemorySpan> open;  // tensors of one block share a handle
  for (const int index : indices) {
    const std::string& handle = handles.handles(index).handle();
    auto block = open.find(handle);
    if (block == open.end()) {
      absl::StatusOr<std::shared_ptr<const CudaRegion>> opened =
          options_.cuda.memory->OpenLegacy(ordinal, handle);
      if (!opened.ok()) {
        return In(fmt::format("bucket.cuda_ipc.handles[{}]", index), opened.status());
      }
      block = open.emplace(handle, DeviceRegion(*std::move(opened), false).memory).first;
    }
    source.blocks.push_back(block->second);
  }
  source.indices = std::move(indices);
  return source;
}

void Node::PushFromDevice(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                          ReplyFunction reply) {
  int ordinal = 0;
  const auto check = [&]() -> absl::StatusOr<std::vector<int>> {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(request.lease(), peer, false));
    REFITD_ASSIGN_OR_RETURN(std::vector<int> indices, HandlesOn(request.bucket(), member->device));
    if (!member->ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "bucket.cuda_ipc is device memory, the lease's device is '{}'", member->device);
    }
    REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
    ordinal = *member->ordinal;
    return indices;
  };
  absl::StatusOr<std::vector<int>> indices = check();
  if (!indices.ok()) return reply(indices.status(), EmptyReply{});
  regions_thread_->Submit([this, call, &request, peer, ordinal, indices = *std::move(indices),
                           reply = std::move(reply)] {
    const ReplyFunction closed = [this, reply](absl::Status status, const ReplyPayload& payload) {
      AnswerClosed([reply, status = std::move(status), payload] { reply(status, payload); });
    };
    const auto open = [&]() -> absl::StatusOr<DeviceSource> {
      REFITD_RETURN_IF_ERROR(OpeningWanted(call));
      return OpenSource(request.bucket().cuda_ipc(), ordinal, indices);
    };
    absl::StatusOr<DeviceSource> source = open();
    const absl::Status wanted = EndOpening(call);
    if (source.ok() && !wanted.ok()) source = wanted;
    if (!source.ok()) return closed(source.status(), EmptyReply{});
    PushOpened(call, request, peer, closed, *source);
  });
}

}  // namespace refitd
