#include "daemon/node/member_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <future>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "daemon/node/identities.h"
#include "daemon/node/life.h"
#include "daemon/process/log.h"
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
MemoryOrigin BlockOrigin(const DeviceRegion& block) {
  return {MemoryOrigin::Kind::kBlock, 0, reinterpret_cast<uintptr_t>(block.data()), 0};
}

// Memory that a process of this host exported is known by that process and the address that it
// gave. A process in another namespace of processes has no number here.
MemoryOrigin ExportOrigin(const MemberRecord& member, uint64_t address) {
  const auto device = static_cast<uint64_t>(*member.ordinal);
  const int pid = member.peer.credentials.has_value() ? member.peer.credentials->pid : 0;
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / 2);
  if (pid <= 0 || address == 0 || address > kMost) {
    return {MemoryOrigin::Kind::kUnknown, device, 0, 0};
  }
  return {MemoryOrigin::Kind::kExported, device, static_cast<uint64_t>(pid),
          static_cast<int64_t>(address)};
}

absl::StatusOr<struct stat> LookAt(const UniqueFd& fd) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoError(errno, "looking at the descriptor");
  return file;
}

absl::StatusOr<UniqueFd> DuplicateOf(const UniqueFd& fd) {
  UniqueFd copy = Duplicate(fd.get());
  if (!copy.valid()) return ErrnoError(errno, "duplicating a descriptor");
  return copy;
}

// The identity of a memfd's region.
std::string IdentityOf(const MemoryOrigin& file) {
  return fmt::format("memfd {} {}", file.space, file.object);
}

// Whether the first `bytes` of the memfd have pages. The daemon must not fill in pages that the
// owner never touched, since they would be charged to the daemon.
bool HasPages(const UniqueFd& fd, int64_t bytes) { return lseek(fd.get(), 0, SEEK_HOLE) >= bytes; }

// HasHostMemory tells whether any side of the rank lies in host memory, which limits.mapped_bytes
// counts.
bool HasHostMemory(const KeptRank& kept) {
  const auto counts = [](const RegionRecord& side) { return !side.on_device || side.pinned; };
  return std::any_of(kept.arenas.begin(), kept.arenas.end(), [&counts](const auto& arena) {
    return counts(arena.front) || counts(arena.back);
  });
}

// Waits for work of another thread, which `begin` is given the end of, to be called once.
bool EndsInTime(const std::function<void(std::function<void()>)>& begin) {
  // Work that is dropped because the daemon ends breaks the promise, which ends the wait too.
  auto ended = std::make_shared<std::promise<void>>();
  const std::future<void> wait = ended->get_future();
  begin([ended = std::move(ended)] { ended->set_value(); });
  return wait.wait_for(kDriverWait) == std::future_status::ready;
}

}  // namespace

// ---- host memory ----

absl::StatusOr<MemoryOrigin> MemberMemory::OriginOf(const UniqueFd& fd) {
  REFITD_ASSIGN_OR_RETURN(const struct stat file, LookAt(fd));
  return MemoryOrigin{MemoryOrigin::Kind::kFile, file.st_dev, file.st_ino, 0};
}

absl::StatusOr<MemorySpan> MemberMemory::Map(const UniqueFd& fd, const MemoryOrigin& origin,
                                             int64_t bytes, Access access,
                                             const std::string& identity) {
  const Key key{origin.space, origin.object, access, std::nullopt};
  std::shared_ptr<const Mapping> mapping = FindMapping(key, bytes);
  if (mapping == nullptr) {
    auto made = std::make_shared<Mapping>();
    REFITD_ASSIGN_OR_RETURN(made->hold, ChargeLimits(identity, bytes));
    REFITD_ASSIGN_OR_RETURN(made->region, HostRegion::Map(fd, bytes, access, HasPages(fd, bytes)));
    KeepMapping(key, made);
    mapping = std::move(made);
  }
  return MemorySpan{mapping->region->data(), bytes, mapping, origin};
}

