// Attaching again after the daemon went away: when, how often, and for how long.
//
//   attached --lease lost--> trying --attached--> attached
//                              |--limit passed, or the daemon refuses for good--> given up
//
// The thread sleeps while the lease lives. Every attempt has a deadline, the trials together have
// `limit` (P4), and the destructor ends them within kCleanupLimit and what one request that can't
// be cut short takes.
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
// An attempt may take this much, or ConnectOptions::wait where that is longer.
inline constexpr std::chrono::milliseconds kAttemptLimit{1'000};

// Pauses between attempts: doubled from kFirstPause to kLongestPause, and of each a random part of
// at least a half, so that the members of a group do not come all at once. Not thread-safe.
class Backoff {
 public:
  explicit Backoff(uint64_t seed) : random_(seed) {}
  Duration Next();

 private:
  std::mt19937_64 random_;
  Duration pause_ = kFirstPause;
};

// Equal for equal members, in every process: runs can be repeated.
uint64_t SeedOf(std::string_view group, std::string_view name, int rank);

// The lease ended because the daemon, or the way to it, is gone: another one may be had.
bool DaemonGone(const absl::Status& lease_end);
// The daemon's answer to an attempt will not change by itself: malformed, refused, disagreeing.
bool RefusedForGood(const absl::Status& attempt);

// The first lease of a member that reattaches: `attach`, again after a pause while the daemon, or
// the way to the group, is not there yet (DaemonGone), until `deadline`. Its last status.
absl::Status AttachUntil(TimePoint deadline, uint64_t seed,
                         const std::function<absl::Status()>& attach);

class Reattacher {
 public:
  struct Hooks {
    // Called on the thread, without a lock held.
    // Why the lease was lost; nullopt: it lives, or all that it brought is not taken yet.
    std::function<std::optional<absl::Status>()> lost;
    std::function<absl::Status(TimePoint deadline, const std::stop_token& stop)> attach;
    std::function<void(absl::Status)> give_up;
  };

  // `daemon` is named in messages; `attempt` is what one attempt may take.
  Reattacher(std::string daemon, Duration limit, Duration attempt, uint64_t seed, Hooks hooks);
  ~Reattacher();
  Reattacher(const Reattacher&) = delete;
  Reattacher& operator=(const Reattacher&) = delete;

  // Something that `lost` looks at changed. What this gives may be called at any time, also when
  // the Reattacher is gone. Thread-safe.
  std::function<void()> Waker() const;

 private:
  struct Signal {
    Mutex mutex;
    CondVar cond;
    bool raised ABSL_GUARDED_BY(mutex) = false;
    void Raise();
  };
  void Run(const std::stop_token& stop);
  // False: given up, or stopped.
  bool ComeBack(absl::Status why, const std::stop_token& stop);
  // False: stopped.
  bool Sleep(Duration pause, const std::stop_token& stop);

  const std::string daemon_;
  const Duration limit_;
  const Duration attempt_;
  const Hooks hooks_;
  std::mt19937_64 seeds_;  // the thread's: each loss gets other pauses
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::jthread thread_;  // last: it uses all the others
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_REATTACH_H_
