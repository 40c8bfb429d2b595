#include "daemon/sockets/process_watch.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "daemon/sockets/peer_credentials.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr uint64_t kWake = 0;  // no handle has this value
constexpr int kMaxEvents = 64;

absl::Status PidfdError(int error, pid_t pid) {
  // EPERM: a seccomp filter that does not know the call.
  if (error == ENOSYS || error == EPERM) {
    return Error(absl::StatusCode::kUnimplemented,
                 "pid {} can't be watched: no pidfds here (errno {})", pid, error);
  }
  return ErrnoError(error, fmt::format("pidfd of pid {}", pid));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessWatch>> ProcessWatch::Create() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoError(errno, "epoll_create1");
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoError(errno, "eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWake}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return ErrnoError(errno, "epoll_ctl");
  }
  return std::unique_ptr<ProcessWatch>(new ProcessWatch(std::move(epoll), std::move(wake)));
}

ProcessWatch::ProcessWatch(UniqueFd epoll, UniqueFd wake)
    : epoll_(std::move(epoll)), wake_(std::move(wake)), thread_([this] { Run(); }) {}

ProcessWatch::~ProcessWatch() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

absl::StatusOr<WatchHandle> ProcessWatch::Watch(const PeerCredentials& peer, Callback died) {
  if (peer.pidfd != nullptr) {
    // A duplicate, since the same descriptor can't be in an epoll set twice.
    UniqueFd pidfd = Duplicate(peer.pidfd->get());
    if (!pidfd.valid()) return PidfdError(errno, peer.pid);
    return Add(std::move(pidfd), std::move(died));
  }
  if (peer.pid <= 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "pid {} can't be watched: its pid namespace is not visible", peer.pid);
  }
  // No pidfd was taken at accept: the process had ended already, unless the kernel has no pidfds.
  const UniqueFd own = OpenPidfd(getpid());
  if (!own.valid()) return PidfdError(errno, peer.pid);
  return Add(UniqueFd(), std::move(died));
}

absl::StatusOr<WatchHandle> ProcessWatch::Add(UniqueFd pidfd, Callback died) {
  const int fd = pidfd.get();
  MutexLock lock(&mutex_);
  const WatchHandle handle(next_handle_++);
  if (fd < 0) {  // the process has ended already: `died` is called by the watch's thread
    gone_.push_back(handle);
    eventfd_write(wake_.get(), 1);
  } else {
    epoll_event event{.events = EPOLLIN | EPOLLONESHOT, .data = {.u64 = handle.value()}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return ErrnoError(errno, "epoll_ctl");
    }
  }
  entries_.emplace(handle, Entry{.pidfd = std::move(pidfd), .died = std::move(died)});
  return handle;
}

bool ProcessWatch::Cancel(WatchHandle handle) {
  std::optional<Callback> died;  // destroyed without the lock
  MutexLock lock(&mutex_);
  died = Take(handle);
  return died.has_value();
}

void ProcessWatch::AwaitCallback() {
  MutexLock lock(&mutex_);
  while (calling_) called_.Wait(&mutex_);
}

size_t ProcessWatch::watched() const {
  MutexLock lock(&mutex_);
  return entries_.size();
}

std::optional<ProcessWatch::Callback> ProcessWatch::Take(WatchHandle handle) {
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return std::nullopt;
  Entry entry = std::move(found->second);
  entries_.erase(found);
  // Removed explicitly: the process's other pidfds share the open file, so closing this one would
  // not remove it.
  if (entry.pidfd.valid()) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, entry.pidfd.get(), nullptr);
  }
  return std::move(entry.died);
}

void ProcessWatch::Fire(WatchHandle handle) {
  std::optional<Callback> died;
  {
    MutexLock lock(&mutex_);
    died = Take(handle);
    calling_ = died.has_value();
  }
  if (!died) return;
  (*died)();
  died.reset();
  MutexLock lock(&mutex_);
  calling_ = false;
  called_.NotifyAll();
}

void ProcessWatch::Run() {
  std::array<epoll_event, kMaxEvents> events;
  for (;;) {
    const int n = epoll_wait(epoll_.get(), events.data(), kMaxEvents, -1);
    for (int i = 0; i < n; ++i) {
      if (events[i].data.u64 != kWake) Fire(WatchHandle(events[i].data.u64));
    }
    eventfd_t ignored;
    eventfd_read(wake_.get(), &ignored);
    std::vector<WatchHandle> gone;
    {
      MutexLock lock(&mutex_);
      if (stop_) return;
      gone.swap(gone_);
    }
    for (const WatchHandle handle : gone) Fire(handle);
  }
}

}  // namespace refitd