// While a limit refuses the bytes, kept arenas in host memory are given up, those that would end
// first before others: of this identity if its own limit refuses, else of any.
absl::StatusOr<ByteLedger::Hold> MemberMemory::ChargeLimits(const std::string& identity,
                                                            int64_t bytes) {
  if (bytes > state_.options.machine_bytes) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "bytes: {} is more than this machine's memory, {}", bytes,
                 state_.options.machine_bytes);
  }
  while (true) {
    absl::StatusOr<ByteLedger::Hold> hold = state_.mapped.Take(identity, bytes);
    if (hold.ok()) return hold;
    const bool own = bytes <= state_.options.max_mapped_bytes - state_.mapped.held();
    std::optional<KeptRank> given_up;  // unmapped without the mutex
    {
      const StateLock lock(&state_.mutex);
      given_up = state_.kept.TakeFirst([&](const KeptRank& kept) {
        return HasHostMemory(kept) && (!own || IdentityOf(Peer{kept.process}) == identity);
      });
    }
    if (!given_up.has_value()) return hold;
    LogInfo("group {}: the kept arenas of instance {} rank {} are given up, their memory is needed",
            given_up->group, given_up->instance, given_up->rank);
    const bool on_device = given_up->ordinal.has_value();
    given_up.reset();
    const auto unpinned = [this](auto ended) { state_.regions_thread->Submit(std::move(ended)); };
    if (on_device && !EndsInTime(unpinned)) return hold;
  }
}

std::shared_ptr<const MemberMemory::Mapping> MemberMemory::FindMapping(const Key& key,
                                                                       int64_t bytes) {
  MutexLock lock(&mutex_);
  const auto it = mappings_.find(key);
  if (it == mappings_.end()) return nullptr;
  std::shared_ptr<const Mapping> mapping = it->second.lock();
  return mapping != nullptr && mapping->bytes() >= bytes ? mapping : nullptr;
}

void MemberMemory::KeepMapping(const Key& key, const std::shared_ptr<const Mapping>& mapping) {
  MutexLock lock(&mutex_);
  mappings_[key] = mapping;
  if (mappings_.size() < sweep_at_) return;
  std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
  sweep_at_ = std::max<size_t>(64, 2 * mappings_.size());
}

// ---- regions ----

absl::StatusOr<MemberRecord*> MemberMemory::Admit(const std::string& token, const Peer& peer,
                                                  const std::string& identity) {
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, state_.members.OfToken(token, peer));
  REFITD_RETURN_IF_ERROR(state_.members.AdmitRegion(*member, identity));
  REFITD_RETURN_IF_ERROR(AdmitRegionOf(state_, *member));
  return member;
}

absl::StatusOr<RegionId> MemberMemory::RegisterRegion(const Token& token,
                                                      const PeerCredentials& peer, UniqueFd fd,
                                                      RegionKind kind, int64_t bytes,
                                                      uint64_t address, KeepDescriptor keep) {
  if (bytes > state_.options.max_region_bytes) {
    return Error(absl::StatusCode::kResourceExhausted, "bytes: {} is more than max_region_bytes {}",
                 bytes, state_.options.max_region_bytes);
  }
  if (kind == RegionKind::kDevice || kind == RegionKind::kPinned) {
    return RegisterOnDevice(token, peer, std::move(fd), kind, bytes, address, keep);
  }
  if (kind != RegionKind::kMemfd) {
    return Error(absl::StatusCode::kUnimplemented,
                 "region_kind: {}: this daemon maps sealed memfds and CUDA's VMM memory only",
                 static_cast<uint32_t>(kind));
  }
  RegionRecord region;
  REFITD_ASSIGN_OR_RETURN(const MemoryOrigin origin, OriginOf(fd));
  region.identity = IdentityOf(origin);
  const std::string key(token.begin(), token.end());
  {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Admit(key, Peer{peer}, region.identity));
    if (member->engine) region.access = Access::kReadWrite;  // trainers' memory is only read
  }
  // Mapping and filling page tables takes long, so it is done outside the mutex.
  REFITD_ASSIGN_OR_RETURN(region.memory,
                          Map(fd, origin, bytes, region.access, IdentityOf(Peer{peer})));
  if (keep != KeepDescriptor::kNo) {
    region.descriptor = std::make_shared<const UniqueFd>(std::move(fd));
  }
  region.for_next_rank = keep == KeepDescriptor::kForNextRank;
  const StateLock lock(&state_.mutex);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Admit(key, Peer{peer}, region.identity));
  return state_.members.AddRegion(member, std::move(region));
}

