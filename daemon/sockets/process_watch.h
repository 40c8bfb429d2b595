// Notices the death of processes (P8) by pidfd. This works even if a forked child keeps the dead
// process's sockets open, so that no end of stream comes.
//
// Invariants: a callback runs at most once, on the watch's own thread, with no lock held, and never
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
  // Ends the thread; callbacks that have not started are dropped. Must not be called from a
  // callback.
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Calls `died` once the process has ended (all of its threads; it need not have been reaped), at
  // once if it has ended already. INVALID_ARGUMENT: the pid is not positive (the peer's pid
  // namespace is not visible). RESOURCE_EXHAUSTED: out of descriptors. UNIMPLEMENTED: the kernel
  // has no pidfds.
  absl::StatusOr<WatchHandle> Watch(const PeerCredentials& peer, Callback died);

  // True: the callback has not started and never will. False: it ran, runs now, or the handle is
  // unknown. Never waits, so any lock may be held; may be called from callbacks.
  bool Cancel(WatchHandle handle);
  // Returns once no callback runs. If every watch was cancelled before, no callback runs any more.
  // Must not be called from a callback, nor with a lock held that a callback takes.
  void AwaitCallback();

  // How many watches have neither fired nor been cancelled.
  size_t watched() const;

 private:
  struct Entry {
    UniqueFd pidfd;  // invalid: the process ended before a pidfd could be taken
    Callback died;
  };
  ProcessWatch(UniqueFd epoll, UniqueFd wake);
  absl::StatusOr<WatchHandle> Add(UniqueFd pidfd, Callback died);
  void Run();
  void Fire(WatchHandle handle);
  // Removes the watch and returns its callback; nullopt: it has fired or was cancelled.
  std::optional<Callback> Take(WatchHandle handle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const UniqueFd epoll_;
  const UniqueFd wake_;  // eventfd: stop_ or gone_ changed

  mutable Mutex mutex_;
  uint64_t next_handle_ ABSL_GUARDED_BY(mutex_) = 1;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<WatchHandle, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::vector<WatchHandle> gone_ ABSL_GUARDED_BY(mutex_);  // to fire at once
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;           // a callback runs
  CondVar called_;

  std::thread thread_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_PROCESS_WATCH_H_
