// Attaching again after the daemon went away: when, how often, and for how long.
//
//   attached --lease lost--> trying --attached--> attached
//                              |--limit passed, or the daemon refuses for good--> given up
//
// The thread sleeps while the lease lives. Every attempt has a deadline, and all attempts together
// have `limit` (P4). The destructor ends them within kCleanupLimit plus the time of one request
// that can't be cut short.
#ifndef REFITD_CLIENT_REATTACH_H_
#define REFITD_CLIENT_REATTACH_H_

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"

namespace refitd::client {

inline constexpr std::chrono::milliseconds kFirstPause{50};
inline constexpr std::chrono::milliseconds kLongestPause{1'000};
// An attempt may take this long, or ConnectOptions::wait if that is longer.
inline constexpr std::chrono::milliseconds kAttemptLimit{1'000};

// Pauses between attempts. They double from kFirstPause to kLongestPause, and each is then
// shortened at random to at least a half, so that the members of a group do not all come at once.
// Not thread-safe.
class Backoff {
 public:
  explicit Backoff(uint64_t seed) : random_(seed) {}
  Duration Next();

 private:
  std::mt19937_64 random_;
  Duration pause_ = kFirstPause;
};

// A seed for Backoff that is equal for equal members in every process, so that runs can be
// repeated.
uint64_t SeedOf(std::string_view group, std::string_view name, int rank);

// True if the lease ended because the daemon, or the way to it, is gone; then another lease may be
// had.
bool DaemonGone(const absl::Status& lease_end);
// True if the daemon's answer to an attempt will not change by itself: the attempt was malformed or
// disagrees with the group. PERMISSION_DENIED is not such an answer: a group that is made again
// belongs to whoever came first until its engines say whose it is (P9).
bool RefusedForGood(const absl::Status& attempt);

// Gets the first lease of a member that reattaches: calls `attach`, again and again with pauses
// while the daemon, or the way to the group, is not there yet (DaemonGone), until `deadline`.
// Returns the last status of `attach`.
absl::Status AttachUntil(TimePoint deadline, uint64_t seed,
                         const std::function<absl::Status()>& attach);

class Reattacher {
 public:
  struct Hooks {
    // All hooks are called on the Reattacher's thread, without a lock held. `lost` says why the
    // lease was lost; nullopt: the lease lives, or not all of its events are taken yet.
    std::function<std::optional<absl::Status>()> lost;
    std::function<absl::Status(TimePoint deadline, const std::stop_token& stop)> attach;
    std::function<void(absl::Status)> give_up;
  };

  // `daemon` is named in messages; `attempt` is how long one attempt may take.
  Reattacher(std::string daemon, Duration limit, Duration attempt, uint64_t seed, Hooks hooks);
  ~Reattacher();
  Reattacher(const Reattacher&) = delete;
  Reattacher& operator=(const Reattacher&) = delete;

  // A function to call when anything changed that `lost` looks at. It may be called at any time,
  // also after the Reattacher was destroyed. Thread-safe.
  std::function<void()> Waker() const;

 private:
  struct Signal {
    Mutex mutex;
    CondVar cond;
    bool raised ABSL_GUARDED_BY(mutex) = false;
    void Raise();
  };
  void Run(const std::stop_token& stop);
  // Attaches again. False: this was given up, or stopped.
  bool ComeBack(absl::Status why, const std::stop_token& stop);
  // Sleeps for `pause`. False: the sleep was stopped.
  bool Sleep(Duration pause, const std::stop_token& stop);

  const std::string daemon_;
  const Duration limit_;
  const Duration attempt_;
  const Hooks hooks_;
  std::mt19937_64 seeds_;  // used by the thread only; each loss gets other pauses
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::jthread thread_;  // last: it uses all the other members
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_REATTACH_H_
