// Members on GPUs: their devices, device memory as regions and as sources of buckets, staging pools
// on GPUs, and the loss of a GPU.
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

bool Node::Spans(const GroupRecord& group) const {
  return group.follower != nullptr || peers_.Any(group.name());
}

// All slots of a daemon that cross to other daemons lie on a GPU, or all in host memory.
absl::Status Node::CheckSpanning(const std::string& group, const MemberRecord* entering) const {
  const MemberRecord* on_device = nullptr;
  const MemberRecord* on_host = nullptr;
  const auto look = [&](const MemberRecord& member) {
    (member.ordinal.has_value() ? on_device : on_host) = &member;
  };
  for (const auto& [id, member] : leases_.all()) {
    if (!member.lost && member.group == group) look(member);
  }
  if (entering != nullptr) look(*entering);
  if (on_device == nullptr) return absl::OkStatus();
  const std::string what =
      entering == nullptr
          ? fmt::format("group '{}' would span daemons", group)
          : fmt::format("device.name: '{}': group '{}' spans daemons", entering->device, group);
  if (options_.cuda.wire == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}, and device memory moves within daemon {} only: {}", what, options_.daemon_id,
                 options_.cuda.no_wire);
  }
  if (on_host == nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}, where all of a daemon's members are on GPUs or none: daemon {} would have one "
               "on {} and one in host memory",
               what, options_.daemon_id, on_device->device);
}

// Refuses combinations that no transport can move, before anything waits for them: device memory to
// another daemon without NCCL, GPU memory into host memory, and one bucket into both host memory
// and a GPU.
absl::Status Node::CheckDevices(const GroupRecord& group, const MemberRecord& record) const {
  if (Spans(group)) REFITD_RETURN_IF_ERROR(CheckSpanning(record.group, &record));
  for (const auto& [id, member] : leases_.all()) {
    if (member.lost || member.group != record.group) continue;
    if (record.engine && member.engine &&
        record.ordinal.has_value() != member.ordinal.has_value()) {
      return Error(
          absl::StatusCode::kFailedPrecondition,
          "device.name: '{}': group '{}' has engine ranks on '{}': one group's engines are "
          "all on GPUs, or all in host memory",
          record.device, record.group, member.device);
    }
    if (member.engine == record.engine) continue;
    const MemberRecord& trainer = record.engine ? member : record;
    const MemberRecord& engine = record.engine ? record : member;
    if (!trainer.ordinal.has_value() || engine.ordinal.has_value()) continue;
    return Error(absl::StatusCode::kFailedPrecondition,
                 "device.name: '{}': group '{}' would have a trainer rank on GPU {} and an engine "
                 "rank in host memory: nothing moves weights that way",
                 record.device, record.group, trainer.device);
  }
  return absl::OkStatus();
}

// ---- slots that cross daemons ----

bool Node::LacksWirePool(const GroupRecord& group) const {
  return Spans(group) && !group.pools.wire().has_value() && leases_.HasDevices(group.name());
}

// The pool is on the lowest GPU that a member is on; bytes that other GPUs of the daemon send or
// receive pass through its slots. It is kept until the group has no member on a GPU here and no
// update runs, since bytes that were packed into it must be the bytes that are sent.
void Node::MakeWirePool(const GroupRecord& group, WirePoolFunction then) {
  const std::string name = group.name();
  std::optional<int> lowest;
  for (const auto& [id, member] : leases_.all()) {
    if (member.group != name || !member.ordinal.has_value()) continue;
    lowest = std::min(lowest.value_or(*member.ordinal), *member.ordinal);
  }
  regions_thread_->Submit([this, name, id = group.id, ordinal = *lowest, then = std::move(then)] {
    absl::Status made = MakeDevicePool(name, id, ordinal);
    Turn turn(this, &mutex_);
    GroupRecord* const found = groups_.Find(name);
    if (found == nullptr || found->id != id) return;
    if (made.ok() && !found->pools.Has(ordinal)) {
      made = absl::CancelledError("the members on that GPU went away");
    }
    // Members may still be on another GPU.
    if (absl::IsCancelled(made) && !OnDevice(name, ordinal) && leases_.HasDevices(name)) {
      return MakeWirePool(*found, then);
    }
    if (made.ok() && !found->pools.wire().has_value()) found->pools.SetWire(ordinal);
    then(found, made, turn);
  });
}

