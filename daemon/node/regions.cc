#include "daemon/node/regions.h"

#include <chrono>
#include <future>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// P4: how long a thread of the descriptor socket waits for the driver, which may be making
// contexts.
constexpr std::chrono::milliseconds kDriverWait{20'000};

constexpr size_t kMaxUuidInMessage = 64;

// The status with the name of its field in front.
absl::Status In(std::string_view field, const absl::Status& status) {
  return Prefixed(status, "{}", field);
}

// A block has one address here, whatever handles name it.
MemoryOrigin OriginOf(const DeviceRegion& block) {
  return {MemoryOrigin::Kind::kBlock, 0, reinterpret_cast<uintptr_t>(block.data()), 0};
}

// Memory that a process of this host exported is known by that process and the address that it
// gave. A process in another namespace of processes has no number here.
MemoryOrigin OriginOf(const MemberRecord& member, uint64_t address) {
  const auto device = static_cast<uint64_t>(*member.ordinal);
  const int pid = member.peer.credentials.has_value() ? member.peer.credentials->pid : 0;
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / 2);
  if (pid <= 0 || address == 0 || address > kMost) {
    return {MemoryOrigin::Kind::kUnknown, device, 0, 0};
  }
  return {MemoryOrigin::Kind::kExported, device, static_cast<uint64_t>(pid),
          static_cast<int64_t>(address)};
}

}  // namespace

// ---- regions ----

absl::StatusOr<MemberRecord*> Regions::Admit(const std::string& token, const Peer& peer,
                                             const std::string& identity) {
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, state_.leases.Authenticate(token, peer));
  REFITD_RETURN_IF_ERROR(state_.memory.Admit(*member, identity));
  REFITD_RETURN_IF_ERROR(identities_.AdmitRegionOf(*member));
  return member;
}

absl::StatusOr<RegionId> Regions::RegisterRegion(const Token& token, const PeerCredentials& peer,
                                                 UniqueFd fd, RegionKind kind, int64_t bytes,
                                                 uint64_t address) {
  if (bytes > state_.options.max_region_bytes) {
    return Error(absl::StatusCode::kResourceExhausted, "bytes: {} is more than max_region_bytes {}",
                 bytes, state_.options.max_region_bytes);
  }
  if (kind == RegionKind::kDevice) {
    return RegisterVmm(token, peer, std::move(fd), bytes, address);
  }
  if (kind != RegionKind::kMemfd) {
    return Error(absl::StatusCode::kUnimplemented,
                 "region_kind: {}: this daemon maps sealed memfds and CUDA's VMM memory only",
                 static_cast<uint32_t>(kind));
  }
  RegionRecord region;
  REFITD_ASSIGN_OR_RETURN(const MemoryOrigin origin, HostMappings::OriginOf(fd));
  region.identity = fmt::format("memfd {} {}", origin.space, origin.object);
  const std::string key(token.begin(), token.end());
  {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Admit(key, Peer{peer}, region.identity));
    if (member->engine) region.access = Access::kReadWrite;  // trainers' memory is only read
  }
  // Mapping and filling page tables takes long, so it is done outside the mutex.
  REFITD_ASSIGN_OR_RETURN(
      region.memory, state_.mappings.Map(fd, origin, bytes, region.access, IdentityOf(Peer{peer})));
  const Turn turn(state_.turns);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Admit(key, Peer{peer}, region.identity));
  return state_.memory.Add(member, std::move(region));
}

absl::StatusOr<RegionRecord> Regions::Take(MemberRecord* member, RegionId region) {
  REFITD_ASSIGN_OR_RETURN(RegionRecord taken, state_.memory.Take(member, region, state_.calls));
  data_plane_.Release(member->id);
  return taken;
}

// P8: CUDA forbids an exporter to free memory before its importer has closed it. Host memory waits
// for no driver.
void Regions::Close(RegionRecord region, std::function<void()> closed) {
  if (!region.on_device) {
    region = {};
    return closed();
  }
  auto held = std::make_shared<RegionRecord>(std::move(region));
  // The closing comes after local moves that were bound ahead, since they may hold the region.
  data_plane_.AfterBinding([this, held, closed = std::move(closed)] {
    state_.regions_thread->Submit([this, held, closed] {
      // The region's end queues its closing on this same thread (RecordOf). `closed` is queued
      // behind the closing.
      *held = {};
      state_.regions_thread->Submit(closed);
    });
  });
}

void Regions::Release(const Caller& caller, bool engine, RegionId region,
                      std::function<void(const absl::Status&)> reply) {
  const auto take = [&]() -> absl::StatusOr<RegionRecord> {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, members_.Authenticate(caller, engine));
    return Take(member, region);
  };
  absl::StatusOr<RegionRecord> taken = take();
  if (!taken.ok()) return reply(taken.status());
  Close(*std::move(taken), [reply = std::move(reply)] { reply(absl::OkStatus()); });
}

