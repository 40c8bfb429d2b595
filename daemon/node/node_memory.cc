// The node's memory: members' regions, the groups' staging pools, the descriptor socket's requests.
#include <sys/stat.h>

#include <chrono>
#include <future>
#include <utility>

#include "daemon/node/node.h"

namespace refitd {
namespace {

// P4: how long a thread of the descriptor socket waits for the driver, which may be making
// contexts.
constexpr std::chrono::milliseconds kDriverWait{20'000};

}  // namespace

absl::Status Node::EnsurePool(GroupRecord* group) {
  return group->pools.EnsureHost(group->name(), group->pool_bytes());
}

// ---- regions ----

absl::StatusOr<MemberRecord*> Node::AdmitRegion(const std::string& token, const Peer& peer,
                                                const std::string& identity) {
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, leases_.Authenticate(token, peer));
  REFITD_RETURN_IF_ERROR(memory_.Admit(*member, identity));
  return member;
}

absl::StatusOr<RegionId> Node::RegisterRegion(const Token& token, const PeerCredentials& peer,
                                              UniqueFd fd, RegionKind kind, int64_t bytes) {
  if (bytes > options_.max_region_bytes) {
    return Error(absl::StatusCode::kResourceExhausted, "bytes: {} is more than max_region_bytes {}",
                 bytes, options_.max_region_bytes);
  }
  if (kind == RegionKind::kCudaVmm) return RegisterVmm(token, peer, std::move(fd), bytes);
  if (kind != RegionKind::kMemfd) {
    return Error(absl::StatusCode::kUnimplemented,
                 "region_kind: {}: this daemon maps sealed memfds and CUDA's VMM memory only",
                 static_cast<uint32_t>(kind));
  }
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoError(errno, "looking at the descriptor");
  RegionRecord region;
  region.identity = fmt::format("memfd {} {}", file.st_dev, file.st_ino);
  const std::string key(token.begin(), token.end());
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member,
                            AdmitRegion(key, Peer{peer}, region.identity));
    if (member->engine) region.access = Access::kReadWrite;  // trainers' memory is only read
  }
  // Mapping and filling page tables takes long, so it is done outside the mutex. Memory that its
  // owner never touched is not filled here, since it would be charged to the daemon.
  constexpr int64_t kStatBlockBytes = 512;
  const bool allocated = file.st_blocks * kStatBlockBytes >= bytes;
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<HostRegion> mapping,
                          HostRegion::Map(fd, bytes, region.access, allocated));
  region.memory = {mapping->data(), mapping->bytes(), mapping};
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, AdmitRegion(key, Peer{peer}, region.identity));
  return memory_.Add(member, std::move(region));
}

absl::StatusOr<RegionRecord> Node::TakeRegion(MemberRecord* member, RegionId region) {
  REFITD_ASSIGN_OR_RETURN(RegionRecord taken, memory_.Take(member, region, calls_));
  data_plane_.Release(member->id);
  return taken;
}

// P8: CUDA forbids an exporter to free memory before its importer has closed it. Host memory waits
// for no driver.
void Node::CloseRegion(RegionRecord region, std::function<void()> closed) {
  if (!region.on_device) {
    region = {};
    return closed();
  }
  auto held = std::make_shared<RegionRecord>(std::move(region));
  // In line behind local moves that are bound ahead and may hold the region.
  data_plane_.AfterBinding([this, held, closed = std::move(closed)] {
    regions_thread_->Submit([this, held, closed] {
      *held = {};
      regions_thread_->Submit(closed);  // behind the closing, which the line above has queued
    });
  });
}

void Node::ReleaseRegion(const v1::ReleaseRegionRequest& request, const Peer& peer, bool engine,
                         ResponseFunction<v1::ReleaseRegionResponse> reply) {
  const auto take = [&]() -> absl::StatusOr<RegionRecord> {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Authenticate(request.lease(), peer, engine));
    return TakeRegion(member, RegionId(request.region_id()));
  };
  absl::StatusOr<RegionRecord> taken = take();
  if (!taken.ok()) return reply(taken.status());
  CloseRegion(*std::move(taken),
              [reply = std::move(reply)] { reply(v1::ReleaseRegionResponse()); });
}

absl::Status Node::ReleaseRegion(const Token& token, const PeerCredentials& peer, RegionId region) {
  const auto take = [&]() -> absl::StatusOr<RegionRecord> {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(
        MemberRecord * member,
        leases_.Authenticate(std::string(token.begin(), token.end()), Peer{peer}));
    return TakeRegion(member, region);
  };
  REFITD_ASSIGN_OR_RETURN(RegionRecord taken, take());
  // A job that is dropped because the daemon ends breaks the promise, which ends the wait too.
  auto closed = std::make_shared<std::promise<void>>();
  const std::future<void> wait = closed->get_future();
  CloseRegion(std::move(taken), [closed = std::move(closed)] { closed->set_value(); });
  if (wait.wait_for(kDriverWait) == std::future_status::ready) return absl::OkStatus();
  return Error(absl::StatusCode::kDeadlineExceeded,
               "region_id: {} is released, but the driver has not closed it within {} ms", region,
               kDriverWait.count());
}

absl::StatusOr<PoolHandle> Node::HandleOf(const MemberRecord& member) {
  GroupRecord* const group = groups_.Of(member);
  if (!member.ordinal.has_value()) REFITD_RETURN_IF_ERROR(EnsurePool(group));
  // An engine only reads slots. A bug there must not damage the slots that its neighbours read.
  REFITD_ASSIGN_OR_RETURN(PoolHandle handle,
                          group->pools.Share(member.ordinal, /*read_only=*/member.engine));
  handle.slot_bytes = group->machine->spec().slot_bytes;
  return handle;
}

absl::StatusOr<PoolHandle> Node::MapPool(const Token& token, const PeerCredentials& peer) {
  const std::string key(token.begin(), token.end());
  std::optional<DeviceSlots::Missing> missing;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, leases_.Authenticate(key, Peer{peer}));
    missing = device_slots_.MissingOf(*member);
    if (!missing.has_value()) return HandleOf(*member);
  }
  auto made = std::make_shared<absl::Status>(absl::UnavailableError("the daemon ends"));
  // A job that is dropped because the daemon ends breaks the promise, which ends the wait too.
  auto ended = std::make_shared<std::promise<void>>();
  const std::future<void> wait = ended->get_future();
  regions_thread_->Submit([this, made, ended = std::move(ended), pool = *missing] {
    *made = device_slots_.MakeNow(pool);
    ended->set_value();
  });
  if (wait.wait_for(kDriverWait) != std::future_status::ready) {
    return Error(absl::StatusCode::kDeadlineExceeded,
                 "the driver has not made the staging slots within {} ms", kDriverWait.count());
  }
  REFITD_RETURN_IF_ERROR(*made);
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, leases_.Authenticate(key, Peer{peer}));
  return HandleOf(*member);
}

}  // namespace refitd
