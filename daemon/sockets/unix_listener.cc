#include "daemon/sockets/unix_listener.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/sockets/peer_credentials.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int kBacklog = 1024;        // connections that the kernel may queue
constexpr int kMaxLockAttempts = 16;  // each attempt is lost to a daemon that ends

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

constexpr char kUnfinishedSuffix[] = ".new";  // suffix of a socket that does not listen yet

std::string LockPath(const std::string& path) { return path + ".lock"; }

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path[0] != '/') {
    return Error(absl::StatusCode::kInvalidArgument, "socket path \"{}\" is not absolute", path);
  }
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "socket path \"{}\" has {} bytes, an address takes at most {}", path, path.size(),
                 sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::Status InUse(const std::string& path, pid_t pid) {
  if (pid <= 0) {
    return Error(absl::StatusCode::kAlreadyExists, "{} is in use by another process", path);
  }
  return Error(absl::StatusCode::kAlreadyExists, "{} is in use by pid {}", path, pid);
}

pid_t PidInside(int lock) {
  char text[16] = {};
  const ssize_t n = pread(lock, text, sizeof(text) - 1, 0);
  return n > 0 ? static_cast<pid_t>(std::strtol(text, nullptr, 10)) : 0;
}

absl::StatusOr<UniqueFd> TakeLock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  for (int attempt = 0; attempt < kMaxLockAttempts; ++attempt) {
    UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock.valid()) return ErrnoError(errno, lock_path);
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoError(errno, lock_path);
      return InUse(path, PidInside(lock.get()));
    }
    // The previous owner may have removed the file between this open() and flock().
    struct stat held {};
    struct stat named {};
    if (fstat(lock.get(), &held) != 0) return ErrnoError(errno, lock_path);
    if (stat(lock_path.c_str(), &named) != 0 || !SameFile(held, named)) continue;
    const std::string pid = fmt::format("{}\n", getpid());
    if (ftruncate(lock.get(), 0) != 0 ||
        pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
      return ErrnoError(errno, lock_path);
    }
    return lock;
  }
  return InUse(path, 0);
}

// Removes a socket that nobody serves. ALREADY_EXISTS: a process serves it, or it is no socket.
absl::Status RemoveStale(const std::string& path, const sockaddr_un& address, int type) {
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoError(errno, path);
  }
  if (!S_ISSOCK(found.st_mode)) {
    return Error(absl::StatusCode::kAlreadyExists, "{} exists and is not a socket", path);
  }
  const UniqueFd probe(socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return ErrnoError(errno, "socket");
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    const auto owner = PeerOf(probe.get(), /*with_pidfd=*/false);
    return InUse(path, owner.ok() ? owner->pid : 0);
  }
  switch (errno) {
    case ECONNREFUSED:
      break;
    case ENOENT:
      return absl::OkStatus();
    case EAGAIN:      // its queue is full: it is live
    case EPROTOTYPE:  // it is live and of another type
      return InUse(path, 0);
    default:
      return ErrnoError(errno, fmt::format("asking who serves {}", path));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return ErrnoError(errno, fmt::format("removing the stale socket {}", path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Create(
    const UnixListenerOptions& options) {
  const std::string& path = options.path;
  REFITD_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  UniqueFd lock;
  if (options.lock) {
    REFITD_ASSIGN_OR_RETURN(lock, TakeLock(path));
  }
  struct stat none {};
  // From here on the lock's file is removed on every return.
  std::unique_ptr<UnixListener> listener(new UnixListener(path, UniqueFd(), std::move(lock), none));
  REFITD_RETURN_IF_ERROR(RemoveStale(path, address, options.type));

  // The socket is made under another name and moved to its path once it listens, so that a process
  // that finds the path can connect. Until listen(), connecting is refused, whatever mode the umask
  // leaves before chmod().
  const std::string made_path = path + kUnfinishedSuffix;
  REFITD_ASSIGN_OR_RETURN(const sockaddr_un made_address, AddressOf(made_path));
  REFITD_RETURN_IF_ERROR(RemoveStale(made_path, made_address, options.type));
  UniqueFd socket(::socket(AF_UNIX, options.type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoError(errno, "socket");
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&made_address), sizeof(made_address)) !=
      0) {
    return ErrnoError(errno, fmt::format("binding {}", path));
  }
  const auto place = [&]() -> absl::Status {
    if (lstat(made_path.c_str(), &listener->made_) != 0) return ErrnoError(errno, path);
    if (chmod(made_path.c_str(), options.mode) != 0) {
      return ErrnoError(errno, fmt::format("mode of {}", path));
    }
    if (listen(socket.get(), kBacklog) != 0) {
      return ErrnoError(errno, fmt::format("listening on {}", path));
    }
    if (renameat2(AT_FDCWD, made_path.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) != 0) {
      return errno == EEXIST ? InUse(path, 0) : ErrnoError(errno, fmt::format("naming {}", path));
    }
    return absl::OkStatus();
  };
  if (absl::Status placed = place(); !placed.ok()) {
    unlink(made_path.c_str());
    return placed;
  }
  listener->socket_ = std::move(socket);
  return listener;
}

UnixListener::~UnixListener() {
  struct stat found {};
  if (socket_.valid() && lstat(path_.c_str(), &found) == 0 && SameFile(found, made_)) {
    unlink(path_.c_str());
  }
  socket_.Reset();
  // The lock file goes last, while the lock is held: a process that waits for the path then finds
  // everything removed.
  if (lock_.valid()) unlink(LockPath(path_).c_str());
}

}  // namespace refitd