absl::Status Regions::ReleaseRegion(const Token& token, const PeerCredentials& peer,
                                    RegionId region) {
  const auto take = [&]() -> absl::StatusOr<RegionRecord> {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(
        MemberRecord * member,
        state_.leases.Authenticate(std::string(token.begin(), token.end()), Peer{peer}));
    return Take(member, region);
  };
  REFITD_ASSIGN_OR_RETURN(RegionRecord taken, take());
  // A job that is dropped because the daemon ends breaks the promise, which ends the wait too.
  auto closed = std::make_shared<std::promise<void>>();
  const std::future<void> wait = closed->get_future();
  Close(std::move(taken), [closed = std::move(closed)] { closed->set_value(); });
  if (wait.wait_for(kDriverWait) == std::future_status::ready) return absl::OkStatus();
  return Error(absl::StatusCode::kDeadlineExceeded,
               "region_id: {} is released, but the driver has not closed it within {} ms", region,
               kDriverWait.count());
}

// ---- staging pools ----

absl::StatusOr<PoolHandle> Regions::HandleOf(const MemberRecord& member) {
  GroupRecord* const group = state_.groups.Of(member);
  if (!member.ordinal.has_value()) REFITD_RETURN_IF_ERROR(group->EnsureHostPool());
  // An engine only reads slots. A bug there must not damage the slots that its neighbours read.
  REFITD_ASSIGN_OR_RETURN(PoolHandle handle,
                          group->pools.Share(member.ordinal, /*read_only=*/member.engine));
  handle.slot_bytes = group->machine->spec().slot_bytes;
  return handle;
}

absl::StatusOr<PoolHandle> Regions::MapPool(const Token& token, const PeerCredentials& peer) {
  const std::string key(token.begin(), token.end());
  std::optional<DeviceSlots::Missing> missing;
  {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                            state_.leases.Authenticate(key, Peer{peer}));
    missing = device_slots_.MissingOf(*member);
    if (!missing.has_value()) return HandleOf(*member);
  }
  auto made = std::make_shared<absl::Status>(absl::UnavailableError("the daemon ends"));
  // A job that is dropped because the daemon ends breaks the promise, which ends the wait too.
  auto ended = std::make_shared<std::promise<void>>();
  const std::future<void> wait = ended->get_future();
  state_.regions_thread->Submit([this, made, ended = std::move(ended), pool = *missing] {
    *made = device_slots_.MakeNow(pool);
    ended->set_value();
  });
  if (wait.wait_for(kDriverWait) != std::future_status::ready) {
    return Error(absl::StatusCode::kDeadlineExceeded,
                 "the driver has not made the staging slots within {} ms", kDriverWait.count());
  }
  REFITD_RETURN_IF_ERROR(*made);
  const Turn turn(state_.turns);
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, state_.leases.Authenticate(key, Peer{peer}));
  return HandleOf(*member);
}

// ---- device memory ----

// The region is closed by a job of the thread for regions: closing waits for the driver, and the
// last reference may be dropped anywhere, even under the mutex.
RegionRecord Regions::RecordOf(std::shared_ptr<const DeviceRegion> region, bool engine,
                               const MemoryOrigin& origin) const {
  const DeviceRegion* const raw = region.get();
  std::shared_ptr<const void> kept(
      raw, [closer = state_.regions_thread, held = std::move(region)](const void*) mutable {
        closer->Submit([closed = std::move(held)]() mutable { closed.reset(); });
      });
  RegionRecord record;
  record.identity = fmt::format("device {} {}", raw->device(), static_cast<void*>(raw->data()));
  record.memory = {raw->data(), raw->bytes(), std::move(kept), origin};
  record.access = engine ? Access::kReadWrite : Access::kReadOnly;
  record.on_device = true;
  return record;
}

// P8: a caller that is answered may free the memory. The first job runs after the caller's job,
// which has then let go of its regions; the second runs after those are closed.
void Regions::AnswerClosed(std::function<void()> answer) {
  state_.regions_thread->Submit(
      [this, answer = std::move(answer)] { state_.regions_thread->Submit(answer); });
}

absl::StatusOr<Regions::DeviceHandle> Regions::CheckHandle(const Caller& caller, bool engine,
                                                           const IpcBlock& block) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, members_.Authenticate(caller, engine));
  if (state_.options.devices.memory == nullptr) {
    return Error(absl::StatusCode::kUnimplemented, "this daemon has no cuda transport: {}",
                 state_.options.devices.detail);
  }
  if (block.handle.size() != kBlockHandleBytes) {
    return InvalidField("cuda_ipc.handle", "cuda_ipc.handle has {} bytes, a CUDA IPC handle {}",
                        block.handle.size(), kBlockHandleBytes);
  }
  if (block.byte_offset != 0) {
    return InvalidField("cuda_ipc.byte_offset",
                        "cuda_ipc.byte_offset is {}, must be 0: a region is a whole block",
                        block.byte_offset);
  }
  if (block.bytes < 0) {
    return InvalidField("cuda_ipc.bytes", "cuda_ipc.bytes is {}, less than 0", block.bytes);
  }
  if (!member->ordinal.has_value() || block.device != member->device) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "cuda_ipc.gpu_uuid is '{}', the lease's device is '{}'",
                 Shorten(block.device, kMaxUuidInMessage), member->device);
  }
  REFITD_RETURN_IF_ERROR(Admit(caller.token, caller.peer, "").status());
  return DeviceHandle{*member->ordinal, engine, block.bytes, block.handle};
}

