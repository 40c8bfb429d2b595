#include "daemon/node/host_mappings.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "transport/base/status.h"

namespace refitd {
namespace {

absl::StatusOr<struct stat> LookAt(const UniqueFd& fd) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoError(errno, "looking at the descriptor");
  return file;
}

// Whether the first `bytes` of the memfd have pages. Pages that its owner never touched are not
// filled in, since they would be charged to the daemon.
bool HasPages(const struct stat& file, int64_t bytes) {
  constexpr int64_t kStatBlockBytes = 512;
  return file.st_blocks * kStatBlockBytes >= bytes;
}

}  // namespace

absl::StatusOr<MemoryOrigin> HostMappings::OriginOf(const UniqueFd& fd) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoError(errno, "looking at the descriptor");
  return MemoryOrigin{MemoryOrigin::Kind::kFile, file.st_dev, file.st_ino, 0};
}

absl::StatusOr<MemorySpan> HostMappings::Map(const UniqueFd& fd, const MemoryOrigin& origin,
                                             int64_t bytes, Access access,
                                             const std::string& identity) {
  if (bytes > region_bytes_) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "bytes: {} is more than this machine's memory, {}", bytes, region_bytes_);
  }
  REFITD_ASSIGN_OR_RETURN(const struct stat file, LookAt(fd));
  const Key key{origin.space, origin.object, access};
  std::shared_ptr<const Mapping> mapping = Find(key, bytes);
  if (mapping == nullptr) {
    auto made = std::make_shared<Mapping>();
    REFITD_ASSIGN_OR_RETURN(made->hold, mapped_.Take(identity, bytes));
    REFITD_ASSIGN_OR_RETURN(made->region,
                            HostRegion::Map(fd, bytes, access, HasPages(file, bytes)));
    Keep(key, made);
    mapping = std::move(made);
  }
  return MemorySpan{mapping->region->data(), bytes, mapping,
                    MemoryOrigin{MemoryOrigin::Kind::kFile, file.st_dev, file.st_ino, 0}};
}

std::shared_ptr<const HostMappings::Mapping> HostMappings::Find(const Key& key, int64_t bytes) {
  MutexLock lock(&mutex_);
  const auto it = mappings_.find(key);
  if (it == mappings_.end()) return nullptr;
  std::shared_ptr<const Mapping> mapping = it->second.lock();
  return mapping != nullptr && mapping->region->bytes() >= bytes ? mapping : nullptr;
}

void HostMappings::Keep(const Key& key, const std::shared_ptr<const Mapping>& mapping) {
  MutexLock lock(&mutex_);
  mappings_[key] = mapping;
  if (mappings_.size() < sweep_at_) return;
  std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
  sweep_at_ = std::max<size_t>(64, 2 * mappings_.size());
}

}  // namespace refitd