absl::StatusOr<RegionRecord> MemberMemory::Take(MemberRecord* member, RegionId region) {
  REFITD_ASSIGN_OR_RETURN(RegionRecord taken,
                          state_.members.TakeRegion(member, region, state_.calls));
  state_.data_plane->Release(member->id);
  return taken;
}

// P8: CUDA forbids an exporter to free memory before its importer has closed it. Host memory waits
// for no driver.
void MemberMemory::Close(RegionRecord region, std::function<void()> closed) {
  if (!region.on_device) {
    region = {};
    return closed();
  }
  auto held = std::make_shared<RegionRecord>(std::move(region));
  // The closing comes after local moves that were bound ahead, since they may hold the region.
  state_.data_plane->AfterBinding([this, held, closed = std::move(closed)] {
    state_.regions_thread->Submit([this, held, closed] {
      // The region's end queues its closing on this same thread (RecordOf). `closed` is queued
      // behind the closing.
      *held = {};
      state_.regions_thread->Submit(closed);
    });
  });
}

void MemberMemory::Release(const Caller& caller, bool engine, RegionId region,
                           std::function<void(const absl::Status&)> reply) {
  const auto take = [&]() -> absl::StatusOr<RegionRecord> {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Authenticate(state_, caller, engine));
    return Take(member, region);
  };
  absl::StatusOr<RegionRecord> taken = take();
  if (!taken.ok()) return reply(taken.status());
  Close(*std::move(taken), [reply = std::move(reply)] { reply(absl::OkStatus()); });
}

absl::Status MemberMemory::ReleaseRegion(const Token& token, const PeerCredentials& peer,
                                         RegionId region) {
  const auto take = [&]() -> absl::StatusOr<RegionRecord> {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(
        MemberRecord * member,
        state_.members.OfToken(std::string(token.begin(), token.end()), Peer{peer}));
    return Take(member, region);
  };
  REFITD_ASSIGN_OR_RETURN(RegionRecord taken, take());
  const auto close = [&](auto closed) { Close(std::move(taken), std::move(closed)); };
  if (EndsInTime(close)) return absl::OkStatus();
  return Error(absl::StatusCode::kDeadlineExceeded,
               "region_id: {} is released, but the driver has not closed it within {} ms", region,
               kDriverWait.count());
}

// ---- kept arenas ----

absl::StatusOr<SideHandle> MemberMemory::TakeKept(const Token& token, const PeerCredentials& peer,
                                                  uint64_t side) {
  const std::string key(token.begin(), token.end());
  const StateLock lock(&state_.mutex);
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, state_.members.OfToken(key, Peer{peer}));
  if (!member->kept.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "no arenas are kept for this lease: it did not restore, or has registered a "
                 "layout");
  }
  const std::vector<KeptRank::Arena>& arenas = member->kept->arenas;
  if (side >= 2 * arenas.size()) {
    return Error(absl::StatusCode::kNotFound,
                 "region_id: {}: {} arenas are kept, with 2 sides each", side, arenas.size());
  }
  const KeptRank::Arena& arena = arenas[side / 2];
  const RegionRecord& region = side % 2 == 0 ? arena.front : arena.back;
  SideHandle handle;
  REFITD_ASSIGN_OR_RETURN(handle.fd, DuplicateOf(*region.descriptor));
  handle.bytes = region.memory.bytes;
  handle.kind = region.pinned      ? RegionKind::kPinned
                : region.on_device ? RegionKind::kDevice
                                   : RegionKind::kMemfd;
  return handle;
}

