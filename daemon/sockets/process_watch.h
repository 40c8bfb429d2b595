// Notices the death of processes (P8), by pidfd: also where a forked child keeps the dead one's
// sockets open, so that no end of stream ever comes.
//
// Invariants: a callback runs at most once, on the watch's own thread, with no lock held, never
// from within Watch or Cancel. No descriptor outlives its watch.
#ifndef REFITD_DAEMON_SOCKETS_PROCESS_WATCH_H_
#define REFITD_DAEMON_SOCKETS_PROCESS_WATCH_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/base/strong_int.h"
#include "transport/base/unique_fd.h"

namespace refitd {

struct PeerCredentials;

using WatchHandle = StrongInt<struct WatchHandleTag, uint64_t>;  // never reused; 0 is none

// Thread-safe.
class ProcessWatch {
 public:
  using Callback = std::function<void()>;

  // Starts the thread. RESOURCE_EXHAUSTED: descriptors.
  static absl::StatusOr<std::unique_ptr<ProcessWatch>> Create();
  // Ends the thread; callbacks that did not start are dropped. Not from within a callback.
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Calls `died` once the process has ended (all of its threads; it need not have been reaped). A
  // process that is gone already fires at once. Prefer the credentials' form: its pidfd was taken
  // when the connection was accepted, a bare pid may have been taken again since. Errors:
  // INVALID_ARGUMENT pid not positive (a peer in a pid namespace that we can't see);
  // RESOURCE_EXHAUSTED descriptors; UNIMPLEMENTED the kernel has no pidfds.
  absl::StatusOr<WatchHandle> Watch(pid_t pid, Callback died);
  absl::StatusOr<WatchHandle> Watch(const PeerCredentials& peer, Callback died);

  // True: the callback has not started and never will. False: it ran, runs now, or the handle is
  // unknown. Never waits, so it may be called with any lock held, and from within callbacks.
  bool Cancel(WatchHandle handle);

  // Not fired and not cancelled.
  size_t watched() const;

 private:
  struct Entry {
    UniqueFd pidfd;  // invalid: the process was gone when it was asked for
    Callback died;
  };
  ProcessWatch(UniqueFd epoll, UniqueFd wake);
  absl::StatusOr<WatchHandle> Add(UniqueFd pidfd, Callback died);
  void Run();
  void Fire(WatchHandle handle);
  // Ends the watch; nullopt: it has ended already.
  std::optional<Callback> Take(WatchHandle handle);

  const UniqueFd epoll_;
  const UniqueFd wake_;  // eventfd: stop_ or gone_ changed

  mutable Mutex mutex_;
  uint64_t next_handle_ ABSL_GUARDED_BY(mutex_) = 1;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<WatchHandle, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::vector<WatchHandle> gone_ ABSL_GUARDED_BY(mutex_);  // to fire at once

  std::thread thread_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_PROCESS_WATCH_H_