// P1: while an update runs, its parts go on through the same slots, even those of members that
// left.
void Node::DropWirePool(GroupRecord* group) {
  const std::string& name = group->name();
  if (!group->pools.wire().has_value() || leases_.HasDevices(name) ||
      group->machine->update_running()) {
    return;
  }
  const int ordinal = *group->pools.wire();
  group->pools.ClearWire();
  DropPool(group, ordinal);
}

// P8: device memory is kept only for members that can use it. Transfers that run hold it
// themselves.
void Node::DropPool(GroupRecord* group, int ordinal) {
  if (group->pools.wire() == ordinal || OnDevice(group->name(), ordinal)) return;
  group->pools.Drop(ordinal);
}

// A joined daemon leaves with its last member, which ends its epochs. A coordinator stays, so it
// reports its end as lost, which closes the epoch everywhere; the next update that needs an epoch
// opens another, perhaps on another GPU. While an update runs, its nodes may be using the epoch.
void Node::GiveUpEpochs(const GroupRecord& group, Turn& turn) {
  if (group.coordinator == nullptr || group.machine->update_running()) return;
  for (const auto& [id, epoch] : group.epochs) {
    // If an epoch's slots are still being made, its failure is reported when they are made.
    if (!epoch.on_devices || epoch.ordinal < 0 || ReachesSlots(epoch, group)) continue;
    turn.Post(group.name(), EpochUp{id, absl::CancelledError("its slots on a GPU are given back")});
  }
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

bool Node::OnDevice(const std::string& group, int ordinal) const {
  return leases_.OnDevice(group, ordinal) || waiters_.AnyOfSlots(group, ordinal);
}

// Only this function makes pools on GPUs, on one thread, so that none is made twice.
absl::Status Node::MakeDevicePool(const std::string& group, uint64_t id, int ordinal) {
  // The group's record, if it still lacks the pool.
  const auto find = [&]() -> absl::StatusOr<GroupRecord*> {
    mutex_.AssertHeld();
    GroupRecord* found = groups_.Find(group);
    if (found == nullptr || found->id != id) return NoGroup(group);
    return found->pools.Has(ordinal) ? nullptr : found;
  };
  int64_t bytes = 0;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const GroupRecord* lacking, find());
    if (lacking == nullptr) return absl::OkStatus();
    // The job may have waited long in line.
    if (!OnDevice(group, ordinal)) return absl::CancelledError("the member went away");
    bytes = lacking->pool_bytes();
  }
  absl::StatusOr<CudaPool> made = options_.cuda.memory->MakePool(ordinal, bytes);
  if (!made.ok()) {
    return Error(made.status().code(), "group '{}': staging slots: {}", group,
                 Message(made.status()));
  }
  // As in DeviceRegion: the last reference may be dropped anywhere.
  auto held = std::make_shared<CudaPool>(*std::move(made));
  Pools::Device pool;
  pool.descriptor = held->descriptor.get();
  const CudaPool* const raw = held.get();
  pool.memory = {
      raw->region->data(), raw->region->bytes(),
      std::shared_ptr<const void>(raw, [closer = regions_thread_, memory = options_.cuda.memory,
                                        held = std::move(held)](const void*) mutable {
        closer->Submit([memory = std::move(memory), pool = std::move(held)] {
          memory->GiveBack(std::move(*pool));
        });
      })};
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(GroupRecord * lacking, find());
  if (!OnDevice(group, ordinal)) return absl::CancelledError("the member went away");
  if (lacking != nullptr) lacking->pools.Put(ordinal, std::move(pool));
  return absl::OkStatus();
}