// ---- staging pools ----

absl::StatusOr<PoolHandle> MemberMemory::HandleOf(const MemberRecord& member) {
  GroupRecord* const group = state_.groups.Of(member);
  if (!member.ordinal.has_value()) REFITD_RETURN_IF_ERROR(state_.pools.EnsureHost(*group));
  // An engine only reads slots. A bug there must not damage the slots that its neighbours read.
  return state_.pools.Share(*group, member.ordinal, /*read_only=*/member.engine);
}

absl::StatusOr<PoolHandle> MemberMemory::MapPool(const Token& token, const PeerCredentials& peer) {
  const std::string key(token.begin(), token.end());
  std::optional<StagingPools::Missing> missing;
  {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, state_.members.OfToken(key, Peer{peer}));
    missing = state_.pools.MissingOf(*member);
    if (!missing.has_value()) return HandleOf(*member);
  }
  auto made = std::make_shared<absl::Status>(absl::UnavailableError("the daemon ends"));
  const auto make = [&](auto ended) {
    state_.regions_thread->Submit([this, made, ended = std::move(ended), pool = *missing] {
      *made = state_.pools.MakeNow(pool);
      ended();
    });
  };
  if (!EndsInTime(make)) {
    return Error(absl::StatusCode::kDeadlineExceeded,
                 "the driver has not made the staging slots within {} ms", kDriverWait.count());
  }
  REFITD_RETURN_IF_ERROR(*made);
  const StateLock lock(&state_.mutex);
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, state_.members.OfToken(key, Peer{peer}));
  return HandleOf(*member);
}

// ---- device memory ----

// The region is closed by a job of the thread for regions: closing waits for the driver, and the
// last reference may be dropped anywhere, even under the mutex.
RegionRecord MemberMemory::RecordOf(std::shared_ptr<const DeviceRegion> region, bool engine,
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
// which has then dropped its regions; the second runs after those are closed.
void MemberMemory::AnswerClosed(std::function<void()> answer) {
  state_.regions_thread->Submit(
      [this, answer = std::move(answer)] { state_.regions_thread->Submit(answer); });
}

absl::StatusOr<MemberMemory::DeviceHandle> MemberMemory::CheckHandle(const Caller& caller,
                                                                     bool engine,
                                                                     const IpcBlock& block) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(state_, caller, engine));
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

absl::StatusOr<RegionRecord> MemberMemory::OpenDevice(const DeviceHandle& handle) const {
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> opened =
      state_.options.devices.memory->OpenBlock(handle.ordinal, handle.handle);
  if (!opened.ok()) return In("cuda_ipc.handle", opened.status());
  const MemoryOrigin origin = BlockOrigin(**opened);
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

void MemberMemory::RegisterDevice(const Caller& caller, bool engine, const IpcBlock& block,
                                  RegisterReply reply) {
  const auto check = [&]() -> absl::StatusOr<DeviceHandle> {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(DeviceHandle checked, CheckHandle(caller, engine, block));
    REFITD_RETURN_IF_ERROR(state_.members.BeginOpening());
    return checked;
  };
  absl::StatusOr<DeviceHandle> handle = check();
  if (!handle.ok()) return reply(handle.status());
  state_.regions_thread->Submit(
      [this, handle = *std::move(handle), caller, reply = std::move(reply)] {
        absl::StatusOr<RegionRecord> opened = OpenDevice(handle);
        const auto add = [&]() -> absl::StatusOr<Registered> {
          const StateLock lock(&state_.mutex);
          state_.members.EndOpening();
          REFITD_RETURN_IF_ERROR(opened.status());
          // The lease may have ended meanwhile, and another region of the same memory may have
          // come, so the member must be admitted once more.
          REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                                  Admit(caller.token, caller.peer, opened->identity));
          const int64_t bytes = opened->memory.bytes;
          return Registered{state_.members.AddRegion(member, *std::move(opened)), bytes};
        };
        absl::StatusOr<Registered> added = add();
        if (added.ok()) return reply(added);
        AnswerClosed([reply, refused = added.status()] { reply(refused); });
      });
}

