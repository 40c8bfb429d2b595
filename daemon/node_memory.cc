// The node's memory: members' regions, the groups' staging pools, the descriptor socket's requests.
#include "daemon/node_memory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <utility>

namespace refitd {

absl::Status Node::EnsurePool(GroupRecord* group) {
  if (group->pool != nullptr) return absl::OkStatus();
  if (group->pool_bytes() == 0) {
    return absl::UnavailableError("the coordinator has not answered yet");
  }
  REFITD_ASSIGN_OR_RETURN(
      UniqueFd fd, CreateSealedMemfd("refitd-pool-" + group->machine->name(), group->pool_bytes()));
  REFITD_ASSIGN_OR_RETURN(group->pool,
                          HostRegion::Map(fd, group->pool_bytes(), Access::kReadWrite, false));
  group->pool_fd = std::move(fd);
  return absl::OkStatus();
}

// ---- the descriptor socket ----

absl::StatusOr<RegionId> Node::RegisterRegion(const Token& token, const PeerCredentials& peer,
                                              UniqueFd fd, RegionKind kind, int64_t bytes) {
  if (kind != RegionKind::kMemfd) {
    return Error(absl::StatusCode::kUnimplemented,
                 "region_kind: {}: this daemon maps sealed memfds only",
                 static_cast<uint32_t>(kind));
  }
  if (bytes > options_.max_region_bytes) {
    return Error(absl::StatusCode::kResourceExhausted, "bytes: {} is more than max_region_bytes {}",
                 bytes, options_.max_region_bytes);
  }
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoError(errno, "looking at the descriptor");
  const std::pair<uint64_t, uint64_t> identity(file.st_dev, file.st_ino);
  const std::string key(token.begin(), token.end());
  const auto admit = [&]() -> absl::StatusOr<MemberRecord*> {
    mutex_.AssertHeld();
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, AuthenticateToken(key, Peer{peer}));
    if (member->regions.size() >= static_cast<size_t>(options_.max_regions_per_member)) {
      return Error(absl::StatusCode::kResourceExhausted, "the member has {} regions already",
                   member->regions.size());
    }
    if (regions_ >= options_.max_regions) {
      return Error(absl::StatusCode::kResourceExhausted, "the daemon has {} regions already",
                   regions_);
    }
    if (!member->engine) return member;
    // Two regions over one memfd could hold two tensors in the same bytes, unseen by
    // ValidateLayout.
    for (const auto& [id, region] : member->regions) {
      if (region.file == identity) {
        return Error(absl::StatusCode::kAlreadyExists, "the descriptor is region {} already", id);
      }
    }
    return member;
  };
  Access access = Access::kReadOnly;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, admit());
    if (member->engine) access = Access::kReadWrite;  // trainers' memory is only read
  }
  // Mapping and filling page tables takes long: outside the mutex. Memory that its owner never
  // touched is not filled here: it would be charged to the daemon.
  constexpr int64_t kStatBlockBytes = 512;
  const bool allocated = file.st_blocks * kStatBlockBytes >= bytes;
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<HostRegion> mapping,
                          HostRegion::Map(fd, bytes, access, allocated));
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, admit());
  const RegionId id(next_region_++);
  member->regions[id] = {std::move(mapping), identity};
  ++regions_;
  return id;
}

absl::Status Node::ReleaseRegion(const Token& token, const PeerCredentials& peer, RegionId region) {
  std::shared_ptr<HostRegion>
      released;  // unmapped after the mutex, and after the copies that hold it
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                          AuthenticateToken(std::string(token.begin(), token.end()), Peer{peer}));
  const auto it = member->regions.find(region);
  if (it == member->regions.end()) {
    return Error(absl::StatusCode::kNotFound, "region_id: {} is no region of this member", region);
  }
  std::vector<const Layout*> layouts;
  if (member->layout != nullptr) layouts.push_back(member->layout.get());
  for (const auto& [call, pending] : layouts_) {
    if (pending.member == member->id) layouts.push_back(pending.layout.get());
  }
  for (const Layout* layout : layouts) {
    for (const Piece& piece : layout->pieces) {
      if (piece.region == region) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "region_id: {} is in use by tensor '{}'", region,
                     layout->tensors[piece.tensor].name);
      }
    }
  }
  for (const auto& [call, bucket] : buckets_) {
    if (bucket.source != CheckedBucket::Source::kRegions) continue;
    for (const CheckedBucket::Place& place : bucket.places) {
      if (place.region == region) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "region_id: {} is the source of an unanswered bucket", region);
      }
    }
  }
  executor_.Release(member->id);
  released = std::move(it->second.mapping);
  member->regions.erase(it);
  --regions_;
  return absl::OkStatus();
}

absl::StatusOr<PoolHandle> Node::MapPool(const Token& token, const PeerCredentials& peer) {
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                          AuthenticateToken(std::string(token.begin(), token.end()), Peer{peer}));
  GroupRecord* group = FindGroup(member->group);
  REFITD_RETURN_IF_ERROR(EnsurePool(group));
  PoolHandle handle;
  handle.bytes = group->pool_bytes();
  handle.slot_bytes = group->machine->spec().slot_bytes;
  if (member->engine) {
    // An engine only reads slots; a bug there must not damage what its neighbours load.
    REFITD_ASSIGN_OR_RETURN(handle.fd, ReadOnlyDuplicate(group->pool_fd));
    return handle;
  }
  handle.fd = UniqueFd(fcntl(group->pool_fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!handle.fd.valid()) return ErrnoError(errno, "duplicating the pool's descriptor");
  return handle;
}

}  // namespace refitd