void Node::AwaitPool(MemberRecord record, const GroupRecord& group, GroupEvent attached) {
  const MemberId member = record.id;
  const int ordinal = *record.ordinal;
  regions_thread_->Submit([this, member, name = record.group, id = group.id, ordinal] {
    EndPooling(member, MakeDevicePool(name, id, ordinal));
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
  if (made.ok()) made = CheckDevices(*group, waited.record);
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
  DropWirePool(group);
  DropPool(group, ordinal);
  GiveUpEpochs(*group, turn);
}

void Node::PerformMakeSlots(const GroupRecord& group, const MakeSlots& a) {
  const MemberRecord* const member = leases_.Find(a.member);
  if (member == nullptr || !member->ordinal.has_value()) return;
  regions_thread_->Submit(
      [this, member = a.member, name = group.name(), id = group.id, ordinal = *member->ordinal] {
        GroupEventOf(name, id, SlotsMade{member, MakeDevicePool(name, id, ordinal)});
      });
}

std::optional<Node::MissingPool> Node::Missing(const MemberRecord& member) {
  if (!member.ordinal.has_value()) return std::nullopt;
  const GroupRecord& group = *groups_.Find(member.group);
  if (group.pools.Has(*member.ordinal)) return std::nullopt;
  return MissingPool{member.group, group.id, *member.ordinal};
}

void Node::LeaseSlot(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                     ReplyFunction reply) {
  const auto check = [&]() -> absl::StatusOr<std::optional<MissingPool>> {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(request.lease(), peer, false));
    std::optional<MissingPool> missing = Missing(*member);
    if (!missing.has_value()) return missing;
    REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
    return missing;
  };
  const absl::StatusOr<std::optional<MissingPool>> missing = check();
  if (!missing.ok()) return reply(missing.status(), EmptyReply{});
  if (!missing->has_value()) return LeaseOpened(call, request, peer, std::move(reply));
  regions_thread_->Submit(
      [this, call, request, peer, pool = **missing, reply = std::move(reply)]() mutable {
        absl::Status made = OpeningWanted(call);
        if (made.ok()) made = MakeDevicePool(pool.group, pool.id, pool.ordinal);
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
  const GroupRecord& group = *groups_.Find(trainer.group);
  if (Spans(group)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs of one daemon, and group '{}' spans daemons",
                 BroadcastMethodName(method), trainer.group);
  }
  if (!trainer.ordinal.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "broadcast: {} is between GPUs, and this trainer rank's memory is the host's",
                 BroadcastMethodName(method));
  }
  if (absl::Status can = transport_->CanBroadcast(method); !can.ok()) {
    return Error(can.code(), "broadcast: {}: {}", BroadcastMethodName(method), Message(can));
  }
  return absl::OkStatus();
}

// One instance alone gains nothing: its ranks hold shards, so no byte goes to two of them.
bool Node::CouldGain(const MemberRecord& trainer) const {
  if (!trainer.ordinal.has_value() || Spans(*groups_.Find(trainer.group))) return false;
  const auto can = [this](BroadcastMethod method) { return transport_->CanBroadcast(method).ok(); };
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

std::vector<Node::MissingPool> Node::MissingFor(const MemberRecord& trainer) {
  std::map<int, MissingPool> missing;
  for (const auto& [id, member] : leases_.all()) {
    if (member.lost || member.group != trainer.group) continue;
    if (!member.engine && id != trainer.id) continue;
    const std::optional<MissingPool> pool = Missing(member);
    if (pool.has_value()) missing[pool->ordinal] = *pool;
  }
  std::vector<MissingPool> all;
  for (auto& [ordinal, pool] : missing) all.push_back(std::move(pool));
  return all;
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
  needs.missing = MissingFor(*member);
  if (needs.missing.empty()) return needs;
  REFITD_RETURN_IF_ERROR(AdmitOpening(call, member->id));
  GroupRecord* group = groups_.Find(member->group);
  needs.group = member->group;
  needs.id = group->id;
  ++group->preparing_begins;
  return needs;
}

absl::Status Node::MakePools(CallId call, const std::vector<MissingPool>& missing) {
  for (const MissingPool& pool : missing) {
    REFITD_RETURN_IF_ERROR(OpeningWanted(call));
    const absl::Status made = MakeDevicePool(pool.group, pool.id, pool.ordinal);
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