absl::StatusOr<RegionRecord> MemberMemory::Pin(int ordinal, bool engine, const UniqueFd& fd,
                                               int64_t bytes, const std::string& identity) {
  REFITD_RETURN_IF_ERROR(CheckSealedMemfd(fd, bytes));
  REFITD_ASSIGN_OR_RETURN(const MemoryOrigin origin, OriginOf(fd));
  const Key key{origin.space, origin.object, Access::kReadWrite, ordinal};
  std::shared_ptr<const Mapping> mapping = FindMapping(key, bytes);
  if (mapping == nullptr) {
    if (!HasPages(fd, bytes)) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "region_kind: 3: not all of the {} bytes have pages, which who shares pinned "
                   "memory makes",
                   bytes);
    }
    auto made = std::make_shared<Mapping>();
    REFITD_ASSIGN_OR_RETURN(made->hold, ChargeLimits(identity, bytes));
    REFITD_ASSIGN_OR_RETURN(made->pinned,
                            state_.options.devices.memory->PinHost(ordinal, fd, bytes));
    KeepMapping(key, made);
    mapping = std::move(made);
  }
  const DeviceRegion* const pinned = mapping->pinned.get();
  RegionRecord record = RecordOf({std::move(mapping), pinned}, engine, origin);
  record.memory.bytes = bytes;
  record.identity = IdentityOf(origin);
  record.pinned = true;
  return record;
}

absl::StatusOr<RegionId> MemberMemory::RegisterOnDevice(const Token& token,
                                                        const PeerCredentials& peer, UniqueFd fd,
                                                        RegionKind kind, int64_t bytes,
                                                        uint64_t address, KeepDescriptor keep) {
  const std::string key(token.begin(), token.end());
  int ordinal = 0;
  bool engine = false;
  MemoryOrigin origin;
  {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Admit(key, Peer{peer}, ""));
    if (state_.options.devices.memory == nullptr) {
      return Error(absl::StatusCode::kUnimplemented,
                   "region_kind: {}: this daemon has no cuda transport: {}",
                   static_cast<uint32_t>(kind), state_.options.devices.detail);
    }
    if (!member->ordinal.has_value()) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "region_kind: {} is memory for a device, the lease's device is '{}'",
                   static_cast<uint32_t>(kind), member->device);
    }
    ordinal = *member->ordinal;
    engine = member->engine;
    origin = ExportOrigin(*member, address);
  }
  std::shared_ptr<const UniqueFd> kept;
  if (keep != KeepDescriptor::kNo) {
    REFITD_ASSIGN_OR_RETURN(UniqueFd copy, DuplicateOf(fd));
    kept = std::make_shared<const UniqueFd>(std::move(copy));
  }
  RegionRecord region;
  if (kind == RegionKind::kPinned) {
    REFITD_ASSIGN_OR_RETURN(region, Pin(ordinal, engine, fd, bytes, IdentityOf(Peer{peer})));
  } else {
    REFITD_ASSIGN_OR_RETURN(
        std::shared_ptr<const DeviceRegion> imported,
        state_.options.devices.memory->ImportDescriptor(ordinal, std::move(fd), bytes));
    region = RecordOf(std::move(imported), engine, origin);
  }
  region.descriptor = std::move(kept);
  region.for_next_rank = keep == KeepDescriptor::kForNextRank;
  const StateLock lock(&state_.mutex);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Admit(key, Peer{peer}, region.identity));
  return state_.members.AddRegion(member, std::move(region));
}

absl::StatusOr<DeviceSource> MemberMemory::OpenSource(const std::vector<DeviceRef>& handles,
                                                      int ordinal, std::vector<int> indices) const {
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
      const MemoryOrigin origin = BlockOrigin(**opened);
      block = open.emplace(handle, RecordOf(*std::move(opened), false, origin).memory).first;
    }
    source.blocks.push_back(block->second);
  }
  source.indices = std::move(indices);
  return source;
}

}  // namespace refitd
