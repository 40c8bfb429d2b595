#include "transport/host/memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "transport/base/status.h"

namespace refitd {
namespace {

absl::Status CheckBytes(int64_t bytes) {
  if (bytes >= 1 && bytes <= kMaxRegionBytes) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "region of {} bytes: must be 1 to {}", bytes,
               kMaxRegionBytes);
}

absl::Status CheckAccess(const UniqueFd& fd, Access access) {
  const int flags = fcntl(fd.get(), F_GETFL);
  if (flags < 0) return ErrnoError(errno, "reading the access mode of a region");
  const int mode = flags & O_ACCMODE;
  if (mode == O_WRONLY || (flags & O_PATH) != 0) {
    return Error(absl::StatusCode::kPermissionDenied, "memfd is not open for reading");
  }
  if (access == Access::kReadWrite && mode != O_RDWR) {
    return Error(absl::StatusCode::kPermissionDenied, "memfd is not open for writing");
  }
  return absl::OkStatus();
}

absl::Status MapError(int error, int64_t bytes) {
  const std::string what = fmt::format("mapping {} bytes of a memfd", bytes);
  if (error == EACCES || error == EPERM) return ErrnoError(error, what);
  return Error(absl::StatusCode::kResourceExhausted, "{}: {}", what,
               Message(ErrnoError(error, "mmap")));
}

}  // namespace

int64_t MachineMemoryBytes() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * int64_t{sysconf(_SC_PAGESIZE)};
}

absl::StatusOr<UniqueFd> CreateSealedMemfd(const std::string& name, int64_t bytes) {
  REFITD_RETURN_IF_ERROR(CheckBytes(bytes));
  UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid() && errno == EINVAL) {
    return Error(absl::StatusCode::kInvalidArgument, "memfd name of {} bytes is too long",
                 name.size());
  }
  if (!fd.valid()) return ErrnoError(errno, "creating a memfd");
  // A receiver of a read-only duplicate could otherwise open it again for writing through /proc.
  if (fchmod(fd.get(), 0600) != 0) return ErrnoError(errno, "restricting a memfd to its owner");
  if (ftruncate(fd.get(), bytes) != 0) {
    return Error(absl::StatusCode::kResourceExhausted, "memfd of {} bytes: {}", bytes,
                 Message(ErrnoError(errno, "ftruncate")));
  }
  // The last seal keeps others from adding one that would stop writes.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoError(errno, "sealing a memfd");
  }
  return fd;
}

absl::Status CheckSealedMemfd(const UniqueFd& fd, int64_t bytes) {
  REFITD_RETURN_IF_ERROR(CheckBytes(bytes));
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 && errno == EINVAL) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "descriptor is not a memfd: only sealed memfds can be shared");
  }
  if (seals < 0) return ErrnoError(errno, "reading the seals of a region");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "memfd is not sealed against shrinking (seals {:#x}; F_SEAL_SHRINK is needed)",
                 static_cast<unsigned>(seals));
  }
  struct statfs system;
  if (fstatfs(fd.get(), &system) != 0) return ErrnoError(errno, "reading the kind of a region");
  if (system.f_type == HUGETLBFS_MAGIC) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "memfd is of huge pages (MFD_HUGETLB): not supported");
  }
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoError(errno, "reading the size of a region");
  if (info.st_size < bytes) {
    return Error(absl::StatusCode::kInvalidArgument, "memfd has {} bytes, region claims {}",
                 static_cast<int64_t>(info.st_size), bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ReadOnlyDuplicate(const UniqueFd& fd) {
  // dup() would share the open file description and its access mode; opening again makes a new one.
  const std::string path = fmt::format("/proc/self/fd/{}", fd.get());
  UniqueFd duplicate(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!duplicate.valid()) return ErrnoError(errno, "opening a memfd again for reading");
  return duplicate;
}

absl::StatusOr<std::shared_ptr<HostRegion>> HostRegion::Map(const UniqueFd& fd, int64_t bytes,
                                                            Access access, bool populate) {
  REFITD_RETURN_IF_ERROR(CheckSealedMemfd(fd, bytes));
  REFITD_RETURN_IF_ERROR(CheckAccess(fd, access));
  const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  // If the mapping may be written, its pages are populated writable, so that a first write does not
  // fault again.
  const int flags = MAP_SHARED | (populate ? MAP_POPULATE : 0);
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), protection, flags, fd.get(), 0);
  if (data == MAP_FAILED) return MapError(errno, bytes);
  // Keep weights out of core dumps, since they are large; a failure has no other effect.
  (void)madvise(data, static_cast<size_t>(bytes), MADV_DONTDUMP);
  return std::shared_ptr<HostRegion>(new HostRegion(static_cast<char*>(data), bytes, access));
}

HostRegion::~HostRegion() { REFITD_CHECK(munmap(data_, static_cast<size_t>(bytes_)) == 0); }

}  // namespace refitd