absl::StatusOr<RegionRecord> Regions::OpenDevice(const DeviceHandle& handle) const {
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> opened =
      state_.options.devices.memory->OpenBlock(handle.ordinal, handle.handle);
  if (!opened.ok()) return In("cuda_ipc.handle", opened.status());
  const MemoryOrigin origin = OriginOf(**opened);
  RegionRecord region = RecordOf(*std::move(opened), handle.engine, origin);
  if (handle.bytes > region.memory.bytes) {
    return InvalidField("cuda_ipc.bytes", "cuda_ipc.bytes is {}: the block has {}", handle.bytes,
                        region.memory.bytes);
  }
  if (handle.bytes > 0) region.memory.bytes = handle.bytes;
  if (region.memory.bytes <= state_.options.max_region_bytes) return region;
  return Error(absl::StatusCode::kResourceExhausted,
               "cuda_ipc.bytes: {} is more than max_region_bytes {}", region.memory.bytes,
               state_.options.max_region_bytes);
}

void Regions::RegisterDevice(const Caller& caller, bool engine, const IpcBlock& block,
                             RegisterReply reply) {
  const auto check = [&]() -> absl::StatusOr<DeviceHandle> {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(DeviceHandle checked, CheckHandle(caller, engine, block));
    REFITD_RETURN_IF_ERROR(state_.memory.BeginOpening());
    return checked;
  };
  absl::StatusOr<DeviceHandle> handle = check();
  if (!handle.ok()) return reply(handle.status());
  state_.regions_thread->Submit(
      [this, handle = *std::move(handle), caller, reply = std::move(reply)] {
        absl::StatusOr<RegionRecord> opened = OpenDevice(handle);
        const auto add = [&]() -> absl::StatusOr<Registered> {
          const Turn turn(state_.turns);
          state_.memory.EndOpening();
          REFITD_RETURN_IF_ERROR(opened.status());
          // The lease may have ended meanwhile, and another region of the same memory may have
          // come, so the member must be admitted once more.
          REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                                  Admit(caller.token, caller.peer, opened->identity));
          const int64_t bytes = opened->memory.bytes;
          return Registered{state_.memory.Add(member, *std::move(opened)), bytes};
        };
        absl::StatusOr<Registered> added = add();
        if (added.ok()) return reply(added);
        AnswerClosed([reply, refused = added.status()] { reply(refused); });
      });
}

absl::StatusOr<RegionId> Regions::RegisterVmm(const Token& token, const PeerCredentials& peer,
                                              UniqueFd fd, int64_t bytes, uint64_t address) {
  const std::string key(token.begin(), token.end());
  int ordinal = 0;
  bool engine = false;
  MemoryOrigin origin;
  {
    const Turn turn(state_.turns);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Admit(key, Peer{peer}, ""));
    if (state_.options.devices.memory == nullptr) {
      return Error(absl::StatusCode::kUnimplemented,
                   "region_kind: 2: this daemon has no cuda transport: {}",
                   state_.options.devices.detail);
    }
    if (!member->ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "region_kind: 2 is device memory, the lease's device is '{}'", member->device);
    }
    ordinal = *member->ordinal;
    engine = member->engine;
    origin = OriginOf(*member, address);
  }
  REFITD_ASSIGN_OR_RETURN(
      std::shared_ptr<const DeviceRegion> imported,
      state_.options.devices.memory->ImportDescriptor(ordinal, std::move(fd), bytes));
  RegionRecord region = RecordOf(std::move(imported), engine, origin);
  const Turn turn(state_.turns);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Admit(key, Peer{peer}, region.identity));
  return state_.memory.Add(member, std::move(region));
}

absl::StatusOr<DeviceSource> Regions::OpenSource(const std::vector<DeviceRef>& handles, int ordinal,
                                                 std::vector<int> indices) const {
  DeviceSource source;
  std::map<std::string_view, MemorySpan> open;  // tensors of one block share a handle
  for (const int index : indices) {
    const std::string_view handle = handles[static_cast<size_t>(index)].handle;
    auto block = open.find(handle);
    if (block == open.end()) {
      absl::StatusOr<std::shared_ptr<const DeviceRegion>> opened =
          state_.options.devices.memory->OpenBlock(ordinal, handle);
      if (!opened.ok()) {
        return In(fmt::format("bucket.cuda_ipc.handles[{}]", index), opened.status());
      }
      const MemoryOrigin origin = OriginOf(**opened);
      block = open.emplace(handle, RecordOf(*std::move(opened), false, origin).memory).first;
    }
    source.blocks.push_back(block->second);
  }
  source.indices = std::move(indices);
  return source;
}

}  // namespace refitd
